"""The command roll-lite: runs a recipe, or does what comes before and after a run.

roll-lite rlvr --model models/tiny --data reverse:5        # as `python recipes/rlvr.py` in a clone
roll-lite report runs/RUN                                  # all names below have --help
torchrun --nproc-per-node 8 -m roll_lite rlvr ...          # several ranks
"""

import argparse
import ast
import runpy
import shutil
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from roll_lite import output

PACKAGE = Path(__file__).parent
RECIPES = PACKAGE / "recipes"
TOOLS = {  # modules with a `main(arguments)` that returns the exit code; some import torch
    "plan": "planning.__main__",
    "report": "report.__main__",
    "rewards": "rewards.__main__",
    "envs": "envs.__main__",
    "replay": "replay",
    "export": "train.export",
    "verify": "proof.verify",
    "whatif": "proof.whatif",
    "influence": "proof.influence",
    "bisect": "proof.bisect",
    "ci": "proof.ci",
    "tiny": "models.tiny",
}
USAGE = 2  # exit code of a command that is not understood


def main() -> None:
    recipes = recipe_names()
    match sys.argv[1:]:
        case [name, *arguments] if name in recipes:
            sys.argv = [f"roll-lite {name}", *arguments]
            runpy.run_module(f"roll_lite.recipes.{name}", run_name="__main__", alter_sys=True)
        case [name, *arguments] if name in TOOLS:
            output.protect()  # a reader such as head may end before the tool
            sys.exit(import_module(f"roll_lite.{TOOLS[name]}").main(arguments))
        case ["eject", *arguments]:
            eject(arguments)
        case [] | ["-h" | "--help"]:
            print(_help())
        case [name, *_]:
            near = get_close_matches(name, [*recipes, *TOOLS, "eject"], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            error = f"roll-lite {name} is not understood; {hint}roll-lite --help lists all"
            print(error, file=sys.stderr)
            sys.exit(USAGE)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("[!_]*.py"))


def eject(arguments: list[str]) -> None:
    """Copy a recipe into a folder, for you to edit."""
    parser = argparse.ArgumentParser("roll-lite eject", description=eject.__doc__)
    parser.add_argument("recipe", choices=recipe_names())
    parser.add_argument("folder", type=Path, help="where the copy is written: FOLDER/RECIPE.py")
    options = parser.parse_args(arguments)
    copy = options.folder / f"{options.recipe}.py"
    if copy.exists():
        parser.error(f"{copy} exists; remove it, or name another folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RECIPES / copy.name, copy)
    print(f"wrote {copy}; run it with: python {copy}")


def _help() -> str:
    recipes = [f"  {name:10}{_title(RECIPES / f'{name}.py')}" for name in recipe_names()]
    tools = [
        f"  {name:10}{_title(PACKAGE.joinpath(*module.split('.')).with_suffix('.py'))}"
        for name, module in TOOLS.items()
    ]
    eject_line = f"  {'eject':10}{eject.__doc__}"
    return "\n".join([__doc__, "Recipes:", *recipes, "", "Tools:", *tools, eject_line])


def _title(path: Path) -> str:
    """The first line of a module's docstring, without importing it."""
    return ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]


if __name__ == "__main__":
    main()
