"""Mixtures of files and tasks: exact shares, an order that resumes, and what is refused."""

import itertools
import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from roll_lite.data import Mixture, held_out, parse_mixture, read_prompts, tasks
from roll_lite.data.mixture import next_in_turn


def write(path, domains, prefix=""):
    """A row for each domain; ids only with a prefix."""
    rows = [{"prompt": f"{path.name} {i}", "domain": domain} for i, domain in enumerate(domains)]
    if prefix:
        rows = [row | {"id": f"{prefix}{i}"} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source_of(prompt):
    """The file of a prompt that `write` wrote, or the task."""
    text = prompt.messages[0]["content"]
    return text.split()[0] if ".jsonl" in text else prompt.id.split("/")[0]


def take(mixture, count):
    return list(itertools.islice(mixture, count))


def test_counts_stay_within_one_of_their_shares():
    for seed in range(30):
        r = random.Random(seed)
        weights = [
            Fraction(r.choice([1, 2, 3, 7, 20, 100]), r.choice([1, 10]))
            for _ in range(r.randint(1, 8))
        ]
        counts = [0] * len(weights)
        for place in range(1, 300):
            counts[next_in_turn(counts, weights)] += 1
            shares = [weight * place / sum(weights) for weight in weights]
            assert all(abs(c - s) < 1 for c, s in zip(counts, shares, strict=True)), (seed, place)


def test_files_and_tasks_have_their_shares_and_epochs(tmp_path):
    a = write(tmp_path / "a.jsonl", ["math"] * 12)
    b = write(tmp_path / "b.jsonl", ["code"] * 5)
    mixture = Mixture((f"{a}@0.5", f"{b}@0.3", "addition:2@0.2"), seed=7)
    drawn = take(mixture, 200)
    for end in range(10, 201, 10):
        assert Counter(map(source_of, drawn[end - 10 : end])) == {
            "a.jsonl": 5, "b.jsonl": 3, "addition:2": 2,
        }  # fmt: skip
    of_a = [prompt.id for prompt in drawn if source_of(prompt) == "a.jsonl"]
    epochs = [of_a[i : i + 12] for i in range(0, 96, 12)]
    assert all(sorted(epoch) == sorted(p.id for p in read_prompts(a)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    generated = list(itertools.islice(tasks.prompts("addition:2", seed=7), 40))
    assert [prompt for prompt in drawn if prompt.domain == "addition"] == generated
    assert mixture.domains == ("math", "code", "addition")


def test_a_file_of_several_domains_keeps_its_own_shares(tmp_path):
    path = write(tmp_path / "a.jsonl", ["math", "math", "code", "math"] * 5)
    drawn = take(Mixture((path, "reverse:3"), seed=0), 160)
    for end in range(8, 161, 8):
        domains = Counter(prompt.domain for prompt in drawn[end - 8 : end])
        assert domains == {"math": 3, "code": 1, "reverse": 4}
    of_file = Counter(prompt.id for prompt in drawn if prompt.domain != "reverse")
    assert set(of_file.values()) == {4} and len(of_file) == 20


def test_prompts_of_a_domain_come_beside_the_shares(tmp_path):
    """Who asks for more of a domain changes neither the shares nor the other domains."""
    a = write(tmp_path / "a.jsonl", ["math"] * 30 + ["code"] * 10)
    b = write(tmp_path / "b.jsonl", ["math"] * 50)
    entries = (f"{a}@4", f"{b}@6")
    plain, asked = Mixture(entries, seed=1), Mixture(entries, seed=1)
    drawn, more = [], []
    for i in range(60):
        drawn.append(next(asked))
        more += [asked.next_of("math") for _ in range(i % 3)]
    reference = take(plain, 60)
    assert [source_of(p) for p in drawn] == [source_of(p) for p in reference]
    assert [p.domain for p in drawn] == [p.domain for p in reference]
    code = [p.id for p in drawn if p.domain == "code"]
    assert code == [p.id for p in reference if p.domain == "code"]
    assert all(prompt.domain == "math" for prompt in more)
    # 3 parts of the mixture are a's, 6 are b's
    assert Counter(map(source_of, more)) == {"a.jsonl": len(more) / 3, "b.jsonl": len(more) * 2 / 3}
    of_b = [p.id for p in drawn + more if source_of(p) == "b.jsonl"]
    assert len(of_b) > 50 and len(set(of_b)) == 50
    assert asked.next_of("poetry") is None


def test_a_mixture_resumes_anywhere(tmp_path):
    a = write(tmp_path / "a.jsonl", ["math", "code", "code"] * 3)
    entries = (f"{a}@0.7", "counting:4@0.3")

    def go_on(mixture, begin, end):
        return [
            mixture.next_of("code") if place % 4 == 3 else next(mixture)
            for place in range(begin, end)
        ]

    whole = go_on(Mixture(entries, seed=3), 0, 60)
    for stop in (0, 1, 17, 42):
        first, second = Mixture(entries, seed=3), Mixture(entries, seed=3)
        go_on(first, 0, stop)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert go_on(second, stop, 60) == whole[stop:]
    assert go_on(Mixture(entries, seed=4), 0, 60) != whole


def test_states_of_other_mixtures_are_refused(tmp_path):
    a, b = (write(tmp_path / f"{name}.jsonl", ["math"] * 4) for name in "ab")
    state = Mixture((a, "addition:2@2"), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"a\.jsonl@1\.0, addition:2@2\.0, but this one is .*b\."):
        Mixture((b, "addition:2@2"), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"but this one is .*addition:2@3\.0; go on with"):
        Mixture((a, "addition:2@3"), seed=0).load_state_dict(state)
    write(tmp_path / "a.jsonl", ["math"] * 5)
    with pytest.raises(ValueError, match=r"a\.jsonl is not what it was"):
        Mixture((a, "addition:2@2"), seed=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("paths", "sources"),
    [
        (["a.jsonl", "x/b.jsonl"], ["a", "b"]),
        (["a.jsonl", "x/a.jsonl"], ["a.jsonl", "x-a"]),
        (["p/x/a.jsonl", "q/x/a.jsonl"], ["p-x-a", "q-x-a"]),
        (["x/a.jsonl", "x/a.json"], ["x-a.jsonl", "x-a.json"]),
    ],
)
def test_files_have_names_of_their_own(paths, sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, ["math"])
    assert [prompt.source for prompt in held_out(paths, None)] == sources


def test_how_sources_are_written():
    parsed = parse_mixture(("x/a.jsonl", "b@v2.jsonl@0.1", "addition:2@1e-1", "./addition:2"))
    assert [(e.source, e.weight, e.kind == "task") for e in parsed] == [
        ("x/a.jsonl", 1, False),
        ("b@v2.jsonl", Fraction(1, 10), False),
        ("addition:2", Fraction(1, 10), True),
        ("./addition:2", 1, False),
    ]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ((), r"data=\(\) must be a list of at least one SOURCE@WEIGHT"),
        ("a.jsonl", "data='a.jsonl' must be a list"),
        (("a.jsonl@0",), "'a.jsonl@0': '0' is not a finite weight above 0"),
        (("a.jsonl@-1",), "'-1' is not a finite weight"),
        (("a.jsonl@nan",), "'nan' is not a finite weight"),
        (("a.jsonl@inf",), "'inf' is not a finite weight"),
        (("a.jsonl@",), "'a.jsonl@': '' is not a finite weight"),
        (("@0.5",), "'@0.5': .*write SOURCE@WEIGHT"),
        (("b@v2.jsonl",), "'v2.jsonl' is not a finite weight.*that has an @ needs its weight"),
        (("addition:0",), "task='addition:0' is not known"),
        (("a.jsonl@1", "x/../a.jsonl"), r"'x/\.\./a\.jsonl' is the same source as 'a\.jsonl@1'"),
        (("addition:2", "addition:02@3"), "'addition:02@3' is the same source as 'addition:2'"),
    ],
)  # fmt: skip
def test_wrong_entries_are_named(entries, problem):
    with pytest.raises(ValueError, match=problem):
        parse_mixture(entries)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"'adition:2' is neither a file nor a task; .*addition:N"):
        Mixture(("adition:2@0.5",), seed=0)
    a = write(tmp_path / "a.jsonl", ["math"] * 4, prefix="q")
    b = write(tmp_path / "b.jsonl", ["code"] * 2, prefix="q")
    with pytest.raises(ValueError, match=r"id 'q0' is in .*a\.jsonl and in .*b\.jsonl; give"):
        Mixture((a, b), seed=0)


