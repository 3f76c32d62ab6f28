"""Rows of files and tasks: what is wrong is named, and the order resumes."""

import json
from functools import partial

import pytest

from roll_lite import data
from roll_lite.rollout.record import read_prompt, write_prompt

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def write(folder, *lines):
    path = folder / "rows.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_both_forms_of_a_dialogue_are_the_same(tmp_path):
    path = write(
        tmp_path,
        {"messages": [QUESTION, ANSWER]},
        "",
        {"prompt": "2 + 2?", "reply": "4", "source": "other fields do not matter"},
        {"prompt": [QUESTION], "reply": "4"},
    )
    rows = data.read_dialogues(path)
    assert [row.messages for row in rows] == [(QUESTION, ANSWER)] * 3
    assert [row.id for row in rows] == [f"{path} line {n}" for n in (1, 3, 4)]


def test_preferences_and_prompts(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    row = {"prompt": [system, QUESTION], "chosen": "4", "rejected": "5"}
    (pair,) = data.read_preferences(write(tmp_path, row))
    assert (pair.messages, pair.chosen, pair.rejected) == ((system, QUESTION), "4", "5")
    path = write(tmp_path, row, {"id": "q7", "prompt": "2 + 2?", "ground_truth": "4"})
    first, second = data.read_prompts(path)
    assert (first.id, first.domain, first.messages) == (f"{path} line 1", "", (system, QUESTION))
    assert (second.id, second.ground_truth, second.messages) == ("q7", "4", (QUESTION,))


def test_tests_and_numbers_of_a_prompt(tmp_path):
    tests = [{"code": "assert f(1.5) == 2"}, {"input": "3", "output": None}]
    path = write(tmp_path, {"prompt": "a", "tests": tests}, {"prompt": "b", "tests": []})
    assert [prompt.tests for prompt in data.read_prompts(path)] == [tuple(tests), ()]
    written = ["18", "-3", "1.50", "1e5", "0.1", "12345678901234567890"]
    path = write(tmp_path, *[f'{{"prompt": "a", "ground_truth": {x}}}' for x in written])
    assert [prompt.ground_truth for prompt in data.read_prompts(path)] == written
    (prompt,) = data.read_prompts(write(tmp_path, {"prompt": "a", "id": 7, "tests": [{"x": 1.5}]}))
    assert (prompt.id, prompt.tests) == ("7", ({"x": 1.5},))


def test_other_fields_of_a_prompt_are_its_extra(tmp_path):
    extra = {"level": 3, "test": "x", "answers": ["4", {"a": None}], "truth": 1.5}
    path = write(tmp_path, {"prompt": "a", "ground_truth": 4} | extra, {"prompt": "b"})
    assert [prompt.extra for prompt in data.read_prompts(path)] == [extra, {}]
    first = data.read_prompts(path)[0]
    assert read_prompt(json.loads(json.dumps(write_prompt(first)))) == first
    old = {name: value for name, value in write_prompt(first).items() if name != "extra"}
    assert read_prompt(old).extra == {}  # of a checkpoint that has none


def test_two_prompts_with_one_id_are_refused(tmp_path):
    rows = [{"prompt": "a", "id": name} for name in ("x", "y", "x")]
    with pytest.raises(
        ValueError, match=r"rows\.jsonl line 3: id 'x' is also .*rows\.jsonl line 1"
    ):
        data.read_prompts(write(tmp_path, *rows))


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("read", "row", "problem"),
    [
        ("preferences", {"prompt": "a", "rejected": "c"}, "no field 'chosen'; a preference row"),
        ("preferences", PAIR | {"chosen": ["b"]}, "field 'chosen' is a list instead of text"),
        ("preferences", PAIR | {"chosen": None}, "field 'chosen' is null instead of text"),
        ("preferences", PAIR | {"chosen": "c"}, "chosen and rejected are the same text"),
        ("preferences", PAIR | {"prompt": [QUESTION, ANSWER]}, "prompt ends with the assistant"),
        ("dialogues", {"prompt": "a"}, "no field 'reply'; a dialogue row has messages, or"),
        ("dialogues", {"reply": "a"}, "no field 'prompt'"),
        ("dialogues", {"messages": []}, "field 'messages' is an empty list instead of messages"),
        ("dialogues", {"messages": {}}, "field 'messages' is an object instead of messages"),
        ("dialogues", {"messages": ["a"]}, r"messages\[0\] is text instead of an object"),
        ("dialogues", {"messages": [{"role": "me"}]}, r"messages\[0\] has role 'me', not one of"),
        ("dialogues", {"messages": [QUESTION, {"role": "user"}]}, r"\[1\] has null instead of"),
        ("dialogues", {"messages": [QUESTION]}, "roles are user, but the assistant must reply"),
        ("dialogues", {"messages": [QUESTION, ANSWER, ANSWER]}, "user, assistant, assistant, but"),
        ("prompts", {"prompt": 3}, "field 'prompt' is a number instead of messages"),
        ("prompts", {"prompt": "a", "ground_truth": True}, "'ground_truth' is a truth value inst"),
        ("prompts", {"prompt": "a", "ground_truth": [4]}, "'ground_truth' is a list instead of"),
        ("prompts", {"prompt": "a", "domain": 4}, "'domain' is a number instead of text"),
        ("prompts", {"prompt": "a", "tests": {}}, "'tests' is an object instead of a list"),
        ("prompts", {"prompt": "a", "tests": [{}, "b"]}, r"tests\[1\] is text instead of an obj"),
        (
            "prompts",
            {"prompt": "a", "ground_thruth": 4},
            "'ground_thruth' looks like a misspelt 'gr",
        ),
        ("prompts", ["prompt"], "a list instead of an object"),
        ("prompts", '{"prompt": "a"', r"not JSON: .*delimiter.*; a prompt row has prompt"),
    ],
)
def test_bad_rows_are_named_by_file_line_and_field(tmp_path, read, row, problem):
    good = {"prompt": "a", "reply": "b", "chosen": "b", "rejected": "c"}
    path = write(tmp_path, good, good, row, good)
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 3: .*{problem}"):
        getattr(data, f"read_{read}")(path)


