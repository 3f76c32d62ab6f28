"""What must be equal on all ranks: code, versions, device map and options. Compared at the start,
because ranks that differ wait for each other in vain, or compute something else without a word."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent.parent
OWN_BY_RANK = ("run_dir",)
"""Options that may differ: the default has the time in it, and only rank 0 writes to the folder."""
Description = dict[str, Any]


def describe(device_map: str, options: Mapping[str, Any]) -> Description:
    """Of this rank, as JSON reads it back."""
    shared = {name: value for name, value in options.items() if name not in OWN_BY_RANK}
    described = {
        "the code of roll_lite": _digest(_package()),
        "the code of the program": _digest(_program()),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the device map": device_map,
        "options": shared,
    }
    return json.loads(json.dumps(described, default=str))


def differences(own: Description, other: Description) -> str:
    """Name and both values of each difference; empty if there is none."""
    pairs = {name: (other[name], own[name]) for name in own if name != "options"}
    names = sorted({*own["options"], *other["options"]})
    pairs |= {name: (other["options"].get(name), own["options"].get(name)) for name in names}
    unequal = {name: (there, here) for name, (there, here) in pairs.items() if there != here}
    return "; ".join(f"{name} is {there}, not {here}" for name, (there, here) in unequal.items())


def _package() -> dict[str, Path]:
    """By name; without the recipes, of which only the one that runs matters."""
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    return {name: path for name, path in files.items() if not name.startswith("recipes")}


def _program() -> dict[str, Path]:
    """The file that was started, and modules beside it, such as a recipe that it imports."""
    started = getattr(sys.modules.get("__main__"), "__file__", None)
    if started is None:  # a notebook
        return {}
    folder = os.path.dirname(os.path.abspath(started))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    beside = {file for file in files if file and os.path.dirname(os.path.abspath(file)) == folder}
    # torch.ops calls itself _ops.py, which is no file
    return {os.path.basename(file): Path(file) for file in beside if os.path.isfile(file)}


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]
