"""Chat templates and the tokenizer: messages become ids once and are never re-tokenised."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from roll_lite.chat_template import (
    check_arguments,
    load_tokenizer,
    special_tokens,
    stop_ids,
    try_template,
    with_fixed_date,
)
from roll_lite.checks import UserError
from roll_lite.types import Message, Prompt

OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"
_QUESTION = {"role": "user", "content": "?"}
_MARK = "\u2063reply\u2063"  # placeholder for a reply in the rendered template
_TOOL_CALL = r"(?s)<tool_call>\s*(.*?)\s*</tool_call>"
_MEMORY = 1024  # encoded texts that are kept
_AT_ONCE = 1024  # replies per tokenizer call: faster than one by one, with bounded memory
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters without a meaning


class Transcript(NamedTuple):
    """A named conversation with replies to learn."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    """Functions that the model may call, as JSON schemas."""
    num_read: int = 0
    """Messages at the beginning whose replies are not learned."""


class Chat:
    """Encodes conversations by the chat template of a model folder."""

    def __init__(self, folder: str | Path, /, system: str | None = None, **template_args: Any):
        """`system` is the system message of conversations that have none."""
        self._system = [{"role": "system", "content": system}] if system else []
        self.tokenizer = load_tokenizer(Path(folder))
        template = with_fixed_date(self.tokenizer.get_chat_template())
        check_arguments(template_args, template, folder)
        self.tokenizer.chat_template = template
        self._template_args = template_args
        self._memory: dict[str, list[int]] = {}
        # Called without transformers' wrapper, which takes longer than a turn's tokens do.
        self._backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a folder may have stored either
            self._backend.no_truncation()
            self._backend.no_padding()
        self._special = special_tokens(self.tokenizer)
        # SentencePiece tokenizers put a space before a text, but not behind a newline.
        self._lead = "" if self._ids("\na")[-1:] == self._ids("a") else "\n"
        self._num_lead = len(self._ids(self._lead)) if self._lead else 0
        try_template(folder, lambda: self._render([_QUESTION]))
        try_template(folder, lambda: "".join(self._around_reply([_QUESTION], [])))
        self.end_of_turn = self._end_of_turn()
        self._opening = self._render([_QUESTION])
        self._turn_end, self._after_turn = self._text_after_reply()
        self.stop_ids = stop_ids(Path(folder), self.end_of_turn, self.tokenizer.eos_token_id)
        """Sampling one of these ends a turn."""

    def encode(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids of a conversation, up to the start of the model's reply.

        `tools` are functions that the model may call, as JSON schemas; few templates show them.
        """

        def encode() -> list[int]:
            return self._ids(self._prompt_text(messages, tools))

        return list(self._remembered(encode, "prompt", *messages, tools))

    def encode_ahead(self, conversations: Iterable[Sequence[Message]]) -> None:
        """Encode conversations that `encode` will soon get: all at once, on all cores.

        One that cannot be encoded is left to `encode`, which raises.
        """
        named = {_name("prompt", *messages, None): messages for messages in conversations}
        named = dict(islice(named.items(), _MEMORY))
        texts: dict[str, str] = {}
        for name in named.keys() - self._memory.keys():
            with suppress(Exception):  # of any kind: templates are code
                texts[name] = self._prompt_text(named[name])
        if len(self._memory) + len(texts) > _MEMORY:
            self._memory = {n: ids for n, ids in self._memory.items() if n in named}
        with suppress(TypeError):  # half of a surrogate pair
            self._memory |= zip(texts, self._ids_of_all(list(texts.values())), strict=True)

    def continue_with(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """The ids for the next reply: the conversation so far, then `messages`.

        `token_ids` (the conversation exactly as it was sampled) is kept; only the text that the
        template puts after a reply is encoded. What environments and tools say is quoted, as by
        `encode_quoted`.
        """

        def text_after(messages: Sequence[Message]) -> str:
            return self._lead + self._around_reply([_QUESTION], messages)[1]

        def encode() -> list[int]:
            return self._quoted_ids(text_after, messages)[self._num_lead :]

        after_ids = self._remembered(encode, "continuation", *messages)
        if token_ids and token_ids[-1] in self.stop_ids and self.end_of_turn in after_ids:
            after_ids = after_ids[after_ids.index(self.end_of_turn) + 1 :]
        return token_ids + after_ids

    def encode_dialogues(
        self, dialogues: Sequence[Transcript | tuple[str, Sequence[Message]]]
    ) -> list[list[tuple[list[int], list[bool]]]]:
        """Ids of named conversations, and masks of the replies, stop tokens included.

        The ids before a reply are always `encode` of the messages before it. Where a template
        writes the last reply differently from earlier ones (Qwen3 drops earlier thoughts), one
        sequence cannot have that for all replies, and a conversation becomes several.
        """
        replies = [_up_to_replies(Transcript(*dialogue)) for dialogue in dialogues]
        encoded = iter(self.encode_replies([reply for group in replies for reply in group]))
        return [_join_replies(islice(encoded, len(group))) for group in replies]

    def encode_replies(
        self, replies: Sequence[Transcript | tuple[str, Sequence[Message]]]
    ) -> list[tuple[list[int], list[int]]]:
        """Ids before the reply and of the reply, for named conversations that end with one.

        The first are `encode` of the messages before the reply; the second end with a stop token.
        """
        encoded = []
        for start in range(0, len(replies), _AT_ONCE):
            texts = []
            for reply in replies[start : start + _AT_ONCE]:
                name, messages, tools, _ = Transcript(*reply)
                with _naming(name):
                    prompt = self._prompt_text(messages[:-1], tools)
                    texts.append((prompt, self._reply_text(messages[-1])))
            prompts, replied = zip(*texts, strict=True)
            distinct = list(dict.fromkeys(prompts))
            ids_of = dict(zip(distinct, self._ids_of_all(distinct), strict=True))
            reply_ids = map(self._ended, self._continuations(replied))
            encoded += [(ids_of[p], ids) for p, ids in zip(prompts, reply_ids, strict=True)]
        return encoded

    def encode_quoted(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of `encode`, or of a finished conversation, for messages that quote others: a
        special token in a message is text like any other, so only the template's own control.
        """

        def text_of(data: Sequence[Any]) -> str:
            return (
                self._prompt_text(*data) if add_generation_prompt else self._render(data[0], False)
            )

        def encode() -> list[int]:
            return self._quoted_ids(text_of, (messages, tools))

        return list(self._remembered(encode, "quoted", *messages, tools, add_generation_prompt))

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise ValueError for the first question whose roles the template refuses."""
        accepted: set[tuple[str, ...]] = set()
        for prompt in filter(lambda prompt: prompt.is_question, prompts):
            roles = tuple(message["role"] for message in prompt.messages)
            if roles not in accepted:
                with _naming(prompt.id):
                    self._prompt_text(prompt.messages)
                accepted.add(roles)

    def has_vocabulary_of(self, other: "Chat") -> bool:
        """Whether both tokenizers have the same vocabulary."""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._backend is None or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def _remembered(self, encode: Callable[[], list[int]], *key: Any) -> list[int]:
        """Samples of a group often read the same: their prompt, a board after the same moves."""
        name = _name(*key)
        if name not in self._memory:
            if len(self._memory) == _MEMORY:
                self._memory.clear()
            self._memory[name] = encode()
        return self._memory[name]

    def _prompt_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        if not any(message["role"] == "system" for message in messages):
            messages = [*self._system, *messages]
        text = self._render(messages, **({"tools": list(tools)} if tools else {}))
        if tools and text == self._render(messages):
            raise UserError("the chat template does not show tools; describe them in a message")
        for message in messages:
            content = message["content"].strip()
            if message["role"] == "system" and content not in text:
                raise UserError(
                    "the chat template leaves out the system message; put its text into the "
                    "user's first message"
                )
            if message["role"] == "tool" and content not in text and _escaped(content) not in text:
                raise UserError(
                    "the chat template does not know the role tool; write what a tool returns as a "
                    "message of the user"
                )
            _check_calls(message, text)
        return text

    def _reply_text(self, reply: Message) -> str:
        """What the model writes after a prompt, with the end of the turn."""
        content = reply["content"]
        text = self._render([_QUESTION, reply], add_generation_prompt=False)
        has_thoughts = CLOSE_THOUGHTS in content
        drops_thoughts = has_thoughts and CLOSE_THOUGHTS not in text  # as R1's template does
        _check_calls(reply, text)
        if text.startswith(self._opening) and not drops_thoughts:
            return text[len(self._opening) :].removesuffix(self._after_turn)
        if reply.get("tool_calls"):
            raise UserError(
                "the chat template writes a reply that calls tools in another place than it asks "
                "for one; write the calls as text"
            )
        if self._opening.rstrip().endswith(OPEN_THOUGHTS):
            content = _in_thoughts(content)
        elif has_thoughts and self._opening.rstrip().endswith(CLOSE_THOUGHTS):
            raise UserError(
                f"the reply has thoughts ({CLOSE_THOUGHTS}), but the chat template asks for one "
                "without; take them out, or change template_args"
            )
        return content + self._turn_end

    def _end_of_turn(self) -> int:
        """The special token that the template puts after a reply; eos if there is none."""
        _, after = self._around_reply([_QUESTION], [])
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        found = (token_id for token_id in self._ids(after) if token_id in special)
        end_of_turn = next(found, self.tokenizer.eos_token_id)
        if end_of_turn is None:
            raise UserError("neither the chat template nor an eos_token defines the end of a reply")
        return end_of_turn

    def _text_after_reply(self) -> tuple[str, str]:
        """What the template writes after a reply: up to the end of the turn, and after it."""
        _, after = self._around_reply([_QUESTION], [])
        space, token, tail = after.partition(self.tokenizer.convert_ids_to_tokens(self.end_of_turn))
        return (space + token, tail) if token else ("", after)

    def _around_reply(self, before: Sequence[Message], after: Sequence[Message]) -> tuple[str, str]:
        """The template's text before and after a reply between these messages."""
        messages = [*before, {"role": "assistant", "content": _MARK}, *after]
        text = self._render(messages, add_generation_prompt=bool(after))
        opening, _, ending = text.partition(_MARK)
        return opening, ending

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **more: Any
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt,
                **self._template_args, **more,
            )  # fmt: skip
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template refuses the roles {roles} ({error}); join neighbouring "
                "messages of one role, and put a system message into the user's first message"
            ) from None

    def _ids(self, text: str) -> list[int]:
        if self._backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._backend.encode(text, add_special_tokens=False).ids

    def _ids_of_all(self, texts: Sequence[str]) -> list[list[int]]:
        if self._backend is None:
            return [self._ids(text) for text in texts]
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that go on where others ended."""
        encoded = self._ids_of_all([self._lead + text for text in texts])
        return [ids[self._num_lead :] for ids in encoded]

    def _quoted_ids(self, render: Callable[[Any], str], data: Any) -> list[int]:
        """The ids of a text that the template makes of data, whose special tokens are split."""
        said = "\0".join(_texts(data))
        found = [token for token in self._special if token in said]
        unused = (mark for mark in map(chr, _PRIVATE_USE) if mark not in said)
        marks = dict(zip(found, unused, strict=False))
        text = render(_replaced(data, marks))
        return self._ids_of_marked(text, marks) if marks else self._ids(text)

    def _ids_of_marked(self, text: str, marks: dict[str, str]) -> list[int]:
        """The ids of a text with marks for special tokens that are to be split."""
        split = {ord(mark): token for token, mark in marks.items()}
        ids: list[int] = []
        for part in re.split(f"({'|'.join(self._special.values())})", text):
            if part.strip() in self._special:
                ids.append(self.tokenizer.convert_tokens_to_ids(part.strip()))
            elif part:
                ids += self._plain_ids(part.translate(split), is_first=not ids)
        return ids

    def _plain_ids(self, text: str, is_first: bool) -> list[int]:
        """The ids of a text without special tokens, at the start or behind a special token."""
        marker = next(iter(self._special))
        lead = "" if is_first or self._ids(f"{marker}a")[1:] == self._ids("a") else self._lead
        num_lead = len(self._ids(lead)) if lead else 0
        if self._backend is None:
            ids = self.tokenizer.encode(
                lead + text, add_special_tokens=False, split_special_tokens=True
            )
            return ids[num_lead:]
        self._backend.encode_special_tokens = True  # as text
        try:
            return self._ids(lead + text)[num_lead:]
        finally:
            self._backend.encode_special_tokens = False

    def _ended(self, reply_ids: list[int]) -> list[int]:
        """A reply with a stop token at its end, which few templates do not write."""
        is_ended = reply_ids[-1:] == [self.end_of_turn]
        return reply_ids if is_ended else [*reply_ids, self.end_of_turn]


def _name(*key: Any) -> str:
    """Messages are dictionaries, which cannot be keys."""
    return repr(key)


def _texts(data: Any) -> Iterator[str]:
    """All strings in data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list | tuple):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _texts(each)


