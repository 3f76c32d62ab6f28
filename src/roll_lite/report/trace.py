"""A run as a trace of Chrome's format, which ui.perfetto.dev and chrome://tracing show.

It has three kinds of processes. `steps` has the parts of each step, as the recipe timed them,
evaluations and checkpoints. A process for each rank has its share of them, and when its engine had
samples to train on. `samples` has each sample: queued, generating, environment, scoring, waiting.
"""

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from roll_lite.report.reader import DROPPED, Row, RunFolder, step_of
from roll_lite.report.records import encode

PHASES = ("rollout", "teacher", "prepare", "train", "sync", "records")
"""Parts of a step in their order: time/NAME of the metrics."""
ROLES = {"train": ("train", "critic"), "sync": ("train", "generate"), "teacher": ("teacher",)}
"""Roles whose ranks work in a part of a step; engines are seen by their samples."""
WORDS = {"stepping": "environment", "done": "waiting"}
STEPS, SAMPLES, FIRST_RANK = 1, 2, 10
"""Process ids."""
NOTHING: Row = {}


class Span(NamedTuple):
    name: str
    start: float
    """Seconds since the epoch, like `end`."""
    end: float


def write_trace(run: RunFolder, path: Path, steps: range | None = None) -> int:
    """Write the trace of the steps, or of all; returns the number of events."""
    rows = [row for row in run.rows if steps is None or row["step"] in steps]
    phases = {row["step"]: found for row in rows if (found := step_phases(row))}
    num_events = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for event in _Trace(run, rows, phases, steps).events():
            file.write((",\n" if num_events else "\n") + encode(event))
            num_events += 1
        file.write("\n]}\n")
    return num_events


def step_phases(row: Row) -> list[Span]:
    """The parts of a step, placed by the time of its record, which comes after an evaluation."""
    if "time" not in row or "time/step" not in row:
        return []
    end = row["time"] - row.get("time/evaluate", 0.0)
    at = end - row["time/step"]
    spans: list[Span] = []
    for name in PHASES:
        if seconds := row.get(f"time/{name}"):
            spans.append(Span(name, at, min(end, at + seconds)))
            at = spans[-1].end
    return spans or [Span("step", at, end)]


