"""Output that cannot be written is dropped, and the run goes on: a closed terminal, head, a full
disk."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest
from support.made_runs import make_run
from support.paths import PYTHONPATH, RECIPES
from support.runs import flags, sft_options, toy_options

PROGRAM = """
import logging, sys, time, warnings
from roll_lite import output
output.protect()
logging.basicConfig()
for number in range(3000):
    print("printed", number, "\\u2211 \\ud800", flush=number % 2)
    print("printed", number, file=sys.stderr)
    sys.stdout.buffer.write(b"bytes")
    logging.warning("logged %d", number)
    warnings.warn(f"warned {number}")
lost = dict(output.newly_lost())
assert list(output.newly_lost()) == [] and lost.keys() == set(sys.argv[2:]), lost
open(sys.argv[1], "w").write("went on")
"""
SFT = RECIPES / "sft.py"
RLVR = RECIPES / "rlvr.py"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENV = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def program(tmp_path):
    """Runs PROGRAM in a shell's redirections; returns the exit code of Python."""

    def run(shell, *lost, flags=()):
        done = tmp_path / "done"
        done.unlink(missing_ok=True)
        command = [sys.executable, *flags, "-c", PROGRAM, done, *lost]
        script = f'"$@" {shell}; exit ${{PIPESTATUS[0]}}'
        ended = subprocess.run(
            ["bash", "-c", script, "bash", *command], env=ENV, capture_output=True, text=True
        )
        assert done.exists() and done.read_text() == "went on", ended.stderr
        return ended.returncode

    return run


@pytest.mark.parametrize("flags", [(), ("-u",)])
@pytest.mark.parametrize(
    ("shell", "lost"),
    [
        ("", []),
        (">/dev/full", ["stdout"]),
        (">/dev/full 2>&1", ["stdout", "stderr"]),
        ("| head -1 >/dev/null", ["stdout"]),
        ("2>&1 | head -1 >/dev/null", ["stdout", "stderr"]),
        (">&-", ["stdout"]),
        (">&- 2>&- <&-", ["stdout", "stderr"]),
    ],
)
def test_a_program_goes_on_without_its_output(program, shell, lost, flags):
    assert program(shell, *lost, flags=flags) == 0


def test_what_can_be_written_is_whole(tmp_path):
    """And as Python itself would write it, but for what the encoding lacks."""
    code = "from roll_lite import output\noutput.protect()\n"
    text = "import sys\nprint('a\\u00e9 \\u2211')\nsys.stderr.write('b')\nsys.stdout.write('end')\n"

    def run(code, encoding):
        env = ENV | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    assert run(code + text, "utf-8") == run(text, "utf-8") == (0, "aé ∑\nend".encode(), b"b")
    assert run(text, "latin-1")[0] == 1
    assert run(code + text, "latin-1") == (0, b"a\xe9 \\u2211\nend", b"b")


def test_a_tool_whose_reader_ends_comes_to_its_end(tmp_path):
    run = make_run(tmp_path / "a")
    script = '"$@" | true; exit ${PIPESTATUS[0]}'
    command = [sys.executable, "-m", "roll_lite", "report", run]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command], env=ENV, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and (run / "report.html").exists()


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all():
    """Another program may have made the terminal that they share so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    code = "from roll_lite import output\noutput.protect()\nfor n in range(40000): print(n)"
    with subprocess.Popen([sys.executable, "-c", code], env=ENV, stdout=writing) as process:
        os.close(writing)
        with open(reading) as lines:
            assert [int(line) for line in lines] == list(range(40000))
    assert process.returncode == 0


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    code = "from roll_lite import output\noutput.protect()\nimport os\n"
    code += f"file = open({str(tmp_path / 'file')!r}, 'w')\nos.write(2, b'printed')\nprint('too')"
    script = '"$@" >&- 2>&- <&-'
    command = ["bash", "-c", script, "bash", sys.executable, "-c", code]
    assert subprocess.run(command, env=ENV).returncode == 0
    assert (tmp_path / "file").read_text() == ""


# ---- runs


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").open()]


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.open()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "lost"),
    [
        (">/dev/full 2>&1", {"stdout", "stderr"}),
        ("| head -1", {"stdout"}),
        (">&- 2>&-", {"stdout", "stderr"}),
    ],
)
@pytest.mark.parametrize("start", [[SFT], [RLVR], [*TWO_RANKS, RLVR]], ids=["sft", "rlvr", "two"])
def test_a_run_comes_to_its_end(small_folder, tmp_path, start, shell, lost):
    run = tmp_path / "run"
    *_, recipe = start
    options = sft_options if recipe == SFT else toy_options
    values = options(small_folder, run, steps=4, data="reverse:1", checkpoint_every=2)
    command = ["bash", "-c", f'"$@" {shell}; exit ${{PIPESTATUS[0]}}', "bash", sys.executable]
    done = subprocess.run([*command, *map(str, [*start, *flags(values)])], env=ENV)
    assert done.returncode == 0 and steps(run)[-1] == 4
    assert (run / "model" / "model.safetensors").is_file()
    told = [event for event in events(run) if event["event"] == "output_lost"]
    assert {event["stream"] for event in told} == lost and len(told) == len(lost)


@contextmanager
def in_terminal(*command):
    """In a session of its own, whose terminal is closed by closing the descriptor."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execvpe(sys.executable, [sys.executable, *map(str, command)], ENV)
    try:
        yield pid, terminal
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def drain(terminal, until):
    """Read what is printed, so that nothing blocks."""
    os.set_blocking(terminal, False)
    while not until():
        try:
            os.read(terminal, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("start", [[SFT], [RLVR], [*TWO_RANKS, RLVR]], ids=["sft", "rlvr", "two"])
def test_closing_the_terminal_keeps_what_was_learnt(small_folder, tmp_path, start):
    run = tmp_path / "run"
    *_, recipe = start
    options = sft_options if recipe == SFT else toy_options
    values = options(small_folder, run, steps=100_000, data="reverse:1")
    with in_terminal(*start, *flags(values)) as (pid, terminal):
        drain(terminal, lambda: len(steps(run)) > 3)
        os.close(terminal)  # SIGHUP, and every write fails with EIO
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (1 if start[1:] else 128 + signal.SIGHUP)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{steps(run)[-1]:08d}"


@pytest.mark.slow
def test_a_run_that_ignores_sighup_goes_on_without_its_terminal(small_folder, tmp_path):
    """As with nohup or disown."""
    run = tmp_path / "run"
    start = "import signal, runpy, sys\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    start += "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    values = sft_options(small_folder, run, steps=60, data="reverse:1")
    with in_terminal("-c", start, SFT, *flags(values)) as (pid, terminal):
        drain(terminal, lambda: len(steps(run)) > 3)
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and steps(run)[-1] == 60
    assert (run / "model" / "model.safetensors").is_file()
