"""Training rows from files or generated tasks, in an order that resumes.

dialogue    {"messages": [...]} or {"prompt": text or messages, "reply": text or messages}; reply
            may be called completion; with tools (a list of objects) if the messages call them
preference  {"prompt": text or messages, "chosen": text, "rejected": text}; chosen and rejected may
            be messages, and the prompt their beginning
prompt      {"prompt": text or messages}, optionally with id and ground_truth (text or a number),
            domain (text) and tests (a list of objects); all other fields become its `extra`

Other fields of dialogues and preferences are ignored. A `Mixture` draws prompts from several files
and tasks.
"""

from roll_lite.data.mixture import Mixture, check_mixture, held_out, parse_mixture
from roll_lite.data.rows import (
    Dialogue,
    Preference,
    PromptLimit,
    Row,
    RowOptions,
    read_dialogues,
    read_preferences,
    read_prompts,
    read_rows,
)
from roll_lite.data.sources import (
    DIALOGUES,
    PREFERENCES,
    PROMPTS,
    Endless,
    HeldOutOptions,
    Shuffled,
    check_source,
    fixed_options,
    task_dialogues,
    task_preferences,
)
from roll_lite.data.tasks import is_task
