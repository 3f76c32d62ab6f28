"""Distillation as a user runs it; the teacher is a short fine-tuning of the student."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.forked_ranks import run_ranks
from support.launch import run_recipe, run_torchrun
from support.paths import RECIPES
from support.recipes import call_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_lite.options import from_flat
from roll_lite.recipes import distill, rlvr, sft
from roll_lite.report.reader import RunFolder
from roll_lite.roles import Roles

DISTILL = RECIPES / "distill.py"
RLVR = RECIPES / "rlvr.py"
SHORT = {
    "data": "reverse:2", "steps": 16, "rows_per_step": 16, "lr": 5e-3, "warmup_steps": 2,
    "eval_rows": 32, "eval_every": 16, "device": "cpu",
}  # fmt: skip
ON_POLICY = {
    "data": ("reverse:2",), "advantage": "opd", "prompts_per_step": 16, "samples_per_prompt": 4,
    "max_tokens": 6, "lr": 2e-3, "warmup_steps": 2, "steps": 16, "eval_every": 0,
    "kv_cache_gib": 0.01, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(small_folder, tmp_path_factory):
    """Its run folder. It knows the form of a reply and is unsure of the letters."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    cfg = from_flat(sft.Config, 
        model=str(small_folder), data="reverse:2", careless=0.5, steps=40, rows_per_step=16,
        warmup_steps=5, lr=5e-3, eval_rows=8, run_dir=str(run_dir),
    )  # fmt: skip
    call_recipe(sft, cfg)
    return run_dir


def run(student, teacher, run_dir, **changes):
    values = {"model": str(student), "teacher": str(teacher / "model")} | SHORT | changes
    call_recipe(distill, from_flat(distill.Config, run_dir=str(run_dir), **values))
    return run_dir


def run_on_policy(student, teacher, run_dir, /, **changes):
    values = {"model": str(student), "teacher": (str(teacher / "model"),)} | ON_POLICY | changes
    call_recipe(rlvr, from_flat(rlvr.Config, run_dir=str(run_dir), **values))
    return run_dir


def metric(run_dir, name):
    return [value for _, value in RunFolder(run_dir).metric(name)]


def same_weights(a, b):
    a, b = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed", "js"])
def test_every_divergence_brings_the_student_closer(small_folder, teacher, tmp_path, kind):
    run_dir = run(small_folder, teacher, tmp_path / "run", kind=kind)
    before, *_, after = metric(run_dir, "eval/kl")
    assert after < 0.5 * before
    losses = metric(run_dir, "loss/loss")
    assert losses[-1] < 0.6 * losses[0]
    assert (losses == metric(run_dir, "loss/kl")) == (kind == "forward")


def test_a_student_that_is_its_teacher_has_nothing_to_learn(teacher, tmp_path):
    run_dir = run(teacher / "model", teacher, tmp_path / "run", steps=1, lr=0.0)
    assert metric(run_dir, "eval/kl") == pytest.approx([0.0, 0.0], abs=1e-5)


def test_on_policy_the_students_own_samples_come_closer(small_folder, teacher, tmp_path):
    """From a student that has seen a few of the teacher's tokens: it already ends its replies."""
    start = run(small_folder, teacher, tmp_path / "start")
    run_dir = run_on_policy(start / "model", teacher, tmp_path / "run")
    kls, losses = metric(run_dir, "rollout/kl"), metric(run_dir, "loss/loss")
    assert sum(kls[-3:]) < 0.75 * sum(kls[:3])
    assert losses == pytest.approx(kls, abs=1e-3)  # ratios are 1, so the loss is the KL
    assert max(metric(run_dir, "mismatch/logprob_max")) < 1e-3


