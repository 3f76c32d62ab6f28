"""The journal: finished samples with their scores, so that a crash costs only what was in flight.

A file for each policy version, RUN_DIR/journal/version-00000012, holds the samples that ended under
it. A record is its length and CRC-32 (little-endian, 32 bits each) and two pickles of plain data:
the sample's key and the sample. The first record names what the samples depend on: options, files,
weights. They are used again only where all of that is the same.

Records are written once, in one write() each: they survive the death of the process, not that of
the machine. What a crash left of a last record is cut off by the next start.
"""

import hashlib
import io
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from roll_lite.files import own_content
from roll_lite.rollout.prompts import Visit
from roll_lite.rollout.record import read_sample, write_sample
from roll_lite.types import Sample

FORMAT = "roll_lite journal 1"
HEADER = struct.Struct("<II")
UNRELATED = ("run_dir", "resume", "steps", "kv_cache_gib", "chosen", "tracker", "from_hub")
"""Options that no sample depends on."""
Key = tuple[str, int, int]
"""A sample: its prompt, which visit of it, and the place in the group."""


def fingerprint(options: Mapping[str, Any]) -> str:
    """A digest of a recipe's flat options and of the files that they name, the recipe included.

    Options have digests of the files of --code."""
    related = {name: value for name, value in options.items() if name not in UNRELATED}
    texts = [sys.argv[0]]
    for value in (value for name, value in related.items() if name != "code"):
        texts += [value] if isinstance(value, str) else []
        texts += [v for v in value if isinstance(v, str)] if isinstance(value, tuple | list) else []
    files = [_version_of(text.split("@")[0]) for text in texts]
    return _digest(json.dumps([related, files], sort_keys=True, default=str).encode())


def _version_of(path: str) -> list[int]:
    """Size and time of a file; of anything else, nothing."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a null character
        return []
    return [found.st_size, found.st_mtime_ns] if os.path.isfile(path) else []


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Found(NamedTuple):
    """The file of a version, as an earlier start left it."""

    weights: str
    samples: dict[Key, bytes]


class Journal:
    """Used in the coordinator's event loop."""

    def __init__(self, folder: str | Path, made_with: str, resumed_at: int):
        """Files of samples that were not `made_with` the same options are removed.

        Weights up to the step at which the run is `resumed_at` are known to be the same: they led
        to its checkpoint.
        """
        self._folder = Path(folder)
        self._made_with = made_with
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self._version = -1
        self._found: dict[int, Found] = {}
        """By versions that are still to come."""
        self._usable: dict[int, dict[Key, bytes]] = {}
        for path in self._folder.glob("version-*"):
            if (found := _read(path, made_with)) is None:
                path.unlink()
            elif (version := _version(path)) < resumed_at:
                self._usable[version] = found.samples
            else:
                self._found[version] = found

    def begin(self, version: int, weights: str) -> None:
        """From now on samples end under this policy version, whose weights have that digest."""
        self.close()
        self._version = version
        path = self._folder / f"version-{version:08d}"
        found = self._found.pop(version, None)
        if found and found.weights == weights:
            self._usable[version] = found.samples
        else:
            path.unlink(missing_ok=True)
        self._file = path.open("ab", buffering=0)
        if self._file.tell() == 0:
            self._append((FORMAT, self._made_with, weights))

    def restored(self, visit: Visit, index: int) -> Sample | None:
        """A finished sample of an earlier start."""
        key = visit.prompt.id, visit.number, index
        for samples in self._usable.values():
            if (payload := samples.pop(key, None)) is not None:
                return _sample(payload, visit)
        return None

    def write(self, sample: Sample) -> None:
        """Keep a finished sample."""
        versions = sample.turns[-1].versions
        # New weights may be in the engines a moment before they are announced.
        if not versions or versions[-1][1] <= self._version:
            key = sample.prompt.id, sample.visit, sample.index
            self._append(key, write_sample(sample))

    def forget(self, before: int) -> None:
        """Remove the samples that ended under a version `before` this one."""
        self._usable = {v: samples for v, samples in self._usable.items() if v >= before}
        for path in self._folder.glob("version-*"):
            if _version(path) < before:
                path.unlink()

    def remove(self) -> None:
        """The run is complete."""
        self.close()
        self.forget(sys.maxsize)
        with suppress(OSError):  # there may be files of another kind
            self._folder.rmdir()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _append(self, *parts: Any) -> None:
        if self._file is None:
            return
        payload = b"".join([pickle.dumps(part, protocol=5) for part in parts])
        record = HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            if self._file.write(record) < len(record):  # a disk that fills up accepts a part first
                self.close()
        except OSError as error:  # the run does not need the journal
            print(f"warning: no journal of this step: {error}", file=sys.stderr, flush=True)
            self.close()


def _version(path: Path) -> int:
    return int(path.name.removeprefix("version-"))


def _read(path: Path, made_with: str) -> Found | None:
    """The samples of a file; None if they were made otherwise. Cuts off a broken end."""
    data = path.read_bytes()
    records = list(_records(data))
    own_content(path)
    os.truncate(path, sum(HEADER.size + len(payload) for payload in records))
    try:
        head, *keys = (_load(payload)[0] for payload in records)
    except (ValueError, EOFError, pickle.UnpicklingError):  # ValueError: there is no record
        return None
    if head[:2] != (FORMAT, made_with):
        return None
    return Found(head[2], dict(zip(keys, records[1:], strict=True)))


def _records(data: bytes) -> Iterator[bytes]:
    """The payloads up to the first that is broken."""
    place = 0
    while place + HEADER.size <= len(data):
        length, crc32 = HEADER.unpack_from(data, place)
        payload = data[place + HEADER.size : place + HEADER.size + length]
        if len(payload) < length or zlib.crc32(payload) != crc32:
            return
        yield payload
        place += HEADER.size + length


class _PlainUnpickler(pickle.Unpickler):
    """Run folders may come from others: nothing of theirs is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a journal holds plain data, not {module}.{name}")


def _sample(payload: bytes, visit: Visit) -> Sample | None:
    """None if a reward or an environment put other than plain data into it."""
    try:
        return read_sample(_load(payload, 2)[1], visit.prompt)
    except pickle.UnpicklingError:
        return None


def _load(payload: bytes, num_parts: int = 1) -> list[Any]:
    """The first parts of a record."""
    file = io.BytesIO(payload)
    return [_PlainUnpickler(file).load() for _ in range(num_parts)]
