"""Imports go down the layers only, and what worker processes import brings no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import SOURCES

SOURCE = Path(SOURCES) / "roll_lite"
LAYERS = [  # top first; a name may import names below its line, and within its own package
    {"__main__"},
    {"replay"},
    {"loop"},
    {"policy", "roles", "command"},
    {"rewarding", "export", "planning"},
    {"reward_roles"},
    {"rollout", "train", "sync"},
    {"cluster", "engine", "data", "workers", "report"},
    {"device_map"},
    {"models", "envs", "chat", "tasks"},
    {"rewards", "kernels", "chat_template"},
    {"sandbox"},
    {"options"},
    {"types", "progress", "checks", "stopping", "processes"},
]
# Siblings that may meet: sync is where trainer and engine do.
ALLOWED = {("sync", "train")}
TORCH_FREE = (
    "types",
    "progress",
    "checks",
    "stopping",
    "processes",
    "options",
    "chat",
    "chat_template",
    "tasks",
    "data",
    "rewards",
    "envs",
    "sandbox",
    "workers",
    "rollout",
)


def part_of(module: str) -> str:
    return module.removeprefix("roll_lite.").split(".")[0]


def imports(path: Path) -> set[str]:
    """Parts of roll_lite that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {part_of(name) for name in names if name.startswith("roll_lite.")}


def level(part: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if part in names]
    assert found, f"{part} is in no layer; add it to LAYERS and docs/architecture.md"
    return found[0]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_go_down(path):
    part = part_of(str(path.relative_to(SOURCE).with_suffix("")).replace("/", "."))
    if part == "__init__":
        return
    for imported in imports(path) - {part}:
        if (part, imported) not in ALLOWED:
            assert level(part) < level(imported), f"{path} imports {imported}"


@pytest.mark.parametrize("part", TORCH_FREE)
def test_worker_imports_bring_no_torch(part):
    target = SOURCE / part
    files = target.rglob("*.py") if target.is_dir() else [target.with_suffix(".py")]
    modules = [
        "roll_lite." + str(f.relative_to(SOURCE).with_suffix("")).replace("/", ".") for f in files
    ]
    code = "; ".join(f"import {m.removesuffix('.__init__')}" for m in sorted(modules))
    code += "; import sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_cluster_reads_the_ranks():
    for path in SOURCE.rglob("*.py"):
        if "cluster" not in path.parts:
            text = path.read_text()
            assert '"RANK"' not in text and '"WORLD_SIZE"' not in text, path
