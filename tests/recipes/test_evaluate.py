"""recipes/evaluate.py: answers are written as they come, and what died goes on."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.recipes import call_recipe

from roll_lite.options import from_flat
from roll_lite.recipes import evaluate, rlvr
from roll_lite.rollout import evaluation


@pytest.fixture
def config(tiny_folder, tmp_path):
    def make(name, **changes):
        options = {
            "model": str(tiny_folder), "data": ("reverse:2", "addition:1"), "prompts": 6,
            "samples": 2, "max_tokens": 5, "kv_cache_gib": 0.02, "run_dir": str(tmp_path / name),
        } | changes  # fmt: skip
        return from_flat(evaluate.Config, **options)

    return make


@pytest.fixture
def scored(monkeypatch):
    """The prompts of the replies that were scored."""
    ids = []

    def reward(prompt, reply):
        ids.append(prompt.id)
        return float(len(reply) % 2)

    for domain in ("reverse", "addition"):
        monkeypatch.setitem(rlvr.Config.INLINE, domain, reward)
    return ids


@contextmanager
def dying_after(num_groups, monkeypatch):
    """Nothing can be written any more after so many; gives the ids of those that were."""
    original, written = evaluation.write_group, []

    def write_group(group):
        if len(written) == num_groups:
            raise OSError("no space left")
        written.append(group.prompt.id)
        return original(group)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(evaluation, "write_group", write_group)
        yield written


def answers_of(cfg):
    return Path(cfg.run_dir, "answers.jsonl")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(cfg):
    lines = Path(cfg.run_dir, "rollouts", "step_00000.jsonl").read_text().splitlines()
    names = "prompt_id", "index", "token_ids", "logprobs", "reply", "reward", "messages"
    return [[json.loads(line)[name] for name in names] for line in lines]


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def test_an_evaluation_that_died_asks_what_is_missing(config, scored, monkeypatch):
    """The result is that of one that did not die: every reply, logprob and metric."""
    whole, cfg = config("whole"), config("died")
    expected = call_recipe(evaluate, whole)
    assert len(scored) == 2 * 12 and not answers_of(whole).exists()
    with dying_after(5, monkeypatch) as written:
        call_recipe(evaluate, cfg)
    lines = answers_of(cfg).read_text().splitlines()[1:]
    assert [json.loads(line)["prompt"]["id"] for line in lines] == written
    with answers_of(cfg).open("a") as file:
        file.write(lines[0][:40])  # the end came while a line was written
    shared = answers_of(cfg).with_name("shared")  # as in a copy of hard links
    os.link(answers_of(cfg), shared)
    before = shared.read_bytes()
    with dying_after(2, monkeypatch) as more:
        call_recipe(evaluate, config("died"))
    scored.clear()
    found = call_recipe(evaluate, config("died", kv_cache_gib=0.03))
    assert len(scored) == 2 * 5 and len({*scored, *written, *more}) == 12
    assert rows_of(cfg) == rows_of(whole)
    assert without_times(found) == without_times(expected)
    assert not answers_of(cfg).exists() and shared.read_bytes() == before


def test_answers_to_other_questions_are_asked_again(config, scored, tmp_path, monkeypatch):
    rows = [{"id": i, "prompt": f"Reverse {i}", "domain": "reverse"} for i in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with dying_after(3, monkeypatch) as written:
        call_recipe(evaluate, config("run", data=(path,)))
    changed = next(row for row in rows if str(row["id"]) in written)
    changed["prompt"] = "Reverse it"
    write_rows(tmp_path / "rows.jsonl", rows)
    scored.clear()
    call_recipe(evaluate, config("run", data=(path,)))
    kept = {*written} - {str(changed["id"])}
    assert set(scored) == {"0", "1", "2", "3"} - kept and len(scored) == 2 * 2


def test_what_failed_is_asked_again(config, scored, monkeypatch):
    """The reward was broken for some prompts, and has been mended."""
    right = rlvr.Config.INLINE["reverse"]

    def broken(prompt, reply):
        if int(prompt.id[-1]) % 2:
            raise KeyError("no such key")
        return right(prompt, reply)

    with monkeypatch.context() as patch:
        patch.setitem(rlvr.Config.INLINE, "reverse", broken)
        with dying_after(9, monkeypatch):
            call_recipe(evaluate, config("run"))
    rows = [json.loads(line) for line in answers_of(config("run")).read_text().splitlines()[1:]]
    failed = {row["prompt"]["id"] for row in rows if any(s["error"] for s in row["samples"])}
    assert 0 < len(failed) < 9
    scored.clear()
    assert call_recipe(evaluate, config("run"))["eval/failed"] == 0
    assert failed <= set(scored) and len(scored) == 2 * (3 + len(failed))


def test_when_all_failed_the_error_says_why_and_it_can_be_tried_again(config, scored, monkeypatch):
    def broken(prompt, reply):
        raise KeyError("no such key")

    with monkeypatch.context() as patch:
        for domain in ("reverse", "addition"):
            patch.setitem(rlvr.Config.INLINE, domain, broken)
        with pytest.raises(RuntimeError, match=r"24 samples failed(.|\n)*KeyError: 'no such key'"):
            call_recipe(evaluate, config("run", max_error_share=1.0))
    assert call_recipe(evaluate, config("run"))["eval/failed"] == 0


def test_what_is_no_checkpoint_is_refused_before_anything_is_written(config, tmp_path):
    with pytest.raises(ValueError, match=r"is not the folder of a checkpoint.*step-00000100"):
        call_recipe(evaluate, config("run", checkpoint=str(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_does_not_go_on_with_other_options(config, scored, monkeypatch):
    with dying_after(1, monkeypatch):
        call_recipe(evaluate, config("run"))
    with pytest.raises(ValueError, match=r"cannot be resumed with max_tokens=6 \(was 5\); give"):
        call_recipe(evaluate, config("run", max_tokens=6))


def test_an_evaluation_does_not_go_on_with_other_weights(
    config, scored, tiny_folder, tmp_path, monkeypatch
):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    with dying_after(1, monkeypatch):
        call_recipe(evaluate, config("run", model=str(model)))
    os.utime(model / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be resumed with weights_written=\{'model.safe"):
        call_recipe(evaluate, config("run", model=str(model)))


def test_files_that_share_ids_are_refused(config, tmp_path):
    rows = [{"id": i, "prompt": f"Reverse {i}", "domain": "reverse"} for i in range(2)]
    files = tuple(write_rows(tmp_path / name, rows) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(ValueError, match=r"id '0' is in .*a.jsonl and in .*b.jsonl"):
        call_recipe(evaluate, config("run", data=files))


def test_files_of_one_domain_have_their_own_rates(config, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(
        rlvr.Config.INLINE, "words", lambda prompt, reply: float(prompt.ground_truth)
    )
    files = []
    for name, rewards in {"a/test": (1, 1, 0), "b/test": (0, 0), "words": (1,)}.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        rows = [
            {"id": f"{name}/{i}", "prompt": "?", "domain": "words", "ground_truth": str(reward)}
            for i, reward in enumerate(rewards)
        ]
        files.append(write_rows(path, rows))
    cfg = config("run", data=(*files, "addition:1"), samples=1)
    monkeypatch.setitem(rlvr.Config.INLINE, "addition", lambda prompt, reply: 0.0)
    metrics = call_recipe(evaluate, cfg)
    shown = {words[0]: words[1:3] for line in capsys.readouterr().out.splitlines()[-7:]
             if (words := line.split())}  # fmt: skip
    expected = {  # name: prompts, pass@1; a file named as a domain has both names
        "a-test": (3, 2 / 3), "b-test": (2, 0.0), "words-words": (1, 1.0), "words": (6, 0.5),
        "addition": (6, 0.0), "all": (12, 0.25),
    }  # fmt: skip
    for name, (count, rate) in expected.items():
        key = "eval/pass@1" if name == "all" else f"eval/{name}/pass@1"
        assert metrics[key] == pytest.approx(rate) and shown[name] == [str(count), f"{rate:.3f}"]
    alone = call_recipe(evaluate, config("alone", data=tuple(files[:1]), samples=1))
    assert [name for name in alone if name.endswith("pass@1")] == ["eval/pass@1"]


def test_the_improvement_over_another_evaluation(config, scored, tmp_path, capsys):
    call_recipe(evaluate, config("a"))
    against = str(tmp_path / "a")
    call_recipe(evaluate, config("b", against=against))
    found = capsys.readouterr().out
    assert f"pass@1 over {against}: +0.000 (95% interval -0.250 to +0.250, by 12 prompts" in found
    for name, value in {"samples": 3, "seed": 1, "prompts": 5, "temperature": 0.5}.items():
        with pytest.raises(ValueError, match=f"has {name}=.*, and here it is {value}"):
            call_recipe(evaluate, config("c", against=against, **{name: value}))
    with pytest.raises(ValueError, match="has no complete evaluation"):
        call_recipe(evaluate, config("d", against=str(tmp_path)))
