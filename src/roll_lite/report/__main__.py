"""Show runs: as one HTML page, live in a browser or in the terminal; compare two runs.

roll-lite report RUN [RUN ...]             writes RUN/report.html
roll-lite report RUN --out page.html
roll-lite report RUN --serve               shows the run while it goes on
roll-lite report A B                       also prints what differs
roll-lite report runs                      a table of all runs in a folder, and a page of them
roll-lite report RUN --tail                prints the last steps and two samples
roll-lite report RUN --curve reward/mean   draws a metric in the terminal
roll-lite report RUN --trace out.json      writes a trace for ui.perfetto.dev
"""

import argparse
import sys
from pathlib import Path

from roll_lite.checks import parse_range
from roll_lite.report.metrics import hints
from roll_lite.report.overview import best_evaluation
from roll_lite.report.page import serve, write_page
from roll_lite.report.reader import RunFolder, find_runs
from roll_lite.report.terminal import comparison, draw_curve, runs_table, tail
from roll_lite.report.trace import write_trace


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        folders = [path for folder in options.runs for path in find_runs(folder)]
        runs = [RunFolder(folder) for folder in folders]
        if options.tail:
            print("\n\n".join(tail(run, options.tail) for run in runs))
            return 0
        if options.curve is not None:
            curves = [_curve(run, options.curve) for run in runs]
            titles = [f"{run.folder}\n" if len(runs) > 1 else "" for run in runs]
            print("\n\n".join(map("".join, zip(titles, curves, strict=True))))
            return 0
        if options.trace and len(runs) > 1:
            raise ValueError(f"--trace is of one run, and these are {len(runs)}; name one")
        if options.trace:
            num_events = write_trace(runs[0], options.trace, parse_range("steps", options.steps))
            print(f"wrote {options.trace} ({num_events:,} events); open it at ui.perfetto.dev")
            return 0
        if len(runs) > len(options.runs):
            print(runs_table(runs))
        elif len(runs) > 1:
            print(comparison(runs))
        if options.serve:
            serve(runs, options.port)
            return 0
        path = options.out or Path(options.runs[0]) / "report.html"
        write_page(runs, path, int(options.samples_mb * 1e6))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0


def _curve(run: RunFolder, metric: str) -> str:
    """The curve of a metric, or of the main evaluation, below what it means."""
    name = metric or (best_evaluation(run) or {"metric": "reward/mean"})["metric"]
    return "\n".join([*hints([name]).values(), draw_curve(run.metric(name))])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "roll-lite report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders above them")
    parser.add_argument("--out", type=Path, help="the file to write (report.html in the first)")
    parser.add_argument(
        "--samples-mb",
        type=float,
        default=16.0,
        help="how much of the file samples may take, chosen from the newest steps and from steps "
        "at equal distances (16); --serve shows all samples",
    )
    parser.add_argument(
        "--tail",
        type=int,
        nargs="?",
        const=20,
        metavar="STEPS",
        help="print the last steps (20) in the terminal, and the worst and the best sample",
    )
    parser.add_argument(
        "--curve",
        nargs="?",
        const="",
        metavar="METRIC",
        help="draw a metric (the main evaluation) in the terminal",
    )
    parser.add_argument(
        "--trace", type=Path, help="a file for the trace of steps, ranks and samples of a run"
    )
    parser.add_argument("--steps", default="", help="with --trace: which, as 5 or 5-8 (all)")
    parser.add_argument("--serve", action="store_true", help="serve the page on this machine")
    parser.add_argument("--port", type=int, default=0, help="with --serve (a free one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
