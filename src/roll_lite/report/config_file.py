"""config.json: the options of a run, flat, with its starts.

`starts` has the command, the recipe's file, step, machine, ranks, changed options and shown metrics
of every start. `chosen` names options that were not given, but chosen for the model. `recipe` is
the name of the file that wrote it.
"""

import inspect
import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.files import read_json_object
from roll_lite.options import flatten

STARTS, CHOSEN, RECIPE = "starts", "chosen", "recipe"


def write_config(folder: Path, config: Any, resumed_at: int | None, **about: Any) -> str:
    """`about` is kept with the start. Returns the run's id, which stays when it is resumed."""
    path = folder / "config.json"
    options = to_json(config)
    before = {}
    if resumed_at is not None and path.exists():
        before = read_json_object(path)
    starts = before.get(STARTS, [])
    run_id = starts[0]["id"] if starts else uuid.uuid4().hex
    start = {
        "step": resumed_at or 0,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command_line(),
        **machine(),
        "file": str(Path(inspect.getfile(type(config))).resolve()),
        **about,
        "id": run_id,
    }
    if before:
        start["changed"] = changes(before, options)
    options[RECIPE] = recipe_name(type(config))
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    partial.write_text(json.dumps(options | {STARTS: [*starts, start]}, indent=2) + "\n")
    partial.rename(path)
    return run_id


def to_json(config: Any) -> dict[str, Any]:
    """The options of a recipe, flat, as JSON reads them back."""
    return json.loads(json.dumps(flatten(config), default=str))


def read_options(path: str | Path, *, with_chosen: bool = True) -> dict[str, Any]:
    """The options in a config.json, flat."""
    try:
        written = read_json_object(Path(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; name the config.json of a run") from None
    left_out = {STARTS, CHOSEN, RECIPE, *(() if with_chosen else written.get(CHOSEN, ()))}
    return {name: value for name, value in written.items() if name not in left_out}


def written_by(path: str | Path) -> str | None:
    """The recipe that wrote a config.json, if it says so."""
    return read_json_object(Path(path)).get(RECIPE)


def recipe_name(config: type) -> str:
    """The name of the file that defines a Config."""
    return Path(inspect.getfile(config)).stem


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Old and new value of every option that differs and can differ."""
    names = now.keys() & before.keys() - {"run_dir", "resume"}
    return {n: [before[n], now[n]] for n in sorted(names) if before[n] != now[n]}


def command_line(*args: str) -> str:
    """The command line of this program, with these arguments or its own.

    Under torchrun it is without rendezvous options.
    """
    program = packaged_recipe()
    start = ["roll-lite", program] if program else ["python", sys.argv[0]]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        start = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
        if (nodes := os.environ["GROUP_WORLD_SIZE"]) != "1":
            start += ["--nnodes", nodes]
        start += ["-m", "roll_lite", program] if program else [sys.argv[0]]
    return shlex.join([*start, *(args or sys.argv[1:])])


def packaged_recipe() -> str | None:
    """The name of the recipe that `roll-lite NAME` runs in this process, if it does."""
    script = Path(sys.argv[0])
    return script.stem if script.parent == Path(__file__).parents[1] / "recipes" else None


def machine() -> dict[str, Any]:
    """What a start ran on: hardware of this node, versions and, in a clone, the commit."""
    hardware = f"{os.cpu_count()} CPU cores"
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {hardware}"
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    commit = _commit(Path(__file__).parents[3])
    return {"hardware": hardware, "versions": versions} | ({"commit": commit} if commit else {})


def _commit(clone: Path) -> str:
    """The commit of a clone, with -dirty after it if files have changed since; else nothing."""
    if not (clone / ".git").exists():
        return ""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):  # there may be no git
        found = subprocess.run(describe, cwd=clone, capture_output=True, text=True, timeout=10)
        return found.stdout.strip()
    return ""
