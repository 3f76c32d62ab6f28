"""Rows to train on: JSON lines of a file, or the generated tasks, in an order that resumes.

dialogue    {"messages": [...]} or {"prompt": text or messages, "reply": text}
preference  {"prompt": text or messages, "chosen": text, "rejected": text}
prompt      {"prompt": text or messages}, perhaps with id, domain, ground_truth (a text or a
            number each but the domain, which is text) and tests (a list of objects)

Other fields are ignored. Prompts of several files and tasks together are a `Mixture`.
"""

from roll_lite.data.kinds import (
    Dialogue,
    Preference,
    read_dialogues,
    read_preferences,
    read_prompts,
)
from roll_lite.data.mixture import Mixture, held_out, parse_mixture
from roll_lite.data.order import Endless, Shuffled
from roll_lite.data.rows import Row, read_rows
from roll_lite.data.sources import (
    DEFAULT_TASK,
    DIALOGUES,
    PREFERENCES,
    PROMPTS,
    Source,
    check_source,
    fixed_options,
    task_dialogues,
    task_preferences,
)

__all__ = [
    "DEFAULT_TASK",
    "DIALOGUES",
    "PREFERENCES",
    "PROMPTS",
    "Dialogue",
    "Endless",
    "Mixture",
    "Preference",
    "Row",
    "Shuffled",
    "Source",
    "check_source",
    "fixed_options",
    "held_out",
    "parse_mixture",
    "read_dialogues",
    "read_preferences",
    "read_prompts",
    "read_rows",
    "task_dialogues",
    "task_preferences",
]
