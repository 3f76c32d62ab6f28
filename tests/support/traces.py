"""Reads traces by the rules of their format."""

import json
from collections import defaultdict

KEYS = {"name", "ph", "ts", "pid", "tid", "args"}


def read_trace(path):
    """The events, after checks of the trace event format: keys, whole microseconds, nesting."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    events = json.loads(path.read_text(), parse_constant=refuse)["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        assert set(event) == KEYS | ({"dur"} if event["ph"] == "X" else set()), event
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid"))
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        check_nesting(lane)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} == named
    return events


def check_nesting(lane):
    """Slices of a lane lie within each other or apart."""
    open_ends = []
    for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], event
        open_ends.append(event["ts"] + event["dur"])


def slices(events, pid, name=None):
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and name in (None, e["name"])]
