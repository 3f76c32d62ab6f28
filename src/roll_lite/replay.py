"""Generate a recorded sample again, and show where it differs from the record.

roll-lite replay RUN --sample STEP/PROMPT/INDEX            # as in 3/addition:2/17/0
roll-lite replay RUN --sample STEP/PROMPT/INDEX --pdb      # stop in reward or environment

RUN is the run folder of rlvr.py or agentic.py. The sample has the weights of its policy
version, from the run's checkpoints, the random numbers that it had, and the run's own environment
and rewards, in this process. On a CPU all bits are equal. The exit code is 0 if tokens, logprobs
and reward are equal, and 1 if they are not.
"""

import argparse
import bdb
import json
import pdb
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.places import Place
from roll_lite.cluster.role import RoleHandle
from roll_lite.code_files import load_code
from roll_lite.command_line import known_options, name_changed_files
from roll_lite.device_map import parse_device_map
from roll_lite.engine.service import EngineService
from roll_lite.hub_options import with_hub
from roll_lite.models.config import LoraOptions, read_config
from roll_lite.models.lora import add_adapters
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.models.transformer import Transformer
from roll_lite.options import flatten, from_flat
from roll_lite.own_files import import_file
from roll_lite.planning import cache_tokens
from roll_lite.players import Players, make_players
from roll_lite.policy import PolicyConfig
from roll_lite.report.config_file import RECIPE, read_options
from roll_lite.report.reader import Row, RunFolder, TokenTexts, step_of
from roll_lite.report.records import Token, read_prompt, read_tokens, rollout_lines
from roll_lite.report.terminal import readable, shown_messages
from roll_lite.rewards.combine import is_async
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.prompts import Visit, derive_seed
from roll_lite.train.export import checkpoint_adapters, checkpoint_weights
from roll_lite.types import Group, Sample

RECIPES = Path(__file__).parent / "recipes"
WORKERS = ("reward_workers", "env_workers")
MAX_NAMED = 8
"""Names that an error lists."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    on_interrupt = signal.getsignal(signal.SIGINT)  # a breakpoint() installs another handler
    try:
        return replay(options)
    except bdb.BdbQuit:
        print("left the debugger; nothing was compared")
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if signal.getsignal(signal.SIGINT) is not on_interrupt:
            signal.signal(signal.SIGINT, on_interrupt)


def replay(options: argparse.Namespace) -> int:
    run = RunFolder(options.run)
    row = find_sample(run, options.sample, options.visit)
    given = {"model": options.model, "device": options.device}
    cfg = read_config_of(run, {name: v for name, v in given.items() if v is not None})
    if (expected := derive_seed(cfg.seed, row["prompt_id"], row["visit"])) != row["seed"]:
        raise UserError(
            f"the sample has seed {row['seed']}, but seed={cfg.seed} of {run.folder}/config.json "
            f"gives {expected}; was one of them edited?"
        )
    print("\n".join(shown_messages(row)))
    print(f"visit {row['visit']}, seed {row['seed']}, {_versions(row)}")
    version, checkpoint = find_weights(run, _first_version(row), cfg.model)
    debugger = Debugger() if options.pdb else None
    sample = generate(cfg, row, version, checkpoint, debugger, lora=_unmerged(run, cfg))
    again = json.loads(next(rollout_lines([Group(prompt=sample.prompt, samples=[sample])])))
    found = Difference(row, again, TokenTexts(run))
    print("\n".join(found.lines()))
    return 0 if found.is_equal else 1


# What was recorded


def find_sample(run: RunFolder, sample: str, visit: int | None = None) -> Row:
    """The line of a sample, named STEP/PROMPT/INDEX. The name of a prompt may have slashes."""
    if not (found := re.fullmatch(r"(\d+)/(.+)/(\d+)", sample, re.DOTALL)):
        raise UserError(f"--sample {sample} is not STEP/PROMPT/INDEX, as in 3/{{prompt_id}}/0")
    step, prompt_id, index = int(found[1]), found[2], int(found[3])
    rows = [row for row in recorded_samples(run, step) if row.get("prompt_id") == prompt_id]
    rows = [row for row in rows if visit in (None, row.get("visit"))]
    if not rows:
        ids = dict.fromkeys(str(row.get("prompt_id")) for row in recorded_samples(run, step))
        raise UserError(f"step {step} has no prompt {prompt_id}; it has {_listing(ids)}")
    if not (chosen := [row for row in rows if row.get("index") == index]):
        places = ", ".join(str(row.get("index")) for row in rows)
        raise UserError(f"prompt {prompt_id} of step {step} has samples {places}, but no {index}")
    if len(chosen) > 1:
        visits = " or ".join(f"--visit {row.get('visit')}" for row in chosen)
        raise UserError(f"step {step} has prompt {prompt_id} {len(chosen)} times; add {visits}")
    return chosen[0]


def recorded_samples(run: RunFolder, step: int) -> Iterator[Row]:
    """The lines of a step's samples."""
    name = f"step_{step:05d}"
    names = [n for n in run.names if n.startswith("step_")]
    if name not in names:
        steps = _listing([str(step_of(n)) for n in names]) if names else "none"
        raise UserError(
            f"{run.folder} has no samples of step {step}; recorded steps: {steps} "
            "(--rollouts-every of the run)"
        )
    start: int | None = 0
    while start is not None:
        page = run.samples(name, start)
        if page["broken"]:
            print(f"note: broken lines of {name}.jsonl that are skipped: {page['broken']}")
        yield from page["samples"]
        start = page["next"]


