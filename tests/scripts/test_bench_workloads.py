"""scripts/bench/engine.py: the requests that other engines are measured with too."""

import random
import sys

from support.paths import SCRIPTS


def test_workloads_are_those_of_the_published_numbers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS / "bench"), *sys.path])
    from engine import WORKLOADS

    r = random.Random(0)  # prompts token by token, each after its length; then all output lengths
    prompts = []
    for _ in range(256):
        prompts.append([])
        for _ in range(r.randint(100, 1024)):
            prompts[-1].append(r.randrange(10000))
    lengths = [r.randint(100, 1024) for _ in range(256)]
    assert WORKLOADS["N"]() == list(zip(prompts, lengths, strict=True))
    assert sum(lengths) == 150_245

    r = random.Random(1)
    prompts = [[r.randrange(10000) for _ in range(200)] for _ in range(64)]
    r = random.Random(2)
    lengths = [r.randint(64, 512) for _ in range(1024)]
    work = WORKLOADS["R"]()
    assert [prompt for prompt, _ in work] == [prompts[i // 16] for i in range(1024)]
    assert [length for _, length in work] == lengths and sum(lengths) == 293_533
