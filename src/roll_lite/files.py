"""Files of folders that may be damaged, or come from others. Standard library only."""

import json
import shutil
from pathlib import Path
from typing import Any

from roll_lite.checks import UserError

MAX_JSON_BYTES = 2**26
"""More than any config or index of a model has."""


def check_is_file(path: Path) -> None:
    """Refuse what is there and no file: who opens a pipe waits for ever."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; copy or download it again")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FileNotFoundError if there is no such file."""
    check_is_file(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise UserError(f"{path} has {size:,} bytes, too many; copy or download it again")
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; copy or download it again") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; copy or download it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; copy or download it again")
    return found


def own_content(path: Path) -> None:
    """Before a file is changed in place: what has its other names (hard links) stays as it is."""
    if path.is_file() and path.stat().st_nlink > 1:
        copy = path.with_name(f".{path.name}.copy")
        copy.unlink(missing_ok=True)
        shutil.copyfile(path, copy)
        copy.replace(path)
