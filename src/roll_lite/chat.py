"""The only place that touches a tokenizer: messages become ids once and are never re-tokenised."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from roll_lite.types import Message

_MARK = "\u2063reply\u2063"  # stands for a reply in the template, so that we find what follows it


class Chat:
    """Encodes conversations by the chat template of a model folder."""

    def __init__(self, folder: str | Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {folder} has no chat template; take the model's chat variant, "
                "or put a chat_template.jinja into the folder"
            )
        self.stop_ids = _stop_ids(Path(folder), self.tokenizer.eos_token_id)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model's reply begins."""
        return self._ids(self._render(messages))

    def continue_with(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """The ids after a sampled reply: its end, further messages, and the next reply's opening.

        `token_ids` (all of the conversation so far, as it was sampled) stays as it is; only the
        text that the template puts after a reply is encoded.
        """
        question = {"role": "user", "content": "?"}
        reply = {"role": "assistant", "content": _MARK}
        text = self._render([question, reply, *messages])
        after = self._ids(text[text.rindex(_MARK) + len(_MARK) :])
        is_closed = token_ids[-1] in self.stop_ids and after[0] == token_ids[-1]
        return token_ids + (after[1:] if is_closed else after)

    def encode_dialogue(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation and a mask of what the assistant says, its stops included."""
        turns = _split_at_replies(messages)
        ids = self.encode(turns[0][0])
        mask = [False] * len(ids)
        for i, (_, reply) in enumerate(turns):
            reply_ids = [*self._ids(reply["content"]), self.stop_ids[0]]
            ids, mask = ids + reply_ids, mask + [True] * len(reply_ids)
            if i + 1 < len(turns):
                ids = self.continue_with(ids, turns[i + 1][0])
                mask += [False] * (len(ids) - len(mask))
        return ids, mask

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _render(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's end of turn first, then any other the generation config names."""
    path = folder / "generation_config.json"
    configured = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    more = configured if isinstance(configured, list) else [configured]
    ids = tuple(dict.fromkeys(i for i in [eos_id, *more] if i is not None))
    if not ids:
        raise ValueError(f"{folder} names no eos token in its tokenizer or generation_config.json")
    return ids


def _split_at_replies(messages: Sequence[Message]) -> list[tuple[list[Message], Message]]:
    """(what the model reads, what it replies) for each assistant message, the last one included."""
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
