"""Where the samples of a step of two runs go apart: sample, token and stage."""

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile, zip_longest
from typing import NamedTuple

from roll_lite.report.reader import DROPPED, Row, RunFolder, step_of
from roll_lite.report.records import Token, numbers, read_tokens
from roll_lite.report.terminal import readable

STAGES = (
    "data", "environment", "seed", "failure", "context", "engine", "sync", "stop", "sampler",
    "answers", "reply", "reward",
)  # fmt: skip
"""Of a sample. An earlier one, in any sample of a step, is the cause of later ones in others."""
GIVEN = {
    "domain": "data", "messages": "data", "ground_truth": "data", "tests": "data", "extra": "data",
    "prompt_seed": "environment", "seed": "seed",
}  # fmt: skip
"""Fields of a sample before it begins, and their stages."""
OUTCOME = {"reply": "reply", "end": "environment", "reward": "reward", "parts": "reward"}
OF_TURN = {"finish": "stop", "reward": "reward", "state": "environment"}
ROUNDING = 1e-5
"""Differences of logprobs in fp32 that other kernels, or another order of a sum, make."""
WIDTH = 80


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
    """How the samples of a name, such as step_00010, differ; None if they do not, or if one run has
    not recorded them."""
    if name not in a.names or name not in b.names:
        return None
    step = step_of(name)
    dropped = f"{DROPPED}_{step:05d}"
    kept = [{_key(row): row for row in run.all_samples(name)} for run in (a, b)]
    others = [run.all_samples(dropped) if dropped in run.names else () for run in (a, b)]
    known = [{_key(row): row for row in rows} | own for rows, own in zip(others, kept, strict=True)]
    pairs = [(row, known[1][key]) for key, row in known[0].items() if key in known[1]]
    if found := [parting for pair in pairs if (parting := part(*pair))]:
        first = min(found, key=lambda parting: STAGES.index(parting.stage))
        num = sum(parting.stage == first.stage for parting in found)
        first = first._replace(what=f"{first.what}; so {num} of {len(pairs)} samples")
        return _engine_or_model(first, pairs, step) if first.stage == "engine" else first
    if [*kept[0]] != [*kept[1]]:
        places = zip_longest(*(map(name_of, found.values()) for found in kept))
        is_filter = any((_key(row) in kept[0]) != (_key(row) in kept[1]) for row, _ in pairs)
        what = next(f"{x} | {y}" for x, y in places if x != y)
        return Parting("filter" if is_filter else "prompts", what)
    for pair in pairs:
        if apart := _first({"advantages": "advantages"}, *pair):
            return apart._replace(rows=pair)
    return None


