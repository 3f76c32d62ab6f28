"""Two runs that differ in one thing: step, sample, token, stage and kind of cause are named."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from support.made_runs import HOSTILE
from support.paths import SCRIPTS

from roll_lite.proof.bisect import main
from roll_lite.proof.samples import part
from roll_lite.report.contract import write_contract
from roll_lite.report.records import encode, numbers, pack

STEP = 3
SAMPLE = 5
"""Its line in the file of the step, from 0."""


@pytest.fixture
def other(evidence, tmp_path):
    """A copy of the run, for a test to change."""
    without = shutil.ignore_patterns("checkpoints", "model")
    return shutil.copytree(evidence, tmp_path / "other", ignore=without)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(encode(row) + "\n" for row in rows))


def differ(run, *names, step=STEP):
    """Other digests from this step on, as every later step follows from it."""
    rows = read(run / "digests.jsonl")
    for row in rows:
        for name in names if row["step"] == step else [n for n in row if row["step"] > step]:
            if name not in ("step", "contract", "chain"):
                assert name in row
                row[name] = "0" * 32
    write(run / "digests.jsonl", rows)


def edit_samples(run, change, name=f"step_{STEP:05d}"):
    path = run / f"rollouts/{name}.jsonl"
    rows = read(path)
    change(rows)
    write(path, rows)


def edit_metric(run, name, step=STEP):
    rows = read(run / "metrics.jsonl")
    for row in rows:
        if row["step"] == step:
            row[name] += 0.125
    write(run / "metrics.jsonl", rows)


def bisect(capsys, a, b, *options):
    code = main([str(a), str(b), *map(str, options)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_equal_runs_are_equal(evidence, other, capsys):
    code, said = bisect(capsys, evidence, other)
    assert code == 0 and "all 7 steps that both have are equal" in said


def test_a_run_that_ended_earlier_is_equal_as_far_as_it_goes(evidence, other, capsys):
    """Its last step was evaluated, as the last of a run is, and the other's was not."""
    rows = read(other / "digests.jsonl")[:3]
    rows[-1] |= {"answers": "1" * 32, "metrics": "2" * 32}
    write(other / "digests.jsonl", rows)
    metrics = read(other / "metrics.jsonl")[:3]
    metrics[-1]["eval/pass@1"] = 0.5
    write(other / "metrics.jsonl", metrics)
    code, said = bisect(capsys, evidence, other)
    assert code == 0 and "all 3 steps" in said
    (other / "metrics.jsonl").unlink()  # no evaluation explains the digest any more
    code, said = bisect(capsys, evidence, other)
    assert code == 1 and "step 2, " in said


# ---- samples


def first_sampled(row):
    return row["turns"][0]["read"]


def other_token(row):
    row["token_ids"][first_sampled(row)] += 1


def other_read_token(row):
    row["token_ids"][first_sampled(row) - 1] += 1


def other_logprob(row, apart=0.25):
    """Of the first token that was sampled."""
    values = numbers(row["logprobs"])
    values[0] += apart
    row["logprobs"] = pack(values)


def longer(row):
    """The reply goes on for a token."""
    row["token_ids"].append(7)
    row["logprobs"] = pack([*numbers(row["logprobs"]), -1.0])
    row["turns"][0]["sampled"] += 1


SAMPLES = {
    "data": (lambda row: row.update(ground_truth="zz"), "ground_truth: "),
    "seed": (lambda row: row.update(seed=row["seed"] + 1), "seed: "),
    "environment": (lambda row: row.update(prompt_seed=7), "prompt_seed: None | 7"),
    "context": (other_read_token, "read"),
    "engine": (other_logprob, "logprobs differ by up to 0.25, entropies of the trainer by 0"),
    "stop": (longer, "none | id 7"),
    "sampler": (other_token, "id "),
    "reply": (lambda row: row.update(reply="!"), "reply: "),
    "reward": (lambda row: row.update(reward=0.125), " | 0.125"),
    "advantages": (lambda row: row.update(advantages=8.5), " | 8.5"),
}


@pytest.mark.parametrize("stage", SAMPLES)
def test_a_change_of_one_sample_is_found(evidence, other, stage, capsys):
    change, told = SAMPLES[stage]
    edit_samples(other, lambda rows: change(rows[SAMPLE]))
    differ(other, "samples", "batch/advantages", "gradient", "weights", "metrics")
    code, said = bisect(capsys, evidence, other)
    row = read(evidence / f"rollouts/step_{STEP:05d}.jsonl")[SAMPLE]
    assert code == 1
    assert f"first difference: step {STEP}, {stage}\n" in said
    assert f"sample {row['index']} of prompt {row['prompt_id']}, visit {row['visit']}" in said
    assert told in said
    places = {
        "context": first_sampled(row) - 1, "engine": first_sampled(row),
        "sampler": first_sampled(row), "stop": len(row["token_ids"]),
    }  # fmt: skip
    assert stage not in places or f"token {places[stage]}, in turn 1" in said