def test_held_out_samples_measure_the_kl_to_the_teacher(
    small_folder, teacher, tmp_path, monkeypatch
):
    answers, measure = [], Roles.kl_to_teacher
    monkeypatch.setattr(
        Roles, "kl_to_teacher", lambda self, *given, **named: answers.append(given[0])
        or measure(self, *given, **named),
    )  # fmt: skip
    run_dir = run_on_policy(
        small_folder, teacher, tmp_path / "run", steps=2, eval_every=2, eval_prompts=8
    )
    model = AutoModelForCausalLM.from_pretrained(teacher / "model")
    for groups, kl in zip(answers, metric(run_dir, "eval/kl"), strict=True):
        gaps = []
        for part in (part for group in groups for s in group.samples for part in s.sequences):
            ids = torch.tensor(part.token_ids)
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            taught = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
            rows = zip(part.loss_mask[1:], part.logprobs[1:], taught, strict=True)
            gaps += [own - theirs for is_sampled, own, theirs in rows if is_sampled]
        assert kl == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)


def test_held_out_prompts_need_a_teacher_too(small_folder, teacher, tmp_path):
    folders = (f"reverse={teacher / 'model'}",)
    with pytest.raises(ValueError, match="no teacher for domain 'addition'"):
        run_on_policy(
            small_folder, teacher, tmp_path / "run", teacher=folders, eval_every=1,
            eval_data=("addition:1",),
        )  # fmt: skip


BRIEF = {run: {"rows_per_step": 4, "eval_rows": 2}, run_on_policy: {"prompts_per_step": 4}}


@pytest.mark.parametrize("run", BRIEF)
def test_resumed_runs_are_the_same(small_folder, teacher, tmp_path, run):
    whole = run(small_folder, teacher, tmp_path / "whole", **BRIEF[run], steps=4)
    parts = run(small_folder, teacher, tmp_path / "parts", **BRIEF[run], steps=2)
    run(small_folder, teacher, parts, **BRIEF[run], steps=4, resume=True)
    assert metric(parts, "loss/loss") == metric(whole, "loss/loss")
    assert same_weights(parts, whole)


@pytest.mark.parametrize("run", BRIEF)
def test_adapters_change_the_projections_that_are_named(teacher, small_folder, tmp_path, run):
    """And the engine samples from the model that has them."""
    lora = {"lora_rank": 2, "lora_targets": ("down",), "lr": 0.05}
    options = BRIEF[run] | lora | {"steps": 2}
    run_dir = run(small_folder, teacher, tmp_path / "run", **options)
    before, after = (load_file(f / "model.safetensors") for f in (small_folder, run_dir / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "down_proj" in name}
    if run is run_on_policy:
        assert max(metric(run_dir, "mismatch/logprob_max")) < 1e-3


def test_a_teacher_beside_rewards_is_weighed_and_teaches_its_domain(
    small_folder, teacher, tmp_path, monkeypatch
):
    """Rewards are all equal, so what is left of an advantage is the teacher's."""
    for domain in ("reverse", "counting"):
        monkeypatch.setitem(rlvr.Config.INLINE, domain, lambda prompt, reply: 0.5)
    update, trained = rlvr.update, []
    monkeypatch.setattr(rlvr, "update", lambda s, *more: trained.extend(s) or update(s, *more))
    options = {"advantage": "grpo", "steps": 1, "data": ("reverse:2", "counting:3")}
    folders = (f"reverse={teacher / 'model'}",)
    run_on_policy(
        small_folder, teacher, tmp_path / "run", **options, teacher=folders, teacher_weight=0.25
    )
    model = AutoModelForCausalLM.from_pretrained(teacher / "model")
    is_taught = ["reverse" in sequence.id for sequence in trained]
    assert 0 < sum(is_taught) < len(trained)
    for sequence, has_teacher in zip(trained, is_taught, strict=True):
        ids = torch.tensor(sequence.token_ids)
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        gains = logits.gather(1, ids[1:, None])[:, 0] - torch.tensor(sequence.logprobs[1:])
        expected = 0.25 * gains * torch.tensor(sequence.loss_mask[1:]) * has_teacher
        assert sequence.advantages[1:] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": ()}, "advantage='opd' needs a teacher; name one"),
        ({"teacher_weight": 0.5}, "teacher_weight=0.5 is not read with advantage='opd'"),
        ({"teacher": ("math=a", "math=b")}, "names a domain twice"),
        ({"teacher": ("nowhere",)}, "nowhere"),
        ({"device_map": "train=all generate=all"}, "role teacher is missing; add it"),
    ],
)
def test_wrong_teachers_are_named(small_folder, teacher, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run_on_policy(small_folder, teacher, tmp_path / "run", **changes)


def test_a_domain_without_a_teacher_is_refused_where_it_is_the_only_signal(
    small_folder, teacher, tmp_path
):
    both = ("reverse:2", "counting:3")
    folders = (f"counting={teacher / 'model'}",)
    with pytest.raises(ValueError, match="no teacher for domain 'reverse'"):
        run_on_policy(small_folder, teacher, tmp_path / "run", teacher=folders, data=both)


def test_another_tokenizer_is_refused_by_name(small_folder, tmp_path):
    folder = shutil.copytree(small_folder, tmp_path / "other" / "model")
    other = AutoTokenizer.from_pretrained(small_folder)
    other.add_tokens(["<more>"])
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"teacher=.*other.* have different tokenizers"):
        run_on_policy(small_folder, tmp_path / "other", tmp_path / "run")