def _key(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row["visit"], row["index"]


def name_of(row: Row) -> str:
    return f"sample {row['index']} of prompt {readable(row['prompt_id'])}, visit {row['visit']}"


def part(a: Row, b: Row) -> Parting | None:
    """The first difference of two samples, in the order in which a sample comes to be."""
    found = _first(GIVEN, a, b)
    if "failed" in (a["state"], b["state"]) and a["state"] != b["state"]:
        found = found or _first({"error": "failure"}, a, b)
    if "token_ids" in a and "token_ids" in b:
        found = found or _part_tokens(a, b)
        turns = enumerate(zip(a["turns"], b["turns"], strict=False), 1)
        of_turns = (_first(OF_TURN, *pair, f" of turn {number}") for number, pair in turns)
        found = found or next(filter(None, of_turns), None)
    elif texts := _texts_apart(a, b):
        stage = "answers" if texts[0]["role"] == "assistant" else "environment"
        found = found or _first({"content": stage}, *texts)
    found = found or _first(OUTCOME, a, b)
    return found and found._replace(rows=(a, b))


def _first(stages: Mapping[str, str], a: Row, b: Row, where: str = "") -> Parting | None:
    """Of fields with their stages; a dropped sample has fewer."""
    known = a.keys() & b.keys() if "why" in {**a, **b} else stages.keys()
    name = next((n for n in stages if n in known and a.get(n) != b.get(n)), None)
    if name is None:
        return None
    values = [row.get(name) for row in (a, b)]
    texts = [readable(value if isinstance(value, str) else repr(value)) for value in values]
    return Parting(stages[name], f"{name}{where}: " + " | ".join(text[:WIDTH] for text in texts))


def _texts_apart(a: Row, b: Row) -> tuple[Row, Row] | None:
    """The first messages that differ."""
    said = [
        row.get("transcript") or [*row["messages"], {"role": "assistant", "content": row["reply"]}]
        for row in (a, b)
    ]
    pairs = zip_longest(*said, fillvalue={"role": "", "content": None})
    return next(((x, y) for x, y in pairs if x != y), None)


def _part_tokens(a: Row, b: Row) -> Parting | None:
    both = list(zip_longest(_in_sequences(a), _in_sequences(b), fillvalue=(None, None)))
    place = next((i for i, (x, y) in enumerate(both) if x != y), None)
    if place is None:
        return None
    (sequence, x), (other_sequence, y) = both[place]
    is_sampled = [token is not None and token.logprob is not None for token in (x, y)]
    if all(is_sampled):
        stage = "sampler" if x.id != y.id else "sync" if x.logprob == y.logprob else "engine"
    elif any(is_sampled) and both[place - 1][0][1].logprob is not None:  # one of them goes on
        stage = "stop"
    else:
        texts = _texts_apart(a, b)
        is_recorded = bool(a["messages"]) or "transcript" in a
        said = texts if texts is not None and texts[0]["role"] != "assistant" else ({}, {})
        stage = "environment" if said[0] or not is_recorded else "context"
    what = f"token {place}, in turn {(x or y).turn + 1}: {_describe(x)} | {_describe(y)}"
    if found := not any(is_sampled) and _first({"content": stage}, *said):
        what += f", of {found.what}"
    elif x == y:
        what += f", of sequence {sequence} | {other_sequence}: the model had read other turns"
    return Parting(stage, what, token=place)


def _in_sequences(row: Row) -> list[tuple[int, Token]]:
    """Tokens with the number of their sequence, which is what the model knew of earlier turns."""
    sizes = [turn["read"] + turn["sampled"] for turn in row["turns"]]
    orders = enumerate(row.get("sequences", [range(len(sizes))]))
    sequences = [number for number, order in orders for turn in order for _ in range(sizes[turn])]
    return list(zip(sequences, read_tokens(row), strict=True))


def _describe(token: Token | None) -> str:
    if token is None or token.logprob is None:
        return f"id {token.id}, read" if token else "none"
    return f"id {token.id}, logprob {token.logprob:.9g}, version {token.version}"


# ---- numbers of engine and trainer


def _engine_or_model(first: Parting, pairs: Sequence[tuple[Row, Row]], step: int) -> Parting:
    """The trainer runs the engine's model. Where its entropies, of the same tokens, differ as the
    engine's logprobs do, the model is another; else the engine, or the weights that it has."""
    engine, trainer = zip(*(_sampled_alike(*pair) for pair in pairs), strict=True)
    size, of_trainer = (
        max(map(max, filter(None, each)), default=0.0) for each in (engine, trainer)
    )
    stage = "model" if of_trainer > size / 100 else "engine"
    if stage == "engine" and step > 1 and size > ROUNDING and all(e[0] for e in engine if e):
        stage = "sync"  # no token is right, and all were at the step before
    more = f"; logprobs differ by up to {size:.2g}, entropies of the trainer by {of_trainer:.2g}"
    return first._replace(stage=stage, what=first.what + more, size=size)


def _sampled_alike(a: Row, b: Row) -> tuple[list[float], list[float]]:
    """How far apart logprobs are, and the trainer's entropies, of the tokens that both have
    sampled, up to the first that differs."""
    tokens = [read_tokens(row) if "token_ids" in row else [] for row in (a, b)]
    alike = takewhile(lambda pair: pair[0].id == pair[1].id, zip(*tokens, strict=False))
    sampled = [(x.logprob, y.logprob) for x, y in alike if None not in (x.logprob, y.logprob)]
    entropies = zip(*(numbers(row.get("entropies", "")) for row in (a, b)), strict=False)
    entropies = islice(entropies, len(sampled))
    return tuple([abs(x - y) for x, y in pairs] for pairs in (sampled, entropies))


def trainer_apart(a: RunFolder, b: RunFolder, name: str, num_parts: int) -> float:
    """How far apart the trainer's entropies of the same samples are; of the first of several parts,
    each of which has an update."""
    if name not in a.names or name not in b.names:
        return 0.0
    pairs = [*zip(a.all_samples(name), b.all_samples(name), strict=False)][::num_parts]
    return max((apart for pair in pairs for apart in _sampled_alike(*pair)[1]), default=0.0)
