"""Forged run folders are refused, or on the list of docs/howto/evidence.md."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.launch import run_recipe
from support.paths import DOCS
from support.runs import flags, toy_options

from roll_lite.proof import verify as module
from roll_lite.proof.recorded import RecordedRun, rows
from roll_lite.proof.verify import check_folder, main, plan
from roll_lite.report.contract import contract_path, hash_of, write_contract
from roll_lite.report.digests import chained, digest_metrics, digest_of_lines
from roll_lite.report.records import encode, numbers, pack
from roll_lite.train.checkpoint_folders import read_manifest, write_manifest
from roll_lite.train.shards import Piece, write_shard

STEP = "rollouts/step_00003.jsonl"
ANSWERS = "rollouts/eval_00003.jsonl"


@pytest.fixture
def run(evidence, tmp_path):
    return shutil.copytree(evidence, tmp_path / "run")


def test_a_run_agrees_with_itself(run):
    assert list(check_folder(RecordedRun(run))) == []


# ---- the folder is changed, by someone who does not know the digests


def edit_lines(path, change):
    """`change` gets the rows of a file and may return others."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found = change(found) or found
    path.write_text("".join(encode(row) + "\n" for row in found))


def edit(name, change):
    return lambda run: edit_lines(run / name, change)


def edit_sample(field, value):
    """Another value in the second sample of step 3."""

    def change(found):
        found[1][field] = value(found[1][field]) if callable(value) else value

    return edit(STEP, change)


def swap_weights(run):
    """The checkpoint of step 4 with the tensors of step 2, sealed again."""
    for name in ("step-00000002", "step-00000004"):
        assert (run / "checkpoints" / name).is_dir()
    seal_checkpoint(run, load(next((run / "checkpoints/step-00000002").glob("policy*"))))


