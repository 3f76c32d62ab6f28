"""ECHO (Shrivastava et al. 2026, arXiv 2605.24517): an agent also learns what its environment says.

PPO on the tokens that the model sampled, plus a small cross-entropy on the tokens that the
environment answered with. These have gone through the model anyway, so they cost next to nothing,
and they teach something in episodes whose rewards are all the same. loss/cross_entropy_observed is
their mean cross-entropy, which should fall.

python recipes/agentic.py --code recipes/code/echo.py --loss echo --data frozen_lake
"""

from typing import Annotated

from typing_extensions import Doc

import roll_lite as rl
from roll_lite.train.losses import ClipHigh, ClipLow, ppo, required

ObservationWeight = Annotated[
    float, Doc("Weight of the mean cross-entropy of what the environment wrote."), rl.AtLeast(0)
]


@rl.LossFacts(reads_observations=True)
def echo(
    logprobs_R,
    delta_R,
    advantages_R,
    batch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    observation_weight: ObservationWeight = 0.1,
):
    """Rows of either kind have weights that add up to 1, so both terms are means."""
    options = {"clip_low": clip_low, "clip_high": clip_high}
    loss_R, measurements = ppo(logprobs_R, delta_R, advantages_R, batch, **options)
    measurements["loss/cross_entropy_observed"] = -logprobs_R
    observed_R = required(batch, "observed_R")
    return (-observation_weight * logprobs_R).where(observed_R, loss_R), measurements


LOSSES = {"echo": echo}
