"""Prompts of several sources, each with its share.

A source is a file of prompt rows, a name of such files on the Hugging Face Hub (hub.py), a
generated task or an environment, written `SOURCE@WEIGHT`, or `SOURCE` for weight 1:
`("gsm8k.jsonl@0.4", "addition:2@0.3", "sokoban@0.3")`. A name of the form of a task is a task, and
that of an environment an environment; write `./sokoban` for a file of that name. The weight follows
the last @, so a path that contains an @ needs an explicit weight.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from roll_lite.checks import UserError
from roll_lite.data.rows import read_prompts
from roll_lite.data.sources import Endless, Indexed, Shuffled, check_source, digest
from roll_lite.data.tasks import is_reasoning_gym, is_task, parse_task
from roll_lite.data.tasks import prompts as task_prompts
from roll_lite.envs.specs import env_tasks, held_out_tasks
from roll_lite.hub import data_label, is_data_name, parse_data_name
from roll_lite.rewards import reasoning_gym
from roll_lite.types import Prompt


class Entry(NamedTuple):
    source: str
    weight: Fraction
    kind: Literal["file", "task", "env"]


def parse_mixture(entries: Sequence[str], envs: Collection[str] = ()) -> tuple[Entry, ...]:
    """Sources and their weights; no file is read. `envs` are the names of environments."""
    if isinstance(entries, str) or not entries:
        raise UserError(f"data={entries!r} must be a list of at least one SOURCE@WEIGHT")
    seen: dict[Any, str] = {}
    parsed = tuple(_parse_entry(text, envs) for text in entries)
    for text, entry in zip(entries, parsed, strict=True):
        identity = _identity(entry)
        if identity in seen:
            raise UserError(
                f"{text!r} is the same source as {seen[identity]!r}; name it once, with the sum "
                "of the weights"
            )
        seen[identity] = text
    return parsed


def _identity(entry: Entry) -> Any:
    if entry.kind == "file":
        return Path(entry.source).resolve()
    is_whole = entry.kind == "env" or is_reasoning_gym(entry.source)
    return entry.source if is_whole else parse_task(entry.source)


def check_mixture(entries: Sequence[str], envs: Collection[str] = ()) -> None:
    """Raise ValueError unless every source is a file, a task or one of these environments."""
    for entry in parse_mixture(entries, envs):
        if entry.kind != "env":
            check_source(entry.source, envs)


def _parse_entry(text: str, envs: Collection[str]) -> Entry:
    source, at, weight = text.rpartition("@")
    if not at or (":" in weight and is_data_name(text)):  # what follows @ is a commit
        source = text
        weight = "1"
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not source or not 0 < value < math.inf:
        raise UserError(
            f"{text!r}: {weight!r} is not a finite weight above 0 of a source; write "
            "SOURCE@WEIGHT, e.g. gsm8k.jsonl@0.5 (a path that has an @ needs its weight)"
        )
    is_env = source.partition(":")[0] in envs
    kind = "env" if is_env else "task" if is_task(source) else "file"
    if kind == "file" and not {"/", "."} & {*source}:
        check_source(source, envs)  # it is rather a name that is misspelt
    return Entry(source, Fraction(str(value)), kind)  # 0.1 is a tenth, not the float nearest to it


@dataclass(slots=True)
class Stream:
    """The prompts of one domain of one source."""

    domain: str
    weight: Fraction
    """Share of the mixture, not normalised."""
    prompts: Shuffled[Prompt] | Endless[Prompt] | Indexed[Prompt]
    num_drawn: int = 0
    """Prompts drawn in turn; `next_of` takes further ones."""

    @property
    def num_asked(self) -> int:
        return self.prompts.position - self.num_drawn

    def take(self) -> Prompt:
        return self.prompts.take(1)[0]


class Mixture:
    """An endless iterator of prompts that can resume, and can give a prompt of one domain.

    The order of the sources is not random: after any number of prompts each source has had its
    share of them, within one prompt, and so has each domain of a file within the file. Every domain
    of a file is shuffled separately, so `next_of(domain)` changes nothing for other domains.
    """

    def __init__(
        self,
        entries: Sequence[str],
        *,
        seed: int | str,
        held_out_share: float = 0.0,
        fitting: Callable[[list[Prompt]], list[Prompt]] = lambda prompts: prompts,
        envs: Collection[str] = (),
        read: Callable[[str], list[Prompt]] = read_prompts,
    ):
        """`held_out_share` of the rows of each file never comes; `held_out` gives them.

        `fitting`, such as a PromptLimit, chooses the rows that may come among all other rows.
        `envs` are the names of environments; `read` reads a file.
        """
        self._entries = parse_mixture(entries, envs)
        self._share = held_out_share
        files = _read_files(self._entries, envs, read)
        for source, prompts in files.items():
            files[source] = [p for p in prompts if not is_held_out(p, held_out_share)]
            if not files[source]:
                raise UserError(
                    f"a share of {held_out_share} holds out all {len(prompts)} rows of {source}; "
                    "hold out less"
                )
        num_rows = {source: len(prompts) for source, prompts in files.items()}
        files = {source: fitting(prompts) for source, prompts in files.items()}
        self.rows = [prompt for prompts in files.values() for prompt in prompts]
        """All prompts of all files that may come; tasks are endless and not included."""
        self._file_ids = {prompt.id for prompt in self.rows}
        self._contents = {
            source: digest(source) + (f"/{len(rows)}" if len(rows) < num_rows[source] else "")
            for source, rows in files.items()
        }
        self._streams = [
            _file_streams(entry, files[entry.source], seed)
            if entry.kind == "file"
            else [_generated_stream(entry, seed)]
            for entry in self._entries
        ]

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        counts = [sum(stream.num_drawn for stream in streams) for streams in self._streams]
        streams = self._streams[next_in_turn(counts, [e.weight for e in self._entries])]
        counts = [stream.num_drawn for stream in streams]
        stream = streams[next_in_turn(counts, [stream.weight for stream in streams])]
        stream.num_drawn += 1
        return stream.take()

    def next_of(self, domain: str) -> Prompt | None:
        """An extra prompt of a domain, which counts in no share; None for an unknown domain."""
        streams = [s for streams in self._streams for s in streams if s.domain == domain]
        if not streams:
            return None
        counts = [stream.num_asked for stream in streams]
        return streams[next_in_turn(counts, [stream.weight for stream in streams])].take()

    def comes_again(self, prompt: Prompt) -> bool:
        """Whether a later epoch repeats the prompt, as for files; tasks never repeat an id."""
        return prompt.id in self._file_ids

    @property
    def domains(self) -> tuple[str, ...]:
        """All domains, in the order of the sources."""
        return tuple({s.domain: None for streams in self._streams for s in streams})

    def state_dict(self) -> dict[str, Any]:
        """Prompts drawn in turn and the position, for every domain of every source, as JSON."""
        return {
            "entries": self._names(),
            "contents": self._contents,
            "held_out_share": self._share,
            "streams": [
                {stream.domain: [stream.num_drawn, stream.prompts.position] for stream in streams}
                for streams in self._streams
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["entries"] != self._names():
            raise UserError(
                f"the state is of the mixture {', '.join(state['entries'])}, but this one is "
                f"{', '.join(self._names())}; go on with the same sources and weights in the "
                "same order, or start a new run"
            )
        if (share := state["held_out_share"]) != self._share:
            raise UserError(
                f"the state was saved with {share} of the rows held out, but now it is "
                f"{self._share}; go on with the same share, or start a new run"
            )
        for source, content in self._contents.items():
            if state["contents"][source] != content:
                raise UserError(
                    f"{source} is not what it was when the state was saved, or other rows of it "
                    "fit; restore the old file and sizes, or start a new run"
                )
        for streams, saved in zip(self._streams, state["streams"], strict=True):
            for stream in streams:
                stream.num_drawn, stream.prompts.position = saved[stream.domain]

    def _names(self) -> list[str]:
        return [f"{entry.source}@{float(entry.weight)}" for entry in self._entries]


def is_held_out(prompt: Prompt, share: float) -> bool:
    """Whether a prompt of a file is among the share of them that is held out.

    It depends on the text alone: not on seed, order, path or id; equal questions stay together.
    """
    text = json.dumps(prompt.messages, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def held_out(
    entries: Sequence[str],
    count: int | None,
    *,
    of_tasks: int | None = None,
    share: float | None = None,
    envs: Collection[str] = (),
    read: Callable[[str], list[Prompt]] = read_prompts,
) -> list[Prompt]:
    """Prompts to evaluate on: the first `count` of each source, held-out ones where it is endless.

    With count=None it is all prompts of a file, and `of_tasks` of a task or an environment. With a
    share, only the rows of a file that a Mixture with this `held_out_share` never gives.
    """
    entries = parse_mixture(entries, envs)
    files = _read_files(entries, envs, read)
    prompts: list[Prompt] = []
    for entry in entries:
        count_endless = of_tasks if count is None else count
        if entry.kind == "env":
            prompts += held_out_tasks([entry.source], count_endless)
        elif entry.kind == "task":
            questions = task_prompts(entry.source, seed=0, split="held_out")
            prompts += islice(questions, count_endless)
        else:
            rows = files[entry.source]
            if share is not None and not (rows := [p for p in rows if is_held_out(p, share)]):
                raise UserError(
                    f"a share of {share} holds out none of the {len(files[entry.source])} rows of "
                    f"{entry.source}; hold out more, or name other prompts to evaluate on"
                )
            prompts += rows[:count]
    return prompts


def next_in_turn(counts: Sequence[int], weights: Sequence[Fraction]) -> int:
    """Index of the next source, such that every count always stays within one of its share.

    The quota method of Balinski and Young (1975): among sources below their share of the total
    count, this draw included, the one whose next item is due first. Taking the largest deficit is
    not enough: with unequal weights counts deviate by more than one.
    """
    place = sum(counts) + 1
    total = sum(weights)
    due = [i for i, weight in enumerate(weights) if counts[i] * total < weight * place]
    return min(due, key=lambda i: (counts[i] + 1) / weights[i])


def _read_files(
    entries: Sequence[Entry], envs: Collection[str], read: Callable[[str], list[Prompt]]
) -> dict[str, list[Prompt]]:
    """Prompts by file, with ids unique across files: samples are seeded by the prompt's id."""
    names = _short_names([entry.source for entry in entries if entry.kind == "file"])
    files: dict[str, list[Prompt]] = {}
    owners: dict[str, str] = {}
    for source, name in names.items():
        check_source(source, envs)
        files[source] = [replace(prompt, source=name) for prompt in read(source)]
        for prompt in files[source]:
            owner = owners.setdefault(prompt.id, source)
            if owner != source:
                raise UserError(
                    f"id {prompt.id!r} is in {owner} and in {source}; give the rows of one file "
                    "other ids, or leave the ids out"
                )
    return files


