"""Which samples taught it this? The update of a step, repeated without each of its groups in turn.

roll-lite influence RUN --step 12               # groups that helped, and groups that hurt
roll-lite influence RUN --step 12 --by sample

The step starts from the checkpoint before it, with the samples that were recorded. Without a group
it is the same, but that no token of the group has a loss: the advantages of others stay, and what
the loss is divided by. The effect of the group is the mean logprob of right held-out answers after
the whole step, minus that after the step without it. The answers are the last of each prompt that
passed in an evaluation of the run, or its ground truth if that passes.

One process does it, whatever the ranks of the run. RUN/influence_STEP.jsonl has the effects, and
the page of the run shows them.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from roll_lite.chat import Chat
from roll_lite.checks import UserError
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle
from roll_lite.data import Dialogue
from roll_lite.envs.agents import AgentChat
from roll_lite.envs.play import EnvError
from roll_lite.policy import PolicyConfig
from roll_lite.proof.recorded import RecordedRun, listing
from roll_lite.replay import read_config_of, recorded_samples
from roll_lite.report.reader import Row, RunFolder
from roll_lite.report.records import encode, read_prompt
from roll_lite.rewards.combine import is_async
from roll_lite.rollout.record import read_row
from roll_lite.train.batch import pack
from roll_lite.train.checkpoint_folders import read_manifest
from roll_lite.train.encoding import encode_dialogues
from roll_lite.train.sample_rows import AdvantageState
from roll_lite.train.sequences import TrainingSequence
from roll_lite.types import Group, Score

GROUP = ("prompt_id", "visit")
UNITS = {"group": GROUP, "sample": (*GROUP, "index")}
"""What is left out, and the fields that name it."""
SHOWN = 10
"""Lines that are printed at each end."""
ALONE = {"engines_sleep": False, "offload": False, "kv_cache_gib": 0.01}
"""Options of engines, which generate nothing."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "roll-lite influence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run of rlvr.py or agentic.py")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--by", choices=UNITS, default="group", help="default: group")
    parser.add_argument("--model", help="what training started from, if its folder has moved")
    options = parser.parse_args(arguments)
    try:
        run = RunFolder(options.run)
        cfg = read_config_of(run, ALONE | ({"model": options.model} if options.model else {}))
        rows = measure(run, cfg, options.step, UNITS[options.by])
        path = run.folder / f"influence_{options.step:05d}.jsonl"
        path.write_text("".join(f"{encode(row)}\n" for row in rows))
    except (ValueError, OSError, LookupError, EnvError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]:
        word = "hurt  " if row["effect"] < 0 else "helped" if row["effect"] > 0 else "      "
        name = "/".join(str(row[field]) for field in ("prompt_id", "index") if field in row)
        print(f"{word} {row['effect']:+.5f}  reward {row['reward']:.3f}  {name}")
    print(f"wrote {path}")
    return 0


def measure(run: RunFolder, cfg: PolicyConfig, step: int, names: Collection[str]) -> list[Row]:
    """The effect of each part of a step's samples with equal `names`, the most harmful first."""
    recorded = RecordedRun(run.folder)
    lines = [*recorded_samples(run, step)]
    checkpoint = _checkpoint_before(recorded, step)
    answers = right_answers(run, cfg)
    chat = Chat(cfg.model, **cfg.chat.arguments)
    held_out = encode_dialogues(chat, chain.from_iterable(answers))
    scored = pack(held_out, cfg.training.tokens_per_microbatch)
    device_map = " ".join(f"{role}=all" for role in cfg.cluster_options["roles"])
    with Cluster(device_map, cfg.device) as cluster:
        updates = updates_of(cfg, step, lines, checkpoint, cluster, chat)

        def logprob() -> float:
            logprobs = updates.policy.whole_logprobs(scored)
            return math.fsum(rows_R.sum().item() for rows_R in logprobs) / len(answers)

        before = logprob()
        updates.repeat()
        whole = logprob()
        digests = updates.policy.digests()
        differ = [n for n in ("gradient", "weights") if digests[n] != recorded.steps[step].get(n)]
        print(f"note: not as recorded: {listing(differ)}" if differ else "the step is as recorded")
        moved = f"by {whole - before:+.5f}, to {whole:.5f}"
        print(f"it moves the mean logprob of {len(answers)} right answers {moved}", flush=True)
        parts: dict[tuple, list[int]] = {}
        for number, line in enumerate(lines):
            parts.setdefault(tuple(line[name] for name in names), []).append(number)
        found = []
        for key, numbers in parts.items():
            updates.repeat(without=numbers)
            reward = fmean(lines[number]["reward"] for number in numbers)
            row = dict(zip(names, key, strict=True)) | {"reward": reward}
            found.append(row | {"effect": whole - logprob()})
    return sorted(found, key=itemgetter("effect"))


# ---- the step, repeated


