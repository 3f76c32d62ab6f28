"""Folders of runs made by hand, in the format of report/run.py, for tests of the page."""

import json
from pathlib import Path

from roll_lite.report.records import pack

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "</script><!-- \u202eabc\u2066 \u0000 \ud800 &lt; {{data}} {{script}}"
)


def sample(step: int, number: int, **changes) -> dict:
    """The row of a sample of two turns' worth of tokens: two were read, three sampled."""
    reward = float(number % 3)
    return {
        "prompt_id": f"p{number // 4}", "domain": "even" if number % 2 == 0 else "odd",
        "index": number % 4, "state": "done",
        "messages": [{"role": "user", "content": f"question {number // 4}"}],
        "reply": f"answer {number} of step {step}", "ground_truth": "g", "tests": [], "extra": {},
        "end": "", "reward": reward, "parts": {"format": 0.25}, "error": None,
        "token_ids": [5, 6, 7, 8, 9], "logprobs": pack([-0.125, -2.5, -0.03125]),
        "turns": [{"read": 2, "sampled": 3, "finish": "stop", "versions": [[0, 3], [2, 4]]}],
        "replicas": [number % 2],
        "events": [["queued", 100.0 + step, 3], ["generating", 100.1 + step, 3],
                   ["scoring", 100.4 + step, 3], ["done", 100.5 + step, 4]],
        "advantages": reward - 1.0, **changes,
    }  # fmt: skip


def metrics(step: int) -> dict:
    return {
        "step": step, "time": 100.0 + 2 * step, "reward/mean": step / 7, "reward/odd/mean": 0.5,
        "loss/entropy": 2.0 / step, "loss/grad_norm": 1.0, "rollout/reply_tokens": 3.0,
        "time/rollout": 1.0, "time/train": 0.5, "time/step": 1.5,
        **({"eval/pass@1": 0.1 * step} if step % 2 == 0 else {}),
    }  # fmt: skip


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, num_steps: int = 4, num_samples: int = 8, **options) -> Path:
    config = {"model": "nowhere", "steps": 6, "lr": 0.1, **options}
    start = {"step": 0, "time": "2026-01-01 00:00:00", "command": "python recipes/rlvr.py"}
    start["ranks"] = {"train": [[0]], "generate": [[0], [1]]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"starts": [start]}))
    steps = range(1, num_steps + 1)
    write_lines(folder / "metrics.jsonl", [metrics(step) for step in steps])
    lost = sample(2, 99, state="failed", reward=None, error="Traceback: boom", turns=[], tokens=3)
    dropped = {"event": "sample", "step": 2, "why": "its reward raised", **lost}
    write_lines(folder / "events.jsonl", [dropped, {"event": "checkpoint", "step": 4, "time": 9.0}])
    for step in steps:
        rows = [sample(step, number) for number in range(num_samples)]
        write_lines(folder / "rollouts" / f"step_{step:05d}.jsonl", rows)
    return folder