def _short_names(sources: Sequence[str]) -> dict[str, str]:
    """For each source the first of its names that no other source could have."""
    names = {source: tuple(_names_of(source)) for source in sources}
    counts = Counter(name for each in names.values() for name in {*each})
    return {s: next((n for n in each if counts[n] == 1), s) for s, each in names.items()}


def _names_of(source: str) -> Iterator[str]:
    """Names of a source, the shortest first: a file without suffix, with more and more of its
    folders; data on the Hub without its owner, with config and split, and with the owner."""
    if not is_data_name(source):
        path = Path(source)
        *folders, stem = [part for part in path.with_suffix("").parts if part != path.anchor]
        for num in range(len(folders) + 1):
            yield "-".join([*folders[len(folders) - num :], stem])
        yield "-".join([*folders, path.name])
        return
    name = parse_data_name(source)
    owner, repo = name.repo.split("/")
    part = [re.sub(r"[^\w.-]+", "-", name.part)] if name.part else []
    for words in ([repo], [repo, *part], [owner, repo], [owner, repo, *part]):
        yield "-".join(words)


def _generated_stream(entry: Entry, seed: int | str) -> Stream:
    if entry.kind == "task" and is_reasoning_gym(entry.source):
        row = partial(reasoning_gym.question, entry.source, seed=seed, split="train")
        return Stream(reasoning_gym.DOMAIN, entry.weight, Indexed(row))
    generate = env_tasks if entry.kind == "env" else task_prompts
    restart = partial(generate, entry.source, seed=seed)
    return Stream(next(restart()).domain, entry.weight, Endless(restart))


def _file_streams(entry: Entry, prompts: list[Prompt], seed: int | str) -> list[Stream]:
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    # Without the folder or the commit: a file that moved keeps its order.
    name = Path(data_label(entry.source)).name
    return [
        Stream(
            domain,
            entry.weight * len(rows) / len(prompts),
            Shuffled(rows, seed=f"{seed}/{name}/{domain}"),
        )
        for domain, rows in domains.items()
    ]
