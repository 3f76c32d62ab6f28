"""One HTML file that shows runs: data, style and script are in it, and it needs nothing else.

The script is plain JavaScript in web/, and reads the data from a JSON element of the page. The page
is written to a file, or served live: for this machine alone, from folders that are read again as
they grow. A live page's address has a random word, so that other users and pages cannot read it.
"""

import base64
import hashlib
import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from roll_lite.report.metrics import hints
from roll_lite.report.overview import differences, elapsed, overview
from roll_lite.report.paired import improvement_over
from roll_lite.report.reader import Row, RunFolder, TokenTexts, step_of
from roll_lite.report.records import encode
from roll_lite.report.trace import PHASES, ROLES

WEB = Path(__file__).parent / "web"
SCRIPTS = (
    "dom", "chart", "runs", "overview", "curves", "times", "timeline", "maths", "markdown",
    "sample", "rollouts", "main",
)  # fmt: skip
OF_TWO_SAMPLES = (*SCRIPTS[:-2], "apart")
MAX_ROWS = 5000
"""Rows of metrics.jsonl, of all runs."""
NEWEST_STEPS, MAX_STEPS = 3, 24
"""Steps whose samples are in the file if all are too many: the newest, and an even choice."""
MAX_TEXT, MAX_ITEMS = 20_000, 8_000
"""Characters of a text, and entries of a list, that the file keeps of one sample."""
PACKED = ("logprobs", "entropies", "mismatches", "advantages")
"""Fields whose texts are numbers, as in records.py: 16 characters are three numbers."""