def load(path):
    """Copies: the file itself is written again."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def seal_checkpoint(run, tensors):
    path = run / "checkpoints/step-00000004"
    manifest = read_manifest(path)
    pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
    manifest.files[:] = [write_shard(path, 0, pieces, of="policy")]
    write_manifest(path, manifest)


def nudge_weight(run):
    path = next((run / "checkpoints/step-00000004").glob("policy*"))
    tensors = load(path)
    name = next(name for name in tensors if ".model." in name)
    tensors[name].view(-1)[5] *= 1 + 2**-20
    seal_checkpoint(run, tensors)


def cut(path):
    content = path.read_bytes()
    path.unlink()  # it may be a link of a file that others have
    path.write_bytes(content[: len(content) // 2])


def swap_model(run):
    path = run / "model/model.safetensors"
    tensors = load(path)
    next(iter(tensors.values())).view(-1)[0] += 0.5
    save_file(tensors, path, {"format": "pt"})


def edit_config(run):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": 7}))


def edit_contract(run):
    path = next((run / "contracts").iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": {}}))


def swap_contract(run):
    """A contract of other code, and the lines name it."""
    old = next((run / "contracts").iterdir())
    name = write_contract(run, json.loads(old.read_text()) | {"code": {}})
    edit_lines(run / "digests.jsonl", lambda found: [row | {"contract": name} for row in found])


FORGED = {
    "a better reward": edit_sample("reward", 1.0 + 2**-10),
    "another reply": edit_sample("reply", "ba"),
    "another token": edit_sample("token_ids", lambda ids: [*ids[:-1], ids[-1] + 1]),
    "another logprob": edit_sample(
        "logprobs", lambda text: pack([x + 2**-12 for x in numbers(text)])
    ),
    "another advantage": edit_sample("advantages", 2.0),
    "another prompt": edit_sample("messages", [{"role": "user", "content": "Reverse: x"}]),
    "a sample is dropped": edit(STEP, lambda found: found[:-1]),
    "two samples change places": edit(STEP, lambda found: [found[1], found[0], *found[2:]]),
    "the file of a step is missing": lambda run: (run / STEP).unlink(),
    "a better answer": edit(ANSWERS, lambda found: found[0].update(reward=1.5)),
    "a better evaluation": edit(
        "metrics.jsonl", lambda found: [row | {"eval/pass@1": 1.0} for row in found]
    ),
    "a step of the metrics is dropped": edit("metrics.jsonl", lambda found: found[:-2]),
    "a metric is dropped": edit("metrics.jsonl", lambda found: found[2].pop("loss/entropy") and 0),
    "a line of digests is dropped": edit("digests.jsonl", lambda f: [*f[:2], *f[3:]]),
    "two lines of digests change places": edit("digests.jsonl", lambda f: [*f[:2], f[3], f[2]]),
    "a digest is changed": edit("digests.jsonl", lambda f: f[2].update(gradient="0" * 32)),
    "swapped weights": swap_weights,
    "a bit of a weight": nudge_weight,
    "a torn checkpoint": lambda run: cut(next((run / "checkpoints/step-00000004").glob("policy*"))),
    "another model": swap_model,
    "another option": edit_config,
    "an edited contract": edit_contract,
    "another contract": swap_contract,
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_folder_is_refused(run, forge, capsys):
    forge(run)
    assert main([str(run)]) in (1, 2)  # 2: a contract that cannot be read as such
    assert "all digests agree" not in capsys.readouterr().out  # nothing was computed


# ---- by someone who has this code: all digests are made again


def chain_again(run):
    """The chain over what digests.jsonl has now, and digests of what was changed."""
    metrics = {}
    for row in rows(run / "metrics.jsonl"):
        metrics.setdefault(row["step"], []).append(digest_metrics(row))
    before = ""
    lines = rows(run / "digests.jsonl")
    for line in lines:
        if found := metrics.get(line["step"]):
            line["metrics"] = found.pop(0)
        for kind, name in (("samples", "step"), ("answers", "eval")):
            path = run / f"rollouts/{name}_{line['step']:05d}.jsonl"
            if kind in line and path.exists():
                line[kind] = digest_of_lines(kind, path.read_text().splitlines())
        before = line["chain"] = chained(line, before)
    (run / "digests.jsonl").write_text("".join(encode(line) + "\n" for line in lines))


def forge_rewards(run):
    def change(found):
        for row in found:
            row["reward"] = 1.0

    edit_lines(run / STEP, change)
    edit_lines(
        run / "metrics.jsonl",
        lambda f: [r | {"reward/mean": 1.0} if r["step"] == 3 else r for r in f],
    )


def forge_evaluation(run):
    edit_lines(
        run / "metrics.jsonl",
        lambda f: [r | {"eval/pass@1": 1.0} if r["step"] == 3 else r for r in f],
    )


def forge_gradient(run):
    edit_lines(
        run / "digests.jsonl",
        lambda f: [r | {"gradient": "0" * 32} if r["step"] == 3 else r for r in f],
    )


def forge_weights(run):
    """Step 3 ends with weights that it did not compute."""
    edit_lines(
        run / "digests.jsonl",
        lambda f: [r | {"weights": f[2]["weights"]} if r["step"] == 3 else r for r in f],
    )


COMPUTED = {
    "rewards": (forge_rewards, ("samples", "metrics")),
    "an evaluation": (forge_evaluation, ("metrics",)),
    "a gradient": (forge_gradient, ("gradient",)),
    "weights": (forge_weights, ("weights",)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("forge", "names"), COMPUTED.values(), ids=COMPUTED)
def test_a_forged_chain_does_not_survive_its_step(run, forge, names, capsys):
    forge(run)
    chain_again(run)
    assert list(check_folder(RecordedRun(run))) == []
    assert main([str(run), "--steps", "3", "--no-more"]) == 1
    out = capsys.readouterr().out
    assert "step 3: " + ", ".join(names) + " do not agree" in out


@pytest.mark.slow
def test_steps_computed_again_agree(run, capsys):
    assert main([str(run), "--steps", "1,3,6", "--no-more"]) == 0
    out = capsys.readouterr().out
    assert "steps 1 to 1 are computed again from the run's start" in out
    assert "steps 3 to 3 are computed again from the checkpoint of step 2" in out
    assert "all that was computed again agrees" in out


@pytest.mark.slow
def test_a_run_of_two_ranks_agrees(learnt_folder, tmp_path, capsys):
    """Sharded weights have a digest over both ranks' files."""
    options = toy_options(learnt_folder, tmp_path / "two", steps=4, checkpoint_every=2, lr=1e-3)
    options |= {"data": "reverse:1", "samples_per_prompt": 4, "reward_workers": 0}
    run_recipe("rlvr", *flags(options), num_ranks=2)
    assert main([str(tmp_path / "two"), "--steps", "4", "--no-more"]) == 0
    assert "steps 3 to 4 are computed again from the checkpoint of" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_was_resumed_with_other_options_agrees(run, capsys):
    """Each step under the options that it had; the exported model is that of the last start."""
    config = json.loads((run / "config.json").read_text())
    resumed = json.loads(json.dumps(config).replace(config["run_dir"], str(run)))
    (run / "config.json").write_text(json.dumps(resumed))
    run_recipe("rlvr", "--resume", str(run), "--steps", "8", "--eval-every", "4")
    assert main([str(run), "--steps", "3,8", "--no-more"]) == 0
    out = capsys.readouterr().out
    assert "step 3: all digests agree" in out and "step 8: all digests agree" in out
    run_recipe("rlvr", "--resume", str(run), "--lr", "1e-5")  # no step has this rate
    assert list(check_folder(RecordedRun(run))) == []
    shutil.rmtree(run / "checkpoints/step-00000004")
    shutil.rmtree(run / "checkpoints/step-00000006")
    assert main([str(run), "--steps", "7", "--no-more"]) == 2
    assert "changed between it and the checkpoint before it" in capsys.readouterr().err


