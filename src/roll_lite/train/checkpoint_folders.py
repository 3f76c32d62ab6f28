"""A run's checkpoints on disk, complete or absent: publishing, pruning, verifying, reading.

The manifest of a folder lists the files of all ranks; it has a checksum of each and of itself.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll_lite.checks import UserError
from roll_lite.models.config import ModelConfig
from roll_lite.train.shards import (
    DamagedError,
    Piece,
    ShardRecord,
    StoredPiece,
    check_cover,
    read_shards,
    write_durably,
)

FORMAT = 1
MANIFEST = "manifest.json"
Kind = Literal["full", "adapter"]
CHUNK_BYTES = 4 * 2**20


class Checkpoints:
    """The folder of a run's checkpoints; used by the controller."""

    def __init__(
        self, folder: str | Path, *, keep_last: int = 2, keep_best: int = 1, keep_every: int = 0
    ):
        """Kept are the last, the best and, with `keep_every`, those of all its multiples."""
        if keep_last < 1 or keep_best < 0:
            raise UserError(
                f"keep_last={keep_last} must be at least 1 and keep_best={keep_best} at least 0"
            )
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every = keep_every
        self._writing: set[int] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._put_back_replaced()

    def newest_first(self) -> list[Path]:
        """Complete checkpoints."""
        steps = {_step(path): path for path in self.folder.iterdir()}
        return [steps[step] for step in sorted(steps.keys() - {None}, reverse=True)]

    def newest_whole(self, verify_all: Callable[[Path], list[str]]) -> Path | None:
        """The newest one without problems (`verify` over all parts); None if there is none."""
        damaged = []
        for path in self.newest_first():
            problems = list(dict.fromkeys(verify_all(path)))  # each part reports the manifest
            if not problems:
                return path
            damaged.append(f"{path} is damaged: {'; '.join(problems)}")
            print(f"{damaged[-1]}; looking for an older checkpoint", flush=True)
        if damaged:
            raise DamagedError("no checkpoint is whole:\n" + "\n".join(damaged))
        return None

    def begin(self, step: int) -> Path:
        """An empty folder for the files of all ranks; partial folders of dead runs are removed."""
        self._writing.add(step)
        being_written = {self._hidden(other, "partial") for other in self._writing - {step}}
        for leftover in self.folder.glob(".step-*"):
            if leftover not in being_written:
                shutil.rmtree(leftover, ignore_errors=True)
        partial = self._hidden(step, "partial")
        partial.mkdir()
        return partial

    def finish(
        self,
        step: int,
        records: Sequence[ShardRecord],
        *,
        architecture: ModelConfig,
        state: dict[str, Any],
        layout: dict[str, int],
        kind: Kind = "full",
        score: float | None = None,
    ) -> Path:
        """Publish the checkpoint once all ranks have written, and remove superseded ones."""
        manifest = Manifest(
            step=step,
            kind=kind,
            score=score,
            layout=layout,
            architecture=dataclasses.asdict(architecture),
            state=state,
            files=sorted(records, key=lambda record: record.file),
        )
        partial, path = self._hidden(step, "partial"), self.folder / _name(step)
        try:
            check_cover(records)
            _check_present(partial, records)
            write_manifest(partial, manifest)
            self._publish(partial, path)
        except BaseException:
            self.abandon(step)
            raise
        self._writing.discard(step)
        self._prune(path)
        return path

    def abandon(self, step: int) -> None:
        """Remove what was written since `begin`."""
        self._writing.discard(step)
        shutil.rmtree(self._hidden(step, "partial"), ignore_errors=True)
        self._put_back_replaced()

    def _publish(self, partial: Path, path: Path) -> None:
        _sync_folder(partial)
        replaced = self._hidden(_step(path), "replaced")
        if path.exists():  # a run resumed from an earlier step writes this one again
            path.rename(replaced)
        partial.rename(path)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _put_back_replaced(self) -> None:
        """Undo a replacement that was interrupted between its two renames."""
        for replaced in self.folder.glob(".step-*.replaced"):
            path = self.folder / replaced.stem.removeprefix(".")
            if not path.exists():
                replaced.rename(path)

    def _prune(self, just_written: Path) -> None:
        present = self.newest_first()
        scores = {path: score for path in present if (score := _score(path)) is not None}
        best = sorted(scores, key=lambda path: (scores[path], _step(path)), reverse=True)
        kept = {just_written, *present[: self.keep_last], *best[: self.keep_best]}
        if self.keep_every:
            kept |= {path for path in present if _step(path) % self.keep_every == 0}
        for path in set(present) - kept:
            # Rename first: a half-removed folder must not look like a checkpoint.
            removed = self._hidden(_step(path), "removed")
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def _hidden(self, step: int, suffix: Literal["partial", "replaced", "removed"]) -> Path:
        return self.folder / f".{_name(step)}.{suffix}"


