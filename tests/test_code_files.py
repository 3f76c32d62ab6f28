"""Files of --code: what is read from them, their options, and what is wrong with them."""

import asyncio
import json
import re

import pytest
from support.launch import run_recipe
from support.recipes import call_recipe
from support.runs import flags, samples_of, steps_of, toy_options
from support.scripts import run_script
from support.training_data import make_groups

import roll_lite as rl
from roll_lite.checks import UserError
from roll_lite.cluster.launch import Launch
from roll_lite.code_files import CodeOptions, load_code
from roll_lite.device_map import Device
from roll_lite.options import flatten, from_flat
from roll_lite.own_files import digest_of, import_file
from roll_lite.planning.resolve import resolve
from roll_lite.recipes import rlvr
from roll_lite.train.losses import LOSSES
from roll_lite.types import Prompt
from roll_lite.workers.pool import RewardWorkers

ALL = """
from __future__ import annotations

from random import Random
from typing import Annotated

from typing_extensions import Doc

import roll_lite as rl


def bonus_reward(prompt, reply, *, bonus: Annotated[float, Doc("What it is worth.")] = 0.25):
    return bonus * len({*reply})


async def slow_reward(prompt, reply):
    return 1.0


class Coin:
    def reset(self, seed):
        return "Heads?", {}

    def step(self, reply):
        return "", 1.0, True, False, {}


def share(groups, *, least: float = 0.5):
    samples = [sample for group in groups for sample in group.samples]
    return sum(sample.score.value >= least for sample in samples) / len(samples)


class Tracker:
    def __init__(self, run, *, prefix: str = "own"):
        self.file = (run.folder / f"{prefix}.txt").open("a")

    def log(self, step, metrics):
        self.file.write(f"{step}\\n")

    def close(self):
        self.file.close()


def keep(group, *, most: float = 10.0):
    return max(sample.score.value for sample in group.samples) <= most


def prompts(source, history, *, period: int = 1):
    return next(source)


def mine(logprobs_R, delta_R, advantages_R, batch, *, power: float = 1.0):
    return -advantages_R * (power * delta_R).exp()


def centred(rewards_S, groups_S, *, scale: float = 1.0) -> rl.PerSample:
    return scale * (rewards_S - rewards_S.mean())


REWARDS = {"reverse": bonus_reward}
INLINE = {"addition": slow_reward}
ENVS = {"coin": Coin}
METRICS = {"share": share}
TRACKERS = {"file": Tracker}
LOSSES = {"mine": mine}
ADVANTAGES = {"centred": centred}
"""
OPTIONS = {"bonus", "least", "prefix", "most", "period"}
"""Those of functions that are used whatever the options are."""


@pytest.fixture
def everything(code_file):
    return code_file(ALL)


def config(toy_folder, **changes):
    return from_flat(rlvr.Config, **toy_options(toy_folder, "no-such-run", **changes))


# ---- what a file has


def test_all_that_a_file_has_is_found_with_its_options(everything):
    own = CodeOptions.of(code=(everything,), bonus=2.0, most=1.0)
    assert {*own.keywords} == OPTIONS and own.keywords["bonus"].help == "What it is worth."
    functions, inline = own.rewards({"reverse": len, "math": len}, {"reverse": len, "other": len})
    assert {*functions} == {"reverse", "math"} and {*inline} == {"addition", "other"}
    assert functions["reverse"](None, "abca") == 6.0 and functions["math"] is len
    assert [*own.envs] == ["coin"] and own.envs["coin"].__name__ == "Coin"
    low, high = make_groups([[0.0, 1.0], [0.0, 2.0]])
    assert own.metrics["share"]([low, high]) == 0.5
    assert own.keep(low) and not own.keep(high)
    assert own.prompts(iter("xy"), {}) == "x"
    (tracker,) = own.trackers
    assert tracker.func.__name__ == "Tracker" and tracker.keywords == {"prefix": "own"}


def test_without_files_there_is_nothing():
    own = CodeOptions()
    assert own.keywords == {} and own.rewards({}, {}) == ({}, {})
    assert own.envs == {} and own.metrics == {} and own.trackers == ()
    assert own.keep is None and own.prompts is None


