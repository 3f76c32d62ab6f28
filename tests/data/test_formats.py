"""Rows as other trainers have them: the forms that TRL's dataset_formats.md defines, other column
names, JSON lists and parquet."""

import json
import sys

import pytest

from roll_lite import data
from roll_lite.checks import UserError
from roll_lite.types import Prompt

SKY = "What color is the sky?"
USER = {"role": "user", "content": SKY}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}, "type": "function"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def write(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def columns(*entries):
    return data.RowOptions(columns=entries).by_name


def test_prompt_completion_and_messages_are_dialogues(tmp_path):
    """The standard and the conversational form; of both only the completion is learned."""
    rows = [
        {"prompt": SKY, "completion": "It is blue."},
        {"prompt": [USER], "completion": [BLUE]},
        {"messages": [USER, BLUE]},
    ]
    found = data.read_dialogues(write(tmp_path, *rows))
    assert [row.messages for row in found] == [(USER, BLUE)] * 3
    assert [row.num_read for row in found] == [1, 1, 0]
    row = {"prompt": [USER, GREEN, USER], "completion": [BLUE, USER, BLUE]}
    (found,) = data.read_dialogues(write(tmp_path, row))
    assert found.messages == (USER, GREEN, USER, BLUE, USER, BLUE) and found.num_read == 3
    with pytest.raises(ValueError, match="'completion' begins with role 'user'; it is what"):
        data.read_dialogues(write(tmp_path, {"prompt": SKY, "completion": [USER, BLUE]}))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": SKY, "chosen": "It is blue.", "rejected": "It is green."},
        {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
        {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": SKY, "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": [USER], "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
        {"prompt": SKY, "chosen": [BLUE], "rejected": [GREEN]},
    ],
)
def test_preferences_with_a_prompt_or_without(tmp_path, row):
    (pair,) = data.read_preferences(write(tmp_path, row))
    assert (pair.messages, pair.chosen, pair.rejected) == ((USER,), "It is blue.", "It is green.")


def test_the_prompt_of_two_texts_is_what_both_begin_with(tmp_path):
    """As TRL's extract_prompt says: the space before the point where they part is the replies'."""
    row = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    (pair,) = data.read_preferences(write(tmp_path, row))
    assert [message["content"] for message in pair.messages] == ["The sky is"]
    assert (pair.chosen, pair.rejected) == (" blue.", " green.")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, "no text that both chosen and rejected continue"),
        ({"chosen": "a b", "rejected": "a"}, "no text that both chosen and rejected continue"),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, "are the same text"),
        ({"chosen": [BLUE], "rejected": [GREEN]}, "no prompt before the reply"),
        ({"chosen": [USER, BLUE], "rejected": [USER]}, "are assistant and nothing; each must be"),
        ({"chosen": [USER, BLUE], "rejected": [USER, USER]}, "are assistant and user; each must"),
        ({"prompt": SKY, "chosen": [BLUE], "rejected": "b"}, "'chosen' is a list instead of text"),
    ],
)
def test_preferences_that_are_none_are_named(tmp_path, row, problem):
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 1: .*{problem}"):
        data.read_preferences(write(tmp_path, row))


def test_dialogues_with_tools(tmp_path):
    """Calls may have no content, and arguments as JSON text; schemas may be JSON text too."""
    said = {"role": "tool", "name": "weather", "content": "rain"}
    asked = {"role": "assistant", "tool_calls": [CALL]}
    as_text = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    other = {"role": "assistant", "content": "", "tool_calls": [{"function": as_text}]}
    rows = [
        {"messages": [USER, asked, said, BLUE], "tools": [TOOL]},
        {"messages": [USER, other, said, BLUE], "tools": json.dumps([TOOL])},
    ]
    for row in data.read_dialogues(write(tmp_path, *rows)):
        assert row.messages == (USER, asked | {"content": ""}, said, BLUE) and row.tools == (TOOL,)
    wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls has a call that is not"):
        data.read_dialogues(write(tmp_path, {"messages": [USER, wrong, said, BLUE]}))