def write_page(runs: Sequence[RunFolder], path: Path, max_bytes: int) -> None:
    """The samples in the file take at most `max_bytes`, shared by the runs."""
    parts = []
    for run in runs:
        texts = TokenTexts(run)
        samples = embedded_samples(run, max_bytes // len(runs))
        used = [sample for chosen in samples.values() for sample in chosen["samples"]]
        rows = _kept_rows(run.rows, MAX_ROWS // len(runs))
        data = run_data(run, rows, texts.note) | {"samples": samples, "texts": texts.of(used)}
        if len(rows) < len(run.rows):
            kept = f"{len(rows):,} of {len(run.rows):,} rows of metrics.jsonl"
            data["notes"].append(f"{kept} are in this page")
        parts.append(data)
    _write(path, html(page_data(runs, parts)))


def write_two_samples(
    runs: Sequence[RunFolder], samples: Sequence[Row], path: Path, about: str, token: int | None
) -> None:
    """A sample of each run side by side, with this token marked; or no samples."""
    parts = [
        {"name": str(run.folder), "sample": clip(row), "texts": TokenTexts(run).of([row])}
        for run, row in zip(runs, samples, strict=False)
    ]
    data = {"live": False, "about": about, "token": token, "runs": parts}
    _write(path, html(data, OF_TWO_SAMPLES))


def _write(path: Path, page: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.rename(path)


def page_data(runs: Sequence[RunFolder], parts: list[Row], *, live: bool = False) -> Row:
    return {
        "live": live, "written": time.time(), "differences": differences(runs), "runs": parts,
        "phases": PHASES, "roles": ROLES,
    }  # fmt: skip


def run_data(run: RunFolder, rows: Sequence[int], *notes: str) -> Row:
    """All that the page shows of a run but its samples; of the metrics, the rows with these
    numbers."""
    metrics = columns(run, rows)
    return {
        "name": str(run.folder),
        "options": clip(run.options),
        "starts": clip(run.starts),
        "recipe": run.config.get("recipe"),
        "overview": overview(run),
        "improvement": improvement_over(run, run),
        "metrics": metrics,
        "meanings": hints(metrics),
        "events": clip(run.events[-200:]),
        "notes": [note for note in (*run.notes, *notes) if note],
        "names": run.names,
        "effects": run.effects,
        "restarts": run.num_restarts,
    }


def columns(run: RunFolder, rows: Sequence[int]) -> dict[str, list]:
    """The metrics by name, with a value for each of these rows, and `seconds` of the run."""
    names = dict.fromkeys(["step", "time", *(name for row in run.rows for name in row)])
    seconds = elapsed(run)
    found = {name: [run.rows[i].get(name) for i in rows] for name in names}
    return found | {"seconds": [round(seconds[i], 3) for i in rows]}


def _kept_rows(rows: Sequence[Row], most: int) -> list[int]:
    """Numbers of at most about this many rows; rows with an evaluation stay."""
    every = math.ceil(len(rows) / max(1, most)) or 1

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
            size = len(_html_json(sample)) + 2
            if size > share:
                break
            kept.append(sample)
            share -= size
            max_bytes -= size
        found[name] = {"samples": kept, "total": run.count_samples(name)}
    return found


def choose_steps(steps: Sequence[int]) -> list[int]:
    """The newest steps, and older ones at equal distances from the first."""
    num_older = MAX_STEPS - NEWEST_STEPS
    older = steps[:-NEWEST_STEPS]
    every = max(1, math.ceil(len(older) / num_older))
    return [*older[::every], *steps[-NEWEST_STEPS:]]


def clip(value: Any) -> Any:
    """The value with long texts and lists cut; a text names what is left out."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        more = f"{len(value) - MAX_TEXT:,} more characters"
        return f"{value[:MAX_TEXT]}… [{more} are in the run folder; --serve shows them]"
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


def _html_json(value: Any) -> str:
    """JSON in ASCII that is safe in an HTML file: without `<`."""
    return encode(value).replace("<", "\\u003c")


def html(data: Row, scripts: Sequence[str] = SCRIPTS) -> str:
    """The page. Its policy lets it run this script and this style, and load nothing."""
    style = (WEB / "page.css").read_text()
    script = "\n".join((WEB / f"{name}.js").read_text() for name in scripts)
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
    return before + _html_json(data) + after


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class LiveRuns:
    """The data that a live page requests."""

    def __init__(self, runs: Sequence[RunFolder]):
        self.runs = runs
        self._lock = Lock()
        self._texts = [TokenTexts(run) for run in runs]

    def page(self) -> str:
        with self._lock:
            parts = [self._read(number) | {"texts": {}} for number in range(len(self.runs))]
            return html(page_data(self.runs, parts, live=True))

    def news(self, run: int, num_rows: int) -> Row:
        """The run without its first rows of metrics, which the page has."""
        with self._lock:
            return self._read(run, num_rows)

    def _read(self, number: int, first_row: int = 0) -> Row:
        run = self.runs[number]
        run.refresh()
        return run_data(run, range(first_row, len(run.rows)), self._texts[number].note)

    def samples(self, run: int, name: str, start: int) -> Row:
        with self._lock:
            page = self.runs[run].samples(name, start)
            total = self.runs[run].count_samples(name)
            return page | {"total": total, "texts": self._texts[run].of(page["samples"])}


def make_server(runs: Sequence[RunFolder], port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on loopback, and the address of its page."""
    live = LiveRuns(runs)
    word = secrets.token_urlsafe(16)

    def news(query: dict[str, str]) -> str:
        return _html_json(live.news(int(query["run"]), int(query["rows"])))

    def samples(query: dict[str, str]) -> str:
        return _html_json(live.samples(int(query["run"]), query["name"], int(query["start"])))

    answers: dict[str, Callable[[dict[str, str]], str]] = {
        f"/{word}/": lambda query: live.page(), f"/{word}/news": news, f"/{word}/samples": samples,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            if (answer := answers.get(url.path)) is None:
                return self.send_error(404)
            try:
                text = answer({name: values[0] for name, values in parse_qs(url.query).items()})
            except (ValueError, KeyError, IndexError, OSError) as error:
                return self.send_error(400, type(error).__name__)
            self._send(text.encode(), "text/html" if url.path.endswith("/") else "application/json")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args) -> None:
            """Requests are not worth a line."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    return server, f"http://127.0.0.1:{server.server_address[1]}/{word}/"


def tunnel(port: int) -> str:
    """The command that brings a port of this machine to that where it is entered."""
    return f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"


def serve(runs: Sequence[RunFolder], port: int) -> None:
    server, address = make_server(runs, port)
    print(f"open {address} in a browser on this machine; Ctrl-C ends it")
    print(f"elsewhere: {tunnel(server.server_address[1])}, then open the same address", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
