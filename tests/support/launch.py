"""Ways to start a program: in this process, under torchrun, and where it is to fail."""

import configparser
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from roll_lite.cluster.launch import read_launch
from roll_lite.cluster.places import choose_device, make_places, start_group
from roll_lite.device_map import DeviceMap, Role
from support.paths import PYTHONPATH, RECIPES, ROOT, SUPPORT

GONE_SECONDS = 90  # from the fault to the end of the last process, even on a busy machine


@contextmanager
def start_alone(device):
    """The place of a process that runs everything itself."""
    chosen = choose_device(device, read_launch())
    start_group(chosen, read_launch(), dist.HashStore(), seconds=300)
    try:
        alone = DeviceMap((Role("all", (0,)),), 1)
        yield make_places(alone, 0, chosen, report=print, lost=set(), regroup=None)["all"]
    finally:
        dist.destroy_process_group()


def run_recipe(recipe, *arguments, num_ranks=1):
    """As a user does: python, or torchrun for several ranks; returns what was printed."""
    return run_torchrun(num_ranks, RECIPES / f"{recipe}.py", *arguments)


def run_torchrun(num_ranks, program, *arguments):
    """forked_ranks.py starts ranks faster."""
    launch = [sys.executable]
    if num_ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launch, program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,  # only for a hang: a busy machine is slow
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Program:
    """A running torchrun program; a mark in the environment identifies its processes."""

    def __init__(self, name, num_ranks, folder, *options, programs=SUPPORT / "cluster_programs.py"):
        self.mark = f"ROLL_LITE_TEST={uuid.uuid4()}"
        self.result_file = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *options]
        command = [sys.executable, *(torchrun if num_ranks > 1 else [])]
        key, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [*command, str(programs), name, str(self.result_file)],
            env=os.environ | {key: value, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for(self, condition, seconds=180):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"too late:\n{self.output()}"
            assert self.process.poll() is None or condition(), f"ended early:\n{self.output()}"
            time.sleep(0.02)

    def processes(self):
        """Ids of all its processes, without zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def process_of_rank(self, rank):
        for pid in self.processes():
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        raise AssertionError(f"no process of rank {rank}")

    def output(self):
        return self.log.read_text()

    def check_ctrl_c(self):
        """Once its file exists, Ctrl-C ends it soon, and it says why."""
        self.wait_for(self.result_file.exists)
        time.sleep(0.5)
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.end(within=GONE_SECONDS) != 0
        assert "KeyboardInterrupt" in self.output()

    def end(self, within):
        """Wait until all its processes are gone, without torchrun's help; returns the exit code."""
        end = time.monotonic() + within
        try:
            self.process.wait(within)
            while left := self.processes():
                assert time.monotonic() < end, f"{left} still there:\n{self.output()}"
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {within} s:\n{self.output()}") from None
        finally:
            for pid in self.processes():
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGKILL)
        assert "forcefully exiting" not in self.output()  # torchrun had to kill a rank after 30 s
        return self.process.returncode

    def result(self):
        code = self.end(within=300)
        assert code == 0, self.output()
        return json.loads(self.result_file.read_text())


def run_failing(name, num_ranks, folder, **options):
    """Run a program that fails; returns its output once all its processes are gone."""
    program = Program(name, num_ranks, folder, **options)
    program.wait_for(lambda: "ready" in program.output())
    assert program.end(within=GONE_SECONDS) != 0
    return program.output()


def installed(folder):
    """Make the entry points of setup.cfg known, as pip does."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (info := folder / "roll_lite-0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roll_lite\nVersion: 0\n")
    handlers = config["options.entry_points"]["torchrun.handlers"]
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]{handlers}\n")
    return f"{PYTHONPATH}:{folder}"
