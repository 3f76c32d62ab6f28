"""Mistakes in the user's own code: their lines come first, all ranks exit with 2, no restart."""

import os
import subprocess
import sys

import pytest
from support.forked_ranks import run_ranks
from support.paths import PYTHONPATH, RECIPES
from support.runs import flags, toy_options

from roll_lite.checks import UserError
from roll_lite.cluster.errors import RoleError, exit_code_of, own_code_of
from roll_lite.own_code import find_own_code
from roll_lite.own_files import import_file
from roll_lite.rollout.history import History
from roll_lite.stopping import Stopped

LOSS = "loss=rl.PolicyLoss(cfg.policy_loss, cfg.kl),"
ESTIMATE = "advantages = options.estimate(rows)"
MY_LOSS = """
def my_loss(logprobs_R, log_ratio_R, advantages_R, batch):
    return shared(advantages_R)


def shared(values_R):
    return 1 / 0


"""
WRONG_LOSS = {LOSS: LOSS.replace("kl)", "kl, my_loss)"), "def prepare(": f"{MY_LOSS}def prepare("}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Writes mine.py, a copy of rlvr.py with some of its text replaced, into the working folder."""

    def write(changes):
        text = (RECIPES / "rlvr.py").read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "mine.py").write_text(text)
        return tmp_path / "mine.py"

    monkeypatch.chdir(tmp_path)
    return write


@pytest.fixture
def options(toy_folder, tmp_path):
    values = toy_options(toy_folder, tmp_path / "run", steps=1, data="reverse:1")
    return flags(values | {"eval_every": 0, "prompts_per_step": 2})


def place(path, line):
    """As an error names it; the line is given by its text."""
    return f"mine.py line {path.read_text().splitlines().index(line) + 1}"


def lines_of_loss(path):
    return (
        "\nerror: ZeroDivisionError: division by zero\n"
        f"  {place(path, '    return 1 / 0')}, in shared\n    return 1 / 0\n"
        f"  {place(path, '    return shared(advantages_R)')}, in my_loss\n"
        "    return shared(advantages_R)\n"
    )


def test_the_lines_of_a_loss_come_first(copy, options, command):
    path = copy(WRONG_LOSS)
    code, text = command(path, *options)
    ending = "called in train.step on rank 0\n\n--debug prints the traceback\n"
    assert code == 2 and f"{lines_of_loss(path)}{ending}" in text and "Traceback" not in text
    with pytest.raises(RoleError, match=r"train\.step failed on rank 0: ZeroDivisionError"):
        command(path, *options, "--run-dir", "other", "--debug")


def test_the_lines_of_a_recipe_come_first(copy, options, command):
    path = copy({ESTIMATE: "advantages = rl.Estimate(rows)"})
    code, text = command(path, *options)
    first = (
        f"\n  {place(path, '    advantages = rl.Estimate(rows)')}, in prepare\n    advantages = "
    )
    assert code == 2 and "\nerror: AttributeError: roll_lite has no Estimate; " in text
    assert first in text and text.index(first) < text.index(", in main\n") and "Trace" not in text


def test_what_the_library_raises_comes_after_the_lines_that_called_it(copy, options, command):
    """It may be the library's mistake, so a restart may try again."""
    path = copy({ESTIMATE: "advantages = rows.mean_of_group(rows.rewards_S[:1])"})
    code, text = command(path, *options)
    assert code == 1 and "\nerror: RuntimeError: index_add_()" in text
    own, called = text.split("\nwhich called\n")
    assert own.count(", in prepare\n") == 1 and called.count(", in mean_of_group\n") == 1


def test_an_error_after_a_checkpoint_says_how_to_go_on(copy, options, command):
    path = copy({"for step in loop:": f"for step in loop:\n{' ' * 20}1 / (2 - step)"})
    code, text = command(path, *options, "--steps", 2, "--checkpoint-every", 1)
    first = f"  {place(path, ' ' * 20 + '1 / (2 - step)')}, in main\n    1 / (2 - step)\n"
    assert code == 2 and f"{first}To continue the run:\n    " in text and "--resume" in text


REWARD = """
def mine(prompt, reply):
    return len(reply) / 0


REWARDS = {"reverse": mine}
"""