def test_a_model_of_an_earlier_start_is_not_compared(run):
    """The run was resumed for more steps, and interrupted."""
    swap_model(run)
    config = json.loads((run / "config.json").read_text()) | {"steps": 9}
    (run / "config.json").write_text(json.dumps(config))
    assert all("model/" not in problem for problem in check_folder(RecordedRun(run)))


@pytest.mark.parametrize(
    ("value", "text", "is_named"),
    [
        ("model", "a/model", True),
        ("math=big", "math=a/big", True),
        ("math=big", "code=a/big", False),
        (["f.jsonl@0.5"], ["a/f.jsonl@0.5"], True),
        ("model", "a/other", False),
        (0.5, 0.25, False),
    ],
)
def test_options_are_compared_by_the_last_name_of_a_path(value, text, is_named):
    assert module._is_named(value, text) is is_named


# ---- bad input


@pytest.mark.slow
def test_another_contract_is_not_compared(run, capsys):
    """Here: other code. Lines and contract agree with each other."""
    name = next((run / "contracts").iterdir()).stem
    contract = json.loads(contract_path(run, name).read_text())
    contract["code"]["loop.py"] = "0" * 32
    contract["packages"]["torch"] = "1.0"
    new = write_contract(run, contract)
    config = json.loads((run / "config.json").read_text())
    config["starts"][0]["contract"] = new
    (run / "config.json").write_text(json.dumps(config))
    edit_lines(run / "digests.jsonl", lambda found: [row | {"contract": new} for row in found])
    chain_again(run)
    assert new == hash_of(contract)
    assert main([str(run), "--steps", "3"]) == 2
    error = capsys.readouterr().err
    assert "nothing was compared" in error
    assert "code: loop.py" in error and "packages: torch: 1.0 | " in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "digests.jsonl").unlink(), "has no digests.jsonl"),
        (lambda run: shutil.rmtree(run / "contracts"), "is missing: it says what decides"),
        (
            lambda run: edit_lines(run / "digests.jsonl", lambda f: f[-1].pop("contract") and f),
            "is damaged: KeyError('contract')",
        ),
        (lambda run: (run / "config.json").unlink(), "is not the folder of a run"),
    ],
)
def test_what_is_missing_is_named(run, change, message, capsys):
    change(run)
    assert main([str(run)]) == 2
    assert message in capsys.readouterr().err


def test_a_step_that_the_run_has_not(run, capsys):
    assert main([str(run), "--steps", "3,99"]) == 2
    assert "--steps 99: the run has digests of steps 1 to 6" in capsys.readouterr().err


def test_an_asynchronous_run_is_refused(run, capsys):
    recorded = RecordedRun(run)
    recorded.config["max_staleness"] = 1
    with pytest.raises(ValueError, match="cannot be computed again"):
        module.verify(recorded, [3], one_more=False)


def on_a_gpu(run, monkeypatch):
    recorded = RecordedRun(run)
    contract = recorded.contract_of(1)
    machine = contract["machine"] | {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(RecordedRun, "contract_of", lambda *_: contract | {"machine": machine})
    return recorded


@pytest.mark.parametrize(
    ("changes", "scale", "agrees"),
    [
        ({"gradient": "x", "weights": "y"}, 1 + 1e-5, True),
        ({"gradient": "x", "weights": "y"}, 1.01, False),
        ({"gradient": "x", "samples": "y"}, 1.0, False),
        ({"batch/advantages": "x"}, 1.0, False),
    ],
)
def test_sums_on_a_gpu_need_not_repeat(run, monkeypatch, capsys, changes, scale, agrees):
    recorded, again = on_a_gpu(run, monkeypatch), RecordedRun(run)
    again.steps[3] = again.steps[3] | changes
    recorded.metrics[3]["loss/grad_norm"] = 0.5
    again.metrics[3] = {"loss/grad_norm": scale * 0.5}
    assert module._agrees(recorded, again, 3) is agrees
    assert ("gradient's norm to 1e-05" in capsys.readouterr().out) is agrees


def test_on_a_gpu_only_the_step_after_a_checkpoint_can_be_compared(run, monkeypatch):
    recorded = on_a_gpu(run, monkeypatch)
    assert {*module._chosen(recorded, [3], one_more=True)} <= {1, 3, 5}
    with pytest.raises(ValueError, match="--steps 4: weights need not repeat on a GPU"):
        module._chosen(recorded, [4], one_more=False)


def test_the_nearest_checkpoints_are_taken(run):
    assert plan(RecordedRun(run), [1, 2, 3, 6]) == [(0, 2), (2, 3), (4, 6)]


def test_the_guide_lists_what_cannot_be_seen():
    text = (DOCS / "howto" / "evidence.md").read_text()
    for word in ("moments", "best of several", "events.jsonl", "not computed again"):
        assert word in text, word
