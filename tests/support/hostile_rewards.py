"""Rewards that test_hostile_rewards.py imports by name: they attack the worker that they run in."""

import json
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from roll_lite.sandbox.kernel import drop_capabilities
from roll_lite.workers import channel


def connection():
    """The descriptor that the worker answers through."""
    sockets = (int(name) for name in os.listdir("/proc/self/fd"))
    with suppress(OSError):
        return next(fd for fd in sockets if stat.S_ISSOCK(os.fstat(fd).st_mode))


class Wrapped:
    """A socket that sends something else."""

    def __init__(self, real, sendall):
        self.real, self.sendall = real, lambda data: sendall(real, data)

    def __getattr__(self, name):
        return getattr(self.real, name)


def change_answer(sendall):
    """From now on, also after this call."""
    send = channel.WorkerEnd.send

    def changed(self, message):
        if not isinstance(self._socket, Wrapped):
            self._socket = Wrapped(self._socket, sendall)
        send(self, message)

    channel.WorkerEnd.send = changed


def answer_twice(real, data):
    real.sendall(data)
    real.sendall(data)


def answer_again_when_idle(real, data):
    def later():
        time.sleep(0.1)
        real.sendall(data)

    real.sendall(data)
    threading.Thread(target=later, daemon=True).start()


AFTER_THE_ANSWER = {
    "twice": answer_twice,
    "again-when-idle": answer_again_when_idle,
    "part-when-idle": lambda real, data: real.sendall(data + data[:3]),
}


def with_body(fields):
    """Another message under the answer's header."""
    body = json.dumps(fields).encode()
    return lambda real, data: real.sendall(struct.pack("!Q", len(body)) + data[8:17] + body)


INSTEAD_OF_THE_ANSWER = {
    "question": with_body({"messages": [], "num_known": 0, "options": {"stop": []}}),
    "no-score": with_body({"ending": "returned"}),
    "results": with_body({"ending": "returned", "results": [{"reward": 1, "measurements": {}}]}),
    "no-tokens": with_body({"out_of_tokens": "x"}),
    "other-job": lambda real, data: real.sendall(data[:8] + bytes(7) + b"\x77" + data[16:]),
    "no-json": lambda real, data: real.sendall(data[:17] + b"\x80" * len(data[17:])),
    "no-fields": lambda real, data: real.sendall(data[:17] + b"[".ljust(len(data) - 18) + b"]"),
    "endless": lambda real, data: real.sendall(b"\x7f" * 40),
    "noise": lambda real, data: real.sendall(os.urandom(1 << 20)),
}
ANSWERS = {"half": lambda real, data: real.sendall(data[: len(data) // 2])}
ANSWERS |= AFTER_THE_ANSWER | INSTEAD_OF_THE_ANSWER


class Exploding(Exception):
    """Makes a file where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(self.args[0]),)


class ExplodingNumber(float):
    def __reduce__(self):
        return os._exit, (3,)


def attack(prompt, reply):
    """The reply is a command with an optional argument."""
    what, _, argument = reply.partition(" ")
    if what == "pid":
        return os.getpid()
    elif what == "answer":
        change_answer(ANSWERS[argument])
    elif what == "fork-and-raise":
        if os.fork() == 0:
            raise ValueError("in the child")
        os.wait()
    elif what == "fork-and-return":
        if os.fork() == 0:
            return 7.0
        os.wait()
    elif what == "fork-and-exit":
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    elif what == "steal-orders":
        if os.fork() == 0:
            while os.read(connection(), 4096):
                pass
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "stop-when-idle":
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return os.getpid()
    elif what == "explode":
        raise Exploding(argument)
    elif what == "number":
        return ExplodingNumber(2.0)
    elif what == "long-error":
        raise ValueError("x" * (1 << 20))
    elif what == "signal-parent":
        once, number = argument.split()
        with suppress(FileExistsError):
            if once != "-":
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            os.kill(os.getppid(), int(number))
            time.sleep(1000)
    return 1.0


def change_state(prompt, reply):
    """Change what the reply says, or report it."""
    what, _, argument = reply.partition(" ")
    if what == "folder":
        os.chdir(argument)
    elif what == "gone":
        os.mkdir(argument)
        os.chdir(argument)
        os.rmdir(argument)
    elif what == "environment":
        os.environ["HOSTILE"] = "yes"
        del os.environ["PATH"]
        os.putenv("UNSEEN", "yes")
    elif what == "handlers":
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    elif what == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    elif what == "limits":
        for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
            resource.setrlimit(name, (64, resource.getrlimit(name)[1]))
    elif what == "hard-limits":
        drop_capabilities()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    elif what == "mask":
        os.umask(0o777)
    elif what == "sleep":
        time.sleep(float(argument))
    elif what == "hang":
        time.sleep(1000)
    elif what == "report":
        Path(argument).write_text(repr(_report()))
    return os.getpid()


def _report():
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    umask = os.umask(0)
    os.umask(umask)
    return [
        os.getcwd(),
        sorted(os.environ.items()),
        sorted(subprocess.run(["/usr/bin/env"], capture_output=True).stdout.splitlines()),
        [signal.getsignal(number) for number in numbers],
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        [resource.getrlimit(name) for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)],
        umask,
    ]
