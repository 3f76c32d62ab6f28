"""recipes/rlvr.py over ranks: any device map, beside or in turns with training, resumed."""

import itertools
import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.forked_ranks import run_ranks
from support.launch import run_torchrun
from support.models import make_toy
from support.paths import SUPPORT
from support.recipes import call_recipe
from support.rlvr_program import share_of_good_letters
from support.runs import comparable, gain, samples_of, steps_of, toy_options

from roll_lite.options import from_flat
from roll_lite.recipes import evaluate, rlvr
from roll_lite.report.overview import best_evaluation
from roll_lite.report.reader import RunFolder
from roll_lite.report.records import numbers
from roll_lite.train.checkpoint_folders import read_manifest

PROGRAM = SUPPORT / "rlvr_program.py"
TURNS = {"engines_sleep": True, "offload": True}


def launch(num_ranks, *, start=run_ranks, **options):
    """The recipe as a program of its own; returns the metrics of its steps."""
    start(num_ranks, PROGRAM, json.dumps(options))
    return steps_of(options["run_dir"])


def test_the_learning_rate_goes_by_steps(here):
    """However many updates a step has, and in a run that is resumed."""
    options = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 1, "steps": 4}
    whole = here("whole", updates_per_step=2, **options)
    expected = pytest.approx([0.5e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])
    assert [row["loss/lr"] for row in whole] == expected
    here("parts", **options | {"steps": 2})
    resumed = here("parts", **options, resume=True)
    assert [row["loss/lr"] for row in resumed][2:] == pytest.approx([2e-2 / 3, 1e-2 / 3])
    late = here("late", advantage="gae", critic_warmup_steps=4, **options | {"steps": 8})
    assert [row["loss/lr"] for row in late if "loss/lr" in row] == expected  # the policy's own


MAPS = {
    "one": (1, {}),
    "two_shared": (2, {}),
    "four_shared_tp": (4, {"device_map": "train=all,tp=1 generate=all,tp=1"}),
    "four_partly": (4, {"device_map": "train=0-1 generate=1-3"}),
    "four_split_ahead": (
        4,
        {"device_map": "train=0-1 generate=2-3", "max_staleness": 1, "stale": "drop"},
    ),
}
UNDER_TORCHRUN = ("four_partly",)


