"""Chat templates and the tokenizer: messages become ids once and are never re-tokenised."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from roll_lite.types import Message

_QUESTION = {"role": "user", "content": "?"}
_MARK = "\u2063reply\u2063"  # placeholder for a reply in the rendered template
_AT_ONCE = 1024  # dialogues per tokenizer call: faster than one by one, with bounded memory


class Chat:
    """Encodes conversations by the chat template of a model folder."""

    def __init__(self, folder: str | Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {folder} has no chat template; take the model's chat variant, "
                "or put a chat_template.jinja into the folder"
            )
        self._last_encoded: tuple[tuple | None, list[int]] = None, []
        self.end_of_turn = self._end_of_turn()
        self.stop_ids = _stop_ids(Path(folder), self.end_of_turn, self.tokenizer.eos_token_id)
        """Sampling one of these ends a turn."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to the start of the model's reply."""
        # The samples of a group have the same messages, one after the other.
        key = tuple(tuple(message.items()) for message in messages)
        if self._last_encoded[0] != key:
            self._last_encoded = key, self._ids(self._render(messages))
        return list(self._last_encoded[1])

    def continue_with(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """The ids for the next reply: the conversation so far, then `messages`.

        `token_ids` (the conversation exactly as it was sampled) is kept; only the text that the
        template puts after a reply is encoded.
        """
        _, after = self._around_reply([_QUESTION], messages)
        return self._join(token_ids, self._ids(after))

    def encode_dialogues(
        self, dialogues: Sequence[Sequence[Message]]
    ) -> list[tuple[list[int], list[bool]]]:
        """Ids of whole conversations, and masks of the assistant's tokens, stop tokens included."""
        encoded = []
        for start in range(0, len(dialogues), _AT_ONCE):
            part = [list(self._texts(m)) for m in dialogues[start : start + _AT_ONCE]]
            texts = list({text: None for turns in part for turn in turns for text in turn})
            found = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            ids_of = dict(zip(texts, found, strict=True))
            encoded += [self._assemble(turns, ids_of) for turns in part]
        return encoded

    def encode_whole(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a finished conversation, exactly as the template renders it."""
        return self._ids(self._render(messages, add_generation_prompt=False))

    def has_vocabulary_of(self, other: "Chat") -> bool:
        """Whether both tokenizers have the same vocabulary."""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _texts(self, messages: Sequence[Message]) -> Iterator[tuple[str, str, str]]:
        """Of each reply: the text before it, a prefix some templates add to it, and the reply."""
        turns = _split_at_replies(messages)
        for i, (read, reply) in enumerate(turns):
            before = self._around_reply([_QUESTION], read)[1] if i else self._render(read)
            yield before, self._lead(read, is_last=i + 1 == len(turns)), reply["content"]

    def _assemble(
        self, turns: Sequence[tuple[str, str, str]], ids_of: Mapping[str, list[int]]
    ) -> tuple[list[int], list[bool]]:
        """A conversation's ids and mask from the ids of its texts."""
        ids, mask = [], []
        for before, lead, reply in turns:
            ids = self._join(ids, ids_of[before]) + ids_of[lead]
            mask += [False] * (len(ids) - len(mask))
            said = [*ids_of[reply], self.end_of_turn]
            ids, mask = ids + said, mask + [True] * len(said)
        return ids, mask

    def _join(self, token_ids: list[int], after_ids: list[int]) -> list[int]:
        """Append, without repeating the end-of-turn token that the reply may already end with."""
        if token_ids and token_ids[-1] in self.stop_ids and self.end_of_turn in after_ids:
            after_ids = after_ids[after_ids.index(self.end_of_turn) + 1 :]
        return token_ids + after_ids

    def _end_of_turn(self) -> int:
        """The special token that the template puts after a reply; eos if there is none."""
        _, after = self._around_reply([_QUESTION], [])
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        found = (token_id for token_id in self._ids(after) if token_id in special)
        end_of_turn = next(found, self.tokenizer.eos_token_id)
        if end_of_turn is None:
            raise ValueError(
                "neither the chat template nor an eos_token defines the end of a reply"
            )
        return end_of_turn

    def _lead(self, read: Sequence[Message], is_last: bool) -> str:
        """The text between generation prompt and reply, such as Qwen3's empty thoughts."""
        opening = self._render(read)
        before, _ = self._around_reply(read, [] if is_last else [_QUESTION])
        return before[len(opening) :] if before.startswith(opening) else ""

    def _around_reply(self, before: Sequence[Message], after: Sequence[Message]) -> tuple[str, str]:
        """The template's text before and after a reply between these messages."""
        messages = [*before, {"role": "assistant", "content": _MARK}, *after]
        text = self._render(messages, add_generation_prompt=bool(after))
        opening, _, ending = text.partition(_MARK)
        return opening, ending

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _stop_ids(folder: Path, *ids: int | None) -> tuple[int, ...]:
    """The given ids, then those of the folder's generation config."""
    path = folder / "generation_config.json"
    configured = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    more = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(i for i in [*ids, *more] if i is not None))


def _split_at_replies(messages: Sequence[Message]) -> list[tuple[list[Message], Message]]:
    """(messages that the model reads, its reply) for each assistant message."""
    turns, read = [], []
    for message in messages:
        if message["role"] == "assistant":
            turns.append((read, message))
            read = []
        else:
            read.append(message)
    if read or not turns or not all(before for before, _ in turns):
        roles = [message["role"] for message in messages]
        raise ValueError(f"a dialogue must alternate and end with the assistant; roles: {roles}")
    return turns
