"""Rows as sequences: what carries loss, what is too long, which models understand each other."""

import shutil
from dataclasses import replace

import pytest
from support.chat_templates import save_tokenizer

from roll_lite.chat import Chat
from roll_lite.data import Dialogue, Preference
from roll_lite.train.encoding import (
    check_vocabulary,
    encode_dialogues,
    encode_preferences,
    fit,
    truncate,
)

LARGE = {"tokens_per_microbatch": 1000, "max_positions": 1000}


def said(*turns):
    roles = ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))


def learnt(chat, sequence):
    """The tokens that carry loss, as text; <|im_end|> shows as a full stop."""
    pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
    ids = [token_id for token_id, is_learnt in pairs if is_learnt]
    return "".join("." if i == chat.end_of_turn else chat.decode([i]) for i in ids)


def test_dialogues_learn_all_replies_and_pairs_only_the_last(tiny_folder):
    chat = Chat(tiny_folder)
    (sequence,) = encode_dialogues(chat, [Dialogue(id="d", messages=said("hi", "yo", "1?", "2"))])
    assert learnt(chat, sequence) == "yo.2."
    row = Preference(id="p", messages=said("hi", "yo", "1?"), chosen="2", rejected="three")
    ((chosen, rejected),) = encode_preferences(chat, [row], **LARGE)
    assert (learnt(chat, chosen), learnt(chat, rejected)) == ("2.", "three.")
    assert chosen.token_ids == sequence.token_ids
    assert (chosen.id, rejected.id) == ("p chosen", "p rejected")
    other = Preference(id="q", messages=said("1?"), chosen="4", rejected="5")
    pairs = encode_preferences(chat, [row, other], **LARGE)
    assert pairs[0] == (chosen, rejected)
    assert [learnt(chat, sequence) for sequence in pairs[1]] == ["4.", "5."]


def test_a_conversation_that_drops_thoughts_is_learned_reply_by_reply(tmp_path):
    """Qwen3's template: of the replies before the last, only the answer is read."""
    chat = Chat(save_tokenizer("qwen3", tmp_path))
    messages = said("hi", "<think>\nhm\n</think>\n\nyo", "1?", "2")
    first, last = encode_dialogues(chat, [Dialogue(id="d", messages=messages)])
    assert learnt(chat, first) == "<think>\nhm\n</think>\n\nyo."
    assert learnt(chat, last) == "<think>\n\n</think>\n\n2." and (first.id, last.id) == ("d", "d")
    row = Preference(id="p", messages=messages[:-1], chosen="2", rejected="<think>\n3</think>3")
    ((chosen, rejected),) = encode_preferences(chat, [row], **LARGE)
    assert chosen.token_ids == last.token_ids and chosen.loss_mask == last.loss_mask
    assert learnt(chat, rejected) == "<think>\n3\n</think>\n\n3."


def test_what_is_too_long_is_named_or_cut(tiny_folder):
    rows = [Dialogue(id=f"x line {n}", messages=said("a" * n, "bb")) for n in (1, 20)]
    sequences = encode_dialogues(Chat(tiny_folder), rows)
    length = len(sequences[1].token_ids)
    limits = {"tokens_per_microbatch": length - 2, "max_positions": 512}
    with pytest.raises(ValueError, match=rf"x line 20 has {length} tokens.*too_long to truncate"):
        fit(sequences, **limits, too_long="error")
    cut, num_cut = fit(sequences, **limits, too_long="truncate")
    assert num_cut == 1 and cut[0] == sequences[0]
    assert cut[1].token_ids == sequences[1].token_ids[:-1]
    experts = bytes(number for number in range(length - 1) for _ in range(2))
    recorded = [replace(sequences[1], experts=experts)]
    assert truncate(recorded, length - 2)[0] == [replace(cut[1], experts=experts[:-2])]
    limits = {"tokens_per_microbatch": 512, "max_positions": length - 1}
    assert fit(sequences, **limits, too_long="error") == (sequences, 0)


def test_a_pair_that_does_not_fit_is_named_and_never_truncated(tiny_folder):
    chat = Chat(tiny_folder)
    rows = [
        Preference(id=f"x line {n}", messages=said("hi"), chosen="a" * n, rejected="b")
        for n in (1, 20)
    ]
    pairs = encode_preferences(chat, rows, **LARGE)
    chosen, rejected = (len(sequence.token_ids) for sequence in pairs[1])
    enough = {"tokens_per_microbatch": chosen + rejected - 2, "max_positions": chosen - 1}
    assert encode_preferences(chat, rows, **enough) == pairs
    for name, problem in (
        ("tokens_per_microbatch", r"x line 20 chosen and x line 20 rejected .*raise it"),
        ("max_positions", rf"x line 20 chosen has {chosen} tokens, and the model's .*leave the p"),
    ):
        with pytest.raises(ValueError, match=problem):
            encode_preferences(chat, rows, **enough | {name: enough[name] - 1})


def test_models_of_another_vocabulary_are_refused(tiny_folder, tmp_path):
    check_vocabulary(tiny_folder, tiny_folder, "teacher")
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a":', '"tmp":').replace('"b":', '"a":'))
    with pytest.raises(ValueError, match=r"teacher=.*other.*different tokenizers"):
        check_vocabulary(tiny_folder, other, "teacher")
