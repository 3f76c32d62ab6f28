"""A step's update without each group in turn, against updates that are really repeated."""

import json
import math
import shutil
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from support.recipes import call_recipe
from support.runs import samples_of, toy_options

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.options import from_flat
from roll_lite.proof.influence import _turns, main, right_answers, updates_of
from roll_lite.proof.recorded import RecordedRun
from roll_lite.recipes import agentic, rlvr
from roll_lite.replay import read_config_of
from roll_lite.report.config_file import read_options
from roll_lite.report.reader import RunFolder
from roll_lite.report.records import read_tokens
from roll_lite.train.batch import pack
from roll_lite.train.encoding import encode_dialogues

REWARDS = """
def letters(prompt, reply):
    return float(sum(map(ord, reply)) % 3)

INLINE = {"reverse": letters}
"""
SAME = "the step is as recorded"
ENVS = """
from random import Random

class Guess:
    def reset(self, seed):
        self.number, self.num_steps = Random(seed).randint(1, 9), 0
        return f"guess {self.number % 2}", {"rules": "Guess."}

    def step(self, reply):
        self.num_steps += 1
        reward = sum(map(ord, reply)) % 7
        return f"not {reply[:1]}", reward, False, self.num_steps == 3, {}

ENVS = {"mine": Guess}
"""


@pytest.fixture
def run(evidence, tmp_path):
    return shutil.copytree(evidence, tmp_path / "run")


@pytest.fixture(scope="module")
def graded(learnt_folder, tmp_path_factory):
    """A run of three steps in which most groups teach something; tests may add to it."""
    folder = tmp_path_factory.mktemp("graded")
    (folder / "mine.py").write_text(REWARDS)
    options = toy_options(
        learnt_folder, folder / "run", steps=3, eval_every=3, keep_every=1, samples_per_prompt=4,
        reward_workers=0, lr=1e-3, code=(str(folder / "mine.py"),),
    )  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    return folder / "run"


def effects_of(run, step):
    lines = (run / f"influence_{step:05d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---- the update


@pytest.mark.slow
def test_the_effect_of_each_group(graded, capsys):
    """Groups of equal rewards have advantages of 0, so nothing changes without them."""
    run = graded
    assert main([str(run), "--step", "2"]) == 0
    assert SAME in capsys.readouterr().out
    rewards = {
        name: [row["reward"] for row in rows]
        for name, rows in groupby(samples_of(run, 2), key=lambda row: row["prompt_id"])
    }
    rows = effects_of(run, 2)
    effects = [row["effect"] for row in rows]
    assert effects == sorted(effects) and len(rows) == len(rewards) == 8
    for row in rows:
        values = rewards[row["prompt_id"]]
        assert row["reward"] == pytest.approx(sum(values) / len(values))
        assert (row["effect"] == 0) == (len(set(values)) == 1)
    assert any(effects)
    folder = RunFolder(run)
    assert folder.effects == {"step_00002": rows}


@pytest.mark.slow
def test_the_effect_of_each_sample(graded, capsys):
    """The first step starts from the model, without a checkpoint."""
    run = graded
    assert main([str(run), "--step", "1", "--by", "sample"]) == 0
    assert SAME in capsys.readouterr().out
    rows = effects_of(run, 1)
    assert len({(row["prompt_id"], row["index"]) for row in rows}) == len(rows) == 32


class Repeated:
    """The updates of a step of a run: by `Updates`, and by the trainer on whole batches."""

    def __init__(self, run, step, cluster, **changes):
        options = read_options(run / "config.json") | changes
        known = {name: value for name, value in options.items() if value != "left out"}
        self.cfg = cfg = from_flat(rlvr.Config, **known)
        self.checkpoint = RecordedRun(run).checkpoints[step - 1]
        chat = Chat(cfg.model, **cfg.chat.arguments)
        lines = samples_of(run, step)
        self.updates = updates_of(cfg, step, lines, self.checkpoint, cluster, chat)
        self.policy = self.updates.policy

    def weights(self):
        state = self.policy.state()
        return torch.cat([tensor.detach().flatten().double() for tensor in state.values()])

    def truly_without(self, numbers):
        """From the checkpoint, with whole batches in which rows of these samples weigh nothing."""
        self.policy.read_checkpoint(self.checkpoint)
        before = self.weights()
        for sequences, scheduled_at, options in self.updates.noted:
            batch = []
            for micro in pack(sequences, self.updates.budget, **options):
                owners = [sequences[i].sample for i in micro.indices_S]
                is_left = torch.tensor([owner not in numbers for owner in owners])
                weights_R = micro.weights_R * is_left[micro.sequence_R]
                batch.append(replace(micro, weights_R=weights_R))
            self.policy.step(batch, scheduled_at)
        return before, self.weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"updates_per_step": 2, "epochs": 2},
        {"loss": "gspo", "aggregation": "seq_mean_token_mean", "dual_clip": "left out"},
        {"kl_coef": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.01},
        {"tokens_per_microbatch": 64},
    ],
    ids=["default", "four updates", "by sample", "a reference", "many micro-batches"],
)
def test_leaving_out_equals_the_update_really_repeated(graded, changes):
    with Cluster("train=all generate=all reference=all", "cpu") as cluster:
        run = Repeated(graded, 2, cluster, **changes)
        for number in range(0, 32, 4):
            numbers = {*range(number, number + 4)}
            run.updates.repeat(without=numbers)
            found = run.weights()
            before, wanted = run.truly_without(numbers)
            assert (found - wanted).norm() <= 1e-5 * (wanted - before).norm()
            assert (found - wanted).abs().max() <= 1e-6


