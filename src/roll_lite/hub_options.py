"""Names on the Hugging Face Hub in the options of a recipe, and what they stand for.

A model becomes the folder of its snapshot in the cache, data its name with the commit. `from_hub`
in config.json has both beside what was given, so that a resumed run uses the same. The first rank
of each node asks, and the other ranks wait for it. Weights are downloaded later, when a Cluster
starts, and data when it is read: options that are wrong have been refused by then.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError
from roll_lite.cluster.launch import first_of_node, is_first_rank
from roll_lite.hub import (
    FROM_HUB,
    config_folder,
    is_data_name,
    is_model_name,
    is_pinned,
    pinned_data,
    snapshot_name,
)

MODELS = ("model", "teacher", "reference", "judge", "reward_model")
DATA = ("data", "eval_data")
DATA_SET = "datasets/"


def with_hub(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options that held a name, with what it stands for, and `from_hub`."""
    known = dict(flat[FROM_HUB])
    used = {_key(o, name): o for o in (*MODELS, *DATA) for name in _names(o, flat)}
    unknown = {key: o for key, o in used.items() if key not in known and _is_name(o, _name(key))}
    folders = {  # by their options; those of a resumed run may have gone
        place: used.get(key) or used[place]
        for key, place in known.items()
        if not key.startswith(DATA_SET) and (key in used or place in used)
    }
    if unknown or folders:
        question = f"names {sorted(unknown)} {sorted(folders)}"
        found = first_of_node(question, lambda: _find_all(unknown, folders))
        if is_first_rank():
            for key, place in found.items():
                print(f"{_name(key)} is {place}", flush=True)
        known |= found
    places = {known.get(key, _name(key)) for key in used}
    kept = {key: place for key, place in known.items() if place in places}
    changed = {o: _replaced(o, flat[o], known) for o in (*MODELS, *DATA) if flat.get(o)}
    return {o: value for o, value in changed.items() if value != flat[o]} | {FROM_HUB: kept}


def _find_all(unknown: Mapping[str, str], folders: Mapping[str, str]) -> dict[str, str]:
    """What unknown names stand for. Folders that have gone are downloaded, without weights."""
    found = {}
    for key, option in unknown.items():
        name = _name(key)
        try:
            found[key] = config_folder(name) if option in MODELS else pinned_data(name)
        except UserError as error:
            raise UserError(f"{option}={name!r}: {error}") from error.__cause__
    for folder, option in folders.items():
        _restore(folder, option)
    return found


def _restore(folder: str, option: str) -> None:
    if Path(folder, "config.json").is_file():
        return
    name = snapshot_name(folder)
    found = config_folder(name)
    if found != folder:
        raise UserError(
            f"{option}={folder!r} is not here, and {name} is now {found}; set HF_HOME as it was "
            "when the run was started"
        )


def _key(option: str, name: str) -> str:
    """A name as `from_hub` has it: a model and a data set may share one."""
    return f"{DATA_SET}{name}" if option in DATA and is_data_name(name) else name


def _name(key: str) -> str:
    return key.removeprefix(DATA_SET)


def _names(option: str, flat: Mapping[str, Any]) -> Iterator[str]:
    """What an option names, without domains and weights."""
    value = flat.get(option) or ()
    for text in (value,) if isinstance(value, str) else value:
        yield _parts(option, text)[1]


def _parts(option: str, text: str) -> tuple[str, str, str]:
    """A text as its name and what stands before and after it."""
    if option in MODELS:
        before = re.match(r"(?:[^/]+=)?", text)[0] if option == "teacher" else ""
        before = "" if Path(text).exists() else before
        return before, text.removeprefix(before), ""
    name, after = re.fullmatch(r"(.*?)((?:@[0-9.]+(?:e-?[0-9]+)?)?)", text, re.DOTALL).groups()
    return "", name, after


def _is_name(option: str, name: str) -> bool:
    if option in MODELS:
        return is_model_name(name)
    return is_data_name(name) and not is_pinned(name)


def _replaced(option: str, value: Any, known: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return tuple(_replaced(option, text, known) for text in value)
    before, name, after = _parts(option, value)
    return f"{before}{known.get(_key(option, name), name)}{after}"
