"""What decides the bits of a run: code, packages, machine, options and files.

config.json has a hash of it for every start, contracts/HASH.json what it is made of.
"""

import hashlib
import inspect
import json
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from roll_lite.report.config_file import to_json

Contract = dict[str, dict[str, Any]]
PACKAGE = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "flash-attn", "math-verify")
UNRELATED = {
    "run_dir", "resume", "plan", "tracker", "from_hub", "chosen", "code_digests", "profile",
    "checkpoint_minutes", "checkpoint_every", "checkpoint_beside", "export_every", "keep_last",
    "keep_every",
}  # fmt: skip
"""Options that no bit depends on."""
DIGESTS = ("code", "own", "files")
"""Parts whose values are digests of files."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
PROBE_BYTES = 2**20
"""Of a file of weights its length and these at its begin, middle and end are read: the digests of
step 0 are of all weights that are trained."""
CHARACTERS = 32


def make_contract(cfg: Any, num_ranks: int, device: str) -> Contract:
    """Of a recipe's resolved options, on this machine."""
    options = {name: value for name, value in to_json(cfg).items() if name not in UNRELATED}
    recipe = Path(inspect.getfile(type(cfg)))
    own = [recipe, *map(Path, options.get("code", ()))]
    return {
        "code": {
            str(path.relative_to(PACKAGE)): _digest_file(path)
            for path in sorted(PACKAGE.rglob("*.py"))
        },
        "own": {path.name: _digest_file(path) for path in own},
        "packages": {"python": platform.python_version(), **_packages()},
        "machine": {**_machine(device), "ranks": num_ranks},
        "options": {name: _without_folders(value) for name, value in options.items()},
        "files": dict(_files(options)),
    }


def hash_of(contract: Contract) -> str:
    text = json.dumps(contract, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=CHARACTERS // 2).hexdigest()


def contract_path(folder: Path, name: str) -> Path:
    return folder / "contracts" / f"{name}.json"


def write_contract(folder: Path, contract: Contract) -> str:
    """Returns its hash."""
    name = hash_of(contract)
    path = contract_path(folder, name)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(contract, indent=1) + "\n")
    partial.rename(path)
    return name


def changes(before: Contract, now: Contract) -> dict[str, list[str]]:
    """By part of the contract, the entries that differ, with both values of short ones."""
    found = {}
    for part in before.keys() | now.keys():
        old, new = before.get(part, {}), now.get(part, {})
        names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
        if names and part not in DIGESTS:
            names = [f"{name}: {old.get(name)} | {new.get(name)}" for name in names]
        if names:
            found[part] = names
    return found


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _machine(device: str) -> dict[str, Any]:
    """What kernels are chosen by."""
    import torch

    found = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": hashlib.sha256(_cpu_features().encode()).hexdigest()[:16],
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _cpu_features() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        vendor = re.search(r"(?:vendor_id|CPU implementer)\s*: (.*)", text)
        flags = re.search(r"(?:flags|Features)\s*: (.*)", text)
        names = flags[1].split() if flags else []
        wide = sorted(n for n in names if re.match("avx|amx|fma|sse4|f16c|asimd|sve|bf16", n))
        return " ".join([vendor[1] if vendor else "", *wide])
    return platform.processor()


def _files(options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Those that options name, and the files of folders such as models."""
    for option, value in options.items():
        for text in value if isinstance(value, list) else [value]:
            if (path := _path_of(text)) is None or option == "code":
                continue
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file.is_file():
                    inside = f"/{file.name}" if path.is_dir() else ""
                    yield f"{option} {path.name}{inside}", _digest_file(file)


def _path_of(text: Any) -> Path | None:
    """The file or folder that a value names, perhaps with a weight: FILE@0.5, DOMAIN=FOLDER."""
    if not isinstance(text, str) or not text:
        return None
    for name in (text, text.rpartition("@")[0], text.partition("=")[2]):
        with suppress(OSError, ValueError):
            if name and Path(name).exists():
                return Path(name)
    return None


def _without_folders(value: Any) -> Any:
    """A path as its last name: the content is among the files."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if (path := _path_of(value)) is None:
        return value
    return value.replace(str(path), path.name) if str(path) in value else path.name


def _digest_file(path: Path) -> str:
    found = hashlib.blake2b(digest_size=CHARACTERS // 2)
    with path.open("rb") as file:
        if path.suffix in WEIGHTS:
            size = path.stat().st_size
            found.update(str(size).encode())
            for at in (0, size // 2, max(0, size - PROBE_BYTES)):
                file.seek(at)
                found.update(file.read(PROBE_BYTES))
        else:
            while chunk := file.read(PROBE_BYTES):
                found.update(chunk)
    return found.hexdigest()