def test_an_earlier_stage_of_a_later_sample_is_the_cause(evidence, other, capsys):
    """The first sample has another reward because the model read something else in the sixth."""

    def change(rows):
        rows[0]["reward"] = 0.5
        other_read_token(rows[SAMPLE])

    edit_samples(other, change)
    differ(other, "samples")
    assert f"step {STEP}, context\n" in bisect(capsys, evidence, other)[1]


def test_a_logprob_that_differs_is_before_a_token_that_does(evidence, other, capsys):
    def change(rows):
        other_token(rows[0])
        other_logprob(rows[SAMPLE])

    edit_samples(other, change)
    differ(other, "samples")
    assert f"step {STEP}, engine\n" in bisect(capsys, evidence, other)[1]


def test_a_trainer_that_differs_as_the_engine_does_has_another_model(evidence, other, capsys):
    def change(rows):
        other_logprob(rows[SAMPLE], 2**-10)
        rows[0]["entropies"] = pack([x + 2**-11 for x in numbers(rows[0]["entropies"])])

    edit_samples(other, change)
    differ(other, "samples")
    assert f"step {STEP}, model\n" in bisect(capsys, evidence, other)[1]


def test_an_engine_in_which_no_token_is_right_was_not_synced(evidence, other, capsys):
    edit_samples(other, lambda rows: [other_logprob(row, 0.01) for row in rows])
    differ(other, "samples")
    assert f"step {STEP}, sync\n" in bisect(capsys, evidence, other)[1]


def test_prompts_in_another_order(evidence, other, capsys):
    edit_samples(other, lambda rows: rows.insert(0, rows.pop(4)))
    differ(other, "samples")
    assert f"step {STEP}, prompts\n" in bisect(capsys, evidence, other)[1]


def test_a_group_that_was_dropped_in_one_run(evidence, other, capsys):
    path = other / f"rollouts/step_{STEP:05d}.jsonl"
    rows = read(path)
    write(path, rows[4:])
    about = {"event": "sample", "step": STEP, "why": "equal", "state": "filtered"}
    left_out = ("ground_truth", "tests", "extra", "token_ids", "logprobs", "turns", "advantages")
    lost = [about | {n: v for n, v in row.items() if n not in (*left_out, "state")} for row in rows]
    with (other / "events.jsonl").open("a") as file:
        file.write("".join(encode(row) + "\n" for row in lost[:4]))
    differ(other, "samples")
    assert f"step {STEP}, filter\n" in bisect(capsys, evidence, other)[1]


LAKE = [
    {"role": "user", "content": "P_"}, {"role": "assistant", "content": "Right"},
    {"role": "user", "content": "_P"}, {"role": "assistant", "content": "Left"},
]  # fmt: skip
PLAYED = {
    "prompt_id": "lake", "visit": 0, "index": 0, "domain": "lake", "messages": [], "seed": 1,
    "state": "done", "reply": "Left", "transcript": LAKE, "end": "truncated", "reward": 1.0,
    "parts": {}, "token_ids": [1, 2, 3, 4, 5, 6], "logprobs": pack([-0.5, -0.25]),
    "turns": [
        {"read": 2, "sampled": 1, "finish": "stop", "versions": [[0, 0]], "reward": 1.0},
        {"read": 2, "sampled": 1, "finish": "stop", "versions": [[0, 0]], "reward": 0.0},
    ],
}  # fmt: skip


def played(**changes):
    return json.loads(json.dumps(PLAYED)) | changes


def test_another_observation_is_of_the_environment_and_has_its_turn():
    said = [*LAKE[:2], {"role": "user", "content": "__"}, LAKE[3]]
    found = part(played(), played(transcript=said, token_ids=[1, 2, 3, 9, 5, 6]))
    assert found.stage == "environment" and "token 3, in turn 2" in found.what


def test_the_same_messages_that_are_read_as_other_tokens_are_another_context():
    found = part(played(), played(token_ids=[1, 2, 3, 9, 5, 6]))
    assert found.stage == "context"


def test_a_turn_without_the_turn_before_it_is_another_context():
    """Its tokens are the same, and sequences say what the model had read."""
    found = part(played(), played(sequences=[[0], [1]]))
    assert found.stage == "context" and "token 3, in turn 2" in found.what


def test_the_reward_of_a_turn_is_named():
    other = played(reward=0.5)
    other["turns"][0]["reward"] = 0.5
    assert part(played(), other)[:2] == ("reward", "reward of turn 1: 1.0 | 0.5")


def test_a_version_that_differs_is_of_the_sync():
    other = played()
    other["turns"][1]["versions"] = [[0, 1]]
    assert part(played(), other).stage == "sync"


