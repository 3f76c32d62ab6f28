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

from roll_lite.options import chosen_names, flatten

STARTS, CHOSEN, RECIPE = "starts", "chosen", "recipe"
RENAMED = {
    "task": "data",
    "validation_data": "eval_data",
    "validate_every": "eval_every",
    "validation_dialogues": "eval_rows",
    "validation_pairs": "eval_rows",
    "validation_rows": "eval_rows",
    "dialogues_per_step": "rows_per_step",
    "pairs_per_step": "rows_per_step",
    "extra_prompts": "extra_groups",
}
"""Options by names of earlier versions, which are still understood."""


def write_config(folder: Path, config: Any, resumed_at: int | None, **about: Any) -> str:
    """`about` is kept with the start. Returns the run's id, which stays when it is resumed."""
    path, options = folder / "config.json", to_json(config)
    before = {}
    if resumed_at is not None and path.exists():
        before = _read(path)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    start = {"step": resumed_at or 0, "time": now, "command": command(), **machine()}
    start["file"] = str(Path(inspect.getfile(type(config))).resolve())
    ids = [start["id"] for start in before.get(STARTS, []) if "id" in start]
    start |= about | {"id": ids[0] if ids else uuid.uuid4().hex}
    if before:
        start["changed"] = changes(before, options)
    starts = [*before.get(STARTS, []), start]
    chosen = [name for name in before.get(CHOSEN, []) if before[name] == options.get(name)]
    options[CHOSEN] = sorted({*chosen_names(config), *chosen})
    options[RECIPE] = recipe_name(type(config))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(options | {STARTS: starts}, indent=2) + "\n")
    partial.rename(path)
    return start["id"]


def to_json(config: Any) -> dict[str, Any]:
    """The options of a recipe, flat, as JSON reads them back."""
    return json.loads(json.dumps(flatten(config), default=str))


def read_options(path: str | Path, *, with_chosen: bool = True) -> dict[str, Any]:
    """The options in a config.json, flat and by today's names."""
    try:
        written = _read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; name the config.json of a run") from None
    if not isinstance(written, dict):
        raise ValueError(f"{path} holds no JSON object; name the config.json of a run")
    left_out = {STARTS, CHOSEN, RECIPE, *(() if with_chosen else written.get(CHOSEN, ()))}
    options = {name: value for name, value in written.items() if name not in left_out}
    options = _renamed(options)
    return options if STARTS in written else _of_older_version(options)


def written_by(path: str | Path) -> str | None:
    """The recipe that wrote a config.json, if it says so."""
    return json.loads(Path(path).read_text()).get(RECIPE)


def recipe_name(config: type) -> str:
    """The name of the file that defines a Config."""
    return Path(inspect.getfile(config)).stem


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Old and new value of every option that differs and can differ."""
    names = now.keys() & before.keys() - {"run_dir", "resume"}
    return {n: [before[n], now[n]] for n in sorted(names) if before[n] != now[n]}


def command(*args: str) -> str:
    """The command line of this program, with its own arguments unless others are given.

    Under torchrun it is without rendezvous options.
    """
    script, launch = Path(sys.argv[0]), ["python"]
    is_installed = script.parts[-3:-1] == ("roll_lite", "recipes")
    program = ["-m", "roll_lite", script.stem] if is_installed else [sys.argv[0]]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launch = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
        if (nodes := os.environ["GROUP_WORLD_SIZE"]) != "1":
            launch += ["--nnodes", nodes]
    return shlex.join([*launch, *program, *(args or sys.argv[1:])])


def machine() -> dict[str, Any]:
    """What a start ran on: hardware of this node, versions and, in a clone, the commit."""
    hardware, torch = f"{os.cpu_count()} CPU cores", sys.modules.get("torch")
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


def _read(path: str | Path) -> Any:
    written = json.loads(Path(path).read_text())
    if isinstance(written, dict) and isinstance(written.get("history"), list):
        written[STARTS] = written.pop("history")  # its name in earlier versions
    return written


def _renamed(written: dict[str, Any]) -> dict[str, Any]:
    """By names of today; asynchronous runs go on dropping stale samples if they did."""
    options = {name: value for name, value in written.items() if name not in RENAMED}
    options |= {RENAMED[n]: v for n, v in written.items() if n in RENAMED and v is not None}
    if options.get("max_staleness"):
        options.setdefault("stale", "drop")
    return options


def _of_older_version(options: dict[str, Any]) -> dict[str, Any]:
    """Values that mean what the old defaults did."""
    loss = options.get("loss")
    if options.get("critic_lr") == 1e-3 and options.get("advantage") != "gae":
        del options["critic_lr"]
    if loss != "gspo":  # for others 0.2 is still what None means
        for name in ("clip_low", "clip_high"):
            if options.get(name) == 0.2:
                del options[name]
    if loss != "kimi" and options.get("divide_by_std") is True:
        del options["divide_by_std"]
    if loss == "topr" and options.get("aggregation") is None:
        options["aggregation"] = "seq_mean_token_mean"
    return options
