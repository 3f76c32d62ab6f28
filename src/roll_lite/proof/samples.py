"""Where the samples of a step of two runs go apart: sample, token and stage."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from roll_lite.report.reader import DROPPED, Row, RunFolder
from roll_lite.report.records import Token, numbers, read_tokens
from roll_lite.report.terminal import readable

GIVEN = {
    "domain": "data", "messages": "data", "ground_truth": "data", "tests": "data", "extra": "data",
    "prompt_seed": "environment", "seed": "seed",
}  # fmt: skip
"""Fields of a sample that are there before it begins, and the stages that make them."""
OF_TURN = {"finish": "stop", "reward": "reward"}
OUTCOME = {"reply": "reply", "end": "environment", "reward": "reward", "parts": "reward"}
STAGES = (
    "data", "environment", "seed", "failure", "context", "engine", "sync", "stop", "sampler",
    "answers", "reply", "reward",
)  # fmt: skip
"""Of samples. An earlier one in any sample is the cause of later ones in others."""
ROUNDING = 1e-5
"""Differences of logprobs in fp32 that other kernels, or another order of a sum, make."""


class Parting(NamedTuple):
    """Where two runs, or two samples, go apart."""

    stage: str
    what: str
    rows: tuple[Row, Row] | None = None
    token: int | None = None
    """Its place among all tokens of the sample."""
    size: float | None = None
    """Of the largest difference, if it is one of numbers."""
    step: int = 0


def part_samples(a: RunFolder, b: RunFolder, name: str) -> Parting | None:
    """How the samples of a name, such as step_00010, differ; None if they do not."""
    step = int(name.partition("_")[2])
    kept = [{_key(row): row for row in run.all_samples(name)} for run in (a, b)]
    rows = [dict(found) for found in kept]
    for run, found in zip((a, b), rows, strict=True):
        if (dropped := f"{DROPPED}_{step:05d}") in run.names:
            found.update({_key(row): row for row in run.all_samples(dropped)})
    pairs = [(row, rows[1][key]) for key, row in rows[0].items() if key in rows[1]]
    found = [parting for pair in pairs if (parting := part(*pair))]
    if found:
        first = min(found, key=lambda parting: STAGES.index(parting.stage))
        num = sum(parting.stage == first.stage for parting in found)
        first = first._replace(what=f"{first.what}; so differ {num} of {len(pairs)} samples")
        return _engine_or_model(first, pairs, step) if first.stage == "engine" else first
    if list(kept[0]) != list(kept[1]):
        places = zip_longest(*([name_of(row) for row in found.values()] for found in kept))
        what = next(f"{x} | {y}" for x, y in places if x != y)
        is_filter = any((_key(x) in kept[0]) != (_key(x) in kept[1]) for x, _ in pairs)
        return Parting("filter" if is_filter else "prompts", what)
    for x, y in pairs:
        if x.get("advantages") != y.get("advantages"):
            return _of("advantages", "advantages", (x, y), x.get("advantages"), y.get("advantages"))
    return None


def _key(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row["visit"], row["index"]


def name_of(row: Row) -> str:
    return f"sample {row['index']} of prompt {readable(row['prompt_id'])}, visit {row['visit']}"


def _of(stage: str, name: str, rows: tuple[Row, Row], x: Any, y: Any) -> Parting:
    texts = [readable(value if isinstance(value, str) else repr(value)) for value in (x, y)]
    x, y = (text if len(text) < 80 else f"{text[:77]}..." for text in texts)
    return Parting(stage, f"{name}: {x} | {y}", rows)


def part(a: Row, b: Row) -> Parting | None:
    """The first difference of two samples, in the order in which a sample comes to be."""
    for name, stage in GIVEN.items():
        if a.get(name) != b.get(name):
            return _of(stage, name, (a, b), a.get(name), b.get(name))
    if a["state"] != b["state"] and "failed" in (a["state"], b["state"]):
        return _of("failure", "error", (a, b), a.get("error"), b.get("error"))
    if "token_ids" in a and "token_ids" in b:
        if found := _part_tokens(a, b):
            return found
        for number, (x, y) in enumerate(zip(a["turns"], b["turns"], strict=False), 1):
            if differ := sorted(n for n in x.keys() | y.keys() if x.get(n) != y.get(n)):
                name = next((name for name in OF_TURN if name in differ), differ[0])
                stage = OF_TURN.get(name, "environment")
                return _of(stage, f"{name} of turn {number}", (a, b), x.get(name), y.get(name))
    elif texts := _texts_apart(a, b):
        stage = "answers" if texts[0]["role"] == "assistant" else "environment"
        return _of(stage, "text", (a, b), *(text.get("content") for text in texts))
    for name, stage in OUTCOME.items():
        if a[name] != b[name]:
            return _of(stage, name, (a, b), a[name], b[name])
    return None


def _texts_apart(a: Row, b: Row) -> tuple[Row, Row] | None:
    """The first messages that differ."""
    nothing = {"role": "", "content": None}
    pairs = zip_longest(_conversation(a), _conversation(b), fillvalue=nothing)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _conversation(row: Row) -> Sequence[Row]:
    reply = {"role": "assistant", "content": row["reply"]}
    return row.get("transcript") or [*row["messages"], reply]


def _part_tokens(a: Row, b: Row) -> Parting | None:
    both = list(zip_longest(read_tokens(a), read_tokens(b)))
    place = next((i for i, (x, y) in enumerate(both) if x != y), None)
    if place is None:
        return None
    x, y = both[place]
    is_sampled = [token is not None and token.logprob is not None for token in (x, y)]
    size = None
    if all(is_sampled):
        stage = "sampler" if x.id != y.id else "sync" if x.logprob == y.logprob else "engine"
        size = abs(x.logprob - y.logprob) if stage == "engine" else None
    elif any(is_sampled) and both[place - 1][0].logprob is not None:  # one goes on
        stage = "stop"
    else:
        stage = "environment" if _is_said(a, b) else "context"
    what = f"token {place}, in turn {(x or y).turn + 1}: {_describe(x)} | {_describe(y)}"
    return Parting(stage, what, (a, b), place, size)


def _is_said(a: Row, b: Row) -> bool:
    """Whether an environment said something else, before the model read other tokens."""
    is_recorded = bool(a["messages"]) or "transcript" in a
    texts = _texts_apart(a, b)
    return not is_recorded or (texts is not None and texts[0]["role"] != "assistant")


def _describe(token: Token | None) -> str:
    if token is None:
        return "none"
    if token.logprob is None:
        return f"id {token.id}, read"
    return f"id {token.id}, logprob {token.logprob:.9g}, version {token.version}"


# ---- numbers of engine and trainer


def _engine_or_model(first: Parting, pairs: Sequence[tuple[Row, Row]], step: int) -> Parting:
    """The trainer runs the engine's model. Where its entropies, of the same tokens, differ as the
    engine's logprobs do, the model is another; else the engine, or the weights that it has."""
    alike = [_sampled_alike(*pair) for pair in pairs]
    size = max(x for found in alike for x, _ in found)
    trainer = max(y for found in alike for _, y in found)
    stage = "model" if trainer > size / 100 else "engine"
    if stage == "engine" and step > 1 and size > ROUNDING and all(f[0][0] for f in alike if f):
        stage = "sync"  # it was right at the step before, and now no token is
    more = f"; logprobs differ by up to {size:.2g}, entropies of the trainer by {trainer:.2g}"
    return first._replace(stage=stage, what=first.what + more, size=size)


