"""The prompt for an LLM judge, and how its verdict is parsed."""

import re
from collections.abc import Mapping

from roll_lite.types import Message, Prompt

VERDICTS: Mapping[str, float] = {"yes": 1.0, "no": 0.0}
QUESTION = """\
Is the answer right? Compare it with the reference; how it is worded does not matter.

Question:
{question}

Reference:
{reference}

Answer:
{answer}

Think if you need to. The last line of your reply must be one word: yes or no."""


class VerdictError(ValueError):
    """The judge's reply does not end with a verdict."""


def judge_messages(prompt: Prompt, reply: str) -> tuple[Message, ...]:
    """One message for the judge with the question, the reference and the answer."""
    question = "\n\n".join(message["content"] for message in prompt.messages)
    text = QUESTION.format(question=question, reference=prompt.ground_truth, answer=reply)
    return ({"role": "user", "content": text},)


def parse_verdict(text: str, verdicts: Mapping[str, float] = VERDICTS) -> float:
    """The value of the last line, which must be a verdict; punctuation around it is ignored."""
    lines = text.strip().splitlines()
    found = re.search(r"\w(.*\w)?", lines[-1]) if lines else None
    word = found[0].casefold() if found else ""
    if word not in verdicts:
        raise VerdictError(
            f"the judge's last line is {lines[-1][:80]!r} instead of {' or '.join(verdicts)}"
            if lines
            else "the judge said nothing"
        )
    return verdicts[word]
