"""One HTML file that shows runs: data, style and script are in it, and it needs nothing else.

The script is plain JavaScript in web/, and reads the data from a JSON element of the page.
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_lite.report.overview import differences, elapsed, overview
from roll_lite.report.reader import Row, RunFolder, step_of
from roll_lite.report.tokens import TokenTexts
from roll_lite.report.trace import PHASES, ROLES

WEB = Path(__file__).parent / "web"
SCRIPTS = ("dom", "chart", "overview", "curves", "times", "timeline", "sample", "rollouts", "main")
MAX_ROWS = 5000
NEWEST_STEPS, MAX_STEPS = 3, 24
"""Steps whose samples are in the file if all are too many: the newest, and an even choice."""
MAX_TEXT, MAX_ITEMS = 20_000, 8_000
"""Characters of a text, and entries of a list, that the file keeps of one sample."""
PACKED = ("logprobs", "entropies", "advantages")
"""Fields whose texts are numbers, as in samples.py: 16 characters are three numbers."""


def write_page(runs: Sequence[RunFolder], path: Path, max_bytes: int) -> None:
    """The samples in the file take at most `max_bytes`, shared by the runs."""
    parts = []
    for run in runs:
        texts = TokenTexts(run)
        samples = embedded_samples(run, max_bytes // len(runs))
        used = [sample for chosen in samples.values() for sample in chosen["samples"]]
        parts.append(run_data(run, texts.note) | {"samples": samples, "texts": texts.of(used)})
    partial = path.with_name(path.name + ".partial")
    partial.write_text(html(page_data(runs, parts)), encoding="utf-8")
    partial.rename(path)


def page_data(runs: Sequence[RunFolder], parts: list[Row], *, live: bool = False) -> Row:
    return {
        "live": live, "written": time.time(), "differences": differences(runs), "runs": parts,
        "phases": PHASES, "roles": ROLES,
    }  # fmt: skip


def run_data(run: RunFolder, *notes: str) -> Row:
    """All that the page shows of a run, but its samples."""
    kept = _kept_rows(run.rows)
    if len(kept) < len(run.rows):
        notes += (f"{len(kept):,} of {len(run.rows):,} rows of metrics.jsonl are in this page",)
    return {
        "name": str(run.folder),
        "options": clip(run.options),
        "starts": clip(run.starts),
        "recipe": run.config.get("recipe"),
        "overview": overview(run),
        "metrics": columns(run, kept),
        "events": clip(run.events[-200:]),
        "notes": [note for note in (*run.notes, *notes) if note],
        "names": run.names,
    }


def columns(run: RunFolder, kept: Sequence[int]) -> dict[str, list]:
    """The metrics by name, with a value for each row that is kept, and `seconds` of the run."""
    names = dict.fromkeys(["step", "time", *(name for row in run.rows for name in row)])
    seconds = elapsed(run)
    found = {name: [run.rows[i].get(name) for i in kept] for name in names}
    return found | {"seconds": [round(seconds[i], 3) for i in kept]}


def _kept_rows(rows: Sequence[Row]) -> list[int]:
    """Numbers of at most about MAX_ROWS rows; rows with an evaluation stay."""
    every = math.ceil(len(rows) / MAX_ROWS) or 1

    def is_kept(number: int) -> bool:
        is_last = number == len(rows) - 1
        return number % every == 0 or is_last or any(n.startswith("eval/") for n in rows[number])

    return [number for number in range(len(rows)) if is_kept(number)]


def embedded_samples(run: RunFolder, max_bytes: int) -> dict[str, Row]:
    """Samples of chosen steps by name; each name gets an equal share of what is left."""
    steps = sorted({step_of(name) for name in run.names})
    if run.num_sample_bytes > max_bytes:
        steps = choose_steps(steps)
    names = [name for name in reversed(run.names) if step_of(name) in steps]
    found = {}
    for place, name in enumerate(names):
        share = max_bytes // (len(names) - place)
        read = run.samples(name, max_bytes=share)["samples"]
        kept = []
        for sample in map(clip, read):
            size = len(to_json(sample)) + 2
            if size > share:
                break
            kept.append(sample)
            share, max_bytes = share - size, max_bytes - size
        found[name] = {"samples": kept, "total": run.count_samples(name)}
    return found


def choose_steps(steps: Sequence[int]) -> list[int]:
    """The newest steps, and others at equal distances from the first."""
    num_others = MAX_STEPS - NEWEST_STEPS
    newest, others = steps[-NEWEST_STEPS:], steps[:-NEWEST_STEPS]
    every = max(1, math.ceil(len(others) / num_others))
    return [*others[::every], *newest]


def clip(value: Any) -> Any:
    """The value with long texts and lists cut, which says so."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        more = f"{len(value) - MAX_TEXT:,} more characters"
        return f"{value[:MAX_TEXT]}… [{more} are in the run's folder; --serve shows them]"
    if isinstance(value, dict):
        return {
            name: part[: MAX_ITEMS // 3 * 16]
            if name in PACKED and isinstance(part, str)
            else clip(part)
            for name, part in value.items()
        }
    if isinstance(value, list):
        is_numbers = bool(value) and isinstance(value[0], int | float)
        return value[:MAX_ITEMS] if is_numbers else [clip(part) for part in value[:MAX_ITEMS]]
    return value


def to_json(value: Any) -> str:
    """JSON in ASCII that is safe in an HTML file: "nan" and "inf" as texts, no `<`."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_with_texts_for_nan(value), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _with_texts_for_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _with_texts_for_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_texts_for_nan(part) for part in value]
    return value


def html(data: Row) -> str:
    """The page. Its policy lets it run this script and this style, and load nothing."""
    style = (WEB / "page.css").read_text()
    script = "\n".join((WEB / f"{name}.js").read_text() for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"connect-src {chr(39)}{'self' if data['live'] else 'none'}{chr(39)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (WEB / "page.html").read_text()
    filled = {"policy": policy, "style": style, "script": script}
    for name, text in filled.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    before, _, after = page.partition("{{data}}")
    return before + to_json(data) + after


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
