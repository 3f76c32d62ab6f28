"""Pages of docs/reference/ lack nothing that the code has."""

import re

import pytest
from support.paths import DOCS

import roll_lite as rl
from roll_lite.__main__ import TOOLS
from roll_lite.data.tasks import TASKS
from roll_lite.envs.specs import ENVS, options_of
from roll_lite.recipes import agentic
from roll_lite.rewards.instructions import CHECKS, MEASURES
from roll_lite.rewards.registry import REWARDS
from roll_lite.train.advantages import ADVANTAGES
from roll_lite.train.kl import KL_ESTIMATORS
from roll_lite.train.losses import LOSSES
from roll_lite.train.sequences import AGGREGATIONS


def in_backticks(page):
    """Every word of code on a page."""
    code = re.findall(r"`([^`\n]+)`", (DOCS / "reference" / page).read_text())
    return {word for text in code for word in re.findall(r"[\w+]+", text)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("algorithms.md", {*ADVANTAGES, *LOSSES, *AGGREGATIONS, *KL_ESTIMATORS}),
        ("data.md", {*TASKS}),
        ("environments.md", {*ENVS, *agentic.Config.ENVS}),
        ("python.md", {*rl.__all__, *TOOLS}),
        ("rewards.md", {*REWARDS, *MEASURES, *CHECKS}),
    ],
)
def test_a_page_names_all_that_there_is(page, names):
    assert not names - in_backticks(page)


def test_every_option_of_an_environment_is_named():
    options = {name for maker in ENVS.values() for name in options_of(maker)}
    assert not options - in_backticks("environments.md")
