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


# Llama 2's: a space before the end of the turn, which is eos.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def chat_with(folder, template=None, **special):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    for name, token in special.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return Chat(folder)


@pytest.fixture(params=["tiny", "thinking", "other_eos"])
def chat(request, tmp_path):
    template = None if request.param == "tiny" else THINKING
    # Qwen's base models have another eos than the token that ends their turns.
    special = {"eos_token": "<|unk|>"} if request.param == "other_eos" else {}
    return chat_with(tmp_path, template, **special)


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
    first, (ids, mask) = chat.encode_dialogues(
        [[QUESTION, ANSWER], [QUESTION, ANSWER, MORE, ANSWER]]
    )
    assert [first] == chat.encode_dialogues([[QUESTION, ANSWER]])
    assert first[0] == template_ids(chat, [QUESTION, ANSWER], generation=False)[: len(first[0])]
    said = [t for t, m in zip(ids, mask, strict=True) if m]
    assert chat.tokenizer.decode(said) == "15<|im_end|>15<|im_end|>"
    whole = template_ids(chat, [QUESTION, ANSWER, MORE, ANSWER], generation=False)
    assert ids == whole[: len(ids)]
    assert chat.tokenizer.decode(whole[len(ids) :]).strip() == ""


@pytest.mark.parametrize("messages", [[QUESTION], [ANSWER], [QUESTION, ANSWER, ANSWER], []])
def test_a_dialogue_that_does_not_alternate_is_refused(chat, messages):
    with pytest.raises(ValueError, match="must alternate"):
        chat.encode_dialogues([[QUESTION, ANSWER], messages])


def test_stop_ids_come_from_template_tokenizer_and_generation_config(tmp_path):
    chat_with(tmp_path, THINKING, eos_token="<|unk|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert Chat(tmp_path).stop_ids == (2, 0, 7)  # <|im_end|>, <|unk|>, 7


def test_a_space_before_the_end_of_a_turn_is_not_doubled(tmp_path):
    chat = chat_with(tmp_path, LLAMA2)
    sampled = chat.encode([QUESTION]) + chat.tokenizer.encode("15") + [chat.end_of_turn]
    text = chat.tokenizer.decode(chat.continue_with(sampled, [MORE]))
    assert text == "[INST] What is 12 + 3? [/INST]15<|im_end|>[INST] And\n7? [/INST]"


def test_a_tokenizer_without_template_is_refused(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Chat(tmp_path)


def test_characters_round_trip(chat):
    text = "Hello, World! 12+34=46 ~`\n end"
    assert chat.decode(chat.tokenizer.encode(text)) == text
