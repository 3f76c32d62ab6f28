"""Mathematical answers: find them in replies, compare them, reward them.

docs/reference/maths.md explains them.

notation (text to tokens) -> parser (tokens to a tree) -> values -> comparison -> reward
"""

from roll_lite.rewards.maths.comparison import Verdict, compare
from roll_lite.rewards.maths.reward import (
    Grade,
    check_truth,
    grade_reply,
    import_math_verify,
    last_number,
    math_answer,
    true_answer,
)

__all__ = [
    "Grade",
    "Verdict",
    "check_truth",
    "compare",
    "grade_reply",
    "import_math_verify",
    "last_number",
    "math_answer",
    "true_answer",
]
