"""Convert public datasets to prompts: rows with id, prompt, domain, and ground_truth or tests.

Rows of GSM8K and MBPP also have a reply, the solution, which sft.py can train on.

    python scripts/convert_data.py gsm8k train.jsonl data/gsm8k.jsonl
    python scripts/convert_data.py humaneval HumanEval.jsonl data/humaneval.jsonl
    python scripts/convert_data.py mbpp mbpp.jsonl data/mbpp.jsonl --split train
    python scripts/convert_data.py deepmath train.jsonl data/deepmath.jsonl --min-difficulty 5

The source files are JSON lines.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import tyro

from roll_lite.data import Row, read_rows

GSM8K = "a row of GSM8K has question, and answer with a number after ####"
HUMANEVAL = "a row of HumanEval has task_id, prompt, entry_point and test"
MBPP = "a row of MBPP has task_id, text, code, test_list and test_setup_code"
SPLITS = {"few-shot": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
"""First and last task of MBPP's parts, as its authors divided it."""
DEEPMATH = "a row of DeepMath has id, prompt, ground_truth and difficulty"
MATH_INSTRUCTION = "Reason step by step, and put the final answer last, in \\boxed{}."
CODE_INSTRUCTION = (
    "Complete this Python function. Answer with the whole code, imports and given functions "
    "included, in one ```python block."
)
MBPP_INSTRUCTION = "Answer with the whole code in one ```python block."
_CALCULATION = re.compile(r"<<[^<>]*>>")  # calculator annotations: 48/2 = <<48/2=24>>24
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gsm8k(
    source: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    instruction: str = MATH_INSTRUCTION,
) -> None:
    """Grade-school maths: the answer is a number.

    Args:
        instruction: stands below each question; the reward also reads answers after ####
    """

    def convert(row: Row) -> dict[str, Any]:
        solution, mark, number = row.text("answer").rpartition("####")
        number = number.strip().replace(",", "")  # 1,080
        if not mark or not _NUMBER.fullmatch(number):
            raise row.error(f"the answer ends with {number[-40:]!r}")
        name = f"gsm8k/{source.stem}/{row.number}"
        reply = f"{_CALCULATION.sub('', solution).strip()}\n\n\\boxed{{{number}}}".lstrip()
        return _math_row(name, row.text("question"), number, instruction) | {"reply": reply}

    _write(out, read_rows(source, convert, GSM8K))


def humaneval(source: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]) -> None:
    """Python functions to complete, each with its tests."""

    def convert(row: Row) -> dict[str, Any]:
        code = row.text("prompt")
        return {
            "id": row.text("task_id"),
            "prompt": f"{CODE_INSTRUCTION}\n\n```python\n{code.rstrip()}\n```",
            "domain": "code",
            "tests": [{"code": f"{row.text('test')}\ncheck({row.text('entry_point')})"}],
        }

    _write(out, read_rows(source, convert, HUMANEVAL))


def mbpp(
    source: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    split: Literal["all", "train", "validation", "test", "few-shot"] = "all",
) -> None:
    """Short Python functions. The prompt shows the first test; all tests must pass.

    Args:
        split: a part, as the authors of MBPP divided it
    """

    def convert(row: Row) -> dict[str, Any] | None:
        number = int(row.text_or_number("task_id"))
        first, last = SPLITS.get(split, (1, 974))
        if not first <= number <= last:
            return None
        tests = row.fields.get("test_list")
        if not tests or not isinstance(tests, list):
            raise row.error("field 'test_list' is not a list of tests")
        code = row.text("code").replace("\r\n", "\n").strip()
        return {
            "id": f"mbpp/{number}",
            "prompt": f"{row.text('text').strip()}\n\nIt must pass tests like this one:\n\n"
            f"```python\n{tests[0]}\n```\n\n{MBPP_INSTRUCTION}",
            "domain": "code",
            "tests": [{"code": "\n".join([row.text("test_setup_code"), *tests]).strip()}],
            "reply": f"```python\n{code}\n```",
        }

    _write(out, [row for row in read_rows(source, convert, MBPP) if row])


def deepmath(
    source: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    min_difficulty: float = -math.inf,
    max_difficulty: float = math.inf,
) -> None:
    """Harder maths: the answer is any expression.

    Args:
        min_difficulty: leave out easier rows
        max_difficulty: leave out harder rows
    """

    def convert(row: Row) -> dict[str, Any] | None:
        if not min_difficulty <= _difficulty(row) <= max_difficulty:
            return None
        answer = row.text_or_number("ground_truth")
        if not answer.strip():
            raise row.error("field 'ground_truth' is empty")
        name = f"deepmath/{source.stem}/{row.text_or_number('id')}"
        return _math_row(name, row.text("prompt"), answer)

    rows = [row for row in read_rows(source, convert, DEEPMATH) if row]
    if not rows:
        raise ValueError(
            f"min_difficulty={min_difficulty} and max_difficulty={max_difficulty} leave none of "
            f"the rows of {source}; widen the range"
        )
    _write(out, rows)


def _difficulty(row: Row) -> float:
    text = row.text_or_number("difficulty")
    try:
        return float(text)
    except ValueError:
        raise row.error(f"field 'difficulty' is {text!r} instead of a number") from None


def _math_row(
    name: str, question: str, answer: str, instruction: str = MATH_INSTRUCTION
) -> dict[str, Any]:
    prompt = f"{question.strip()}\n\n{instruction}"
    return {"id": name, "prompt": prompt, "domain": "math", "ground_truth": answer}


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    out.write_text("".join(lines))
    print(f"{len(rows)} row{'' if len(rows) == 1 else 's'}: {out}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"gsm8k": gsm8k, "humaneval": humaneval, "mbpp": mbpp, "deepmath": deepmath},
        description=__doc__.split("\n\n")[0],
    )
