"""The command roll-lite: runs a recipe, or copies it for you to edit.

roll-lite rlvr --model models/tiny --data reverse:5        # as `python recipes/rlvr.py` in a clone
roll-lite rlvr --help
roll-lite eject rlvr mine                                  # then: python mine/rlvr.py
roll-lite plan --model qwen3-8b --world-size 8             # memory and seconds, without a GPU
roll-lite export runs/RUN/checkpoints/step-00000100 OUT    # a Hugging Face folder
roll-lite replay runs/RUN --sample STEP/PROMPT/INDEX       # generates a recorded sample again
torchrun --nproc-per-node 8 -m roll_lite rlvr ...          # several ranks
"""

import ast
import runpy
import shutil
import sys
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
USAGE = 2  # exit code of a command that is not understood


def main() -> None:
    names = recipe_names()
    match sys.argv[1:]:
        case [name, *arguments] if name in names:
            sys.argv = [f"roll-lite {name}", *arguments]
            runpy.run_module(f"roll_lite.recipes.{name}", run_name="__main__", alter_sys=True)
        case ["plan", *arguments]:
            from roll_lite.planning import __main__ as plan

            sys.exit(plan.main(arguments))
        case ["export", *arguments]:
            from roll_lite import export  # not above: it takes torch a second to import

            sys.exit(export.main(arguments))
        case ["replay", *arguments]:
            from roll_lite import replay

            sys.exit(replay.main(arguments))
        case ["eject", name, folder] if name in names:
            for path in eject(name, Path(folder)):
                print(f"wrote {path}")
        case [] | ["-h" | "--help"]:
            print(_help(names))
        case [*words]:
            print(
                f"roll-lite {' '.join(words)} is not understood\n\n{_help(names)}", file=sys.stderr
            )
            sys.exit(USAGE)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("[!_]*.py"))


def eject(name: str, folder: Path) -> list[Path]:
    """Copy a recipe, and recipes that it imports and that are not there; returns the copies."""
    if (folder / f"{name}.py").exists():
        raise SystemExit(f"{folder / name}.py exists; remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [name, *_imported_recipes(name)]
    missing = [folder / f"{name}.py" for name in wanted if not (folder / f"{name}.py").exists()]
    return [Path(shutil.copyfile(RECIPES / path.name, path)) for path in missing]


def _imported_recipes(name: str) -> list[str]:
    """Other recipes that a recipe imports by their plain names."""
    modules = [node.module for node in ast.walk(_tree(name)) if isinstance(node, ast.ImportFrom)]
    return [module for module in modules if module in recipe_names()]


def _help(names: list[str]) -> str:
    listed = [f"  {name:10} {ast.get_docstring(_tree(name)).splitlines()[0]}" for name in names]
    return "\n".join([__doc__, "Recipes, each with --help:", *listed])


def _tree(name: str) -> ast.Module:
    return ast.parse((RECIPES / f"{name}.py").read_text())


if __name__ == "__main__":
    main()