def read_config_of(run: RunFolder, changes: dict[str, Any]) -> PolicyConfig:
    """The Config of the recipe that wrote the run, without worker processes.

    The recipe is the file that was started, or that of its name if the file is gone.
    """
    options = read_options(run.folder / "config.json")
    name = run.config.get(RECIPE)
    started = run.starts[-1].get("file", "") if run.starts else ""
    path = next((p for p in (Path(started), RECIPES / f"{name}.py") if p.is_file()), None)
    config = getattr(import_file(path), "Config", None) if path else None
    if not (isinstance(config, type) and issubclass(config, PolicyConfig)):
        raise UserError(
            f"{run.folder} was written by the recipe {name}; runs of rlvr.py and agentic.py can be "
            "replayed"
        )
    load_code(options.get("code", ()))
    known = known_options(config, options)  # of code as it is now
    recorded = {name: value for name, value in options.items() if name in known}
    recorded |= dict.fromkeys(WORKERS, 0) | changes
    recorded |= with_hub(flatten(from_flat(config, check=False, **recorded)))
    cfg = from_flat(config, check=False, **recorded)
    name_changed_files(options, cfg)
    return cfg


def find_weights(run: RunFolder, version: int, base: str) -> tuple[int, Path | None]:
    """The version to use, and its checkpoint; None is the model that training started from."""
    known: dict[int, Path | None] = {0: None}
    for path in run.folder.glob("checkpoints/step-*"):
        known[int(path.name.removeprefix("step-"))] = path
    nearest = min(known, key=lambda v: (abs(v - version), v))
    print(f"weights: version {nearest}, {known[nearest] or base}")
    if nearest != version:
        print(
            f"note: the checkpoint of version {version} is missing; there are "
            f"{', '.join(map(str, sorted(known)))}, and {nearest} is the nearest, so differences "
            "are expected. --checkpoint-every 1 --keep-last N keeps those of the last N steps"
        )
    return nearest, known[nearest]


def _first_version(row: Row) -> int:
    return next(token.version for token in read_tokens(row) if token.version is not None)


def _versions(row: Row) -> str:
    versions = dict.fromkeys(t.version for t in read_tokens(row) if t.version is not None)
    if len(versions) == 1:
        return f"sampled by version {_first_version(row)}"
    later = ", ".join(map(str, list(versions)[1:]))
    return f"started by version {_first_version(row)}, which is used; continued by version {later}"


def _unmerged(run: RunFolder, cfg: PolicyConfig) -> LoraOptions | None:
    """The adapters of engines that did not merge them."""
    ranks = {rank for replicas in run.starts[-1]["ranks"].values() for rank in chain(*replicas)}
    device_map = parse_device_map(cfg.device_map, 1 + max(ranks))
    return cfg.training.policy_options["lora"] if device_map.shares_weights else None


# The sample, generated again


