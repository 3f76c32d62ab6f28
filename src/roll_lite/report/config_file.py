"""config.json: the options of a run, flat, with its starts.

`starts` has the command, the recipe's file, step, machine, ranks, changed options and shown metrics
of every start; `copied` marks those of another run, whose steps this one has. `chosen` has what
options were before they were chosen for the model or the machine. `recipe` is the name of the file
that wrote it. `ended` says why a run ended before its last step.
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

STARTS, CHOSEN, RECIPE, ENDED = "starts", "chosen", "recipe", "ended"


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
    _write(path, options | {STARTS: [*starts, start]})
    return run_id


def note_end(folder: str | Path, step: int, why: str, *, has_passed: bool) -> None:
    """A run ends before its last step; `has_passed` says that it could learn no more."""
    path = Path(folder) / "config.json"
    ended = {"step": step, "why": why, "has_passed": has_passed}
    _write(path, json.loads(path.read_text()) | {ENDED: ended})


def read_end(path: str | Path) -> dict[str, Any] | None:
    """What `note_end` wrote, since the run was last started."""
    return json.loads(Path(path).read_text()).get(ENDED)


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # else other names of the file would change with it
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.rename(path)


def to_json(config: Any) -> dict[str, Any]:
    """The options of a recipe, flat, as JSON reads them back."""
    return json.loads(json.dumps(flatten(config), default=str))


def read_options(path: str | Path, *, with_chosen: bool = True) -> dict[str, Any]:
    """The options in a config.json, flat; without those that were chosen, as they were given."""
    try:
        written = read_json_object(Path(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; name the config.json of a run") from None
    chosen = written.get(CHOSEN, {})
    options = {n: v for n, v in written.items() if n not in (STARTS, CHOSEN, RECIPE, ENDED)}
    if with_chosen:
        return options
    given = {name: value for name, value in chosen.items() if value is not None}
    return {name: value for name, value in options.items() if name not in chosen} | given


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
