"""Rows of JSON-lines files: dialogues, preferences and prompts; and prompts that are too long.

A malformed row raises ValueError with the file, the line, the field and what was expected.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from roll_lite.checks import UserError
from roll_lite.progress import ProgressBar
from roll_lite.types import Message, Prompt

T = TypeVar("T")
ROLES = ("system", "user", "assistant")
DIALOGUE = "a dialogue row has messages, or prompt and reply"
PREFERENCE = "a preference row has prompt, chosen and rejected"
PROMPT = "a prompt row has prompt, and may have id, domain, ground_truth and tests"
PROMPT_FIELDS = ("prompt", "id", "domain", "ground_truth", "tests")
TYPE_NAMES = {
    dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip
TEMPLATE_TOKENS = 1024
"""No chat template adds more to the tokens of the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation; its assistant turns are trained on."""

    id: str
    """File and line, or task; named in errors."""
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two replies to a prompt, one better than the other."""

    id: str
    messages: tuple[Message, ...]
    """The prompt."""
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, with checked access to its fields."""

    where: str
    """File and line."""
    number: int
    """Line number, from 1."""
    fields: dict[str, Any]
    expected: str
    """The fields of such a row, in words, for error messages."""
    line: bytes
    """The unparsed line."""

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.where}: {problem}; {self.expected}")

    def text(self, field: str, default: str | None = None) -> str:
        value = self.fields.get(field, default)
        if value is None and field not in self.fields:
            raise self.error(f"no field {field!r}")
        if not isinstance(value, str):
            raise self.error(f"field {field!r} is {TYPE_NAMES[type(value)]} instead of text")
        return value

    def text_or_number(self, field: str, default: str | None = None) -> str:
        """Text, or a number as it is written in the file: 1.50 stays 1.50."""
        if type(self.fields.get(field)) not in (int, float):
            return self.text(field, default)
        return json.loads(self.line, parse_int=str, parse_float=str, parse_constant=str)[field]

    def objects(self, field: str) -> tuple[dict[str, Any], ...]:
        """A list of objects; empty if the row does not have the field."""
        value = self.fields.get(field, [])
        if not isinstance(value, list):
            raise self.error(f"field {field!r} is {TYPE_NAMES[type(value)]} instead of a list")
        return tuple(self._object(f"{field}[{i}]", entry) for i, entry in enumerate(value))

    def others(self, known: Sequence[str]) -> dict[str, Any]:
        """The other fields. One that is nearly a known field which is missing is refused."""
        missing = [field for field in known if field not in self.fields]
        others = {name: value for name, value in self.fields.items() if name not in known}
        for name in others:
            swapped = [field for field in missing if sorted(field) == sorted(name)]
            if close := swapped or get_close_matches(name, missing, n=1, cutoff=0.9):
                raise self.error(f"field {name!r} looks like a misspelt {close[0]!r}; rename it")
        return others

    def messages(self, field: str) -> tuple[Message, ...]:
        """The messages of a field; plain text is one message of the user."""
        value = self.fields.get(field)
        if isinstance(value, str):
            return ({"role": "user", "content": value},)
        if field not in self.fields:
            raise self.error(f"no field {field!r}")
        if not isinstance(value, list) or not value:
            found = "an empty list" if value == [] else TYPE_NAMES[type(value)]
            raise self.error(f"field {field!r} is {found} instead of messages")
        return tuple(self._message(f"{field}[{i}]", entry) for i, entry in enumerate(value))

    def _object(self, where: str, entry: Any) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise self.error(f"{where} is {TYPE_NAMES[type(entry)]} instead of an object")
        return entry

    def _message(self, where: str, entry: Any) -> Message:
        role, content = (self._object(where, entry).get(name) for name in ("role", "content"))
        if role not in ROLES:
            raise self.error(
                f"{where} has role {role!r}, not one of {', '.join(ROLES)} (write what a tool "
                "returns as a message of the user)"
            )
        if not isinstance(content, str):
            found = TYPE_NAMES[type(content)]
            raise self.error(f"{where} has {found} instead of text as its content")
        return {"role": role, "content": content}


def read_dialogues(path: str | Path) -> list[Dialogue]:
    return read_rows(path, _dialogue, DIALOGUE)


def read_preferences(path: str | Path) -> list[Preference]:
    return read_rows(path, _preference, PREFERENCE)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts with unique ids: the samples of a prompt are seeded by its id."""
    owners: dict[str, str] = {}

    def parse(row: Row) -> Prompt:
        prompt = _prompt(row)
        if prompt.id in owners:
            raise row.error(
                f"id {prompt.id!r} is also the id of {owners[prompt.id]}; give each row its own "
                "id, or leave all ids out"
            )
        owners[prompt.id] = row.where
        return prompt

    return read_rows(path, parse, PROMPT)