@pytest.mark.parametrize(
    ("num_prompts", "why"), [(32, "of the last 50 rewards failed"), (1, "2 groups of one step")]
)
def test_a_reward_that_never_works_is_for_the_user_to_mend(
    options, command, tmp_path, monkeypatch, num_prompts, why
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(REWARD)
    more = ("--code", "broken.py", "--prompts-per-step", num_prompts, "--max-refills", 1)
    code, text = command(RECIPES / "rlvr.py", *options, *more)
    error = text.rpartition("\nerror: ")[2].partition("--debug")[0]
    assert code == 2 and why in error
    assert "    return len(reply) / 0\n" in error and len(error.splitlines()) < 15


OWN_FILE = """
def call(function):
    return function()


def fail(error):
    raise error
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.py").write_text(OWN_FILE)
    return import_file(tmp_path / "own.py")


def caught(function, *arguments):
    with pytest.raises(BaseException) as error:
        function(*arguments)
    return error.value


def test_frames_of_imported_files_and_of_those_beside_them_are_the_users(own_file, tmp_path):
    (tmp_path / "beside.py").write_text("def divide():\n    return 1 / 0\n")
    import beside

    own = find_own_code(caught(own_file.call, beside.divide))
    assert [frame.split(", in ")[1] for frame in own.frames] == [
        "divide\n    return 1 / 0", "call\n    return function()"
    ]  # fmt: skip
    assert own.error == "ZeroDivisionError: division by zero" and own.called == ()
    assert find_own_code(caught(lambda: 1 / 0)) is None


def test_an_error_that_cannot_be_printed_is_named(own_file):
    class Mute(Exception):
        def __str__(self):
            raise LookupError("no words")

    assert "Mute: <exception str() failed>" in find_own_code(caught(own_file.fail, Mute())).error
    long = find_own_code(caught(own_file.fail, KeyError("x" * 10_000)))
    assert 1000 < len(str(long)) < 2000


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("x"), 2),
        (UserError("lr=-1 must be above 0"), 2),
        (ConnectionError("the judge is away"), 1),
        (MemoryError(), 1),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 1),
        (RoleError("rank 1 died", role="train", method="step", rank=1), 1),
        (Stopped(2), 1),
        (KeyboardInterrupt(), 1),
        (SystemExit(3), 3),
        (SystemExit("no"), 1),
    ],
)
def test_only_what_a_restart_would_meet_again_exits_with_2(own_file, error, code):
    """Whatever the user's code raises, or what goes through it."""
    assert exit_code_of(caught(own_file.fail, error)) == code


def test_a_prompt_that_history_does_not_have_is_the_users_mistake(own_file):
    error = caught(own_file.call, lambda: History(pass_reward=1.0)["p"])
    assert exit_code_of(error) == 2
    assert "KeyError: \"prompt 'p' has no samples yet: ask whether" in find_own_code(error).error


def test_the_librarys_own_errors_are_not_the_users(own_file):
    """Also where a function of the user's is on the way."""
    error = caught(own_file.call, lambda: import_file(0))
    assert not own_code_of(error).is_direct and exit_code_of(error) == 1


BAD_ROW = '{"promt": "a", "domain": "reverse"}\n'


def failed_ranks(path, *options):
    """What two ranks print, both of which exit with 2; files are named as beside the program."""
    with pytest.raises(AssertionError, match=r"exit codes \[2, 2\]") as failed:
        run_ranks(2, path, *options)
    return str(failed.value).replace(f"{path.parent}/", "")


def test_all_ranks_exit_with_2_for_a_mistake_in_a_loss(copy, options):
    path = copy(WRONG_LOSS)
    text = failed_ranks(path, *options)
    ending = "called in train.step on ranks 0 and 1\n\n--debug prints the traceback\n"
    assert f"{lines_of_loss(path)}{ending}" in text
    assert "tensorpipe" not in text and text.count("error:") == 1


def test_all_ranks_exit_with_2_for_bad_data(copy, options, tmp_path):
    (tmp_path / "rows.jsonl").write_text(BAD_ROW)
    text = failed_ranks(copy({}), *options, "--data", tmp_path / "rows.jsonl")
    assert text.count("error: rows.jsonl line 1: no field 'prompt'") == 1 == text.count("error:")


def test_all_ranks_exit_with_2_where_their_options_differ(copy, options):
    started = "    command.run(main, Config, __doc__"
    differing = f"    import os, sys\n    sys.argv += ['--seed', os.environ['RANK']]\n{started}"
    text = failed_ranks(copy({started: differing}), *options)
    assert text.count("seed is 1, not 0; start all ranks with the same") == 1


@pytest.mark.slow
def test_torchrun_ends_on_one_screen_and_restarts_nothing(copy, options):
    path = copy(WRONG_LOSS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node=2", "--max-restarts=2", path, "--resume=auto"]
    done = subprocess.run(
        [*launch, *map(str, options)], capture_output=True, text=True, timeout=1800,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert f"{lines_of_loss(path)}called in train.step on ranks 0 and 1\n" in done.stderr
    assert done.stdout.count("run folder:") == 1 and done.stderr.count("ZeroDivisionError") == 2
    assert len(done.stderr.splitlines()) <= 60, done.stderr
    last = done.stderr.rpartition("SignalException")[2]
    assert lines_of_loss(path) in last and last.endswith("--debug prints the traceback\n")


@pytest.mark.parametrize(
    ("args", "ending"),
    [
        pytest.param(["--clip-lo", "0.1"], "For full helptext, run ", marks=pytest.mark.slow),
        (
            ["--learning-rate", "0.1"],
            "--learning-rate is --lr here\n\n--debug prints the traceback",
        ),
    ],
)
def test_what_the_user_has_to_change_is_said_last_under_torchrun(tmp_path, args, ending):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, RECIPES / "rlvr.py", *args], capture_output=True, text=True, timeout=1800,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0 and done.stderr.count(ending) == 2
    assert ending in done.stderr.rpartition("SignalException")[2]


@pytest.mark.parametrize(("num_restarts", "continues"), [(0, False), (1, True)])
def test_nobody_is_asked_to_continue_what_torchrun_restarts(
    command, toy_folder, tmp_path, monkeypatch, num_restarts, continues
):
    program = """
from pathlib import Path
from roll_lite import command
from roll_lite.recipes import sft

def main(cfg):
    Path(cfg.run_dir, "checkpoints", "step-00000001").mkdir(parents=True)
    raise RuntimeError("may not come again")

command.run(main, sft.Config, sft.__doc__)
"""
    options = ["--model", toy_folder, "--data", "reverse:1", "--device", "cpu"]
    options += ["--run-dir", "a", "--resume", "auto"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(num_restarts))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(program)
    with pytest.raises(RuntimeError, match="may not come again") as error:
        command("mine.py", *options)
    told = getattr(error.value, "__notes__", [])
    assert any("To continue the run:\n" in note for note in told) == continues


@pytest.mark.parametrize(
    ("file", "code", "message"), [("file", 1, "File too large"), ("missing", 2, "No such file")]
)
def test_only_files_that_the_user_can_mend_exit_with_2(
    command, toy_folder, tmp_path, monkeypatch, file, code, message
):
    """A full disk may be better after a restart; here no file may grow above 4 KiB."""
    (tmp_path / "file").touch()
    program = f"""
import os
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from roll_lite import command
from roll_lite.recipes import sft

def main(cfg):
    most = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (4096, most[1]))
    try:
        os.truncate({file!r}, 5000)
    finally:
        setrlimit(RLIMIT_FSIZE, most)

command.run(main, sft.Config, sft.__doc__)
"""
    options = ["--model", toy_folder, "--data", "reverse:1", "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(program)
    found, text = command("mine.py", *options)
    assert found == code and message in text
    assert "error: [Errno" in text and "Traceback" not in text


@pytest.fixture
def stopping(tmp_path, code_file):
    """Options of a run whose reward calls a debugger."""

    def write(call):
        path = code_file(f"def mine(prompt, reply):\n    {call}\n\nREWARDS = {{'reverse': mine}}\n")
        return "--code", path, "--run-dir", tmp_path / "stopped"

    return write


@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_in_a_worker_ends_the_run_with_the_remedy(options, stopping, command, call):
    code, text = command(RECIPES / "rlvr.py", *options, *stopping(call), "--reward-workers", 1)
    assert code == 2 and "BdbQuit" not in text
    assert text.count("has no terminal in a worker process; add --reward-workers 0") == 1


def test_quitting_the_debugger_ends_the_run_with_one_line(options, stopping, command):
    call = "import bdb; raise bdb.BdbQuit"  # as `q` does
    code, text = command(RECIPES / "rlvr.py", *options, *stopping(call), "--reward-workers", 0)
    assert code == 1 and "BdbQuit" not in text and "--debug" not in text
    assert text.count("left the debugger: the run ends\n") == 1
