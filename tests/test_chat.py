"""Chat encoding against the tokenizer's own template."""

import json

import pytest

from roll_lite.chat import Chat
from roll_lite.models.tiny import character_tokenizer

QUESTION = {"role": "user", "content": "What is 12 + 3?"}
ANSWER = {"role": "assistant", "content": "15"}
MORE = {"role": "user", "content": "And\n7?"}
# A template that, like Qwen3's, writes an earlier reply differently from the last one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(params=["tiny", "thinking"])
def chat(request, tmp_path):
    tokenizer = character_tokenizer()
    if request.param == "thinking":
        tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(tmp_path)
    return Chat(tmp_path)


def template_ids(chat, messages, generation=True):
    return chat.tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, return_dict=False
    )


def test_encode_is_the_template(chat):
    assert chat.encode([QUESTION]) == template_ids(chat, [QUESTION])


def test_a_further_turn_keeps_the_sampled_ids_and_equals_the_template(chat):
    sampled = chat.encode([QUESTION]) + chat.tokenizer.encode("15") + [chat.stop_ids[0]]
    ids = chat.continue_with(sampled, [MORE])
    assert ids[: len(sampled)] == sampled
    assert ids == template_ids(chat, [QUESTION, ANSWER, MORE])


def test_a_reply_cut_short_is_closed(chat):
    sampled = chat.encode([QUESTION]) + chat.tokenizer.encode("15")
    assert chat.continue_with(sampled, [MORE]) == template_ids(chat, [QUESTION, ANSWER, MORE])


def test_dialogue_masks_exactly_what_the_assistant_says(chat):
    ids, mask = chat.encode_dialogue([QUESTION, ANSWER, MORE, ANSWER])
    said = [t for t, m in zip(ids, mask, strict=True) if m]
    assert chat.tokenizer.decode(said) == "15<|im_end|>15<|im_end|>"
    assert ids[: mask.index(True)] == chat.encode([QUESTION])


@pytest.mark.parametrize("messages", [[QUESTION], [ANSWER], [QUESTION, ANSWER, ANSWER], []])
def test_a_dialogue_that_does_not_alternate_is_refused(chat, messages):
    with pytest.raises(ValueError, match="must alternate"):
        chat.encode_dialogue(messages)


def test_stop_ids_come_from_tokenizer_and_generation_config(chat, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Chat(tmp_path).stop_ids == (2, 0)


def test_a_tokenizer_without_template_is_refused(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Chat(tmp_path)


def test_characters_round_trip(chat):
    text = "Hello, World! 12+34=46 ~`\n end"
    assert chat.decode(chat.tokenizer.encode(text)) == text
