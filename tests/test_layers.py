"""Imports go down the layers only and never in a circle, packages have the lines that they should,
and what worker processes import brings no torch."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import DOCS, SOURCES

SOURCE = Path(SOURCES) / "roll_lite"
LAYERS = [  # top first; a name may import names below its line, and within its own package
    {"__main__"},
    {"proof"},
    {"replay"},
    {"loop"},
    {"players", "policy", "roles", "command"},
    {"command_line"},
    {"flags"},
    {"rewarding", "planning", "hub_options"},
    {"reward_roles", "code_files"},
    {"rollout", "train", "sync"},
    {"cluster", "engine", "data", "workers", "report"},
    {"device_map", "own_code"},
    {"models", "envs", "chat", "hub"},
    {"rewards", "kernels", "chat_template"},
    {"sandbox", "characters"},
    {"profiling"},
    {"options"},
    {"own_files"},
    {"types", "progress", "stopping", "processes", "output", "other_names"},
    {"files"},
    {"checks"},
]
# Siblings that may meet: sync is where trainer and engine do.
ALLOWED = {("sync", "train")}
LINES = {  # of Python in a package, at most; "." is the files beside the packages
    ".": 7325, "cluster": 2975, "data": 1300, "engine": 2775, "envs": 2250, "kernels": 1400,
    "models": 3900, "planning": 1525, "proof": 1525, "report": 3050, "rewards": 3525,
    "rollout": 3175, "sandbox": 2450, "train": 5000, "workers": 2575,
}  # fmt: skip
SLACK = 100
TORCH_FREE = (
    "types",
    "progress",
    "checks",
    "files",
    "stopping",
    "processes",
    "options",
    "chat",
    "chat_template",
    "hub",
    "hub_options",
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
    return {part_of(name) for name in imported_names(path) if name.startswith("roll_lite.")}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_names(path: Path) -> set[str]:
    """Modules, and what is imported from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def level(part: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if part in names]
    assert found, f"{part} is in no layer; add it to LAYERS and docs/internals/overview.md"
    return found[0]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_go_down(path):
    part = part_of(str(path.relative_to(SOURCE).with_suffix("")).replace("/", "."))
    if part == "__init__":
        return
    for imported in imports(path) - {part}:
        if (part, imported) not in ALLOWED:
            assert level(part) < level(imported), f"{path} imports {imported}"


def test_worker_imports_bring_no_torch():
    files = [
        path
        for part in TORCH_FREE
        for path in ((SOURCE / part).rglob("*.py") if (SOURCE / part).is_dir()
                     else [(SOURCE / part).with_suffix(".py")])
    ]  # fmt: skip
    code = f"""
import importlib, sys
for name in {sorted(map(module_of, files))}:
    importlib.import_module(name)
    if "torch" in sys.modules or "transformers" in sys.modules:
        sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_picture_of_the_layers_is_this_table():
    text = (DOCS / "internals" / "overview.md").read_text().split("## Layers")[1]
    lines = [line[4:] for line in text.split("`recipes/`")[0].splitlines() if line[:4] == " " * 4]
    assert [{*line.split("  ")[0].split()} for line in lines] == LAYERS


def test_no_circle():
    """Between files, inside a package too, and wherever in a file the import stands."""
    files = {module_of(path): path for path in SOURCE.rglob("*.py") if "recipes" not in path.parts}
    del files["roll_lite"]  # its names are imported when they are used
    graph = {module: imported_names(path) & files.keys() for module, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_growth_is_a_decision():
    """A package that grows or shrinks by more than a few lines says so here, in the same change."""
    lines = dict.fromkeys(LINES, 0)
    for path in SOURCE.rglob("*.py"):
        if "recipes" not in path.parts:
            place = path.relative_to(SOURCE)
            lines[place.parts[0] if len(place.parts) > 1 else "."] += len(path.open().readlines())
    wrong = {name: num for name, num in lines.items() if not 0 <= LINES[name] - num < SLACK}
    assert not wrong, f"packages have {wrong} lines; say so in LINES"


RECIPES = ("rlvr", "agentic", "sft", "dpo", "distill", "evaluate")


def test_a_recipe_and_its_help_bring_no_torch():
    """Ranks that have lost their torchrun, typos and --help do not wait for it."""
    code = f"""
import importlib, runpy, sys
for recipe in {RECIPES}:
    module = "roll_lite.recipes." + recipe
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
    sys.argv = [sys.argv[0], "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, module
        assert "torch" not in sys.modules and "transformers" not in sys.modules, module
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(f"{recipe} [-h]" in done.stdout for recipe in RECIPES)


def test_importing_sets_no_signal():
    """Under torchrun too: what ends a rank with it is set where a command or a cluster begins."""
    code = """
import ctypes, signal, sys
before = [signal.getsignal(number) for number in signal.valid_signals()]
import roll_lite, roll_lite.command, roll_lite.recipes.rlvr
assert before == [signal.getsignal(number) for number in signal.valid_signals()]
at_parent_death, PR_GET_PDEATHSIG = ctypes.c_int(), 2
assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(at_parent_death)) == 0
sys.exit(at_parent_death.value)
"""
    env = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_only_cluster_reads_the_ranks():
    for path in SOURCE.rglob("*.py"):
        if "cluster" not in path.parts:
            text = path.read_text()
            assert '"RANK"' not in text and '"WORLD_SIZE"' not in text, path
