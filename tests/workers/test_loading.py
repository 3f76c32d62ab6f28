"""Workers import rewards by name, including those of the running recipe."""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
from support.scripts import run_recipe_file
from support.worker_rewards import do

from roll_lite.code_files import CodeOptions, load_code
from roll_lite.types import Prompt, Score
from roll_lite.workers import link
from roll_lite.workers.failures import RewardCrash, RewardError
from roll_lite.workers.pool import RewardWorkers


def test_partial_functions_travel():
    with RewardWorkers({"do": partial(do)}, num_workers=1) as workers:
        prompt = Prompt(id="p0", messages=(), domain="do", ground_truth="")
        assert asyncio.run(workers.score(prompt, "ok")) == Score(value=1.0)


def test_what_cannot_be_imported_is_refused():
    def local(prompt, reply):
        return 1.0

    for reward, reason in (
        (lambda prompt, reply: 1.0, "cannot be pickled .*<lambda>"),
        (local, "cannot be pickled .*local"),
        (partial(local), "cannot be pickled .*local"),
        (threading.Lock().acquire, "cannot be pickled"),
    ):
        with pytest.raises(ValueError, match=rf"rewards\['x'\].*{reason}.*reward_workers=0"):
            RewardWorkers({"x": reward})


def test_rewards_of_the_recipe_itself(tmp_path):
    """Which is imported once, by the parent of the workers, and not run again."""
    script = """
        import asyncio, os, sys
        from dataclasses import dataclass
        from roll_lite.types import Prompt
        from roll_lite.workers.failures import RewardError
        from roll_lite.workers.pool import RewardWorkers

        print("imported as", __name__, flush=True)

        @dataclass
        class Own(Exception):
            text: str

        def mine(prompt, reply):
            if reply == "raise":
                raise Own("mine")
            return os.getppid()

        async def main():
            prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
            with RewardWorkers({"d": mine}, num_workers=3) as workers:
                scores = await asyncio.gather(*(workers.score(prompt, "x") for _ in range(50)))
                print("parents", len({score.value for score in scores}))
                try:
                    await workers.score(prompt, "raise")
                except RewardError as error:
                    print("caught", error)

        if __name__ == "__main__":
            print("runs")
            asyncio.run(main())
    """
    assert run_recipe_file(tmp_path, script).splitlines() == [
        "imported as __main__",
        "runs",
        "imported as __mp_main__",
        "parents 1",
        "caught __mp_main__.Own: mine",
    ]


def test_a_reward_that_imports_torch(tmp_path, monkeypatch):
    """No thread runs when workers are forked, and torch works in them."""
    module = """
        import os
        import torch
        from roll_lite.types import Score

        THREADS_AFTER_IMPORT = len(os.listdir("/proc/self/task"))

        def mine(prompt, reply):
            total = torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item()
            return Score(value=total, parts={"threads": THREADS_AFTER_IMPORT})
    """
    (tmp_path / "module_with_torch.py").write_text(dedent(module))
    monkeypatch.syspath_prepend(tmp_path)
    from module_with_torch import mine

    async def score_all():
        prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")
        with RewardWorkers({"d": mine}, num_workers=2, seconds=60) as workers:
            return await asyncio.gather(*(workers.score(prompt, "x") for _ in range(8)))

    expected = [Score(value=300.0**3, parts={"threads": 1.0})] * 8
    assert asyncio.run(score_all()) == expected


