"""A run of six steps that several tests check, and forge."""

import pytest
from support.recipes import call_recipe
from support.runs import sft_options, toy_options

from roll_lite.options import from_flat
from roll_lite.recipes import rlvr, sft


@pytest.fixture(scope="session")
def learnt_folder(tmp_path_factory, tiny_folder):
    """A model that some replies of are right."""
    run = tmp_path_factory.mktemp("learnt") / "run"
    options = sft_options(tiny_folder, run, data="reverse:1", eval_every=0)
    call_recipe(sft, from_flat(sft.Config, **options))
    return run / "model"


@pytest.fixture(scope="session")
def evidence(tmp_path_factory, learnt_folder):
    """A run folder, which no test may change."""
    run = tmp_path_factory.mktemp("evidence") / "run"
    options = toy_options(
        learnt_folder, run, steps=6, eval_every=3, keep_every=2, samples_per_prompt=4,
        reward_workers=0, lr=1e-3,
    )  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    return run
