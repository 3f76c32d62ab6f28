"""Draw a metric of a run in the terminal.

python -m roll_lite.report.curve RUN_DIR [METRIC]
"""

import argparse
import json
import sys
from pathlib import Path

WIDTH = 50


def read_metric(run_dir: str | Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every step that recorded the metric; null is no value."""
    path = Path(run_dir) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        known = ", ".join(sorted({name for row in rows for name in row} - {"step", "time"}))
        raise ValueError(f"{path} has no metric {metric!r}; it has {known}")
    return points


def draw(points: list[tuple[int, float]]) -> str:
    """A bar for each point, scaled to the largest value."""
    top = max(*(value for _, value in points), 1e-12)
    return "\n".join(
        f"step {step:>5}  {value:8.4f}  {'#' * round(WIDTH * value / top)}"
        for step, value in points
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir")
    parser.add_argument("metric", nargs="?", default="eval/pass@1")
    arguments = parser.parse_args()
    try:
        print(draw(read_metric(arguments.run_dir, arguments.metric)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