def read_rows(path: str | Path, parse: Callable[[Row], T], expected: str) -> list[T]:
    """Parse every line that is not blank."""
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file; name one with a JSON object in each line")
    rows = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(parse(_row(f"{path} line {number}", number, line, expected)))
    if not rows:
        raise UserError(f"{path} is empty; it needs a JSON object in each line: {expected}")
    return rows


def _row(where: str, number: int, line: bytes, expected: str) -> Row:
    try:
        fields = json.loads(line)
        if b"\\ud" in line.lower():  # half of a pair is no text, and no tokenizer takes it
            json.dumps(fields, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg}, at character {error.pos + 1}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: {error.reason}, at byte {error.start + 1}"
    except UnicodeEncodeError:
        problem = "half of a surrogate pair (\\ud800 to \\udfff), which is no text"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        problem = f"a number of more than {sys.get_int_max_str_digits():,} digits; write it as text"
    else:
        problem = ""
    if problem:
        raise UserError(f"{where}: {problem}; {expected}")
    if not isinstance(fields, dict):
        raise UserError(f"{where}: {TYPE_NAMES[type(fields)]} instead of an object; {expected}")
    return Row(where, number, fields, expected, line)


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
            f"the roles are {', '.join(roles)}, but the assistant must reply to another role and "
            "come last"
        )
    return Dialogue(id=row.where, messages=messages)


def _preference(row: Row) -> Preference:
    chosen = row.text("chosen")
    rejected = row.text("rejected")
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
        extra=row.others(PROMPT_FIELDS),
    )


def _opening(row: Row) -> tuple[Message, ...]:
    """The messages of a prompt, which must not end with the assistant."""
    messages = row.messages("prompt")
    if messages[-1]["role"] == "assistant":
        raise row.error("the prompt ends with the assistant; end it with the user")
    return messages


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """Refuses or drops prompts that leave no room for a reply of `reply_tokens`."""

    count: Callable[[Prompt], int]
    """Tokens of a prompt."""
    longest_sample: int
    """Tokens of a prompt and its reply."""
    reply_tokens: int
    policy: Literal["error", "drop"]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt that fits."""
        return self.longest_sample - self.reply_tokens

    def __call__(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts that fit, in order."""
        tokens = {prompt.id: self._tokens(prompt) for prompt in self._with_progress(prompts)}
        kept = [prompt for prompt in prompts if tokens[prompt.id] <= self.max_tokens]
        if len(kept) == len(prompts):
            return prompts
        longest = max(tokens, key=tokens.get)
        problem = (
            f"{len(prompts) - len(kept):,} of {len(prompts):,} prompts have more than "
            f"{self.max_tokens:,} tokens; the longest, {longest}, has {tokens[longest]:,}"
        )
        if self.policy == "error" or not kept:
            drop = "; or drop them with long_prompts=drop" if kept else ""
            raise UserError(
                f"{problem}. A sample has at most {self.longest_sample:,} tokens, the least of the "
                "model's positions, tokens_per_microbatch and what kv_cache_gib holds; raise it, "
                f"or lower max_tokens={self.reply_tokens}{drop}"
            )
        print(f"dropped: {problem}", flush=True)
        return kept

    def _tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt; its bytes, of which a token has at least one, where these fit. An
        environment writes its messages later."""
        if not prompt.is_question:
            return 0
        num_bytes = sum(len(message["content"].encode()) for message in prompt.messages)
        if num_bytes + TEMPLATE_TOKENS <= self.max_tokens:
            return num_bytes
        try:
            return self.count(prompt)
        except ValueError as error:  # such as roles that the chat template refuses
            raise UserError(f"{prompt.id}: {error}") from None

    def _with_progress(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        with ProgressBar(len(prompts), "reading", "prompts") as bar:
            for prompt in prompts:
                yield prompt
                bar.advance()