def _replaced(data: Any, texts: dict[str, str]) -> Any:
    """Data with texts replaced in all of its strings."""
    if isinstance(data, str):
        for old, new in texts.items():
            data = data.replace(old, new)
        return data
    if isinstance(data, dict):
        return {name: _replaced(value, texts) for name, value in data.items()}
    return [_replaced(each, texts) for each in data] if isinstance(data, list | tuple) else data


def _escaped(text: str) -> str:
    """A text as it stands in JSON, which some templates make of what a tool returns."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _check_calls(message: Message, text: str) -> None:
    """Refuse calls that are not in the text that the template made of the message."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise UserError(
                "the chat template leaves out the tool_calls of the assistant; write them as text"
            )


def _up_to_replies(dialogue: Transcript) -> list[Transcript]:
    """For each reply that is learned, the conversation up to it."""
    name, messages, tools, num_read = dialogue
    roles = [message["role"] for message in messages]
    is_reply = [role == "assistant" for role in roles]
    ends_well = is_reply[-1:] == [True] and not is_reply[0]
    if not ends_well or any(a and b for a, b in pairwise(is_reply)):
        raise UserError(
            f"{name}: a dialogue must alternate and end with the assistant; roles: {roles}"
        )
    ends = (i + 1 for i, found in enumerate(is_reply) if found and i >= num_read)
    return [Transcript(name, messages[:end], tools) for end in ends]