# ---- digests and metrics

DIGESTS = {
    "advantages": (["batch/advantages", "gradient"], None),
    "batch": (["batch/rows", "batch/weights", "batch/advantages", "gradient"], None),
    "clipping": (["clipping", "weights"], None),
    "gradient": (["gradient", "weights", "metrics"], "loss/grad_norm"),
    "loss": (["gradient", "weights", "metrics"], "loss/loss"),
    "schedule": (["weights", "metrics"], "loss/lr"),
    "optimizer": (["weights"], None),
    "metrics": (["metrics"], "reward/std"),
}


@pytest.mark.parametrize("stage", DIGESTS)
def test_equal_samples_are_followed_by_digests(evidence, other, stage, capsys):
    names, metric = DIGESTS[stage]
    if metric:
        edit_metric(other, metric)
    differ(other, *names)
    code, said = bisect(capsys, evidence, other)
    assert code == 1 and f"first difference: step {STEP}, {stage}\n" in said
    assert metric is None or metric in said


def test_a_loss_may_differ_where_its_gradient_does_not(evidence, other, capsys):
    """As that of tokens beyond the bound of a clip."""
    edit_metric(other, "loss/loss")
    differ(other, "metrics")
    assert f"step {STEP}, loss\n" in bisect(capsys, evidence, other)[1]


def test_entropies_of_the_trainer_tell_its_forward_pass(evidence, other, capsys):
    def change(rows):
        rows[SAMPLE]["entropies"] = pack([x + 0.5 for x in numbers(rows[SAMPLE]["entropies"])])

    edit_samples(other, change)
    differ(other, "samples", "gradient")
    said = bisect(capsys, evidence, other)[1]
    assert f"step {STEP}, forward\n" in said and "differ by up to 0.5" in said


def test_weights_before_the_first_step(evidence, other, capsys):
    differ(other, "weights", step=0)
    assert "first difference: step 0, start\n" in bisect(capsys, evidence, other)[1]


def test_samples_that_are_not_recorded(evidence, other, capsys):
    (other / f"rollouts/step_{STEP:05d}.jsonl").unlink()
    differ(other, "samples", "batch/token_ids")
    said = bisect(capsys, evidence, other)[1]
    assert f"step {STEP}, samples\n" in said and "--rollouts-every 1" in said


def test_other_tokens_of_a_run_without_samples_are_of_its_data(evidence, other, capsys):
    rows = read(other / "digests.jsonl")
    for row in rows:
        row.pop("samples", None)
    write(other / "digests.jsonl", rows)
    differ(other, "batch/token_ids", "batch/rows", "gradient")
    assert f"step {STEP}, data\n" in bisect(capsys, evidence, other)[1]


# ---- evaluation


def test_another_answer_is_of_the_evaluation_unless_samples_say_why(evidence, other, capsys):
    edit_samples(other, lambda rows: rows[1].update(reply="!"), "eval_00003")
    differ(other, "answers")
    assert f"step {STEP}, evaluation\n" in bisect(capsys, evidence, other)[1]
    edit_samples(other, lambda rows: other_read_token(rows[SAMPLE]), "step_00004")
    said = bisect(capsys, evidence, other)[1]
    assert f"step {STEP}, context\n" in said and "at step 4, token" in said


def test_a_metric_of_the_evaluation_is_explained_by_samples(evidence, other, capsys):
    edit_metric(other, "eval/pass@1")
    differ(other, "metrics")
    assert f"step {STEP}, evaluation\n" in bisect(capsys, evidence, other)[1]
    edit_samples(other, lambda rows: other_read_token(rows[SAMPLE]), "step_00004")
    assert f"step {STEP}, context\n" in bisect(capsys, evidence, other)[1]


def test_another_reward_of_an_answer(evidence, other, capsys):
    edit_samples(other, lambda rows: rows[1].update(reward=0.5), "eval_00003")
    differ(other, "answers")
    assert f"step {STEP}, reward\n" in bisect(capsys, evidence, other)[1]


# ---- the kind of cause


def change_contract(run, change):
    (path,) = (run / "contracts").iterdir()
    contract = json.loads(path.read_text())
    change(contract)
    name = write_contract(run, contract)
    write(run / "digests.jsonl", [r | {"contract": name} for r in read(run / "digests.jsonl")])