class CheckpointEngine(EngineService):
    """An engine that takes its weights from a checkpoint. With `lora` it computes with adapters, as
    one that shares the trainer's frozen weights does."""

    def __init__(
        self, folder: str, *, place: Place, lora: LoraOptions | None = None, **options: Any
    ):
        self._lora = lora
        super().__init__(folder, place=place, **options)

    def _open(self, shard: TensorShard | None) -> Transformer:
        model = super()._open(shard)
        if self._lora:
            add_adapters(model, self._lora)
        return model.to(self.place.dtype)

    def load_checkpoint(self, checkpoint: Path, base: str, version: int) -> None:
        if self._lora:
            weights = checkpoint_adapters(checkpoint, base)[0].items()
        else:
            weights = checkpoint_weights(checkpoint, base)
        self.engine.load_weights(weights, version)


def generate(
    cfg: PolicyConfig,
    row: Row,
    version: int,
    checkpoint: Path | None,
    debugger: "Debugger | None",
    lora: LoraOptions | None,
) -> Sample:
    """Run the sample as the recipe does; `lora` is that of engines with adapters."""
    prompt = read_prompt(row)
    roles = ["generate", *cfg.scoring.reward_roles]
    device_map = " ".join(f"{role}=all" for role in roles)
    configs = {"config": read_config(cfg.model), "role_configs": cfg.scoring.reward_configs}
    with Cluster(device_map, cfg.device, roles=roles, options=cfg, **configs) as cluster:
        options = {"folder": cfg.model, "kv_cache_gib": cfg.kv_cache_gib, "lora": lora}
        engines = cluster.role("generate", CheckpointEngine, **options)
        if checkpoint:
            engines.load_checkpoint(checkpoint, cfg.model, version)
        context = min(cfg.longest_sample, cache_tokens(cfg, cluster))
        wrapped = debugger.wrapped if debugger else lambda *tables: tables
        with make_players(
            cfg, [prompt], cfg.scoring.reward_roles, cluster, wrapped=wrapped,
            needs_rewards=cfg.advantages.needs_rewards,
            tokens_per_microbatch=cfg.training.tokens_per_microbatch,
        ) as players:  # fmt: skip
            return repeat(cfg, row, engines, players, context)


def repeat(
    cfg: PolicyConfig, row: Row, engines: RoleHandle, players: Players, max_length: int
) -> Sample:
    chat = Chat(cfg.model, **cfg.chat.arguments)
    params = cfg.sampling.params(
        max_tokens=cfg.lengths.max_tokens, temperature=cfg.temperature, stop_ids=chat.stop_ids
    )
    with Coordinator(
        engines=engines,
        chat=chat,
        play=players.play,
        prompts=iter(()),
        params=params,
        options=replace(cfg.rollout, max_retries=0),
        seed=cfg.seed,
        reward_engines=players.engine_clients,
        max_length=max_length,
        episodes=cfg.episodes,
    ) as rollout:
        return rollout.repeat(Visit(read_prompt(row), row["visit"]), row["index"], params)


# The two, compared