def test_a_reward_whose_module_fails(tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text(
        "import sys\ndef mine(prompt, reply): return 1\n"
        "if 'pytest' not in sys.modules: raise OSError('no dictionary here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from failing_module import mine

    with pytest.raises(RuntimeError, match="no dictionary here"), RewardWorkers({"x": mine}):
        pass


def test_a_supervisor_that_is_stopped_while_it_imports(tmp_path, monkeypatch):
    (tmp_path / "stopping_module.py").write_text(
        "import os, signal, sys\ndef mine(prompt, reply): return 1\n"
        "if 'pytest' not in sys.modules: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(link, "_PING_SECONDS", 0.05)
    from stopping_module import mine

    stopped = r"was stopped \(SIGSTOP\) and has been killed"
    with pytest.raises(RuntimeError, match=stopped), RewardWorkers({"x": mine}):
        pass


def test_what_modules_start_when_they_are_imported_stays(tmp_path, monkeypatch):
    """A server that rewards ask, say; workers that are replaced do not take it along."""
    (tmp_path / "module_with_server.py").write_text(
        "import os, subprocess\n"
        "SERVER = subprocess.Popen(['sleep', '1000'])\n"
        "def ask(prompt, reply):\n"
        "    if reply == 'exit': os._exit(1)\n"
        "    os.kill(SERVER.pid, 0)\n"
        "    return SERVER.pid\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import module_with_server

    module_with_server.SERVER.kill()
    module_with_server.SERVER.wait()
    prompt = Prompt(id="p0", messages=(), domain="ask", ground_truth="")
    with RewardWorkers({"ask": module_with_server.ask}, num_workers=1) as workers:
        with pytest.raises(RewardCrash):
            asyncio.run(workers.score(prompt, "exit"))
        pid = int(asyncio.run(workers.score(prompt, "ask")).value)
        assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x001000\x00"
    assert not Path(f"/proc/{pid}").exists()


OWN_FILE = """
    from dataclasses import dataclass
    from beside_the_file import WORD
    from roll_lite.types import Score

    @dataclass
    class Own(Exception):
        text: str

    def mine(prompt, reply):
        if reply == "raise":
            raise Own(WORD)
        return Score(value=prompt.extra["level"], parts={"right": reply == WORD})

    REWARDS = {"mine": mine}
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """Named like a module of the standard library, with a module beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_file.py").write_text("WORD = 'yes'")
    path = tmp_path / "code.py"
    path.write_text(dedent(OWN_FILE))
    return path


def test_a_file_of_rewards_in_workers(own_file):
    functions, inline = CodeOptions(code=(str(own_file),)).rewards({}, {})
    prompt = Prompt(id="p", messages=(), domain="mine", ground_truth="", extra={"level": 3})
    with RewardWorkers({"mine": partial(functions["mine"])}, num_workers=1) as workers:
        score = asyncio.run(workers.score(prompt, "yes"))
        with pytest.raises(Exception, match="yes") as error:
            asyncio.run(workers.score(prompt, "raise"))
    assert score == Score(value=3.0, parts={"right": 1.0}) and inline == {}
    assert type(error.value) is RewardError and str(error.value).endswith("Own: yes")
    assert f'{own_file}", line ' in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has none of LOSSES, ADVANTAGES, REWARDS, INLINE"),
        ("x = 1\nREWARDS = {'mine': 3}", "line 2: REWARDS must be a dictionary from names to func"),
        ("INLINE = [len]", "line 1: INLINE must be a dictionary from names to functions"),
        (None, "is not a file; name a Python file"),
    ],
)
def test_files_without_rewards_are_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError, match=rf"own\.py.*{message}"):
        load_code([str(tmp_path / "own.py")])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "def f(prompt, reply)\n    return 1\n",
            "line 1: SyntaxError: expected ':'; fix the file\n"
            "    def f(prompt, reply)\n                        ^",
        ),
        (
            "\nimport notthere\n",
            "line 2: ModuleNotFoundError: No module named 'notthere'; install it, or put it beside "
            "the file\n"
            "    import notthere",
        ),
        (
            "x = {}\n\nREWARDS = x['mine']\n",
            "line 3: KeyError: 'mine'; fix the file\n    REWARDS =",
        ),
    ],
)
def test_a_file_of_rewards_that_cannot_be_imported_is_named(tmp_path, text, problem):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.py line") as error:
        load_code([str(tmp_path / "mine.py")])
    assert problem in str(error.value)
