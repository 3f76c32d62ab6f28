"""Which samples taught it this? The update of a step, repeated without each of its groups in turn.

roll-lite influence RUN --step 12               # groups that helped, and groups that hurt
roll-lite influence RUN --step 12 --by sample

The update starts from the checkpoint before the step, on the samples that were recorded. Without a
group it is the same, but that no token of the group has a loss: the advantages of others stay, and
what the loss is divided by. The effect of the group is the mean logprob of right held-out answers
after the whole update, minus that after the one without it. The answers are the last of each prompt
that passed in an evaluation of the run, or a ground truth that passes.

One process does it, whatever the ranks of the run. RUN/influence_STEP.jsonl has the effects, and
the page of the run shows them.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from roll_lite.chat import Chat, Transcript
from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle
from roll_lite.envs.agents import AgentChat
from roll_lite.envs.play import EnvError
from roll_lite.policy import PolicyConfig
from roll_lite.proof.recorded import RecordedRun, listing, recorded_groups
from roll_lite.replay import read_config_of, recorded_samples
from roll_lite.report.reader import NAMED, Row, RunFolder, influence_path
from roll_lite.report.records import encode, read_prompt
from roll_lite.rewards.combine import is_async
from roll_lite.roles import Roles
from roll_lite.rollout.history import has_passed
from roll_lite.train.batch import MicroBatch, pack
from roll_lite.train.checkpoint_folders import read_manifest
from roll_lite.train.encoding import encode_transcripts
from roll_lite.train.sample_rows import AdvantageState
from roll_lite.train.sequences import TrainingSequence
from roll_lite.types import Group, Sample, Score

SHOWN = 10
"""Lines that are printed at each end."""
ALONE = {"engines_sleep": False, "offload": False, "kv_cache_gib": 0.01}
"""Options of engines, which generate nothing."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    given = {name: v for name in ("model", "device") if (v := getattr(options, name))}
    try:
        run = RunFolder(options.run)
        cfg = read_config_of(run, ALONE | given)
        rows = measure(run, cfg, options.step, is_by_sample=options.by == "sample")
        path = influence_path(run.folder, options.step)
        path.write_text("".join(f"{encode(row)}\n" for row in rows))
    except (ValueError, OSError, EnvError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(_table(rows)))
    print(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "roll-lite influence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run of rlvr.py or agentic.py")
    parser.add_argument("--step", type=int, required=True, help="whose update is repeated")
    parser.add_argument("--by", choices=("group", "sample"), default="group", help="default: group")
    parser.add_argument("--model", help="what training started from, if its folder has moved")
    parser.add_argument("--device", help="auto, cpu or cuda, instead of the run's")
    return parser


def _table(rows: list[Row]) -> Iterator[str]:
    yield f"{'effect':>10} {'reward':>7}"
    for place, row in enumerate(rows):
        if SHOWN < place < len(rows) - SHOWN:
            continue
        said = "hurt" if row["effect"] < 0 else "helped" if row["effect"] > 0 else ""
        name = "/".join(str(row[n]) for n in ("prompt_id", "index") if row[n] is not None)
        yield f"{row['effect']:>+10.5f} {row['reward']:>7.3f} {said:6} {name}"


def measure(run: RunFolder, cfg: PolicyConfig, step: int, *, is_by_sample: bool) -> list[Row]:
    """The effect of each group or sample of a step, the most harmful first."""
    recorded = RecordedRun(run.folder)
    groups = recorded_groups(recorded_samples(run, step))
    checkpoint = _checkpoint_before(recorded, step)
    answers = right_answers(run, cfg)
    budget = cfg.training.tokens_per_microbatch
    names = cfg.cluster_options["roles"]
    with Cluster(" ".join(f"{name}=all" for name in names), cfg.device, roles=names) as cluster:
        chat = Chat(cfg.model, **cfg.chat.arguments)
        scored = pack(encode_transcripts(chat, [*chain.from_iterable(answers)]), budget)
        recipe = _recipe_of(cfg)
        roles = recipe.make_roles(cfg, cluster)
        state = _continue_from(checkpoint, cfg, roles)
        updates = Updates(roles.policy, budget)
        recipe.update(recipe.prepare(groups, cfg, roles, state, chat), cfg, updates, step)

        def logprob() -> float:
            logprobs = roles.policy.whole_logprobs(scored)
            return math.fsum(rows_R.sum().item() for rows_R in logprobs) / len(answers)

        updates.keep()
        before = logprob()
        updates.repeat()
        whole = logprob()
        print(_compared(roles.digests(), recorded.steps.get(step, {})))
        print(
            f"step {step} moves the mean logprob of {len(answers)} right held-out answers by "
            f"{whole - before:+.5f}, to {whole:.5f}",
            flush=True,
        )
        found = []
        for row, numbers in _parts(groups, is_by_sample):
            updates.repeat(without=numbers)
            found.append(row | {"effect": whole - logprob()})
    return sorted(found, key=lambda row: row["effect"])


def _checkpoint_before(run: RecordedRun, step: int) -> Path | None:
    """None before the first step."""
    if run.config.get("max_staleness", 0):
        raise UserError(
            f"{run.folder} has max_staleness={run.config['max_staleness']}: its update is not "
            "repeated"
        )
    if step > 1 and step - 1 not in run.checkpoints:
        raise UserError(
            f"--step {step} needs the checkpoint of step {step - 1}, which is missing; there are "
            f"those of steps {listing(sorted(run.checkpoints))}. --keep-every 1 of a run keeps all"
        )
    return run.checkpoints[step - 1] if step > 1 else None