class _Trace:
    def __init__(
        self, run: RunFolder, rows: list[Row], phases: dict[int, list[Span]], steps: range | None
    ):
        self._run = run
        self._rows = rows
        self._phases = phases
        self._steps = steps
        self._ranks: dict[str, list[list[int]]] = (run.starts or [{}])[-1].get("ranks") or {}
        self._busy: dict[int, list[Span]] = defaultdict(list)
        """When each replica of the engines had a sample."""
        self._lanes: list[tuple[float, int]] = []
        """When each lane of samples becomes free, and its number."""
        self._names = set(run.names)
        self._zero = min(self._starts(), default=0.0)

    def _starts(self) -> Iterator[float]:
        """Times at which something began. The run's own is among them, so that traces of several
        parts of it fit together."""
        for row in self._run.rows:
            if "time" in row:
                yield row["time"] - row.get("time/evaluate", 0.0) - row.get("time/step", 0.0)
        for step in self._recorded_steps()[:1]:
            yield from (sample["events"][0][1] for sample in self._samples_of(step))

    def events(self) -> Iterator[Row]:
        yield from _names(STEPS, "steps", "steps", "evaluations", "checkpoints")
        yield from _names(SAMPLES, "samples")
        for row in self._rows:
            yield from self._step(row)
        for event in self._run.events:
            yield from self._checkpoint(event)
        for step, sample in self._samples():
            yield from self._sample(step, sample)
        for rank in sorted({r for role in self._ranks.values() for part in role for r in part}):
            yield from self._rank(rank)

    def _samples(self) -> Iterator[tuple[int, Row]]:
        """Samples with events, in the order of steps; those of a step by their first event."""
        for step in self._recorded_steps():
            if self._steps is None or step in self._steps:
                found = sorted(self._samples_of(step), key=lambda sample: sample["events"][0][1])
                yield from ((step, sample) for sample in found)

    def _recorded_steps(self) -> list[int]:
        kinds = ("step_", f"{DROPPED}_")
        return sorted({step_of(name) for name in self._names if name.startswith(kinds)})

    def _samples_of(self, step: int) -> Iterator[Row]:
        for name in {f"step_{step:05d}", f"{DROPPED}_{step:05d}"} & self._names:
            yield from (sample for sample in self._run.all_samples(name) if sample.get("events"))

    def _step(self, row: Row) -> Iterator[Row]:
        if phases := self._phases.get(row["step"]):
            whole = Span(f"step {row['step']}", phases[0].start, phases[-1].end)
            metrics = {name: value for name, value in row.items() if not name.startswith("time")}
            yield self._slice(STEPS, 1, whole, metrics)
            yield from (self._slice(STEPS, 1, span) for span in phases)
        if seconds := row.get("time/evaluate"):
            end = row["time"]
            yield self._slice(STEPS, 2, Span("evaluation", end - seconds, end))

    def _checkpoint(self, event: Row) -> Iterator[Row]:
        is_wanted = self._steps is None or event.get("step") in self._steps
        if is_wanted and event.get("event") == "checkpoint" and "seconds" in event:
            span = Span("checkpoint", event["time"] - event["seconds"], event["time"])
            if span.start >= self._zero:
                yield self._slice(STEPS, 3, span, {"bytes": event.get("bytes")})

    def _sample(self, step: int, sample: Row) -> Iterator[Row]:
        spans = self._states(step, sample)
        whole = Span(
            f"{sample.get('prompt_id')}/{sample.get('index')}", spans[0].start, spans[-1].end
        )
        about = {name: sample.get(name) for name in ("reward", "state", "domain", "why")}
        lane = self._lane(whole)
        yield self._slice(SAMPLES, lane, whole, {"step": step} | about)
        yield from (self._slice(SAMPLES, lane, span) for span in spans)
        replicas = iter(_replicas(sample))
        for span in spans:
            if span.name == "generating" and (replica := next(replicas, None)) is not None:
                self._busy[replica].append(span)

    def _states(self, step: int, sample: Row) -> list[Span]:
        """The states of a sample; one that is done waits until its step's training begins."""
        after = [span.start for span in self._phases.get(step, ()) if span.name != "rollout"]
        times = [event[1] for event in sample["events"]]
        state = sample["events"][-1][0]
        last = max(times[-1], *after[:1]) if state == "done" and after else times[-1]
        ends = [*times[1:], last]
        return [
            Span(WORDS.get(event[0], event[0]), event[1], end)
            for event, end in zip(sample["events"], ends, strict=True)
        ]

    def _lane(self, span: Span) -> int:
        """The number of a lane that is free when the span begins."""
        if self._lanes and self._lanes[0][0] <= span.start:
            lane = heappop(self._lanes)[1]
        else:
            lane = len(self._lanes) + 1
        heappush(self._lanes, (span.end, lane))
        return lane

    def _rank(self, rank: int) -> Iterator[Row]:
        pid = FIRST_RANK + rank
        roles = [name for name, parts in self._ranks.items() if any(rank in p for p in parts)]
        yield from _names(pid, f"rank {rank}: {', '.join(roles)}", "parts of steps", "engine")
        for spans in self._phases.values():
            for span in spans:
                if not {*ROLES.get(span.name, ())}.isdisjoint(roles):
                    yield self._slice(pid, 1, span)
        for replica, ranks in enumerate(self._ranks.get("generate", ())):
            if rank in ranks:
                yield from self._engine(pid, self._busy[replica])

    def _engine(self, pid: int, spans: list[Span]) -> Iterator[Row]:
        """When an engine had samples, and how many."""
        changes = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
        count = 0
        since = 0.0
        for at, change in changes:
            since = at if count == 0 else since
            count += change
            counted = {"name": "samples", "ph": "C", "ts": self._micros(at), "pid": pid, "tid": 0}
            yield counted | {"args": {"generating": count}}
            if count == 0:
                yield self._slice(pid, 2, Span("generating", since, at))

    def _slice(self, pid: int, tid: int, span: Span, about: Row = NOTHING) -> Row:
        start = self._micros(span.start)
        duration = self._micros(span.end) - start
        event = {"name": span.name, "ph": "X", "ts": start, "dur": duration}
        return event | {"pid": pid, "tid": tid, "args": about}

    def _micros(self, seconds: float) -> int:
        return round(1e6 * (seconds - self._zero))


def _replicas(sample: Row) -> list[int | None]:
    """The engine of each turn."""
    return sample.get("replicas", [])


def _names(pid: int, process: str, *threads: str) -> Iterator[Row]:
    for tid, name in enumerate([process, *threads]):
        kind = "thread_name" if tid else "process_name"
        yield {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
