"""Convert public datasets to prompts: rows with id, prompt, domain, and ground_truth or tests.

Rows of GSM8K also have a reply, the worked solution, which sft.py can train on.

    python scripts/convert_data.py gsm8k train.jsonl data/gsm8k.jsonl
    python scripts/convert_data.py humaneval HumanEval.jsonl data/humaneval.jsonl
    python scripts/convert_data.py deepmath train.jsonl data/deepmath.jsonl --min-difficulty 5

The source files are JSON lines.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import tyro

from roll_lite.data import Row, read_rows

GSM8K = "a row of GSM8K has question, and answer with a number after ####"
HUMANEVAL = "a row of HumanEval has task_id, prompt, entry_point and test"
DEEPMATH = "a row of DeepMath has id, prompt, ground_truth and difficulty"
MATH_INSTRUCTION = "Reason step by step, and put the final answer last, in \\boxed{}."
CODE_INSTRUCTION = (
    "Complete this Python function. Answer with the whole code, imports and given functions "
    "included, in one ```python block."
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # calculator annotations: 48/2 = <<48/2=24>>24
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gsm8k(source: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]) -> None:
    """Grade-school maths: the answer is a number."""

    def convert(row: Row) -> dict[str, Any]:
        solution, mark, number = row.text("answer").rpartition("####")
        number = number.strip().replace(",", "")  # 1,080
        if not mark or not _NUMBER.fullmatch(number):
            raise row.error(f"the answer ends with {number[-40:]!r}")
        name = f"gsm8k/{source.stem}/{row.number}"
        reply = f"{_CALCULATION.sub('', solution).strip()}\n\n\\boxed{{{number}}}".lstrip()
        return _math_row(name, row.text("question"), number) | {"reply": reply}

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


def _math_row(name: str, question: str, answer: str) -> dict[str, Any]:
    prompt = f"{question.strip()}\n\n{MATH_INSTRUCTION}"
    return {"id": name, "prompt": prompt, "domain": "math", "ground_truth": answer}


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    out.write_text("".join(lines))
    print(f"{len(rows)} rows: {out}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"gsm8k": gsm8k, "humaneval": humaneval, "deepmath": deepmath},
        description=__doc__.split("\n\n")[0],
    )
