"""The converter of public datasets, run as a user runs it, on rows written by hand."""

import json
import runpy
import subprocess
import sys

import pytest
from support.paths import SCRIPTS

from roll_lite.data import read_dialogues, read_prompts
from roll_lite.rewards.maths import grade_reply, last_number

SCRIPT = SCRIPTS / "convert_data.py"
APPLES = {"question": "Two apples and 2 more?", "answer": "2+2=<<2+2=4>>4 apples.\n#### 4"}
TOWN = {"question": "How many live there? ", "answer": "10 times 123,456.\n#### 1,234,560"}
COLD = {"question": "How cold?", "answer": "#### is the mark, and so:\n#### -2.5"}
SQUARE = {
    "task_id": "HumanEval/7",
    "prompt": 'import math\n\n\ndef square(x):\n    """ x times x """\n',
    "entry_point": "square",
    "canonical_solution": "    return x * x\n",
    "test": "\n\ndef check(candidate):\n    assert candidate(3) == 9\n",
}
CUBES = [
    {
        "task_id": number,
        "text": "Write a function to cube a number. ",
        "code": "def cube(x):\r\n  return x ** 3",
        "test_setup_code": "three = 3",
        "test_list": ["assert cube(2) == 8", "assert cube(three) == 27"],
        "challenge_test_list": [],
    }
    for number in (10, 11, 510, 511, 600, 601, 974)
]
LIMITS = [
    {"id": str(i), "difficulty": level, "prompt": f"Find limit {i}.", "ground_truth": f"\\pi/{i}"}
    for i, level in enumerate(["2.5", 5, "8.0", "9.5"], start=1)
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def convert(command, tmp_path):
    """Returns the file that was made, and what was printed."""

    def run(dataset, rows, *options):
        source, out = write_rows(tmp_path / "train.jsonl", rows), tmp_path / "made" / "out.jsonl"
        code, text = command(SCRIPT, dataset, source, out, *options)
        assert code == 0, text
        return out, text

    return run


def test_gsm8k(convert):
    out, text = convert("gsm8k", [APPLES, TOWN, COLD])
    assert text.startswith("3 rows: ")
    prompts = read_prompts(out)
    assert [prompt.ground_truth for prompt in prompts] == ["4", "1234560", "-2.5"]
    assert [prompt.id for prompt in prompts] == [f"gsm8k/train/{n}" for n in (1, 2, 3)]
    assert {prompt.domain for prompt in prompts} == {"math"}
    (message,) = prompts[1].messages
    assert message["role"] == "user" and message["content"].startswith("How many live there?\n\n")
    assert "\\boxed{}" in message["content"]
    assert last_number(prompts[1], TOWN["answer"]) == 1
    replies = [dialogue.messages[-1]["content"] for dialogue in read_dialogues(out)]
    assert replies[0] == "2+2=4 apples.\n\n\\boxed{4}"
    assert replies[2] == "#### is the mark, and so:\n\n\\boxed{-2.5}"
    for prompt, reply in zip(prompts, replies, strict=True):
        assert grade_reply(reply, prompt.ground_truth).verdict.kind == "equal"


def test_humaneval(convert):
    out, text = convert("humaneval", [SQUARE])
    assert text.startswith("1 row: ")
    (prompt,) = read_prompts(out)
    assert (prompt.id, prompt.domain, prompt.ground_truth) == ("HumanEval/7", "code", "")
    content = prompt.messages[0]["content"]
    assert "```python block" in content
    assert content.endswith(f"```python\n{SQUARE['prompt']}```")
    (test,) = prompt.tests
    exec(SQUARE["prompt"] + SQUARE["canonical_solution"] + test["code"], {})
    with pytest.raises(AssertionError):
        exec(SQUARE["prompt"] + "    return x + x\n" + test["code"], {})


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), [10, 11, 510, 511, 600, 601, 974]),
        (("--split", "train"), [601, 974]),
        (("--split", "validation"), [511, 600]),
        (("--split", "test"), [11, 510]),
    ],
)
def test_mbpp(convert, options, kept):
    out, _ = convert("mbpp", CUBES, *options)
    prompts, dialogues = read_prompts(out), read_dialogues(out)
    assert [prompt.id for prompt in prompts] == [f"mbpp/{number}" for number in kept]
    content = prompts[0].messages[0]["content"]
    assert "cube(2) == 8" in content and "cube(three)" not in content
    (test,) = prompts[0].tests
    program = dialogues[0].messages[-1]["content"].removeprefix("```python").removesuffix("```")
    exec(program + test["code"], {})
    with pytest.raises(AssertionError):
        exec(program.replace("3", "2 + 4 * (x == 2)") + test["code"], {})


def test_another_instruction(convert):
    out, _ = convert("gsm8k", [APPLES], "--instruction", "Answer after ####.")
    (prompt,) = read_prompts(out)
    assert prompt.messages[0]["content"] == "Two apples and 2 more?\n\nAnswer after ####."


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), [1, 2, 3, 4]),
        (("--min-difficulty", "5"), [2, 3, 4]),
        (("--min-difficulty", "5", "--max-difficulty", "8"), [2, 3]),
    ],
)
def test_deepmath(convert, options, kept):
    out, text = convert("deepmath", LIMITS, *options)
    assert text.startswith(f"{len(kept)} rows: ")
    prompts = read_prompts(out)
    assert [prompt.id for prompt in prompts] == [f"deepmath/train/{n}" for n in kept]
    assert [prompt.ground_truth for prompt in prompts] == [f"\\pi/{n}" for n in kept]
    assert all(prompt.domain == "math" for prompt in prompts)


@pytest.mark.parametrize(
    ("dataset", "good", "bad", "problem"),
    [
        ("gsm8k", APPLES, APPLES | {"answer": "It is 4"}, "the answer ends with 'It is 4'; a row"),
        ("gsm8k", APPLES, APPLES | {"answer": "#### four"}, "the answer ends with 'four'"),
        ("gsm8k", APPLES, {"answer": "#### 4"}, "no field 'question'"),
        ("humaneval", SQUARE, SQUARE | {"test": None}, "field 'test' is null instead of text"),
        ("mbpp", CUBES[0], CUBES[0] | {"test_list": "x"}, "field 'test_list' is not a list"),
        ("deepmath", LIMITS[0], LIMITS[1] | {"ground_truth": " "}, "'ground_truth' is empty"),
        ("deepmath", LIMITS[0], LIMITS[1] | {"difficulty": "high"}, "'difficulty' is 'high' inst"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(tmp_path, dataset, good, bad, problem):
    source, out = write_rows(tmp_path / "train.jsonl", (good, bad)), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"train\.jsonl line 2: ") as raised:
        runpy.run_path(str(SCRIPT))[dataset](source, out)
    assert problem in str(raised.value) and not out.exists()


def test_a_range_of_difficulty_without_rows(tmp_path):
    source, out = write_rows(tmp_path / "train.jsonl", LIMITS), tmp_path / "out.jsonl"
    command = [sys.executable, SCRIPT, "deepmath", source, out, "--min-difficulty", "9.9"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0 and not out.exists()
    assert "min_difficulty=9.9 and max_difficulty=inf leave none of the rows" in result.stderr
