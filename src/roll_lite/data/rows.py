"""Rows of files: dialogues, preferences and prompts; and prompts that are too long.

A file has JSON lines, a list of objects as JSON, or is parquet; a name on the Hugging Face Hub
stands for its files. A malformed row raises ValueError with the file, the line, the field and what
was expected.
"""

import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, TypeVar

from roll_lite.checks import UserError, read_only_if
from roll_lite.data.tasks import is_task
from roll_lite.hub import data_files, data_label
from roll_lite.progress import ProgressBar
from roll_lite.types import Message, Prompt

T = TypeVar("T")
Columns = Mapping[str, Sequence[str]]
"""Fields of rows by our names, with the names that they have in files."""
AS_NAMED: Columns = MappingProxyType({})
ROLES = ("system", "user", "assistant", "tool")
DIALOGUE = "a dialogue row has messages, or prompt and reply (or completion)"
PREFERENCE = "a preference row has prompt, chosen and rejected"
PROMPT = "a prompt row has prompt, and may have id, domain, ground_truth and tests"
PROMPT_FIELDS = ("prompt", "id", "domain", "ground_truth", "tests")
FIELDS = (*PROMPT_FIELDS, "messages", "reply", "completion", "tools", "chosen", "rejected")
TYPE_NAMES = {
    dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number",
    float: "a number", type(None): "null",
}  # fmt: skip
TEMPLATE_TOKENS = 1024
"""No chat template adds more to the tokens of the messages."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows of data files."""

    columns: tuple[str, ...] = ()
    """NAME=COLUMN where columns of the data have other names than ours, as in prompt=question
    ground_truth=answer. Several of one NAME are tried in turn. domain=math, if there is no such
    column, is the domain of all rows that have none."""

    def __post_init__(self):
        for entry in self.columns:
            name, _, column = entry.partition("=")
            if not column or name not in FIELDS:
                raise UserError(
                    f"columns={entry!r} is not NAME=COLUMN, as in prompt=question; NAME is one of "
                    f"{', '.join(FIELDS)}"
                )

    def check_columns(self, *sources: str | None) -> None:
        """Refuse columns where all sources are tasks, which have none."""
        is_read = not all(is_task(source) for source in sources if source)
        read_only_if(is_read, "a file in data or eval_data", self, "columns")

    @property
    def by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, _, column in (entry.partition("=") for entry in self.columns):
            found.setdefault(name, []).append(column)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation; its assistant turns are trained on."""

    id: str
    """File and line, or task; named in errors."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, as JSON schemas."""
    num_read: int = 0
    """Messages at the beginning that are a prompt, so that no turn in them is trained on."""


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
    columns: Columns

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.where}: {problem}; {self.expected}")

    def text(self, field: str, default: str | None = None) -> str:
        value = self.fields.get(field, default)
        if value is None and field not in self.fields:
            raise self.missing(field)
        if not isinstance(value, str):
            raise self.error(f"field {field!r} is {TYPE_NAMES[type(value)]} instead of text")
        return value

    def missing(self, field: str) -> UserError:
        has = ", ".join(self.fields) or "no fields"
        text = f"no field {field!r}; {self.expected}. This row has {has}"
        return UserError(f"{self.where}: {text}; --columns {field}=COLUMN says which of them it is")

    def text_or_number(self, field: str, default: str | None = None) -> str:
        """Text, or a number as it is written in the file: 1.50 stays 1.50."""
        if type(self.fields.get(field)) not in (int, float):
            return self.text(field, default)
        written = json.loads(self.line, parse_int=str, parse_float=str, parse_constant=str)
        return _renamed(written, self.columns)[field]

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
            raise self.missing(field)
        if not isinstance(value, list) or not value:
            found = "an empty list" if value == [] else TYPE_NAMES[type(value)]
            raise self.error(f"field {field!r} is {found} instead of messages")
        return tuple(self._message(f"{field}[{i}]", entry) for i, entry in enumerate(value))

    def _object(self, where: str, entry: Any) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise self.error(f"{where} is {TYPE_NAMES[type(entry)]} instead of an object")
        return entry

    def _message(self, where: str, entry: Any) -> Message:
        entry = self._object(where, entry)
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES:
            raise self.error(f"{where} has role {role!r}, not one of {', '.join(ROLES)}")
        calls = entry.get("tool_calls") if role == "assistant" else None
        if calls and content is None:
            content = ""
        if not isinstance(content, str):
            found = TYPE_NAMES[type(content)]
            raise self.error(f"{where} has {found} instead of text as its content")
        about = {n: entry[n] for n in ("name", "tool_call_id") if role == "tool" and entry.get(n)}
        called = {"tool_calls": self._calls(f"{where}.tool_calls", calls)} if calls else {}
        return {"role": role, "content": content} | about | called

    def _calls(self, where: str, calls: Any) -> list[dict[str, Any]]:
        """Calls of functions; arguments that are JSON as text become objects, as templates need."""
        found = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments", {}) if isinstance(function, dict) else None
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    arguments = None
            if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
                raise self.error(
                    f"{where} has a call that is not "
                    '{"type": "function", "function": {"name": text, "arguments": {...}}}'
                )
            named = {"name": function["name"], "arguments": arguments}
            about = {"id": call["id"]} if call.get("id") else {}
            found.append(about | {"type": "function", "function": named})
        return found