@dataclass
class Updates:
    """The policy's updates of a step. The recipe's `update` notes them, with this in the place of
    the roles."""

    policy: RoleHandle
    budget: int
    critic: None = None
    noted: list[tuple[list[TrainingSequence], int, Row]] = field(default_factory=list)

    def train(
        self, trainer: RoleHandle, sequences: list[TrainingSequence], *,
        scheduled_at: int, is_recorded: bool, **options: Any,
    ) -> dict[str, float]:  # fmt: skip
        self.noted.append((sequences, scheduled_at, options))
        return {}

    def repeat(self, without: Collection[int] = ()) -> None:
        """From the state that the policy keeps, without samples of these numbers."""
        for place, (sequences, scheduled_at, options) in enumerate(self.noted):
            is_first = place == 0  # its gradient is known
            step = self.policy.step_without if is_first else self.policy.step
            only = {i for i, s in enumerate(sequences) if (s.sample in without) == is_first}
            step(pack(sequences, self.budget, only=only, **options), scheduled_at)


def updates_of(
    cfg: PolicyConfig, step: int, lines: Iterable[Row], checkpoint: Path | None,
    cluster: Cluster, chat: Chat,
) -> Updates:  # fmt: skip
    """As the run's recipe makes them of recorded samples, from the checkpoint or the model."""
    modules = (sys.modules[kind.__module__] for kind in type(cfg).__mro__)
    recipe = next(module for module in modules if hasattr(module, "make_roles"))
    roles = recipe.make_roles(cfg, cluster)
    state = AdvantageState(cfg.kl)
    if checkpoint:
        state.load_state_dict(read_manifest(checkpoint).state["controller"]["parts"]["advantages"])
        for role in roles.trained:
            role.read_checkpoint(checkpoint)
    groups = []
    for _, part in groupby(lines, itemgetter(*GROUP)):
        first = next(part)
        prompt = read_prompt(first)
        samples = [read_row(line, prompt) for line in chain([first], part)]
        groups.append(Group(prompt=prompt, samples=samples))
    updates = Updates(roles.policy, cfg.training.tokens_per_microbatch)
    recipe.update(recipe.prepare(groups, cfg, roles, state, chat), cfg, updates, step)
    if not updates.noted:
        raise UserError(f"--step {step} did not train the policy; name another")
    sequences, _, options = updates.noted[0]
    roles.policy.keep(pack(sequences, updates.budget, **options))
    return updates


def _checkpoint_before(run: RecordedRun, step: int) -> Path | None:
    """None before the first step."""
    if step > 1 and step - 1 not in run.checkpoints:
        raise UserError(
            f"--step {step} needs the checkpoint of step {step - 1}, and there are those of steps "
            f"{listing(sorted(run.checkpoints))}; --keep-every 1 of a run keeps all"
        )
    return run.checkpoints.get(step - 1)


# ---- right answers to held-out prompts


def right_answers(run: RunFolder, cfg: PolicyConfig) -> list[list[Dialogue]]:
    """The turns of each."""
    last: dict[str, Row] = {}
    names = (name for name in run.names if name.startswith("eval_"))
    for row in chain.from_iterable(map(run.all_samples, names)):
        if _passes(row, cfg) or row["prompt_id"] not in last:
            last[row["prompt_id"]] = row
    rows = (row if _passes(row, cfg) else _with_truth(row, cfg) for row in last.values())
    if not (right := [_turns(row, cfg) for row in rows if _passes(row, cfg)]):
        least = f"reward {cfg.evaluation.least_to_pass:g} (--pass-reward)"
        raise UserError(
            f"{run.folder} has no right answer to a held-out prompt: none of an evaluation has "
            f"{least}, and no ground truth"
        )
    return right


def _passes(row: Row, cfg: PolicyConfig) -> bool:
    if row["reward"] is None:  # it failed
        return False
    return Score(value=row["reward"], parts=row["parts"]).passes(cfg.evaluation.least_to_pass)


def _with_truth(row: Row, cfg: PolicyConfig) -> Row:
    """With the ground truth as the answer, if a reward can say whether it is one."""
    functions, inline = cfg.own.rewards(cfg.REWARDS, cfg.INLINE)
    reward = (functions | inline).get(row["domain"])
    if not (row["ground_truth"] and reward) or is_async(reward):
        return row
    score = Score.of(reward(read_prompt(row), row["ground_truth"]))
    return row | {"reply": row["ground_truth"], "reward": score.value, "parts": score.parts}


def _turns(row: Row, cfg: PolicyConfig) -> list[Dialogue]:
    """What the model read and said; an episode is played again with its replies."""
    prompt = replace(read_prompt(row), seed=row.get("prompt_seed", row["seed"]))
    said = {"role": "assistant", "content": row["reply"]}
    turns = [(*prompt.messages, said)]
    if not prompt.is_question:
        replies = (m["content"] for m in row.get("transcript", [said]) if m["role"] == said["role"])
        player = AgentChat(lambda env: next(replies))
        asyncio.run(cfg.players[prompt.domain](player, prompt))
        turns = map(tuple, player.turns)
    return [Dialogue(id=prompt.id, messages=turn, num_read=len(turn) - 1) for turn in turns]
