"""Steps in the terminal: the table of a run, and the end of a run's folder."""

import json
import re
from itertools import pairwise

import pytest
from support.made_runs import HOSTILE, make_run, sample, write_lines
from support.terminals import run_in_terminal, screens

from roll_lite.report.__main__ import main
from roll_lite.report.terminal import HEADER_EVERY, StepTable, cell

SHOWN = {
    "reward/mean": "reward", "eval/pass@1": "eval", "rollout/failed": "failed",
    "loss/grad_norm": "grad", "loss/kl": "a long title", "time/step": "step s",
}  # fmt: skip


def spans(line):
    """Where each word of a header ends; a title may have several."""
    return {title: line.index(title) + len(title) for title in SHOWN.values() if title in line}


@pytest.mark.parametrize(
    "value",
    [0, 1, -1, 0.5, 0.9996, 999.4, 999.6, 1234.5, -123456.7, 1e6, -2.5e7, 1.2345e-3, -9.9e-5,
     1e-300, float("inf"), float("nan"), 3],
)  # fmt: skip
def test_a_number_fits_its_column_and_reads_back(value):
    text = cell(value)
    assert len(text) <= 8
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.02, nan_ok=True)


def test_columns_are_aligned_and_the_header_comes_again():
    table, written = StepTable(SHOWN), []
    for step in range(1, 46):
        metrics = {"reward/mean": step / 7, "loss/grad_norm": 10.0**-step, "time/step": 1.5}
        written += table.lines(step, metrics | {"loss/kl": -0.1, "rollout/failed": 0}, 80)
    headers = [i for i, line in enumerate(written) if "step s" in line]
    assert [b - a for a, b in pairwise(headers)] == [HEADER_EVERY + 1] * 2
    assert len({line for line in written if "step s" in line}) == 1
    ends = spans(written[0])
    assert set(ends) == {"reward", "grad", "a long title", "step s"}  # nothing failed
    for line in written:
        if "step s" not in line:
            step, reward, *_ = line.split()
            assert [m.end() for m in re.finditer(r"\S+", line)][1:] == sorted(ends.values())
            assert float(reward) == pytest.approx(int(step) / 7, rel=0.01)


def test_a_column_appears_with_its_first_value():
    table = StepTable(SHOWN)
    table.lines(1, {"reward/mean": 0.5, "rollout/failed": 0}, 80)
    header, row = table.lines(2, {"reward/mean": 0.5, "rollout/failed": 3}, 80)
    assert header.split() == ["step", "reward", "failed"] and row.split() == ["2", "0.5", "3"]
    header, row = table.lines(3, {"reward/mean": 0.5, "eval/pass@1": 0.25}, 80)
    assert header.split() == ["step", "reward", "eval", "failed"]
    assert row.index("0.25") + 4 == spans(header)["eval"]


@pytest.mark.parametrize(("width", "titles"), [(24, 1), (30, 2), (40, 3), (80, 6)])
def test_the_most_important_columns_fit_the_width(width, titles):
    (header, row) = StepTable(SHOWN).lines(7, dict.fromkeys(SHOWN, 0.123), width)
    assert len(row) < width and list(spans(header)) == list(SHOWN.values())[:titles]


RUN = """
import sys
from roll_lite.report.run import Run
from roll_lite.types import Prompt
config = Prompt(id="p", messages=(), domain="", ground_truth="")
run = Run(sys.argv[1], config, num_steps=25, shown={"a": "first", "b": "second"})
for step in range(1, 26):
    run.log(step, {"a": step / 4, "b": 1.0, "rollout/truncated": 0.95})
run.close()
"""


def test_a_run_in_a_terminal_prints_a_table(tmp_path):
    *_, shown = screens(run_in_terminal(RUN, 40, tmp_path / "run"), 40)
    lines = [line for line in shown if line]
    assert sum(line.split() == ["step", "first", "second"] for line in lines) == 2
    rows = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [float(row[1]) for row in rows] == [float(cell(step / 4)) for step in range(1, 26)]
    assert any(line.startswith("hint: 95% of the replies") for line in lines)
    assert not any("steps" in line for line in lines)


def test_the_tail_shows_the_last_steps_and_the_worst_and_best_sample(tmp_path, capsys):
    folder = make_run(tmp_path / "run", num_steps=6)
    rows = [sample(6, n, reward=r, reply=f"reply {n}") for n, r in enumerate([0.5, None, -2, 3])]
    rows[3]["reply"] = HOSTILE + "\x1b]0;title\x07" + "z" * 10_000
    write_lines(folder / "rollouts" / "step_00006.jsonl", rows)
    assert main([str(folder), "--tail", "3"]) == 0
    text = capsys.readouterr().out
    assert "step 6 of 6" in text and "best eval/pass@1 0.6 at step 6" in text
    table = [line.split() for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert [row[0] for row in table] == ["4", "5", "6"]
    worst, best = text[text.index("the worst") :].split("the best")
    assert "reward -2" in worst and "reply 2" in worst and "question 0" in worst
    assert "reward 3" in best and "<script>" in best and "characters" in best
    assert all(character.isprintable() or character == "\n" for character in text)


def test_the_tail_has_the_columns_of_the_run(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["starts"][-1]["shown"] = {"time/train": "seconds"}
    (folder / "config.json").write_text(json.dumps(config))
    main([str(folder), "--tail"])
    assert ["step", "seconds"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("left", [(), ("config.json",), ("metrics.jsonl",)])
def test_the_tail_of_a_torn_folder(tmp_path, capsys, left):
    folder = make_run(tmp_path / "run")
    for path in folder.rglob("*.json*"):
        if path.name not in left:
            path.unlink()
    assert main([str(folder), "--tail"]) == 0
    assert "no scored samples" in capsys.readouterr().out