def test_columns_have_other_names(tmp_path):
    rows = [
        {"question": "2 + 2?", "answer": 4.50, "level": 3},
        {"problem": "1?", "ground_truth": "1"},
    ]
    path = write(tmp_path, *rows)
    path.write_text(path.read_text().replace("4.5,", "4.50,"))
    names = columns("prompt=question", "prompt=problem", "ground_truth=answer", "domain=math")
    first, second = data.read_prompts(path, names)
    assert (first.ground_truth, first.domain, first.extra) == ("4.50", "math", {"level": 3})
    assert (second.messages[0]["content"], second.ground_truth) == ("1?", "1")
    own = write(tmp_path, {"prompt": "a", "domain": "mine", "topic": "code"}, {"prompt": "b"})
    assert [p.domain for p in data.read_prompts(own, columns("domain=math"))] == ["mine", "math"]
    assert data.read_prompts(own, columns("domain=topic"))[0].domain == "code"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["prompt=qestion"], r"line 1: columns=prompt=qestion, but the row has question, answer;"),
        (["prompt=question", "ground_truth=anser"], "line 1: columns=ground_truth=anser, but the"),
        ([], r"line 1: no field 'prompt'; .*has question, answer; --columns prompt=COLUMN says"),
    ],
)
def test_columns_that_no_row_has_are_refused(tmp_path, entries, problem):
    path = write(tmp_path, {"question": "2 + 2?", "answer": "4"})
    with pytest.raises(ValueError, match=problem):
        data.read_prompts(path, columns(*entries))


@pytest.mark.parametrize("entry", ["question", "promt=question", "prompt="])
def test_columns_that_are_not_understood_are_refused(entry):
    with pytest.raises(ValueError, match=rf"columns='{entry}' is not NAME=COLUMN, as in prompt="):
        columns(entry)


def test_rows_without_domain_have_the_one_given(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "domain": "code"})
    assert [prompt.domain for prompt in data.read_prompts(path, domain="mine")] == ["mine", "code"]


def test_a_json_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a", "ground_truth": 4}, {"prompt": "b"}], indent=1))
    found = data.read_prompts(path)
    assert [(p.id, p.ground_truth) for p in found] == [
        (f"{path} row 1", "4"),
        (f"{path} row 2", ""),
    ]
    path.write_text('[{"prompt": "a"}')
    with pytest.raises(ValueError, match=r"rows\.json is not valid JSON: .*an object a line"):
        data.read_prompts(path)
    assert len(data.read_prompts(write(tmp_path, {"prompt": "a"}, name="rows.json"))) == 1


SPELLED = ["1e3", "1.0", "4.50", "-0", "12345678901234567890.10", "1E-2"]


@pytest.mark.parametrize("opening", ["[", " \n" * 40 + "[\n  ", "\ufeff[", "\ufeff\n["])
def test_numbers_of_a_json_list_are_spelled_as_in_the_file(tmp_path, opening):
    """As in the lines of other files; also in a file of an editor that begins with a mark."""
    rows = [
        f'{{"prompt": "a, ]", "id": {i}.0, "ground_truth": {n}}}' for i, n in enumerate(SPELLED)
    ]
    path = tmp_path / "rows.json"
    path.write_text(opening + " ,\n ".join(rows) + " ]\n")
    found = data.read_prompts(path)
    assert [prompt.ground_truth for prompt in found] == SPELLED
    assert [prompt.id for prompt in found] == [f"{i}.0" for i in range(len(SPELLED))]
    assert [json.loads(row)["ground_truth"] for row in rows] == [
        row["ground_truth"] for row in json.loads(path.read_text(encoding="utf-8-sig"))
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\ufeff" * opening.startswith("\ufeff") + "\n".join(rows))
    assert [prompt.ground_truth for prompt in data.read_prompts(lines)] == SPELLED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"prompt": "a"} {"prompt": "b"}]', "Expecting ',' or ']'"),
        ('[{"prompt": "a"},]', "Expecting value"),
        ('[{"prompt": "a"}] []', "Expecting ',' or ']'"),
        ('[{"prompt": "a"}', "Expecting ',' or ']'"),
        ("[", "Expecting value"),
        ("[,]", "Expecting value"),
        ("[[" + "[" * 10**5, "recursion"),
        ('[{"prompt": "\xff"}]', "can't decode byte"),
        ("[]", "is empty"),
        (" [3]", "row 1: a number instead of an object"),
    ],
)
def test_a_json_list_that_is_none_is_named(tmp_path, text, problem):
    (tmp_path / "rows.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=rf"rows\.json.*{problem}"):
        data.read_prompts(tmp_path / "rows.json")


def test_parquet(tmp_path):
    """Nulls stand for what a row does not have, at any depth."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": [USER], "n": 1.5, "id": None, "ground_truth": None},
        {"prompt": [USER | {"name": "me"}], "n": None, "id": 7, "ground_truth": "x"},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert data.read_prompts(path) == [
        Prompt(id=f"{path} row 1", messages=(USER,), domain="", ground_truth="", extra={"n": 1.5}),
        Prompt(id="7", messages=(USER,), domain="", ground_truth="x"),
    ]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.parquet is not a whole parquet file"):
        data.read_prompts(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"which needs pyarrow: pip install 'roll_lite\[data\]'"):
        data.read_prompts(tmp_path / "rows.parquet")