def read_dialogues(source: str | Path, columns: Columns = AS_NAMED) -> list[Dialogue]:
    return read_rows(source, _dialogue, DIALOGUE, columns)


def read_preferences(source: str | Path, columns: Columns = AS_NAMED) -> list[Preference]:
    return read_rows(source, _preference, PREFERENCE, columns)


def read_prompts(source: str | Path, columns: Columns = AS_NAMED, domain: str = "") -> list[Prompt]:
    """Prompts with unique ids: the samples of a prompt are seeded by its id. `domain` is that of
    rows without one."""
    owners: dict[str, str] = {}

    def parse(row: Row) -> Prompt:
        prompt = _prompt(row, domain)
        if prompt.id in owners:
            raise row.error(
                f"id {prompt.id!r} is also the id of {owners[prompt.id]}; give each row its own "
                "id, or leave all ids out"
            )
        owners[prompt.id] = row.where
        return prompt

    return read_rows(source, parse, PROMPT, columns)


def read_rows(
    source: str | Path,
    parse: Callable[[Row], T],
    expected: str,
    columns: Columns = AS_NAMED,
) -> list[T]:
    """Parse every line that is not blank, or every row of a parquet file."""
    label = data_label(str(source))
    rows = []
    for number, (unit, line) in enumerate(_lines(data_files(str(source))), start=1):
        if line.strip():
            rows.append(parse(_row(f"{label} {unit} {number}", number, line, expected, columns)))
    if not rows:
        raise UserError(f"{label} is empty; it needs a JSON object in each line: {expected}")
    return rows


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """The lines of files, and the rows of those without lines, as JSON."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is not a file; name one with a JSON object in each line")
        with path.open("rb") as file:
            if path.suffix == ".parquet":
                for row in _parquet(file, path):
                    yield "row", json.dumps(row, default=str).encode()
            elif path.suffix == ".json" and _is_list(file):
                yield from (("row", row) for row in _json_list(file, path))
            else:
                yield from (("line", line) for line in file)


def _is_list(file: BinaryIO) -> bool:
    """Whether a file of JSON begins with a list; afterwards the file is at its beginning again."""
    start = file.read(len(BOM_UTF8)).removeprefix(BOM_UTF8).lstrip()
    while not start and (more := file.read(64)):
        start = more.lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _json_list(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The items of a list as they are written, with the spelling of their numbers."""
    skip, decode = re.compile(r"[ \t\n\r]*").match, json.JSONDecoder().raw_decode
    try:
        text = file.read().decode("utf-8-sig")
        end = skip(text, text.index("[") + 1).end()
        is_more = text[end : end + 1] != "]"
        while is_more:
            start = end
            _, end = decode(text, start)
            yield text[start:end].encode()
            end = skip(text, end).end()
            if is_more := text[end : end + 1] == ",":
                end = skip(text, end + 1).end()
        if text[end:].strip() != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}; write an object a line") from None