class Difference:
    """Compares the `row` of a sample that was recorded with one that was generated `again`."""

    def __init__(self, row: Row, again: Row, texts: TokenTexts):
        self._row = row
        self._again = again
        self._old = read_tokens(row)
        self._new = read_tokens(again)
        self._texts = texts.of([{"token_ids": [token.id for token in (*self._old, *self._new)]}])
        self.token = _first([t.id for t in self._old], [t.id for t in self._new])
        """Place of the first token that differs, among all that were read and sampled."""
        self._num_same = len(self._old) if self.token is None else self.token
        same = slice(self._num_same)
        self.logprob = _first(
            [t.logprob for t in self._old[same]], [t.logprob for t in self._new[same]]
        )
        """Place of the first logprob that differs, before the first token that does."""

    @property
    def is_equal(self) -> bool:
        scores = [(row["reward"], row["parts"]) for row in (self._row, self._again)]
        return self.token is None and self.logprob is None and scores[0] == scores[1]

    def lines(self) -> Iterator[str]:
        is_same = self.token is None
        yield f"tokens: {f'all {len(self._old)} are equal' if is_same else self._at(self.token)}"
        if self.logprob is None:
            yield f"logprobs: bit for bit equal in the first {self._num_same} tokens"
        else:
            yield f"logprobs: {self._at(self.logprob)}; largest difference {self._largest():.3g}"
        yield from self._scores()
        if error := self._again["error"]:
            yield f"it failed now:\n{error}"
        if (before := self._row["reply"]) != (now := self._again["reply"]):
            yield f"reply recorded: {readable(before)}\nreply now: {readable(now)}"

    def _scores(self) -> Iterator[str]:
        row = self._row
        again = self._again
        yield f"reward: recorded {row['reward']}, now {again['reward']}"
        for name in sorted(row["parts"].keys() | again["parts"].keys()):
            yield f"  {name}: recorded {row['parts'].get(name)}, now {again['parts'].get(name)}"
        for name in ("reason", "end"):
            if row.get(name) or again[name]:
                yield f"{name}: recorded {row.get(name)!r}, now {again[name]!r}"

    def _at(self, place: int) -> str:
        where = (self._old[place : place + 1] or self._new[place : place + 1])[0]
        kind = "read" if where.logprob is None else "sampled"
        both = ", ".join(
            f"{when} {self._token_text(tokens[place]) if place < len(tokens) else 'nothing'}"
            for when, tokens in (("recorded", self._old), ("now", self._new))
        )
        return f"first difference at token {place}, {kind} in turn {where.turn + 1}: {both}"

    def _largest(self) -> float:
        pairs = zip(self._old[: self._num_same], self._new, strict=False)
        return max(abs(o.logprob - n.logprob) for o, n in pairs if o.logprob is not None)

    def _token_text(self, token: Token) -> str:
        logprob = "" if token.logprob is None else f", logprob {token.logprob:.9g}"
        return f"{self._texts.get(token.id, '')!r} (id {token.id}{logprob})"


def _first(old: Sequence[Any], new: Sequence[Any]) -> int | None:
    """The first place where two lists differ; the end of the shorter one counts."""
    pairs = enumerate(zip(old, new, strict=False))
    at = next((place for place, (before, now) in pairs if before != now), None)
    return min(len(old), len(new)) if at is None and len(old) != len(new) else at


# The debugger


class Debugger(pdb.Pdb):
    """Stops in the first line of user code. It leaves Ctrl-C alone."""

    def __init__(self):
        super().__init__(nosigint=True)

    def wrapped(
        self, functions: Mapping, inline: Mapping, players: Mapping
    ) -> tuple[dict, dict, dict]:
        """Rewards and players that stop when they are called."""
        rewards = ({d: self.before(f) for d, f in table.items()} for table in (functions, inline))
        return *rewards, {spec: self.in_player(player) for spec, player in players.items()}

    def before(self, function: Callable) -> Callable:
        """The function, stopping when it is called."""

        async def call_async(*args: Any) -> Any:
            self._begin()
            try:
                return await function(*args)
            finally:
                sys.settrace(None)

        def call(*args: Any) -> Any:
            self._begin()
            try:
                return function(*args)
            finally:
                sys.settrace(None)

        return call_async if is_async(function) else call

    def in_player(self, player: Any) -> Any:
        """The player of an environment, stopping in reset and step, or in its coroutine."""
        if hasattr(player, "episode"):
            return replace(player, episode=self.before(player.episode))

        def make() -> Any:
            env = player.make()
            for name in ("reset", "step"):
                setattr(env, name, self.before(getattr(env, name)))
            return env

        return replace(player, make=make)

    def _begin(self) -> None:
        """Trace what is called from now on. Unlike `runcall`, an error goes through."""
        self.reset()
        sys.settrace(self.trace_dispatch)


def _listing(names: Sequence[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "roll-lite replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--sample", required=True, metavar="STEP/PROMPT/INDEX")
    parser.add_argument("--visit", type=int, help="which, if the step has the prompt several times")
    parser.add_argument("--pdb", action="store_true", help="stop in reward or environment")
    help = "folder or name on the Hugging Face Hub of the model that training started from, if "
    parser.add_argument("--model", help=f"{help}its folder has moved")
    parser.add_argument("--device", help="auto, cpu or cuda, instead of the run's")
    return parser