def test_losses_and_advantages_join_those_of_the_library(toy_folder, everything):
    cfg = config(toy_folder, code=(everything,), loss="mine", advantage="centred", scale=2.0)
    assert cfg.policy_loss.values == {"power": 1.0} and cfg.advantages.values == {"scale": 2.0}
    assert cfg.advantages.unit == rl.PerSample and cfg.min_samples == 2
    values = flatten(cfg)
    assert values.keys() >= OPTIONS | {"power", "scale"}
    assert flatten(from_flat(rlvr.Config, **values)) == values
    load_code([everything])  # again, which changes nothing


def test_options_of_a_file_are_refused_without_it(toy_folder, everything):
    assert config(toy_folder, code=(everything,), bonus=3.0).own.values["bonus"] == 3.0
    with pytest.raises(UserError, match="bonus: not among the options of this recipe"):
        config(toy_folder, bonus=3.0)


def test_several_files_are_joined(code_file):
    first = code_file("def keep(group):\n    return len(group.samples) > 1\n", "first.py")
    second = code_file(
        """
        def keep(group):
            return len(group.samples) < 3

        def shape(prompt, reply, *, shaped: float = 1.0):
            return shaped

        REWARDS = {"mine": shape}
        """,
        "second.py",
    )
    own = CodeOptions(code=(first, second))
    assert [own.keep(group) for group in make_groups([[0], [0, 0], [0, 0, 0]])] == [0, 1, 0]
    assert own.rewards({}, {})[0]["mine"](None, "") == 1.0


def test_functions_of_the_library_bring_no_flags(code_file):
    """As in a file that uses one of ours for another domain; nor do partial functions."""
    path = code_file("""
        from functools import partial

        from roll_lite.rewards.code import passes_tests
        from roll_lite.rewards.combine import weighted

        def mine(prompt, reply, *, size: int = 1):
            return size

        REWARDS = {
            "code": passes_tests, "safe": partial(passes_tests, isolation="rlimits"),
            "both": weighted({"a": (passes_tests, 1.0)}), "given": partial(mine, size=2),
        }
    """)
    own = CodeOptions(code=(path,))
    assert own.keywords == {} and own.rewards({}, {})[0]["given"](None, "") == 2


def test_rewards_with_options_travel_to_workers(everything):
    own = CodeOptions.of(code=(everything,), bonus=2.0)
    functions, _ = own.rewards({}, {})
    prompt = Prompt(id="p", messages=(), domain="reverse", ground_truth="")
    with RewardWorkers({"reverse": functions["reverse"]}, num_workers=1) as workers:
        assert asyncio.run(workers.score(prompt, "abc")).value == 6.0


def test_rewards_that_no_prompt_asks_for_are_refused(everything):
    own = CodeOptions(code=(everything,))
    own.check_domains({"reverse", "math"})
    own.check_domains(())  # environments alone
    CodeOptions().check_domains({"math"})
    with pytest.raises(
        UserError, match=r"mine\.py has rewards for domain addition and reverse, but the prompts"
    ):
        own.check_domains({"math"})
    with pytest.raises(UserError, match=r"no domain; .* --columns domain=addition"):
        own.check_domains({""})