def _recipe_of(cfg: PolicyConfig) -> ModuleType:
    """The module with the steps of the loop; a Config may only add to that of another recipe."""
    modules = [sys.modules[kind.__module__] for kind in type(cfg).__mro__]
    return next(module for module in modules if hasattr(module, "make_roles"))


def _continue_from(checkpoint: Path | None, cfg: PolicyConfig, roles: Roles) -> AdvantageState:
    state = AdvantageState(cfg.kl)
    if checkpoint:
        state.load_state_dict(read_manifest(checkpoint).state["controller"]["parts"]["advantages"])
        for role in roles.trained:
            role.read_checkpoint(checkpoint)
    return state


def _compared(found: Row, recorded: Row) -> str:
    names = [name for name in ("gradient", "weights") if found[name] != recorded.get(name)]
    if names:
        return f"note: the repeated step has another digest of {' and '.join(names)} than the run"
    return "the repeated step has the gradient and the weights of the run"


def _parts(groups: list[Group], is_by_sample: bool) -> Iterator[tuple[Row, set[int]]]:
    """What is left out in turn, and the numbers of its samples."""
    number = 0
    for group in groups:
        for part in [[sample] for sample in group.samples] if is_by_sample else [group.samples]:
            names = group.prompt.id, part[0].visit, part[0].index if is_by_sample else None
            reward = fmean(sample.score.value for sample in part)
            row = dict(zip(NAMED, names, strict=True)) | {"reward": reward}
            yield row, {*range(number, number := number + len(part))}


@dataclass
class Updates:
    """The policy's updates of a step. The recipe's `update` notes them, with this in the place of
    its roles."""

    policy: RoleHandle
    budget: int
    critic: None = None
    noted: list[tuple[list[TrainingSequence], int, Row]] = field(default_factory=list)

    def train(
        self, trainer: RoleHandle, sequences: list[TrainingSequence], *,
        scheduled_at: int, is_recorded: bool = False, **options: Any,
    ) -> dict[str, float]:  # fmt: skip
        self.noted.append((sequences, scheduled_at, options))
        return {}

    def keep(self) -> None:
        if not self.noted:
            raise UserError("the policy was not trained in this step; name another")
        self.policy.keep(self._batch(0, lambda number: True))

    def repeat(self, without: Container[int] = ()) -> None:
        """All updates from the kept state, without samples of these numbers."""
        for place, (_, scheduled_at, _) in enumerate(self.noted):
            if place == 0:
                left_out = self._batch(0, lambda number: number in without)
                self.policy.step_without(left_out, scheduled_at)
            else:
                rest = self._batch(place, lambda number: number not in without)
                self.policy.step(rest, scheduled_at)

    def _batch(self, place: int, is_in: Callable[[int], bool]) -> list[MicroBatch]:
        """Of an update the samples with such numbers."""
        sequences, _, options = self.noted[place]
        only = {i for i, sequence in enumerate(sequences) if is_in(sequence.sample)}
        return pack(sequences, self.budget, only=only, **options)


# ---- right answers to held-out prompts


def right_answers(run: RunFolder, cfg: PolicyConfig) -> list[list[Transcript]]:
    """The turns of each."""
    last: dict[str, Row] = {}
    for name in (name for name in run.names if name.startswith("eval_")):
        for row in run.all_samples(name):
            if _passes(cfg, row) or row["prompt_id"] not in last:
                last[row["prompt_id"]] = row
    truths = (row if _passes(cfg, row) else _with_truth(cfg, row) for row in last.values())
    if not (right := [_turns(cfg, row) for row in truths if _passes(cfg, row)]):
        raise UserError(
            f"{run.folder} has no right answer to a held-out prompt: no evaluation has one of "
            f"reward {cfg.evaluation.least_to_pass:g} (--pass-reward), and no ground truth passes"
        )
    return right


def _passes(cfg: PolicyConfig, row: Row) -> bool:
    if row["reward"] is None:  # it failed
        return False
    score = Score(value=row["reward"], parts=row["parts"])
    sample = Sample(prompt=read_prompt(row), index=row["index"], score=score)
    return has_passed(sample, cfg.evaluation.least_to_pass)


def _with_truth(cfg: PolicyConfig, row: Row) -> Row:
    """With the ground truth as the answer, if a reward can say whether it is one."""
    functions, inline = cfg.own.rewards(cfg.REWARDS, cfg.INLINE)
    reward = (functions | inline).get(row["domain"])
    if not (row["ground_truth"] and reward) or is_async(reward):
        return row
    score = Score.of(reward(read_prompt(row), row["ground_truth"]))
    return row | {"reply": row["ground_truth"], "reward": score.value, "parts": score.parts}


def _turns(cfg: PolicyConfig, row: Row) -> list[Transcript]:
    """What the model read and said; an episode is played again with its replies."""
    prompt = replace(read_prompt(row), seed=row.get("prompt_seed", row["seed"]))
    said = {"role": "assistant", "content": row["reply"]}
    turns = [[*prompt.messages, said]]
    if not prompt.is_question:
        replies = (m["content"] for m in row.get("transcript", [said]) if m["role"] == said["role"])
        player = AgentChat(lambda env: next(replies))
        asyncio.run(cfg.players[prompt.domain](player, prompt))
        turns = player.turns
    return [Transcript(prompt.id, turn, (), len(turn) - 1) for turn in turns]