def _parquet(file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    """Rows without nulls, which stand there for fields that a row does not have."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(
            f"{path} is a parquet file, which needs pyarrow: pip install 'roll_lite[data]'"
        ) from None
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from map(_without_nulls, batch.to_pylist())
    except ArrowException as error:
        raise UserError(f"{path} is not a whole parquet file ({error}); copy it again") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _renamed(fields: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Fields by our names, as far as the row has such columns."""
    chosen = {n: next((c for c in names if c in fields), None) for n, names in columns.items()}
    chosen = {name: column for name, column in chosen.items() if column is not None}
    rest = {name: value for name, value in fields.items() if name not in chosen.values()}
    return rest | {name: fields[column] for name, column in chosen.items()}


def _row(where: str, number: int, line: bytes, expected: str, columns: Columns) -> Row:
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
    found = _renamed(fields, columns)
    for name in columns.keys() - found.keys() - {"domain"}:
        raise UserError(
            f"{where}: columns={name}={columns[name][0]}, but the row has {', '.join(fields)}; "
            "name one of these"
        )
    if columns.get("domain"):
        found.setdefault("domain", columns["domain"][-1])
    return Row(where, number, found, expected, line, columns)


def _dialogue(row: Row) -> Dialogue:
    num_read = 0
    if "messages" in row.fields:
        messages = row.messages("messages")
    else:
        field = "completion" if "completion" in row.fields else "reply"
        reply = _reply(row, field)
        messages = row.messages("prompt")
        num_read = len(messages)
        messages += reply
    roles = [message["role"] for message in messages]
    is_turn = [role == "assistant" for role in roles]
    if not is_turn[-1] or is_turn[0] or any(a and b for a, b in pairwise(is_turn)):
        raise row.error(
            f"the roles are {', '.join(roles)}, but the assistant must reply to another role and "
            "come last"
        )
    return Dialogue(id=row.where, messages=messages, tools=_tools(row), num_read=num_read)


def _reply(row: Row, field: str) -> tuple[Message, ...]:
    """What follows a prompt: text of the assistant's, or messages that begin with it."""
    if not isinstance(row.fields.get(field), list):
        return ({"role": "assistant", "content": row.text(field)},)
    messages = row.messages(field)
    if messages[0]["role"] != "assistant":
        raise row.error(
            f"field {field!r} begins with role {messages[0]['role']!r}; it is what the assistant "
            "writes after the prompt"
        )
    return messages


def _tools(row: Row) -> tuple[dict[str, Any], ...]:
    """Schemas of functions, which some data sets have as JSON text."""
    value = row.fields.get("tools")
    if isinstance(value, str):
        try:
            row = replace(row, fields=row.fields | {"tools": json.loads(value)})
        except ValueError:
            raise row.error("field 'tools' is text that is not JSON") from None
    return row.objects("tools") if row.fields.get("tools") is not None else ()


SAME = "chosen and rejected are the same text, so there is nothing to prefer"


def _preference(row: Row) -> Preference:
    is_list = {isinstance(row.fields.get(field), list) for field in ("chosen", "rejected")}
    if is_list == {True}:
        messages, chosen, rejected = _of_messages(row)
    elif "prompt" in row.fields:
        chosen, rejected = row.text("chosen"), row.text("rejected")
        messages = _opening(row)
    else:
        messages, chosen, rejected = _of_texts(row)
    if chosen == rejected:
        raise row.error(SAME)
    return Preference(id=row.where, messages=messages, chosen=chosen, rejected=rejected)


def _of_messages(row: Row) -> tuple[tuple[Message, ...], str, str]:
    """Chosen and rejected as messages: what both begin with is the prompt, or follows it. A prompt
    as text only stands beside them."""
    chosen, rejected = row.messages("chosen"), row.messages("rejected")
    if chosen == rejected:
        raise row.error(SAME)
    num = _num_common(chosen, rejected)
    opening = chosen[:num]
    if isinstance(row.fields.get("prompt"), list) or ("prompt" in row.fields and not num):
        prompt = _opening(row)
        opening = opening if opening[: len(prompt)] == prompt else prompt + opening
    replies = chosen[num:], rejected[num:]
    is_one = all(len(r) == 1 and r[0]["role"] == "assistant" for r in replies)
    if not is_one or any("tool_calls" in reply for (reply,) in replies):
        roles = " and ".join(", ".join(m["role"] for m in r) or "nothing" for r in replies)
        raise row.error(
            f"after what chosen and rejected have in common they are {roles}; each must be one "
            "reply of the assistant, as text"
        )
    if not opening or opening[-1]["role"] == "assistant":
        raise row.error("chosen and rejected have no prompt before the reply; add the field prompt")
    return opening, replies[0][0]["content"], replies[1][0]["content"]


def _of_texts(row: Row) -> tuple[tuple[Message, ...], str, str]:
    """Chosen and rejected as texts that begin with the prompt; a space before the point where
    they part belongs to the replies."""
    chosen, rejected = row.text("chosen"), row.text("rejected")
    prompt = chosen[: _num_common(chosen, rejected)].removesuffix(" ")
    if not prompt or (chosen != rejected and prompt in (chosen, rejected)):
        raise row.error(
            "there is no prompt, and no text that both chosen and rejected continue; add the field "
            "prompt"
        )
    opening = ({"role": "user", "content": prompt},)
    return opening, chosen[len(prompt) :], rejected[len(prompt) :]


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences have in common, from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _prompt(row: Row, domain: str) -> Prompt:
    return Prompt(
        id=row.text_or_number("id", default=row.where),
        messages=_opening(row),
        domain=row.text("domain", default=domain),
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
        said = (str(m.get(name, "")) for m in prompt.messages for name in ("content", "tool_calls"))
        num_bytes = sum(len(text.encode()) for text in said)
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
