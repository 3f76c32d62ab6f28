"""A recorded sample is generated again, bit for bit, and differences are found where they are."""

import fcntl
import json
import re
import shutil
import signal
from io import StringIO
from itertools import chain, islice
from textwrap import indent

import pytest
import torch
import transformers
from support.made_runs import make_run, sample, write_lines
from support.recipes import call_recipe

from roll_lite.options import from_flat
from roll_lite.recipes import agentic, rlvr
from roll_lite.replay import main, read_config_of
from roll_lite.report.config_file import RECIPE, to_json
from roll_lite.report.reader import RunFolder
from roll_lite.report.records import numbers, pack, read_tokens
from roll_lite.report.terminal import readable

REWARDS = """
from roll_lite.types import Score

def mine(prompt, reply):
    value = float(sum(map(ord, reply)) % 7)
    return Score(value=value, parts={"length": len(reply)}, reason=f"{len(reply)} letters")

REWARDS = {"reverse": mine}
"""
ENVS = """
from random import Random

class Guess:
    def reset(self, seed):
        self.number, self.num_steps = Random(seed).randint(1, 9), 0
        return f"guess {self.number % 2}", {}

    def step(self, reply):
        self.num_steps += 1
        reward = sum(map(ord, reply)) % 7
        return f"not {reply[:1]}", reward, False, self.num_steps == 2, {}

async def talk(chat, task):
    first = await chat([{"role": "user", "content": f"say {task.seed % 9}"}])
    second = await chat([{"role": "user", "content": "say"}])
    return float(len(first["content"]) + 2 * len(second["content"]))

ENVS = {"mine": Guess, "talk": talk}
"""
COMMON = {
    "steps": 3, "prompts_per_step": 2, "samples_per_prompt": 3, "max_tokens": 4, "eval_every": 0,
    "kv_cache_gib": 0.005, "lr": 1e-2, "device": "cpu", "checkpoint_every": 1, "keep_last": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(toy_folder, shared_folder):
    """A run of each recipe, with rewards and environments in files."""
    folder = shared_folder / "replayed"
    with (shared_folder / "replayed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker makes it, or has made it
        if not folder.exists():
            make_runs(toy_folder, folder)
    return folder


def make_runs(toy_folder, folder):
    folder.mkdir()
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "my_envs.py").write_text(ENVS)
    common = COMMON | {"model": str(toy_folder)}
    own = {"data": ("reverse:1",), "code": (str(folder / "my_rewards.py"),), "reward_workers": 0}
    for name, lora_rank in (("rlvr", 0), ("lora", 2)):
        options = common | own | {"lora_rank": lora_rank, "run_dir": str(folder / name)}
        call_recipe(rlvr, from_flat(rlvr.Config, **options))
    own = {"data": ("mine", "talk"), "code": (str(folder / "my_envs.py"),), "history": 0}
    call_recipe(
        rlvr,
        from_flat(agentic.Config, **common, **own, env_workers=0, run_dir=str(folder / "agentic")),
    )
    for recipe in ("rlvr", "lora", "agentic"):  # otherwise all checkpoints would do
        lines = (folder / recipe / "metrics.jsonl").read_text().splitlines()
        norms = [json.loads(line).get("loss/grad_norm", 0.0) for line in lines]
        assert sum(norm > 1e-3 for norm in norms) == COMMON["steps"]


@pytest.fixture
def changed(runs, tmp_path):
    """A run's folder without checkpoints, whose samples a function may change."""

    def copy(recipe, step, change):
        folder = tmp_path / "changed"
        shutil.copytree(runs / recipe, folder, ignore=lambda *_: {"checkpoints", "model"})
        rows = rows_of(folder, step)
        change(rows)
        write_lines(folder / "rollouts" / f"step_{step:05d}.jsonl", rows)
        return folder

    return copy


def rows_of(folder, step):
    path = folder / "rollouts" / f"step_{step:05d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def name_of(step, row):
    return f"{step}/{row['prompt_id']}/{row['index']}"


def sampled_places(row):
    """Places in token_ids of the tokens that were sampled, in the order of logprobs."""
    at, found = 0, []
    for number in chain(*row.get("sequences", [range(len(row["turns"]))])):
        at += row["turns"][number]["read"]
        found += range(at, at + row["turns"][number]["sampled"])
        at += row["turns"][number]["sampled"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "step", "place"), [
    ("rlvr", 1, 1), ("rlvr", 3, 5), ("agentic", 1, 2), ("agentic", 3, 1), ("agentic", 3, 5),
    ("lora", 1, 2), ("lora", 3, 1), ("lora", 3, 5),
])  # fmt: skip
def test_the_bits_are_equal(runs, capsys, recipe, step, place):
    """Of version 0, which is the model itself, and of a checkpoint; by index, task and turn."""
    row = rows_of(runs / recipe, step)[place]
    assert {version for turn in row["turns"] for _, version in turn["versions"]} == {step - 1}
    assert main([str(runs / recipe), "--sample", name_of(step, row)]) == 0
    said = capsys.readouterr().out
    used = f"step-{step - 1:08d}" if step > 1 else "toy"
    assert re.search(rf"^weights: version {step - 1}, .*{used}$", said, re.MULTILINE)
    assert f"tokens: all {len(row['token_ids'])} are equal" in said
    assert f"logprobs: bit for bit equal in the first {len(row['token_ids'])} tokens" in said
    assert f"reward: recorded {row['reward']}, now {row['reward']}" in said
    assert said.startswith("  user:\n    ") and all(
        f":\n{indent(readable(message['content']), '    ')}\n" in said
        for message in row.get("transcript", [{"content": row["reply"]}])
    )
    if recipe != "agentic":
        assert f"reason: recorded {row['reason']!r}, now {row['reason']!r}" in said
    else:
        assert len(row["turns"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rlvr", "agentic"])
def test_recorded_logprobs_and_entropies_are_the_models(runs, toy_folder, recipe):
    """Every sequence of the first step, through the model as transformers has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(toy_folder, dtype=torch.float32)
    for row in rows_of(runs / recipe, 1):
        recorded = [iter(numbers(row[name])) for name in ("logprobs", "entropies")]
        ids = iter(row["token_ids"])
        for order in row.get("sequences", [range(len(row["turns"]))]):
            turns = [row["turns"][number] for number in order]
            lengths = [(turn["read"], turn["sampled"]) for turn in turns]
            sequence = torch.tensor([list(islice(ids, sum(map(sum, lengths))))])
            is_sampled = [s for read, sampled in lengths for s in [False] * read + [True] * sampled]
            with torch.no_grad():
                logprobs_TV = model(sequence).logits[0, :-1].log_softmax(-1)[is_sampled[1:]]
            chosen = logprobs_TV.gather(1, sequence[0, is_sampled][:, None])[:, 0]
            entropies = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
            for found, expected in zip(recorded, (chosen, entropies), strict=True):
                assert list(islice(found, len(expected))) == pytest.approx(
                    expected.tolist(), abs=1e-5
                )
        assert not any(list(rest) for rest in (*recorded, ids))
        mismatches = numbers(row["mismatches"])
        assert len(mismatches) == len(numbers(row["logprobs"])) and max(mismatches) < 1e-5


@pytest.mark.slow
def test_the_first_difference_is_found(changed, capsys):
    """A token, before it a logprob by one bit, and the reward."""
    tampered = {}

    def change(rows):
        row = rows[1]
        places, logprobs = sampled_places(row), numbers(row["logprobs"])
        tampered.update(row=row, token=row["token_ids"][places[2]], places=places)
        row["token_ids"][places[2]] = (tampered["token"] + 1) % 90
        logprobs[1] = numbers(pack([logprobs[1] * (1 + 2**-23)]))[0]
        row["logprobs"], row["reward"] = pack(logprobs), row["reward"] + 0.5

    folder = changed("rlvr", 1, change)
    row, places, token = tampered["row"], tampered["places"], tampered["token"]
    assert main([str(folder), "--sample", name_of(1, row)]) == 1
    said = capsys.readouterr().out
    found = re.search(
        r"tokens: first difference at token (\d+), sampled in turn 1: recorded .+ \(id (\d+), "
        r"logprob (\S+)\), now .+ \(id (\d+), logprob (\S+)\)", said
    )  # fmt: skip
    recorded = numbers(row["logprobs"])
    assert (int(found[1]), int(found[2]), int(found[4])) == (places[2], (token + 1) % 90, token)
    assert float(found[3]) == float(found[5]) == pytest.approx(recorded[2], rel=1e-8)
    found = re.search(r"logprobs: first difference at token (\d+), .*difference (\S+)", said)
    assert int(found[1]) == places[1] and 0 < float(found[2]) < 1e-6
    assert f"reward: recorded {row['reward']}, now {row['reward'] - 0.5}" in said


@pytest.mark.slow
def test_the_nearest_checkpoint_stands_in(changed, runs, capsys):
    folder = changed("agentic", 3, lambda rows: None)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000003").symlink_to(
        runs / "agentic/checkpoints/step-00000003"
    )
    row = rows_of(folder, 3)[0]
    assert main([str(folder), "--sample", name_of(3, row)]) == 1
    said = capsys.readouterr().out
    assert "the checkpoint of version 2 is missing; there are 0, 3, and 3 is the nearest" in said
    assert "logprobs: first difference at token" in said


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "words", "where"), [
    ("rlvr", "p len(reply)\nc\n", ["mine"]),
    ("agentic", "p seed % 1\nc\np len(reply)\nc\nc\n", ["reset", "step", "step"]),
], ids=["rlvr", "agentic"])  # fmt: skip
def test_pdb_stops_in_user_code(runs, capsys, monkeypatch, recipe, words, where):
    row = next(row for row in rows_of(runs / recipe, 1) if row["domain"] in ("reverse", "mine"))
    monkeypatch.setattr("sys.stdin", StringIO(words))
    before = signal.getsignal(signal.SIGINT)
    assert main([str(runs / recipe), "--sample", name_of(1, row), "--pdb"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    said = capsys.readouterr().out
    stops = re.findall(r"> (?:.*)/my_(?:rewards|envs)\.py\(\d+\)(\w+)\(\)", said)
    assert stops == where
    assert (
        f"(Pdb) {len(row['transcript'][1]['content'] if recipe == 'agentic' else row['reply'])}"
        in said
    )


@pytest.mark.slow
def test_leaving_the_debugger_ends_the_replay(runs, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO("q\n"))
    row = rows_of(runs / "rlvr", 1)[0]
    assert main([str(runs / "rlvr"), "--sample", name_of(1, row), "--pdb"]) == 1
    assert "left the debugger" in capsys.readouterr().out


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_options_that_code_has_lost_or_gained_since_do_not_matter(toy_folder, tmp_path):
    code = tmp_path / "own.py"
    code.write_text("def keep(group, *, least: float = 0.0, new: int = 1): ...\n")
    options = to_json(from_flat(rlvr.Config, model=str(toy_folder), code=(str(code),), least=0.25))
    del options["new"], options["chosen"]
    written = options | {RECIPE: "rlvr", "gone": 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    cfg = read_config_of(RunFolder(tmp_path), {"seed": 7})
    assert cfg.own.values == {"least": 0.25, "new": 1} and cfg.seed == 7


def test_unknown_samples_are_refused(tmp_path, capsys):
    folder = make_run(tmp_path / "a", num_samples=12)
    assert "has no prompt p9; it has p0, p1, p2" in refused(capsys, folder, "--sample", "2/p9/0")
    said = refused(capsys, folder, "--sample", "2/p1/7")
    assert "prompt p1 of step 2 has samples 0, 1, 2, 3, but no 7" in said
    said = refused(capsys, folder, "--sample", "8/p1/0")
    assert "no samples of step 8; recorded steps: 1, 2, 3, 4" in said
    assert "is not STEP/PROMPT/INDEX" in refused(capsys, folder, "--sample", "p1/0")
    assert "is not a folder" in refused(capsys, tmp_path / "b", "--sample", "2/p1/0")


def test_damaged_samples_are_refused():
    with pytest.raises(ValueError, match=r"2 of p0 is damaged: its turns have 5 tokens, 3 of them"):
        read_tokens(sample(1, 2, token_ids=[1]))
    with pytest.raises(ValueError, match="AAA is not base64 of float32 numbers"):
        read_tokens(sample(1, 2, logprobs="AAA"))
    found = read_tokens(sample(1, 2))
    assert [token.logprob for token in found] == [None, None, -0.125, -2.5, -0.03125]
    assert [token.version for token in found] == [None, None, 3, 3, 4]


def test_runs_that_cannot_be_replayed_are_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    said = refused(capsys, tmp_path / "empty", "--sample", "1/p0/0")
    assert "recorded steps: none (--rollouts-every of the run)" in said
    folder = make_run(tmp_path / "a", num_steps=1)
    path = folder / "rollouts" / "step_00001.jsonl"
    twice = [sample(1, 0, visit=visit, seed=1) for visit in (4, 5)]
    write_lines(path, twice)
    said = refused(capsys, folder, "--sample", "1/p0/0")
    assert "has prompt p0 2 times; add --visit 4 or --visit 5" in said
    with path.open("a") as file:
        file.write('{"prompt_id": "p0", "index": 1, "vis')  # torn
    assert main([str(folder), "--sample", "1/p0/1"]) == 2
    captured = capsys.readouterr()
    assert "has samples 0, 0, but no 1" in captured.err
    assert "broken lines of step_00001.jsonl that are skipped: 1" in captured.out
    assert "recipe None" in refused(capsys, folder, "--sample", "1/p0/0", "--visit", "4")
    (folder / "config.json").write_text("{")
    said = refused(capsys, folder, "--sample", "1/p0/0", "--visit", "4")
    assert "config.json cannot be read" in said