def test_files_without_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl is empty.*a dialogue row has"):
        data.read_dialogues(write(tmp_path, "", " "))
    with pytest.raises(ValueError, match=r"nowhere\.jsonl is not a file"):
        data.read_dialogues(tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"line 1: not UTF-8"):
        data.read_prompts(tmp_path / "rows.jsonl")


def test_every_epoch_is_a_permutation_of_its_own():
    rows = data.Shuffled(range(50), seed=3)
    epochs = [rows.take(50) for _ in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert data.Shuffled(range(50), seed=4).take(50) != epochs[0]
    assert data.Shuffled(range(50), seed=3).take(200) == [row for epoch in epochs for row in epoch]


@pytest.mark.parametrize(
    "make",
    [
        partial(data.Shuffled, range(7), seed=0),
        partial(data.Endless, partial(data.task_dialogues, "reverse:5", seed=1, careless=0.5)),
    ],
    ids=["file", "task"],
)
def test_rows_go_on_from_a_position(make):
    rows, again = make(), make()
    rows.take(9)
    again.position = json.loads(json.dumps(rows.position))
    assert again.take(20) == rows.take(20)
    assert again.position == 29
    rows.position = 4
    assert rows.take(5) == make().take(9)[4:]


def test_a_careless_answer_that_is_right_makes_no_pair():
    pairs = data.Endless(partial(data.task_preferences, "addition:1", seed=0)).take(200)
    for pair in pairs:
        a, b = (int(word.strip("?")) for word in pair.messages[0]["content"].split()[2::2])
        assert pair.chosen == str(a + b) != pair.rejected


def test_validation_rows(tmp_path):
    path = str(write(tmp_path, *[{"prompt": f"q{i}", "reply": "a"} for i in range(9)]))
    options = data.HeldOutOptions(eval_every=1, eval_data=path, eval_rows=5)
    assert len(data.DIALOGUES.held_out("reverse:3", options)) == 5
    assert data.DIALOGUES.held_out(path, data.HeldOutOptions(eval_every=1)) == []
    assert data.DIALOGUES.held_out("reverse:2", data.HeldOutOptions(eval_every=0)) == []
    options = data.HeldOutOptions(eval_every=1, eval_rows=50)
    held_out = data.DIALOGUES.held_out("reverse:2", options)
    trained = data.DIALOGUES.training("reverse:2", seed=5).take(2000)
    assert len(held_out) == 50
    questions = {row.messages[0]["content"] for row in trained}
    assert not questions & {row.messages[0]["content"] for row in held_out}


def test_a_source_is_a_file_or_a_task():
    data.check_source("reverse:3")
    with pytest.raises(ValueError, match=r"'x\.jsonl' is neither a file nor a task"):
        data.check_source("x.jsonl")
    with pytest.raises(ValueError, match="task='reverse:x' is not known"):
        data.check_source("reverse:x")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "caf\xe9"}', "not UTF-8: invalid continuation byte, at byte 16"),
        (b'{"prompt": "a", "ground_truth": ' + b"7" * 5000 + b"}", "more than 4,300 digits"),
        (
            b'{"prompt": "a", "tests": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "nested too deeply",
        ),
        (rb'{"prompt": "\ud83d"}', "half of a surrogate pair"),
        (b'{"prompt": "a"', "not JSON: "),
    ],
    ids=["utf8", "digits", "depth", "surrogate", "cut"],
)
def test_lines_that_are_no_rows_are_named(tmp_path, line, problem):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"rows.jsonl line 2: ") as error:
        data.read_prompts(path)
    assert problem in str(error.value) and "a prompt row has prompt" in str(error.value)
