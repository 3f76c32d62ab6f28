"""scripts/plot.py: the picture has the numbers of metrics.jsonl."""

import json
import subprocess
import sys
from xml.etree import ElementTree

from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "plot.py"


def plot(folder, *arguments):
    command = [sys.executable, SCRIPT, folder / "out.svg", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def write_run(folder, values, seconds=3.0):
    rows = [{"step": 0, "eval/pass@1": values[0]}]
    for step, value in enumerate(values[1:], 1):
        rows.append({"step": step, "time/step": seconds, "eval/pass@1": value})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def places(picture, kind):
    return [element for element in picture.iter() if element.tag.endswith("}" + kind)]


def numbers(picture, axis):
    """Value -> pixel of the ticks of an axis."""
    end = {"x": "middle", "y": "end"}[axis]
    ticks = [t for t in places(picture, "text") if t.get("text-anchor") == end]
    return {float(t.text): float(t.get(axis)) for t in ticks if t.text.replace(".", "").isdigit()}


def test_points_are_where_the_axes_say(tmp_path):
    values = [0.1, 0.35, 0.6]
    a, b = write_run(tmp_path / "a", values), write_run(tmp_path / "b", values[::-1])
    result = plot(tmp_path, f"up & on={a}", f"down={b}", "--x", "seconds", "--title", "<x>")
    assert result.returncode == 0, result.stderr
    picture = ElementTree.parse(tmp_path / "out.svg")
    texts = [text.text for text in places(picture, "text")]
    assert {"<x>", "up & on", "down", "seconds of steps", "eval/pass@1"} <= set(texts)
    up, down = (curve.get("points").split() for curve in places(picture, "polyline"))
    x_of, y_of = numbers(picture, "x"), numbers(picture, "y")
    per_second = (x_of[6.0] - x_of[0.0]) / 6
    per_one = (y_of[0.6] - 4 - (y_of[0.0] - 4)) / 0.6
    for curve, expected in ((up, values), (down, values[::-1])):
        for number, (place, value) in enumerate(zip(curve, expected, strict=True)):
            x, y = map(float, place.split(","))
            assert abs(x - (x_of[0.0] + 3 * number * per_second)) < 0.2
            assert abs(y - (y_of[0.0] - 4 + value * per_one)) < 0.2


def test_a_missing_metric_is_named(tmp_path):
    run = write_run(tmp_path / "a", [0.1, 0.2])
    result = plot(tmp_path, f"a={run}:eval/none")
    assert result.returncode == 1 and "has no metric 'eval/none'" in result.stderr
