"""Curves of runs as an SVG picture, for docs.

    python scripts/plot.py docs/gsm8k.svg "seed 0=runs/a" "seed 1=runs/b" --x seconds
    python scripts/plot.py out.svg "maths=runs/m:eval/math/pass@1" "code=runs/m:eval/code/pass@1"

A curve is LABEL=RUN, or LABEL=RUN:METRIC. Runs of one label have one colour. Seconds are those of
the steps: evaluations, start and checkpoints are not in them.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Told apart by people who see few colours (Okabe and Ito)."""
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px }
  .grid { stroke: #ccc; stroke-width: 0.5 } .curve { fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) { text { fill: #ccc } .grid { stroke: #555 } }
"""

Point = tuple[float, float]


class Curve(NamedTuple):
    label: str
    points: list[Point]


class Axis(NamedTuple):
    """Values from `low` to `high` over the pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least this."""
    power = 10 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def read_curve(text: str, metric: str, x: str) -> Curve:
    label, _, rest = text.partition("=")
    run, _, own_metric = rest.partition(":")
    path, metric = Path(run) / "metrics.jsonl", own_metric or metric
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = itertools.accumulate(row.get("time/step", 0.0) for row in rows)
    points = [
        (total if x == "seconds" else row["step"], row[metric])
        for row, total in zip(rows, seconds, strict=True)
        if row.get(metric) is not None
    ]
    if not points:
        raise ValueError(f"{path} has no metric {metric!r}")
    return Curve(label, points)


def draw(curves: list[Curve], *, title: str, x_label: str, y_label: str) -> str:
    x_axis, y_axis = _axes([point for curve in curves for point in curve.points])
    labels = list(dict.fromkeys(curve.label for curve in curves))
    colours = dict(zip(labels, itertools.cycle(COLOURS), strict=False))
    parts = [
        *_grid(x_axis, y_axis),
        *(_line(curve, x_axis, y_axis, colours[curve.label]) for curve in curves),
        *_legend(colours),
        _text(LEFT, 20, title, ' class="title"'),
        _text((LEFT + WIDTH) / 2, HEIGHT - 8, x_label, ' text-anchor="middle"'),
        _text(14, HEIGHT / 2, y_label, f' transform="rotate(-90 14 {HEIGHT / 2})"'),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _axes(points: list[Point]) -> tuple[Axis, Axis]:
    xs, ys = zip(*points, strict=True)
    low, high = min(0.0, *ys), max(*ys, min(ys) + 1e-9)
    step = _round_step((high - low) / 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
    x_axis = Axis(min(xs), max(*xs, min(xs) + 1e-9), LEFT, WIDTH - RIGHT)
    return x_axis, Axis(low, high, HEIGHT - BOTTOM, TOP)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<path class="grid" d="M{x_axis.start} {y}H{x_axis.end}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:.6g}", ' text-anchor="end"'))
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<path class="grid" d="M{x} {y_axis.start}V{y_axis.end}"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 16, f"{value:.6g}", ' text-anchor="middle"'))
    return parts


def _line(curve: Curve, x_axis: Axis, y_axis: Axis, colour: str) -> str:
    places = " ".join(f"{x_axis.place(x)},{y_axis.place(y)}" for x, y in curve.points)
    return f'<polyline class="curve" stroke="{colour}" points="{places}"/>'


def _legend(colours: dict[str, str]) -> list[str]:
    parts = []
    for row, (label, colour) in enumerate(colours.items()):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(colours) - 1 - row)
        parts.append(f'<path class="curve" stroke="{colour}" d="M{WIDTH - 180} {y - 4}h18"/>')
        parts.append(_text(WIDTH - 156, y, label))
    return parts


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}"{attributes}>{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("curves", nargs="+", metavar="LABEL=RUN[:METRIC]")
    parser.add_argument("--y", default="eval/pass@1", help="metric; default: %(default)s")
    parser.add_argument("--x", choices=("step", "seconds"), default="step")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    try:
        curves = [read_curve(curve, options.y, options.x) for curve in options.curves]
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    names = {"step": "steps", "seconds": "seconds of steps"}
    picture = draw(curves, title=options.title, x_label=names[options.x], y_label=options.y)
    options.out.write_text(picture)
    print(options.out)


if __name__ == "__main__":
    main()