@pytest.mark.slow
def test_ranks_do_not_change_distillation(small_folder, teacher, tmp_path):
    """Also where student and teacher have different numbers of ranks."""
    arguments = ["--model", small_folder, "--teacher", teacher / "model", "--data", "reverse:2"]
    arguments += ["--steps", 3, "--rows-per-step", 5, "--eval-rows", 8]
    run_ranks(1, DISTILL, *arguments, "--run-dir", tmp_path / "one")
    maps = {"all": "train=all teacher=all", "some": "train=all teacher=1"}
    for start, (name, device_map) in zip((run_ranks, run_torchrun), maps.items(), strict=True):
        run_dir = tmp_path / name
        start(2, DISTILL, *arguments, "--device-map", device_map, "--run-dir", run_dir)
        for key in ("loss/loss", "eval/kl"):
            assert metric(run_dir, key) == pytest.approx(metric(tmp_path / "one", key), abs=1e-5)


@pytest.mark.slow
def test_on_policy_over_ranks_gives_the_samples_of_one(small_folder, teacher, tmp_path):
    arguments = ["--model", small_folder, "--teacher", teacher / "model", "--advantage", "opd"]
    arguments += ["--steps", 2, "--prompts-per-step", 4, "--eval-every", 0, "--data", "reverse:2"]
    run_ranks(1, RLVR, *arguments, "--run-dir", tmp_path / "one")
    split = "train=0 teacher=0 generate=1"
    for name, device_map in (("all", []), ("split", ["--device-map", split])):
        run_dir = tmp_path / name
        run_ranks(2, RLVR, *arguments, *device_map, "--run-dir", run_dir)
        for key in ("loss/loss", "rollout/kl", "rollout/reply_tokens"):
            assert metric(run_dir, key) == pytest.approx(metric(tmp_path / "one", key), abs=1e-4)


@pytest.mark.slow
def test_distillation_as_a_user_runs_it(small_folder, teacher, tmp_path):
    printed = run_recipe(
        "distill", "--model", small_folder, "--teacher", teacher / "model", "--steps", 2,
        "--rows-per-step", 4, "--eval-rows", 4, "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert "step 2  loss" in printed and "tokens/s" in printed and "eval KL" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skew": 0.3}, "skew=0.3 is only read with kind='skewed'"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"device_map": "train=all"}, "role teacher is missing; add it, as in teacher=all"),
    ],
)
def test_wrong_values_are_named(small_folder, teacher, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(small_folder, teacher, tmp_path / "run", **changes)