def _join_replies(
    replies: Iterable[tuple[list[int], list[int]]],
) -> list[tuple[list[int], list[bool]]]:
    """Replies whose context begins with the sequence before them continue that sequence."""
    sequences: list[tuple[list[int], list[bool]]] = []
    for context, reply_ids in replies:
        ids, mask = sequences[-1] if sequences else ([], [])
        if context[: len(ids)] == ids:
            del sequences[-1:]
        else:
            mask = []
        mask = mask + [False] * (len(context) - len(mask)) + [True] * len(reply_ids)
        sequences.append((context + reply_ids, mask))
    return sequences


def _in_thoughts(reply: str) -> str:
    """A reply as it continues thoughts that the prompt opened."""
    if CLOSE_THOUGHTS not in reply:
        return f"\n{CLOSE_THOUGHTS}\n\n{reply}"
    return reply.lstrip().removeprefix(OPEN_THOUGHTS).lstrip("\n")


def as_message(reply: str, *, has_tools: bool) -> Message:
    """A reply as the assistant's message; calls of tools, as most templates ask for them, apart."""
    calls = re.findall(_TOOL_CALL, reply) if has_tools else []
    message: Message = {"role": "assistant", "content": reply}
    parsed = [call for text in calls if (call := _parse_call(text))]
    if not calls or len(parsed) < len(calls):  # what cannot be read stays text
        return message
    content = re.split(_TOOL_CALL, reply, maxsplit=1)[0].strip()
    return message | {"content": content, "tool_calls": parsed}


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
    if not is_call or not isinstance(call.get("arguments", {}), dict):
        return None
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    return {"type": "function", "function": function}


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors name the row that they are about."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