@pytest.fixture(scope="module")
def runs(toy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    steps = {}
    for name, (num_ranks, changes) in MAPS.items():
        start = run_torchrun if name in UNDER_TORCHRUN else run_ranks
        options = toy_options(toy_folder, folder / name, **changes)
        steps[name] = launch(num_ranks, start=start, **options)
    return folder, steps


@pytest.mark.slow
def test_every_map_learns_and_reports_alike(runs):
    _, steps = runs
    keys = {name: {key for row in rows for key in row} for name, rows in steps.items()}
    assert all(keys[name] == keys["one"] for name in keys)
    assert {name: gain(rows) > 0.6 for name, rows in steps.items()} == dict.fromkeys(steps, True)


@pytest.mark.slow
def test_the_number_of_ranks_does_not_change_the_samples(runs):
    """Their gradients differ in the last bits, so logprobs drift apart by less than a sample's."""
    folder, _ = runs
    for name in ("two_shared", "four_shared_tp", "four_partly"):
        for step in range(1, 5):
            expected, found = samples_of(folder / "one", step), samples_of(folder / name, step)
            assert [s["token_ids"] for s in found] == [s["token_ids"] for s in expected]
            assert [s["reward"] for s in found] == [s["reward"] for s in expected]
            for sample, other in zip(found, expected, strict=True):
                close = pytest.approx(numbers(other["entropies"]), abs=1e-2)
                assert numbers(sample["entropies"]) == close


@pytest.mark.slow
def test_engines_over_two_ranks_each_give_the_samples_of_one(tmp_path):
    """In turns with training; and beside it, where trainers hold other parts than engines."""
    folder = make_toy(tmp_path / "toy", num_key_value_heads=2, vocab_size=100)
    options = partial(toy_options, folder, steps=4)
    launch(1, **options(tmp_path / "one"))
    shared = "train=all generate=all,tp=2"
    launch(2, **options(tmp_path / "two", device_map=shared))
    for step in range(1, 5):
        expected, found = samples_of(tmp_path / "one", step), samples_of(tmp_path / "two", step)
        assert [s["token_ids"] for s in found] == [s["token_ids"] for s in expected]
    split = "train=0-1 generate=2-3,tp=2"
    rows = launch(4, **options(tmp_path / "four", device_map=split, max_staleness=1.0, steps=30))
    assert gain(rows) > 0.6


@pytest.mark.slow
def test_beside_training_samples_are_one_version_old_at_most(runs):
    folder, steps = runs
    assert max(row["rollout/max_staleness"] for row in steps["four_split_ahead"]) == 1
    for step in (5, 30):
        for sample in samples_of(folder / "four_split_ahead", step):
            (first, version), *_ = sample["turns"][0]["versions"]
            assert first == 0 and step - 2 <= version <= step - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_staleness_of_one_learns_as_well(toy_folder, tmp_path, seed):
    options = {"seed": seed, "device_map": "train=0 generate=1"}
    gains = [
        gain(launch(2, **toy_options(toy_folder, tmp_path / name, **options | changes)))
        for name, changes in (("turns", {}), ("ahead", {"max_staleness": 1.0}))
    ]
    assert gains[1] > gains[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_learning_twenty_rounds_change_nothing(toy_folder, tmp_path, num_ranks):
    """Weights go to engines that slept, again and again, and every reply stays as likely."""
    changes = {"lr": 0.0, "steps": 20, "eval_every": 5, **TURNS}
    rows = launch(num_ranks, **toy_options(toy_folder, tmp_path / "run", **changes))
    assert max(row["mismatch/logprob_max"] for row in rows) < 2e-6
    rewards = [reward for _, reward in RunFolder(tmp_path / "run").metric("eval/reward")]
    assert len(rewards) == 5 and len(set(rewards)) == 1


ALL_MODELS = {"advantage": "gae", "critic_lr": 1e-2, "kl_coef": 0.1, "eval_every": 1, "steps": 2}


def weights_of(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def same_run(folder, one, other):
    """Metrics of the steps and the exported weights, bit for bit."""
    weights, others = weights_of(folder / one), weights_of(folder / other)
    return (
        comparable(steps_of(folder / one)) == comparable(steps_of(folder / other))
        and weights.keys() == others.keys()
        and all(torch.equal(weights[name], others[name]) for name in weights)
    )


@pytest.mark.parametrize("lora_rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_models_that_take_turns_learn_the_same(here, tmp_path, lora_rank):
    """Policy, critic and reference wait in host memory; resumed, and checkpointed there too."""
    changes = ALL_MODELS | {"lora_rank": lora_rank}
    here("plain", **changes)
    rows = here("turns", **changes, **TURNS)
    assert same_run(tmp_path, "plain", "turns")
    assert {"sleep", "reload", "wake", "sync", "offload"} == {
        key.removeprefix("colocated/") for key in rows[0] if key.startswith("colocated/")
    }
    here("parts", **changes | TURNS | {"steps": 1})
    here("parts", **changes | TURNS, resume=True)
    assert same_run(tmp_path, "plain", "parts")


@pytest.mark.slow
def test_ranks_that_take_turns_learn_the_same(toy_folder, tmp_path):
    """Shards of FSDP; resumed by offloaded trainers."""
    saving = {"checkpoint_every": 1, "keep_last": 3, "steps": 3, "eval_every": 0}
    options = partial(toy_options, toy_folder, **ALL_MODELS | saving)
    launch(2, **options(tmp_path / "plain"))
    shutil.copytree(tmp_path / "plain", tmp_path / "turns")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "turns" / "checkpoints" / f"step-{step:08d}")
    launch(2, **options(tmp_path / "turns", **TURNS, resume=True))
    assert same_run(tmp_path, "plain", "turns")


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_equal": True},
        {"advantage": "gae", "critic_lr": 1e-2, "reward_norm": "running"},
        {"advantage": "reinforce", "kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.01},
        {"advantage": "gae", "lora_rank": 2, "kl_coef": 0.1},
    ],
    ids=["grpo", "critic", "kl", "adapters"],
)
def test_a_resumed_run_is_the_same(here, tmp_path, changes):
    whole = here("whole", steps=4, **changes)
    here("parts", steps=2, **changes)
    parts = here("parts", steps=4, resume=True, **changes)
    assert comparable(parts) == comparable(whole)
    assert [s["token_ids"] for s in samples_of(tmp_path / "parts", 4)] == [
        s["token_ids"] for s in samples_of(tmp_path / "whole", 4)
    ]


@pytest.mark.slow
def test_what_was_generated_ahead_is_used_after_a_restart(toy_folder, tmp_path):
    """And ranks may be laid out anew."""
    options = toy_options(toy_folder, tmp_path / "run", max_staleness=1.0, drop_equal=True)
    launch(2, **options | {"device_map": "train=0 generate=1", "steps": 4})
    rows = launch(4, **options | {"device_map": "train=0-1 generate=2-3", "resume": True})
    assert [row["step"] for row in rows] == list(range(1, 31))
    ids = [[s["prompt_id"] for s in samples_of(tmp_path / "run", step)] for step in range(1, 31)]
    prompts = [list(dict.fromkeys(step)) for step in ids]
    num_used = sum(map(len, prompts))
    assert len({p for step in prompts for p in step}) == num_used
    # Once nearly all rewards are equal, a step may drop more groups than it may replace.
    assert num_used + sum(row.get("rollout/missing_groups", 0) for row in rows) == 30 * 8
    assert num_used > 0.9 * 30 * 8
    assert gain(rows) > 0.6


def test_groups_generated_ahead_are_used_in_the_next_step(here, tmp_path):
    rows = here("run", steps=6, max_staleness=1.0, stale="drop")
    assert any(row["rollout/groups_ready"] + row["rollout/groups_in_flight"] for row in rows)
    assert max(row["rollout/max_staleness"] for row in rows) == 1
    ids = [s["prompt_id"] for step in range(1, 7) for s in samples_of(tmp_path / "run", step)]
    assert len(set(ids)) == 6 * 8


def test_when_every_evaluated_reward_fails_the_run_shows_one(here, monkeypatch):
    def broken(prompt, reply):
        raise KeyError("no such letter")

    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", broken)
    with pytest.raises(RuntimeError, match=r"8 samples failed(.|\n)*KeyError: 'no such letter'"):
        here("run", steps=1)


def test_a_run_is_not_resumed_with_another_seed(here):
    here("run", steps=1)
    with pytest.raises(ValueError, match=r"cannot be resumed with seed=3 \(was 0\)"):
        here("run", steps=2, seed=3, resume=True)


def test_dropped_samples_are_written_down(here, tmp_path):
    (row,) = here("run", steps=1, min_group_reward=0.15)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    dropped = [event for event in events if event["event"] == "sample"]
    assert len(dropped) == row["rollout/filtered"] > 0
    assert all(event["state"] == event["events"][-1][0] == "filtered" for event in dropped)
    assert all(e["why"] == "its group had a mean reward below 0.15" for e in dropped)
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_a_filter_dropped_is_written_for_the_steps_whose_samples_are(
    here, tmp_path, max_staleness
):
    """With staleness groups are also filtered during an evaluation."""
    filtered = {"min_group_reward": 0.15, "max_staleness": max_staleness}
    rows = here("run", steps=4, rollouts_every=3, eval_every=1, **filtered)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    written = {event["step"] for event in events if event["event"] == "sample"}
    assert written and written <= {3, 4}
    assert any(row["rollout/filtered"] for row in rows if row["step"] in (1, 2))


def test_when_nothing_is_left_to_learn_the_run_keeps_what_it_has(here, tmp_path, monkeypatch):
    """From some reply on all rewards are equal: no checkpoint was asked for, and one is there."""
    num_scored = itertools.count()

    def exhausted(prompt, reply):
        return share_of_good_letters(prompt, reply) if next(num_scored) < 200 else 1.0

    options = {"drop_equal": True, "max_refills": 1, "steps": 30, "eval_every": 100}
    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", exhausted)
        rows = here("run", **options)
    last = rows[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}").exists()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    told = [event for event in map(json.loads, lines) if event.get("step") == last]
    told = [event for event in told if event["event"] == "sample"]
    assert len(told) == 16 * 8
    assert {event["why"] for event in told} == {"its group had equal rewards"}
    rows = here("run", resume=True, **options | {"steps": last + 2})
    assert [row["step"] for row in rows if row["step"]] == list(range(1, last + 3))


def write_words(path):
    rows = [{"prompt": f"Reverse {x}{y}", "domain": "reverse"} for x in "abcdefgh" for y in "xyz"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_held_out_rows_of_a_file_are_evaluated_and_never_trained_on(here, tmp_path):
    options = {"data": (write_words(tmp_path / "words.jsonl"),), "eval_share": 0.3}
    here("run", steps=1, eval_every=2, **options)
    here("run", steps=3, eval_every=2, resume=True, **options)
    trained = {s["prompt_id"] for step in range(1, 4) for s in samples_of(tmp_path / "run", step)}
    answers = {
        path.name: {json.loads(line)["prompt_id"] for line in path.read_text().splitlines()}
        for path in (tmp_path / "run" / "rollouts").glob("eval_*.jsonl")
    }
    assert set(answers) == {f"eval_{step:05d}.jsonl" for step in (0, 1, 2, 3)}
    (held_out,) = set(map(frozenset, answers.values()))
    assert len(trained | held_out) == 24 and not trained & held_out and len(held_out) > 2
    with pytest.raises(ValueError, match=r"saved with 0\.3 of the rows held out"):
        here("run", steps=4, resume=True, **options | {"eval_share": 0.0})


def test_evaluations_can_be_left_out(here, tmp_path, capsys):
    here("never", steps=1, eval_every=0, eval_prompts=256)
    assert not list((tmp_path / "never" / "rollouts").glob("eval_*"))
    assert "step 0" not in capsys.readouterr().out
    here("files", steps=1, data=(write_words(tmp_path / "words.jsonl"),))
    printed = capsys.readouterr().out
    assert "no evaluation: files hold nothing out; name --eval-share" in printed
    assert "step 0" not in printed and "step 1  reward" in printed
    here("last", steps=1, eval_every=1, rollouts_every=0)
    assert [path.name for path in (tmp_path / "last" / "rollouts").glob("eval_*")] == [
        "eval_00001.jsonl"
    ]


def test_the_best_checkpoint_of_graded_rewards(here, tmp_path, capsys, monkeypatch):
    """Where no answer passes at first, it goes by the mean reward, also after a resume."""

    def half(prompt, reply):
        return share_of_good_letters(prompt, reply) / 2

    def score(name, step):
        folder = tmp_path / name / "checkpoints" / f"step-{step:08}"
        return read_manifest(folder).score

    def printed():
        return "the best checkpoint is chosen by eval/reward" in capsys.readouterr().out

    options = {"eval_every": 1, "checkpoint_every": 1}
    here("passing", steps=1, pass_reward=0.0, **options)
    assert score("passing", 1) == 1.0 and not printed()
    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", half)
    here("run", steps=1, **options)
    assert printed()
    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", lambda *_: 2.0)
    here("run", steps=2, resume=True, **options)  # all pass now, but it was decided
    assert not printed()
    rewards = dict(RunFolder(tmp_path / "run").metric("eval/reward"))
    assert [score("run", step) for step in (1, 2)] == [rewards[1], rewards[2]]
    assert rewards[1] < rewards[2] == 2
    best = best_evaluation(RunFolder(tmp_path / "run"))
    assert (best["metric"], best["step"]) == ("eval/reward", 2)
    with pytest.raises(ValueError, match="chosen by eval/reward; leave it out"):
        here("run", steps=3, resume=True, pass_reward=0.1, **options)


def test_links_of_wandb_do_not_keep_a_run_from_going_on(here, tmp_path):
    here("run", steps=1)
    for name in ("wandb", "other"):
        (tmp_path / "run" / name).mkdir()
    (tmp_path / "run" / "wandb" / "debug.log").symlink_to(tmp_path / "cache.log")
    here("run", steps=2, resume=True)
    (tmp_path / "run" / "other" / "debug.log").symlink_to(tmp_path / "cache.log")
    with pytest.raises(ValueError, match=r"debug\.log is a link to"):
        here("run", steps=3, resume=True)


def test_tokens_are_counted_over_resumes(here):
    whole = here("whole", steps=4, epochs=2)
    for name in ("rollout/tokens", "train/tokens"):
        so_far = itertools.accumulate(row[name] for row in whole)
        assert [row[f"{name}_total"] for row in whole] == list(so_far)
        assert whole[0][name] > 0
    here("parts", steps=2, epochs=2)
    assert comparable(here("parts", steps=4, epochs=2, resume=True)) == comparable(whole)


def test_the_parts_of_a_step_add_up(here):
    (row,) = here("run", steps=1)
    parts = [row[f"time/{name}"] for name in ("rollout", "prepare", "train", "sync", "records")]
    assert sum(parts) == pytest.approx(row["time/step"])


@pytest.mark.parametrize("denominator", ["behaviour", "old"])
def test_training_on_what_top_k_and_top_p_leave(here, denominator):
    """Engine and trainer leave the same until an update moves the trainer: a model that knows
    nothing yet then removes many of the tokens, which are counted."""
    options = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "kl_coef": 0.1, "denominator": denominator}
    rows = here("run", steps=3, **options)
    assert [row["loss/outside_truncation"] for row in rows] == [0, 0, 0]
    assert max(row["mismatch/logprob_max"] for row in rows) < 1e-4
    twice = here("twice", steps=2, updates_per_step=2, **options)
    assert all(0 < row["loss/outside_truncation"] < 0.5 for row in twice)
    assert all(row["loss/skipped_steps"] == 0 for row in (*rows, *twice))
    (whole,) = here("whole", steps=1)
    assert "loss/outside_truncation" not in whole
    assert rows[0]["loss/entropy"] < 3.0 < whole["loss/entropy"]  # of 18 of the 99 tokens


def test_replies_end_at_stop_texts_whose_tokens_are_trained_on(here, tmp_path):
    here("run", steps=1, stop=("a", "e"), max_tokens=8)
    rows = samples_of(tmp_path / "run", 1)
    assert not any(letter in row["reply"] for row in rows for letter in "ae")
    (early,) = ([r for r in rows if r["turns"][0]["sampled"] < 8 and r["reply"].isalnum()],)
    assert early and {row["turns"][0]["finish"] for row in early} == {"stop"}
    assert all(row["turns"][0]["sampled"] == len(row["reply"]) + 1 for row in early)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_model_and_checkpoint_evaluate_like_the_run(here, toy_folder, tmp_path, lora_rank):
    here("run", steps=2, eval_samples=3, pass_reward=0.25, lora_rank=lora_rank)
    expected = dict(RunFolder(tmp_path / "run").metric("eval/reward"))[2]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    for name, options in {
        "model": {"model": str(tmp_path / "run" / "model")},
        "checkpoint": {"model": str(toy_folder), "checkpoint": str(checkpoint)},
    }.items():
        cfg = from_flat(evaluate.Config, 
            data=("reverse:1",), prompts=8, max_tokens=4, kv_cache_gib=0.005, samples=3,
            pass_reward=0.25, run_dir=str(tmp_path / name), **options,
        )  # fmt: skip
        found = call_recipe(evaluate, cfg)
        assert 0 < found["eval/pass@1"] <= found["eval/pass@3"] <= 1
        assert found["eval/reward"] == pytest.approx(expected, abs=0.15)  # other samples
    base, exported, trained = (
        load_file(folder / "model.safetensors")
        for folder in (toy_folder, tmp_path / "checkpoint" / "model", tmp_path / "run" / "model")
    )
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    assert not all(torch.equal(base[name], trained[name]) for name in trained)
    if lora_rank:
        shutil.copytree(toy_folder, tmp_path / "other")
        with pytest.raises(ValueError, match=r"adapters of the model .*, not of .*other;"):
            other = {"model": str(tmp_path / "other"), "checkpoint": str(checkpoint)}
            from_flat(evaluate.Config, **other, run_dir=str(tmp_path / "no")).check_files()
    greedy = from_flat(evaluate.Config, 
        model=str(tmp_path / "run" / "model"), data=("reverse:1",), prompts=8, max_tokens=4,
        kv_cache_gib=0.005, run_dir=str(tmp_path / "greedy"),
    )  # fmt: skip
    assert call_recipe(evaluate, greedy)["eval/failed"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_new_weights": "abort"}, "on_new_weights='abort' is not read with max_staleness=0"),
        ({"tokens_per_microbatch": 4}, "max_tokens=4 must be below.*tokens_per_microbatch=4"),
        ({"updates_per_step": 9}, "prompts_per_step=8 must be at least updates_per_step=9"),
        ({"advantage": "gae", "critic_warmup_steps": 31}, "critic_warmup_steps=31 must not exceed"),
        ({"eval_share": 0.1}, "eval_share=0.1 is only read with a file in data"),
        ({"eval_share": 1.0}, "eval_share=1.0 must be at least 0 and below 1"),
        (
            {"eval_share": 0.1, "eval_data": ("reverse:2",)},
            "eval_share=0.1 is not read with eval_d",
        ),
        ({"pass_reward": float("nan")}, "pass_reward=nan must be a finite number"),
        ({"judge": "somewhere"}, "somewhere is not a model folder"),
        ({"stale": "drop"}, "stale='drop' is only read with max_staleness above 0"),
        ({"max_staleness": 1.0, "extra_groups": 4}, "extra_groups=4 is not read with max_stal"),
        ({"data": ("reverse:1@0",)}, "not a finite weight"),
        ({"eval_data": ("nowhere.jsonl",)}, "'nowhere.jsonl' is neither a file, a task nor"),
        ({"max_staleness": 1.0, "offload": True}, "offload=True is not read with max_staleness"),
        ({"device_map": "train=all"}, "role generate is missing"),
        ({"device_map": "train=0 generate=1"}, "there is no rank 1"),
        ({"max_tokens": 64}, "max_tokens=64 must be below the model's 64"),
    ],
)
def test_wrong_options_are_named(here, changes, message):
    with pytest.raises(ValueError, match=message):
        here("run", **changes)


def test_a_resumed_copy_of_hard_links_leaves_its_original_alone(here, tmp_path):
    """`cp -al` is a copy that shares the files."""
    here("run", steps=2, rollouts_every=1, checkpoint_every=1)
    original, copy = tmp_path / "run", tmp_path / "copy"
    answers = original / "journal" / "version-00000002"
    answers.parent.mkdir()
    answers.write_bytes(b"torn")
    shutil.copytree(original, copy, copy_function=os.link)
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    here("copy", steps=4, rollouts_every=1, resume=True)
    assert {path: path.read_bytes() for path in before} == before
