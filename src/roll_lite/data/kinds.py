"""What a row may be: a dialogue, a preference, a prompt."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from roll_lite.data.rows import Row, read_rows
from roll_lite.types import Message, Prompt

DIALOGUE = "a dialogue row has messages, or prompt and reply"
PREFERENCE = "a preference row has prompt, chosen and rejected"
PROMPT = "a prompt row has prompt, and may have id, domain, ground_truth and tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation whose assistant turns are learnt."""

    id: str
    """Named in errors."""
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two replies to a prompt, one better than the other."""

    id: str
    messages: tuple[Message, ...]
    """The prompt."""
    chosen: str
    rejected: str


def read_dialogues(path: str | Path) -> list[Dialogue]:
    return read_rows(path, _dialogue, DIALOGUE)


def read_preferences(path: str | Path) -> list[Preference]:
    return read_rows(path, _preference, PREFERENCE)


def read_prompts(path: str | Path) -> list[Prompt]:
    """No two have the same id: the samples of a prompt are seeded by it."""
    owners: dict[str, str] = {}

    def parse(row: Row) -> Prompt:
        prompt = _prompt(row)
        if prompt.id in owners:
            raise row.error(
                f"id {prompt.id!r} is also that of {owners[prompt.id]}; give each row its own, or "
                "leave all out"
            )
        owners[prompt.id] = row.where
        return prompt

    return read_rows(path, parse, PROMPT)


def _dialogue(row: Row) -> Dialogue:
    if "messages" in row.fields:
        messages = row.messages("messages")
    else:
        reply = {"role": "assistant", "content": row.text("reply")}
        messages = (*row.messages("prompt"), reply)
    roles = [message["role"] for message in messages]
    is_turn = [role == "assistant" for role in roles]
    if not is_turn[-1] or is_turn[0] or any(a and b for a, b in pairwise(is_turn)):
        raise row.error(
            f"the roles are {', '.join(roles)}, but the assistant must reply to others and last"
        )
    return Dialogue(id=row.where, messages=messages)


def _preference(row: Row) -> Preference:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    if chosen == rejected:
        raise row.error("chosen and rejected are the same text, so there is nothing to prefer")
    return Preference(id=row.where, messages=_opening(row), chosen=chosen, rejected=rejected)


def _prompt(row: Row) -> Prompt:
    return Prompt(
        id=row.text_or_number("id", default=row.where),
        messages=_opening(row),
        domain=row.text("domain", default=""),
        ground_truth=row.text_or_number("ground_truth", default=""),
        tests=row.objects("tests"),
    )


def _opening(row: Row) -> tuple[Message, ...]:
    """Messages that the model has yet to reply to."""
    messages = row.messages("prompt")
    if messages[-1]["role"] == "assistant":
        raise row.error("the prompt ends with the assistant, who should come after it")
    return messages
