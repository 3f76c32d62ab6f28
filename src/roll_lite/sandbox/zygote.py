"""A small process that has imported what programs often do, and forks one for each program.

Started by `sandbox.py` with an empty environment, as a fresh interpreter.
"""

import os
import pickle
import resource
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from roll_lite.sandbox.isolation import Namespaces, ResourceLimits
from roll_lite.sandbox.keeper import MAX_DESCRIPTORS, Keeper
from roll_lite.sandbox.mechanisms import missing_mechanisms
from roll_lite.sandbox.program import Job

PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "textwrap", "typing",
)  # fmt: skip


def serve(descriptor: int, isolation: str) -> None:
    """Run the jobs that come, one after the other; the first answer says what is missing."""
    client = Connection(os.dup(descriptor))  # a low number, among those that programs lose
    os.close(descriptor)
    for name in PRELOADED:
        import_module(name)
    missing, place = {}, ResourceLimits()
    if isolation == "full":
        missing = missing_mechanisms()
        try:
            place = place if missing else Namespaces()
        except OSError as error:
            missing = {"a file system without the machine's files": str(error)}
    client.send(missing)
    if missing:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    with suppress(EOFError, ConnectionError):  # nobody asks any more
        while True:
            _run(client.recv(), place, client)


def _run(job: Job, place: Namespaces | ResourceLimits, client: Connection) -> None:
    """In a process of its own, because it enters namespaces; answered when all has ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _keep_and_exit(job, place, client, writing)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    status = os.waitpid(pid, 0)[1]
    client.send_bytes(answer or pickle.dumps(f"the keeper of a program ended with {status}"))


def _keep_and_exit(
    job: Job, place: Namespaces | ResourceLimits, client: Connection, answers: int
) -> NoReturn:
    try:
        answer = Keeper(job, place, client).run()
    except BaseException:  # the process ends here, whatever it was
        answer = traceback.format_exc()
    with open(answers, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)