KINDS = {
    "code": ("reward", lambda c: c["code"].update({"rewards/maths/reward.py": "0"})),
    "data": ("reward", lambda c: c["files"].update({"data mine.jsonl": "0"})),
    "options": ("reward", lambda c: c["options"].update(lr=0.5)),
    "packages": ("reward", lambda c: c["packages"].update(torch="1.0")),
    "not deterministic": ("reward", lambda c: None),
    "numerics": ("engine", lambda c: c["machine"].update(threads=7)),
    "code, and no more than rounding": ("engine", lambda c: c["code"].update({"loop.py": "0"})),
    "code or options": ("reward", lambda c: c.update(code={}, options={})),
    # what cannot be the cause of another reward, or of another logprob
    "own options": ("reward", lambda c: (c["machine"].update(threads=7), c.update(options={}))),
    "own code": ("engine", lambda c: (c["files"].update(data="0"), c.update(code={}))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_cause_is_what_the_contracts_differ_in(evidence, other, kind, capsys):
    stage, change = KINDS[kind]
    change_contract(other, change)
    if stage == "reward":
        edit_samples(other, lambda rows: rows[0].update(reward=0.5))
    else:
        edit_samples(other, lambda rows: other_logprob(rows[0], 1e-6))
    differ(other, "samples")
    said = bisect(capsys, evidence, other)[1]
    assert f"kind of cause: {kind.removeprefix('own ')}" in said
    assert ("roll-lite verify" in said) == (kind in ("not deterministic", "numerics"))


def test_the_changed_code_of_the_stage_is_named(evidence, other, capsys):
    def change(contract):
        contract["code"] = dict.fromkeys(contract["code"], "0")

    change_contract(other, change)
    differ(other, "weights")
    assert "code of this stage: train/adamw.py\n" in bisect(capsys, evidence, other)[1]


# ---- the page


def test_the_page_marks_the_token_and_hostile_text_stays_data(evidence, other, tmp_path, capsys):
    def change(rows):
        rows[SAMPLE]["reply"] = HOSTILE.replace("\ud800", "")
        other_token(rows[SAMPLE])

    edit_samples(other, change)
    differ(other, "samples")
    assert bisect(capsys, evidence, other, "--html", tmp_path / "apart.html")[0] == 1
    page = (tmp_path / "apart.html").read_text()
    assert "<script>window.hacked" not in page and "<img" not in page
    data = page.partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(data)
    rows = read(evidence / f"rollouts/step_{STEP:05d}.jsonl")
    assert data["token"] == first_sampled(rows[SAMPLE])
    assert [run["name"] for run in data["runs"]] == [str(evidence), str(other)]
    assert data["runs"][0]["sample"]["token_ids"] == rows[SAMPLE]["token_ids"]
    assert f"step {STEP}, sampler" in data["about"]


def test_equal_runs_have_a_page_too(evidence, other, tmp_path, capsys):
    assert bisect(capsys, evidence, other, "--html", tmp_path / "apart.html")[0] == 0
    assert "steps that both have are equal" in (tmp_path / "apart.html").read_text()


# ---- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "digests.jsonl").unlink(), "has no digests.jsonl"),
        (lambda run: (run / "config.json").unlink(), "is not the folder of a run"),
        (lambda run: shutil.rmtree(run / "contracts"), "is missing: it says what decides"),
        (lambda run: edit_samples(run, lambda r: r[0].update(logprobs="")), "is damaged"),
        (lambda run: edit_samples(run, lambda r: r[0].pop("visit")), "visit"),
    ],
)
def test_what_cannot_be_compared_is_named(evidence, other, change, message, capsys):
    differ(other, "samples")
    edit_samples(other, lambda rows: rows[SAMPLE].update(reward=0.5))
    change(other)
    code, said = bisect(capsys, evidence, other)
    assert code == 2 and message in said


def test_runs_without_a_common_step(evidence, other, capsys):
    write(
        other / "digests.jsonl",
        [r | {"step": r["step"] + 9} for r in read(other / "digests.jsonl")],
    )
    code, said = bisect(capsys, evidence, other)
    assert code == 2 and "have no step in common" in said


def test_it_starts_without_torch():
    code = "import sys, roll_lite.proof.bisect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- for real


@pytest.fixture(scope="module")
def bench(learnt_folder, tmp_path_factory):
    """scripts/bench/planted_faults.py with a model that has learnt little."""
    spec = importlib.util.spec_from_file_location("faults", SCRIPTS / "bench/planted_faults.py")
    module = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    work = tmp_path_factory.mktemp("faults")
    yield module, module.Bench(work, {"rlvr": learnt_folder})
    del sys.modules["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule off by one", "weight decay", "order of prompts"])
def test_a_planted_fault_is_found(bench, name):
    module, runs = bench
    (fault,) = [fault for fault in module.FAULTS if fault.name == name]
    result = runs.try_fault(1, fault)
    assert result.is_found, result.line()


def test_a_page_in_no_folder_is_refused_at_once(evidence, other, capsys):
    with pytest.raises(SystemExit):
        bisect(capsys, evidence, other, "--html", other / "none" / "apart.html")
    assert "its folder does not exist" in capsys.readouterr().err
