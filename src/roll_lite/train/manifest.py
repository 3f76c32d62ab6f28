"""manifest.json: what a checkpoint holds, sealed by a checksum of its own."""

import dataclasses
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll_lite.models.config import ModelConfig
from roll_lite.train.shards import DamagedError, ShardRecord, StoredPiece, write_durably

FORMAT = 1
MANIFEST = "manifest.json"
Kind = Literal["full", "adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What manifest.json says."""

    step: int
    kind: Kind
    score: float | None
    """Higher is better; None if it was not measured."""
    layout: dict[str, int]
    """How the ranks that wrote the files were arranged."""
    architecture: dict[str, Any]
    """The ModelConfig."""
    state: dict[str, Any]
    """Whatever else the run needs to go on, as plain JSON."""
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
        raise ValueError(
            f"{path} has format={version}, and this version of roll_lite reads up to {FORMAT}; "
            "update roll_lite, or name an older checkpoint"
        )
    fields["files"] = [_read_record(record) for record in fields["files"]]
    return Manifest(**fields)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    fields = {"format": FORMAT} | _fields(manifest)
    lines = [_line(name, value) for name, value in fields.items()]
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
        raise ValueError(
            f"the checkpoint of step {manifest.step} is of another architecture: "
            f"{'; '.join(differing)}; resume with the model that it was trained from"
        )


def _seal(body: bytes) -> bytes:
    """The manifest's first line: the checksum of all others."""
    return b'{"crc32": "%08x",' % zlib.crc32(body)


def _line(name: str, value: Any) -> str:
    try:
        return f'"{name}": {json.dumps(value, default=_fields if name == "files" else None)}'
    except TypeError as error:
        raise ValueError(f"{name} must be plain JSON ({error}); write tensors as pieces") from None


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
