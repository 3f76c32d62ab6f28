"""Both formulas written in place, in a copy of rlvr.py, equal the built-in ones bit for bit."""

import pytest
from safetensors.torch import load_file
from support.launch import run_torchrun
from support.paths import RECIPES
from support.runs import comparable, flags, steps_of, toy_options

EDITS = (  # lines of the recipe, and what a person would write there
    (
        "    advantages = options.estimate(rows)\n",
        "    advantages = rows.rewards_S - rows.mean_of_group(rows.rewards_S)\n",
    ),
    (
        "loss=rl.PolicyLoss(cfg.policy_loss, cfg.kl)",
        "loss=rl.PolicyLoss(cfg.policy_loss, cfg.kl, clipped)",
    ),
    (
        "def make_roles(",
        "def clipped(logprobs_R, delta_R, advantages_R, batch):\n"
        "    ratio_R = delta_R.exp()\n"
        "    return (-ratio_R * advantages_R).maximum(-ratio_R.clamp(0.8, 1.2) * advantages_R)\n"
        "\n\n"
        "def make_roles(",
    ),
)
REWARD = """
def variety(prompt, reply):
    return len(set(reply)) / 8

INLINE = {"reverse": variety}
"""
OF_BUILT_IN = {"policy/ratio", "policy/ratio_max", "policy/clip_fraction"}  # measured by ppo alone


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_formulas_in_the_recipe_equal_the_built_in_ones(command, toy_folder, tmp_path, num_ranks):
    edited = (RECIPES / "rlvr.py").read_text()
    for line, replacement in EDITS:
        assert edited.count(line) == 1
        edited = edited.replace(line, replacement)
    (copy := tmp_path / "mine.py").write_text(edited)
    (reward := tmp_path / "reward.py").write_text(REWARD)
    options = {"steps": 3, "epochs": 2, "code": (str(reward),)}
    mine, built_in = (
        flags(toy_options(toy_folder, tmp_path / name, **options) | {"data": "reverse:1"})
        for name in ("mine", "built_in")
    )
    for program, given in ((copy, mine), (RECIPES / "rlvr.py", [*built_in, "--no-divide-by-std"])):
        if num_ranks > 1:
            run_torchrun(num_ranks, program, *given)
        else:
            assert command(program, *given)[0] == 0
    expected = comparable(steps_of(tmp_path / "built_in"))
    assert any(row["policy/clip_fraction"] for row in expected)  # the clip decides something
    without = [{k: v for k, v in row.items() if k not in OF_BUILT_IN} for row in expected]
    assert comparable(steps_of(tmp_path / "mine")) == without
    weights, others = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("mine", "built_in")
    )
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)