def test_one_reward_is_that_of_all_rows_without_domain(code_file, toy_folder, tmp_path):
    """Of the files, or a judge; of several rewards none is."""
    one = code_file("REWARDS = {'mine': lambda prompt, reply: 1.0}")
    two = code_file("INLINE = {'other': lambda prompt, reply: 1.0}", "other.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "domain": "math"}\n')
    options = {"data": (str(rows),), "eval_every": 0}

    def domains(**changes):
        cfg = config(toy_folder, **options | changes)
        return [prompt.domain for prompt in cfg.read_rows(str(rows))]

    assert domains() == domains(code=(one, two)) == ["", "math"]
    assert domains(code=(one,)) == ["mine", "math"]
    assert domains(judge=str(toy_folder)) == ["judge", "math"]
    assert domains(code=(one,), columns=("domain=choice",)) == ["choice", "math"]


def test_the_state_of_a_file_is_noted(toy_folder, everything):
    cfg = config(toy_folder, code=(everything,))
    found, _ = resolve(cfg, Launch(), Device())
    assert found.own.code_digests == (digest_of(everything),) and "code_digests" in found.chosen
    with open(everything, "a") as file:
        file.write("# changed\n")
    assert resolve(cfg, Launch(), Device())[0].own.code_digests != found.own.code_digests


@pytest.mark.parametrize("imported", ["torch", "random"])
def test_rewards_that_bring_torch_to_workers_are_named(code_file, imported):
    path = code_file(f"import {imported}\ndef f(prompt, reply): ...\nREWARDS = {{'a': f}}\n")
    done = run_script(f"""
        from roll_lite.code_files import CodeOptions
        own = CodeOptions(code=({path!r},))
        functions, _ = own.rewards({{}}, {{}})
        own.warn_of_torch([])
        print("now")
        own.warn_of_torch(functions.values())
    """)
    assert done.stdout.startswith("now\n"), done.stderr
    said = re.search(rf"{path} imports torch, so each worker process takes \d+\.\d s", done.stdout)
    assert bool(said) == (imported == "torch")


# ---- what is wrong with a file


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("x = 1\n", "", "has none of LOSSES, ADVANTAGES, REWARDS"),
        ("x = 1\n\ndef f(:\n", " line 3", "SyntaxError: invalid syntax"),
        ("\nimport notthere\n", " line 2", "ModuleNotFoundError: No module named 'notthere'"),
        ("\nLOSSES = [len]\n", " line 2", "LOSSES must be a dictionary from names to functions"),
        ("\n\nENVS = {'a': 1}\n", " line 3", "ENVS must be a dictionary from names to functions"),
        ("METRICS = None\n", " line 1", "METRICS must be a dictionary from names to functions"),
        (
            "\ndef mine(a, b, c, d, *, size=1): ...\nLOSSES = {'mine': mine}\n",
            " line 2",
            r"option size of mine needs a type and a default, as in size: Annotated\[float",
        ),
        (
            "def mine(prompt, reply, *, size: int): ...\nREWARDS = {'mine': mine}\n",
            " line 1",
            "option size of mine needs a type and a default",
        ),
        (
            "\ndef mine(a, b, c, d): ...\nLOSSES = {'ppo': mine}\n",
            " line 2",
            r"LOSSES has 'ppo', which exists already \(.*losses\.py line \d+\); give it another",
        ),
        (
            "def mine(rewards_S): ...\nADVANTAGES = {'grpo': mine}\n",
            " line 1",
            r"ADVANTAGES has 'grpo', which exists already \(.*advantages\.py line \d+\)",
        ),
        (
            "\ndef keep(groups, more): ...\n",
            " line 2",
            r"keep\(groups, more\) must take \(group\); options are keyword-only and have defaults",
        ),
        (
            "class Coin:\n    def reset(self, seed): ...\nENVS = {'coin': Coin}\n",
            " line 1",
            r"environment Coin has no step; it needs reset\(self, seed\) and step\(self, reply\)",
        ),
        ("keep = 5\n", " line 1", "keep=5 must be a function"),
        (
            "def few(logprobs_R, delta_R): ...\nLOSSES = {'few': few}\n",
            " line 1",
            r"few\(logprobs_R, delta_R\) must take \(logprobs_R, delta_R, advantages_R, batch\)",
        ),
        (
            "def bad(group, step): ...\nMETRICS = {'m': bad}\n",
            " line 1",
            r"bad\(group, step\) must take \(groups\)",
        ),
        (
            "from pathlib import Path\n"
            "def mine(prompt, reply, *, table: Path = Path('x')): ...\nREWARDS = {'m': mine}\n",
            " line 2",
            "option table of mine has type .*Path.*; an option is a bool, int, float, str",
        ),
        (
            "def mine(prompt, reply, *, words: list[str] = []): ...\nREWARDS = {'m': mine}\n",
            " line 1",
            r"option words of mine has type list\[str\]; an option is a bool",
        ),
        ("def prompts(source): ...\n", " line 1", r"prompts\(source\) must take \(source, histo"),
        (
            "def a(prompt, reply, *, size: int = 1): ...\n"
            "def b(groups, *, size: int = 2): ...\n"
            "REWARDS, METRICS = {'a': a}, {'b': b}\n",
            " line 2",
            r"option size of b is also one of a, .*mine\.py line 1; rename one",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(code_file, text, place, message):
    path = code_file(text)
    with pytest.raises(UserError, match=rf"{path}{place}:? ?{message}"):
        CodeOptions(code=(path,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def mine(rewards_S): ...", "advantage mine needs a return type, one of rl.PerSample, rl"),
        ("def mine(rewards_S) -> list: ...", "advantage mine needs a return type"),
        (
            "import roll_lite as rl\ndef mine(reward_S) -> rl.PerSample: ...",
            "advantage mine asks for reward_S; the positional parameters of an estimator are among",
        ),
    ],
)
def test_a_wrong_estimator_is_named_when_it_is_chosen(toy_folder, code_file, text, message):
    path = code_file(f"{text}\nADVANTAGES = {{'mine': mine}}\n")
    line = text.count("\n") + 1
    with pytest.raises(UserError, match=rf"{path} line {line}: {message}"):
        config(toy_folder, code=(path,), advantage="mine")
    config(toy_folder, code=(path,))


def test_files_that_do_not_go_together_are_refused(code_file):
    text = "def prompts(source, history):\n    return next(source)\n"
    pair = code_file(text, "a.py"), code_file(text, "b.py")
    message = r"two functions prompts\(source, history\), .*a\.py line 1 and .*b\.py line 1; which"
    with pytest.raises(UserError, match=message):
        CodeOptions(code=pair)
    text = "\ndef f(prompt, reply): ...\nREWARDS = {'mine': f}\n"
    pair = code_file(text, "c.py"), code_file(text, "d.py")
    with pytest.raises(UserError, match=r"d\.py line 3: REWARDS has 'mine', and so has another fi"):
        CodeOptions(code=pair)
    inline = code_file("def f(prompt, reply): ...\nINLINE = {'mine': f}\n", "e.py")
    message = r"domain 'mine' has a reward in REWARDS and one in INLINE, .*c\.py line 2 and .*e\.py"
    with pytest.raises(UserError, match=message):
        CodeOptions(code=(pair[0], inline))
    with pytest.raises(UserError, match=r"code='none\.py' is not a file; name a Python file"):
        load_code(["none.py"])


def test_a_loss_that_returns_no_rows_is_named(code_file):
    path = code_file("\ndef mine(a, b, c, d):\n    return 1.0\nLOSSES = {'mine': mine}\n")
    load_code([path])
    loss = rl.PolicyLoss(rl.LossOptions(loss="mine"))
    rows = pytest.importorskip("torch").zeros(3)
    batch = rl.pack([rl.TrainingSequence(
        token_ids=[1] * 4, loss_mask=[True] * 4, logprobs=[0.0] * 4, advantages=[1.0] * 4,
    )], 8)[0]  # fmt: skip
    with pytest.raises(UserError, match=rf"{path} line 2: mine returned a float as its loss, not"):
        loss(rows, rows, batch)


def test_a_file_is_imported_once_and_under_a_name_of_its_own(code_file):
    path = code_file("REWARDS = {'a': print}\n", "json.py")
    assert import_file(path) is import_file(path) is not json
    assert "_json_py" in import_file(path).__name__
    dashed, plain = (code_file(f"x = {n!r}\n", n) for n in ("my-x.py", "my_x.py"))
    assert (import_file(dashed).x, import_file(plain).x) == ("my-x.py", "my_x.py")


def test_an_error_in_a_module_beside_the_file_is_named_there(code_file, tmp_path):
    (tmp_path / "helper_with_error.py").write_text("x = 1\ny = missing\n")
    path = code_file("import helper_with_error\n")
    with pytest.raises(
        UserError, match=r"helper_with_error\.py line 2: NameError: .*\n    y = mis"
    ):
        load_code([path])


def test_two_files_that_import_torch_are_both_named(code_file):
    loss = code_file("import torch\ndef f(a, b, c, d): ...\nLOSSES = {'a': f}\n", "loss.py")
    text = "import torch\ndef f(prompt, reply): ...\nREWARDS = {'a': f}\n"
    done = run_script(f"""
        from roll_lite.code_files import CodeOptions
        own = CodeOptions(code=({loss!r}, {code_file(text)!r}))
        own.warn_of_torch(own.rewards({{}}, {{}})[0].values())
    """)
    assert done.stdout.count("imports torch") == 1 and "mine.py imports torch" in done.stdout


def test_a_partial_has_the_facts_of_its_function(toy_folder, code_file):
    path = code_file("""
        from functools import partial

        from roll_lite.train.advantages import reinforce
        from roll_lite.train.losses import gspo

        LOSSES = {"wide": partial(gspo, clip_low=1e-3)}
        ADVANTAGES = {"grouped": partial(reinforce, baseline="group")}
    """)
    cfg = config(toy_folder, code=(path,), loss="wide")
    assert cfg.policy_loss.facts == LOSSES["gspo"].facts and cfg.policy_loss.facts.by_sequence
    cfg = config(toy_folder, code=(path,), advantage="grouped")
    assert cfg.advantages.unit == rl.PerToken and cfg.advantages.facts.whitened


def test_an_estimator_with_a_teacher_that_reads_rewards_needs_them(toy_folder, code_file):
    path = code_file("""
        import roll_lite as rl

        def mix(rewards_R, logprobs_R, teacher_logprobs_R) -> rl.PerToken:
            return rewards_R + teacher_logprobs_R - logprobs_R

        ADVANTAGES = {"mix": mix}
    """)
    cfg = config(toy_folder, code=(path,), advantage="mix", teacher=(str(toy_folder),))
    assert cfg.advantages.needs_rewards
    assert not config(
        toy_folder, advantage="opd", teacher=(str(toy_folder),)
    ).advantages.needs_rewards


def test_a_tuple_of_choices_is_an_option(code_file):
    path = code_file("""
        from typing import Literal

        def mine(prompt, reply, *, kinds: tuple[Literal["a", "b"], ...] = ("a",)):
            return len(kinds)

        REWARDS = {"mine": mine}
    """)
    assert CodeOptions.of(code=(path,), kinds=("a", "b")).values == {"kinds": ("a", "b")}


# ---- runs


NOISY = {"prompts_per_step": 2, "samples_per_prompt": 4, "eval_every": 0, "steps": 2}


def test_a_run_uses_all_of_a_file(toy_folder, tmp_path, everything):
    options = toy_options(toy_folder, tmp_path / "run", **NOISY) | {
        "code": (everything,), "loss": "mine", "advantage": "centred", "scale": 2.0, "power": 0.5,
        "bonus": 0.1, "least": 0.35, "prefix": "steps", "most": 0.45, "max_refills": 100,
        "reward_workers": 1,
    }  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    rows = steps_of(tmp_path / "run")
    assert len(rows) == 2 and all(0 <= row["share"] <= 1 for row in rows)
    assert (tmp_path / "run" / "steps.txt").read_text().split()[-2:] == ["1", "2"]
    samples = samples_of(tmp_path / "run", 2)
    rewards = [sample["reward"] for sample in samples]
    assert rewards == pytest.approx([len({*sample["reply"]}) / 10 for sample in samples])
    mean = sum(rewards) / len(rewards)
    expected = [2 * (reward - mean) for reward in rewards]
    assert [sample["advantages"] for sample in samples] == pytest.approx(expected)
    assert len({*expected}) > 1
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["scale"], written["power"], written["bonus"]) == (2.0, 0.5, 0.1)
    assert written["code"] == [everything] and written["code_digests"] == [digest_of(everything)]


@pytest.mark.slow
def test_a_run_uses_all_of_a_file_on_every_rank(toy_folder, tmp_path, everything):
    values = toy_options(toy_folder, tmp_path / "run", **NOISY) | {"power": 0.5, "bonus": 0.1}
    values |= {"loss": "mine", "advantage": "centred", "data": "reverse:1", "code": everything}
    run_recipe("rlvr", *flags(values), num_ranks=2)
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2]
    resumed = ["--resume", tmp_path / "run", "--steps", 3, "--loss", "ppo"]
    run_recipe("rlvr", *resumed, num_ranks=2)
    assert "share" in steps_of(tmp_path / "run")[-1]