def _sampled_alike(a: Row, b: Row) -> list[tuple[float, float]]:
    """Of the tokens that both have sampled, up to the first that differs: how far apart logprobs
    and the trainer's entropies are."""
    found: list[tuple[float, float]] = []
    if "token_ids" in a and "token_ids" in b:
        entropies = [numbers(row.get("entropies", "")) for row in (a, b)]
        for x, y in zip(read_tokens(a), read_tokens(b), strict=False):
            if x.id != y.id or (x.logprob is None) != (y.logprob is None):
                break
            if x.logprob is not None:
                apart = [each[len(found)] if len(found) < len(each) else 0.0 for each in entropies]
                found.append((abs(x.logprob - y.logprob), abs(apart[0] - apart[1])))
    return found


def forward_apart(a: RunFolder, b: RunFolder, name: str, num_parts: int) -> float:
    """How far apart the trainer's entropies, or distances from the engine, of the same batch are.
    Of several parts, each with an update, that of the first counts."""
    if not all(name in run.names for run in (a, b)):
        return 0.0
    pairs = list(zip(a.all_samples(name), b.all_samples(name), strict=False))[::num_parts]
    fields = ("entropies", "mismatches")
    both = ((numbers(x.get(n, "")), numbers(y.get(n, ""))) for x, y in pairs for n in fields)
    return max((abs(x - y) for xs, ys in both for x, y in zip(xs, ys, strict=False)), default=0.0)