@pytest.mark.slow
def test_episodes_whose_turns_are_sequences(learnt_folder, tmp_path, capsys):
    """Recorded samples become the batch that they were, and answers the texts that they were."""
    (tmp_path / "mine.py").write_text(ENVS)
    options = {
        "model": str(learnt_folder), "data": ("mine",), "code": (str(tmp_path / "mine.py"),),
        "history": 1, "advantage": "gigpo", "steps": 2, "prompts_per_step": 4, "env_workers": 0,
        "samples_per_prompt": 4, "max_tokens": 4, "eval_every": 2, "eval_prompts": 6,
        "kv_cache_gib": 0.005, "lr": 1e-2, "device": "cpu", "keep_every": 1,
        "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    call_recipe(rlvr, from_flat(agentic.Config, **options))
    assert main([str(tmp_path / "run"), "--step", "2"]) == 0
    assert SAME in capsys.readouterr().out
    assert all(math.isfinite(row["effect"]) for row in effects_of(tmp_path / "run", 2))

    cfg = read_config_of(RunFolder(tmp_path / "run"), {})
    chat = Chat(cfg.model)
    num_same = 0
    for row in samples_of(tmp_path / "run", 2):
        tokens = read_tokens(row)
        sequences = encode_dialogues(chat, _turns(row, cfg))
        for number in (turns[0] for turns in row["sequences"]):  # which no earlier one began
            ids = sequences[number].token_ids
            num_read = sequences[number].loss_mask.index(True)
            of_turn = [token for token in tokens if token.turn == number]
            assert ids[:num_read] == [token.id for token in of_turn if token.logprob is None]
            said = [token.id for token in of_turn if token.logprob is not None]
            num_same += ids[num_read : num_read + len(said)] == said
    assert num_same > 10  # not all: of texts with special tokens


# ---- bad input


def edit_answers(run, **fields):
    for path in run.glob("rollouts/eval_*.jsonl"):
        rows = [json.loads(line) | fields for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_config(run, **options):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (
            4,
            lambda run: None,
            "needs the checkpoint of step 3, and there are those of steps 2, 4, 6",
        ),
        (9, lambda run: None, "has no samples of step 9; recorded steps: 1, 2, 3, 4, 5, 6"),
        (5, lambda run: (run / "digests.jsonl").unlink(), "has no digests.jsonl"),
        (5, lambda run: edit_config(run, model="/nowhere/model"), "/nowhere/model"),
        (5, lambda run: edit_answers(run, reward=0.0, ground_truth=""), "has no right answer"),
    ],
    ids=["checkpoint", "step", "digests", "model", "answers"],
)
def test_what_is_missing_is_named(run, step, change, message, capsys):
    change(run)
    assert main([str(run), "--step", str(step)]) == 2
    assert message in capsys.readouterr().err
    assert not list(run.glob("influence_*"))


def test_a_ground_truth_stands_in_for_a_right_answer(run):
    edit_answers(run, reward=0.0, reply="?")
    folder = RunFolder(run)
    cfg = read_config_of(folder, {})
    said = [turn.messages[-1]["content"] for turns in right_answers(folder, cfg) for turn in turns]
    truths = [row["ground_truth"] for row in folder.all_samples("eval_00000")]
    assert said == truths and len(said) == 8