def is_finished(run_dir: str | Path, steps: int) -> bool:
    """Whether a run has its last checkpoint and the model that was exported after it."""
    try:
        checkpoint = Path(run_dir) / "checkpoints" / _name(steps) / MANIFEST
        return (Path(run_dir) / "model" / "config.json").stat().st_mtime_ns >= (
            checkpoint.stat().st_mtime_ns
        )
    except OSError:  # one of them does not exist
        return False


def read_pieces(
    folder: str | Path, wanted: dict[str, Piece], *, kind: Kind | None = "full"
) -> None:
    """Fill a rank's pieces in place. A checkpoint of another `kind` is refused; None is any."""
    manifest = read_manifest(folder)
    if kind not in (None, manifest.kind):
        remedy = {
            "full": "turn LoRA off, or resume from an adapter checkpoint",
            "adapter": "turn LoRA on with the same rank, or resume from a full checkpoint",
        }
        raise UserError(
            f"{folder} has kind={manifest.kind!r}, and the run trains kind={kind!r}; "
            f"{remedy[manifest.kind]}"
        )
    read_shards(folder, manifest.files, wanted)


def verify(folder: str | Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """Problems of the manifest and of one part of the files."""
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    found = [_problem(Path(folder) / r.file, r) for r in manifest.files[part::num_parts]]
    return [problem for problem in found if problem]


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(match[1]) if match else None


def _score(path: Path) -> float | None:
    try:
        score = read_manifest(path).score
    except ValueError:  # damaged, or of a newer format
        return None
    return score if score is not None and math.isfinite(score) else None


def _check_present(partial: Path, records: Sequence[ShardRecord]) -> None:
    """Ranks of other machines may have written to local folders of the same name."""
    for record in records:
        path = partial / record.file
        if not path.exists() or path.stat().st_size != record.size:
            raise UserError(
                f"{path} does not have the {record.size} bytes that its rank wrote; "
                "put the checkpoints on a file system that all machines share"
            )


def _problem(path: Path, record: ShardRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes instead of {record.size}"
        crc32 = 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if crc32 == record.crc32 else f"{path} has changed since it was written"


def _sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    kind: Kind
    score: float | None
    """Higher is better; None if nothing was measured."""
    layout: dict[str, int]
    """Number of ranks that wrote the files, their tp and ep."""
    architecture: dict[str, Any]
    """The ModelConfig."""
    state: dict[str, Any]
    """What else the run needs to resume, as plain JSON."""
    files: list[ShardRecord]


def read_manifest(folder: str | Path) -> Manifest:
    path = Path(folder) / MANIFEST
    try:
        seal, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    if seal != _seal(body):
        raise DamagedError(f"{path} has changed since it was written")
    fields = json.loads(b"{" + body)
    if (version := fields.pop("format")) > FORMAT:
        raise UserError(
            f"{path} has format={version}, and this version of roll_lite reads up to {FORMAT}; "
            "update roll_lite, or name an older checkpoint"
        )
    fields["files"] = [_read_record(record) for record in fields["files"]]
    for record in fields["files"]:
        if Path(record.file).name != record.file or not record.file.endswith(".safetensors"):
            raise DamagedError(f"{path} names {record.file!r}, which is no shard of its folder")
    return Manifest(**fields)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    fields = {"format": FORMAT} | _fields(manifest)
    lines = [_json_line(name, value) for name, value in fields.items()]
    body = ",\n".join(lines).encode() + b"\n}\n"
    data = _seal(body) + b"\n" + body
    write_durably(folder / MANIFEST, [memoryview(data)], len(data))


def check_architecture(manifest: Manifest, config: ModelConfig) -> None:
    """Refuse a checkpoint of another model, naming each field that differs."""
    stored, ours = _flat(manifest.architecture), _flat(dataclasses.asdict(config))
    differing = [
        f"{field}={stored.get(field, 'absent')} in the checkpoint, {ours.get(field, 'absent')} here"
        for field in stored | ours
        if field not in stored or field not in ours or stored[field] != ours[field]
    ]
    if differing:
        raise UserError(
            f"the checkpoint of step {manifest.step} is of another architecture: "
            f"{'; '.join(differing)}; resume with the model that it was trained from"
        )


def _seal(body: bytes) -> bytes:
    """The manifest's first line: the checksum of the other lines."""
    return b'{"crc32": "%08x",' % zlib.crc32(body)


def _json_line(name: str, value: Any) -> str:
    try:
        return f'"{name}": {json.dumps(value, default=_fields if name == "files" else None)}'
    except TypeError as error:
        raise UserError(f"{name} must be plain JSON ({error}); write tensors as pieces") from None


def _fields(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, one level deep: `asdict` would copy every list below it."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _read_record(fields: dict[str, Any]) -> ShardRecord:
    pieces = {
        name: StoredPiece(tuple(offsets), tuple(local_shape), tuple(whole_shape), dtype)
        for name, (offsets, local_shape, whole_shape, dtype) in fields.pop("pieces").items()
    }
    return ShardRecord(**fields, pieces=pieces)


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names; tuples as the lists that JSON makes of them."""
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
