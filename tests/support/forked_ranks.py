"""Programs over several ranks without torchrun: ranks are forked from a process that has imported.

A rank that torchrun starts imports torch, transformers and recipes for five seconds; a forked one
has them. This is for programs that are expected to succeed. Tests of how ranks end, restart or are
named need torchrun. Ranks that are forked share a hash seed, so they iterate over sets in the same
order, and ranks of torchrun do not: of each program, at least one launch should be torchrun's.

As a script, this file is the process that is forked. It reads one launch per line of JSON, and
answers with the exit codes of its ranks.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
LATER = ("torch._dynamo", "transformers.models.auto", "transformers.tokenization_utils_tokenizers")
"""What a run imports at its first update, and for its tokenizer."""
SECONDS = 1800  # only for a hang: a busy machine is slow


def run_ranks(num_ranks: int, program: Path, *arguments) -> str:
    """Run a program on forked ranks, or on one without a launch; returns what they printed."""
    import torch.distributed as dist

    # As under torchrun, whose agent serves the store
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        launch = {
            "num_ranks": num_ranks,
            "program": str(program),
            "arguments": list(map(str, arguments)),
            "environment": {k: str(v) for k, v in environment.items()} if num_ranks > 1 else {},
            "log": log.name,
        }
        codes = _server().launch(launch)
        printed = log.read()
    assert not any(codes), f"exit codes {codes}\n{printed}"
    return printed


class _Server:
    def __init__(self):
        paths = [TESTS.parent / "src", TESTS, os.environ.get("PYTHONPATH", "")]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # any other breaks CUDA in forks
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def _end(self):
        self._process.kill()
        self._process.wait()

    def launch(self, launch) -> list[int]:
        self._process.stdin.write(json.dumps(launch) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks ranks has ended: {self.exit_code}"
        return json.loads(answer)


_servers: list[_Server] = []


def _server() -> _Server:
    """Of this process; another one if a test of signals or limits has ended it."""
    while _servers and (code := _servers[-1].exit_code) is not None:
        print(f"the process that forks ranks ended with {code}; starting another", file=sys.stderr)
        _servers.pop()
    if not _servers:
        _servers.append(_Server())
    return _servers[-1]


def _serve() -> dict:
    """Fork ranks and wait for them; returns only in a rank, what it is to run."""
    for line in sys.stdin:
        launch = json.loads(line)
        ranks = []
        for rank in range(launch["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                return launch | {"rank": rank}
            ranks.append(pid)
        print(json.dumps(_wait_for(ranks)), flush=True)
    sys.exit()


def _wait_for(ranks: list[int]) -> list[int]:
    """Their exit codes; ranks that outlive a limit are killed."""

    def kill(*_):
        for pid in ranks:
            if codes.get(pid) is None:
                os.kill(pid, signal.SIGKILL)

    codes: dict[int, int] = {}
    signal.signal(signal.SIGALRM, kill)
    signal.alarm(SECONDS)
    for pid in ranks:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(0)
    return list(codes.values())


def _become_rank(launch: dict) -> None:
    from roll_lite.processes import die_with_parent

    die_with_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    log = os.open(launch["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    rank = str(launch["rank"])
    ranks = {"RANK": rank, "LOCAL_RANK": rank} if launch["num_ranks"] > 1 else {}
    os.environ |= launch["environment"] | ranks
    sys.argv = [launch["program"], *launch["arguments"]]
    sys.path[0] = str(Path(launch["program"]).parent)


if __name__ == "__main__":
    from roll_lite.recipes import agentic, distill, dpo, evaluate, rlvr, sft  # noqa: F401

    for name in LATER:
        __import__(name)
    # Threads would not be in a fork, and what they lock would stay locked.
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    gc.freeze()  # a fork's collections leave these pages alone
    launch = _serve()
    _become_rank(launch)
    runpy.run_path(launch["program"], run_name="__main__")
