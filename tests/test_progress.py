"""The progress line in a real terminal (a pty): what is printed stays whole, whoever prints it."""

import os
import re
import subprocess
import sys

import pytest
from support.terminals import run_in_terminal, screens

from roll_lite import progress
from roll_lite.progress import PhaseFile, ProgressBar, StepTimer

PROGRAM = """
import logging, sys, threading, time, warnings
from roll_lite import progress
from roll_lite.progress import ProgressBar
progress.DRAW_SECONDS = 0
if len(sys.argv) > 1:
    progress.PLAIN_SECONDS = 0
logging.basicConfig(format="%(levelname)s %(message)s")  # keeps the stream from before
outer = ProgressBar(3, "steps")
for step in range(3):
    with ProgressBar(20, "rollout", "samples") as bar:
        def work():
            for _ in range(10):
                bar.advance(1, 100)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(5):
            print("printed", step, number)
        for thread in threads:
            thread.join()
        logging.warning("logged %d", step)
        warnings.warn(f"warned {step}")
    outer.advance()
print("prompt> ", end="", flush=True)
outer.advance(0)
print("answer")
raise RuntimeError("the end")
"""


def said(lines):
    return [line for line in lines if line.startswith(("printed", "WARNING", "prompt"))]


@pytest.mark.parametrize("width", [50, 120])
def test_what_a_program_prints_is_whole_beside_the_progress_line(width):
    shown = screens(run_in_terminal(PROGRAM, width), width)
    final = shown[-1]
    wanted = []
    for step in range(3):
        wanted += [*(f"printed {step} {n}" for n in range(5)), f"WARNING logged {step}"]
    assert said(final) == [*wanted, "prompt> answer"]
    text = "".join(final)  # long lines wrap
    for line in ("UserWarning: warned 2", "Traceback (most recent", "RuntimeError: the end"):
        assert line in text
    assert not any("samples" in line for line in final)  # the last draw was cleared
    progress_lines = {screen[-1] for screen in shown if "rollout" in screen[-1]}
    assert any(re.match(r"steps 2/3, 0:0\d left \| rollout ", line) for line in progress_lines)
    assert any("tokens/s, 0:0" in line for line in progress_lines) == (width == 120)
    assert any(re.search(r"\[#*\.*\]", line) for line in progress_lines) == (width == 120)
    assert all(len(line) < width for line in progress_lines)


def test_without_a_terminal_there_are_plain_lines_now_and_then():
    def run(*arguments):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
        return done.stdout, done.stderr.splitlines()

    quiet, errors = run()
    assert len(said(quiet.splitlines())) == 16 and not any("rollout" in line for line in errors)
    stdout, errors = run("--every-time")
    assert stdout == quiet
    assert any(re.match(r"progress: steps 1/3.* \| rollout \d+/20 samples", e) for e in errors)


def test_a_pipe_to_the_same_terminal_gets_no_progress_line():
    piped = """
import subprocess, sys
subprocess.run([sys.executable, "-W", "ignore", "-c", sys.argv[1]], stdout=tee.stdin)
"""
    start = "import subprocess\ntee = subprocess.Popen(['tee'], stdin=subprocess.PIPE)"
    written = run_in_terminal(start + piped + "tee.communicate()", 100, PROGRAM)
    assert "\x1b" not in written and "rollout" not in written
    for text in (r"prompt> .*answer", r"RuntimeError.*the end"):  # tee may write in between
        assert re.search(text, written, re.DOTALL)


def test_rate_and_time_left(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = ProgressBar(100, "rollout", "samples", done=10, enabled=False)
    assert bar.describe() == "rollout 10/100 samples"
    now += 2
    bar.advance(5, num_tokens=3000)  # 2.5 samples and 1,500 tokens a second; 85 are left: 34 s
    assert bar.describe() == "rollout 15/100 samples, 1,500 tokens/s, 0:34 left"
    bar = ProgressBar(1000, "rollout", "samples", enabled=False)
    now += 10
    bar.advance(1, num_tokens=500)  # the others have run for 10 seconds too
    assert bar.describe() == "rollout 1/1,000 samples, 50 tokens/s"
    steps = ProgressBar(1000, "steps", enabled=False)
    now += 4
    steps.advance()
    assert steps.describe() == "steps 1/1,000, 4 s/step, 1:06:36 left"
    for _ in range(2 * progress.WINDOW):  # what was long ago does not count
        now += 1
        steps.advance()
    assert steps.describe() == "steps 129/1,000, 1 steps/s, 14:31 left"
    checkpoint = ProgressBar(4 * 10**9, "checkpoint", "bytes", enabled=False)
    now += 0.5
    checkpoint.advance(10**9)
    assert checkpoint.describe(has_graph=True) == (
        "checkpoint [####............] 1/4 GB, 2 GB/s, 0:02 left"
    )


def test_a_step_s_parts_are_the_phases_of_its_run(tmp_path):
    phase = PhaseFile(tmp_path / "phase", step=6)
    assert read_phase(tmp_path) == [str(os.getpid()), "6", "start"]
    timer = StepTimer(phase, 7)
    for part in ("rollout", "train", "rollout"):
        timer.begin(part)
        assert read_phase(tmp_path)[1:] == ["7", part]
    assert timer.metrics().keys() == {"time/rollout", "time/train", "time/step"}
    phase.show_states(["generating", "scoring"])
    assert read_phase(tmp_path)[1:] == ["7", "rollout", "generating", "scoring"]
    phase.show_states([])
    phase.enter("end")
    assert read_phase(tmp_path)[1:] == ["7", "end"]


def read_phase(folder):
    (line,) = (folder / "phase").read_text().splitlines()
    return line.split()