def test_a_held_out_share_never_comes_and_stays_the_same(tmp_path):
    path = write(tmp_path / "a.jsonl", ["math"] * 200 + ["code"] * 200)
    prompts = read_prompts(path)
    out = {p.id for p in held_out((path,), None, share=0.1)}
    assert 22 < len(out) < 58  # three standard deviations of 400 draws
    assert out < {p.id for p in held_out((path,), None, share=0.2)}
    for seed in (0, 1):
        mixture = Mixture((f"{path}@2", "addition:2"), seed=seed, held_out_share=0.1)
        drawn = {p.id for p in take(mixture, 620)} | {mixture.next_of("code").id}
        assert drawn & {p.id for p in prompts} == {p.id for p in prompts} - out
    moved = tmp_path / "b.jsonl"  # other order, other ids, and every question twice
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    moved.write_text("\n".join([*reversed(lines), *lines]))
    again = Counter(p.messages[0]["content"] for p in held_out((str(moved),), None, share=0.1))
    assert again == dict.fromkeys((p.messages[0]["content"] for p in prompts if p.id in out), 2)
    state = json.loads(json.dumps(mixture.state_dict()))
    with pytest.raises(
        ValueError, match=r"saved with 0\.1 of the rows held out, but now it is 0\.2"
    ):
        Mixture((f"{path}@2", "addition:2"), seed=1, held_out_share=0.2).load_state_dict(state)


def test_a_share_of_nothing_or_everything_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ["math"] * 2)
    with pytest.raises(ValueError, match=r"0\.001 holds out none of the 2 rows of .*a\.jsonl"):
        held_out((path,), 5, share=0.001)
    with pytest.raises(ValueError, match=r"0\.999 holds out all 2 rows of .*a\.jsonl"):
        Mixture((path,), seed=0, held_out_share=0.999)
