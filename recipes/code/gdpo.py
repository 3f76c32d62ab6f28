"""GDPO (Liu et al. 2026, arXiv 2601.05242): every part of the reward is standardised apart.

In the sum of two rewards that GRPO standardises, (1, 0) and (0, 1) are the same, and a part that
varies much drowns one that varies little. Here each part is compared in its group alone; the sum
of the results, weighted, is standardised over the batch, so that its size does not depend on how
many parts there are.

The reward returns its parts, as in rl.Score(value=1.5, parts={"right": 1.0, "format": 0.5}).

python recipes/rlvr.py --code recipes/code/gdpo.py my_rewards.py --advantage gdpo \
        --parts right format@0.5 --data mine.jsonl
"""

from itertools import chain
from typing import Annotated

from typing_extensions import Doc

import roll_lite as rl

Parts = Annotated[
    tuple[str, ...], Doc("Parts of the score, NAME or NAME@WEIGHT; none named: all, of weight 1.")
]


def has_equal_parts(group: rl.Group, *, parts: Parts) -> bool:
    """Whether no part that counts tells the samples of a group apart."""
    found = [sample.score.parts for sample in group.samples]
    names = [part.partition("@")[0] for part in parts] or chain(*found)
    return all(len({part.get(name, 0.0) for part in found}) == 1 for name in names)


@rl.AdvantageFacts(nothing_to_learn=has_equal_parts)
def gdpo(reward_parts, groups_S, *, parts: Parts = ()) -> rl.PerSample:
    """The sum of the parts, each standardised in its group; standardised over the batch."""
    named = [part.partition("@") for part in parts or reward_parts]
    weights = {name: float(weight or 1) for name, _, weight in named}
    if not weights or weights.keys() - reward_parts.keys():
        raise rl.UserError(
            f"parts={parts} of the score are wanted, and the rewards of this step have "
            f"{tuple(reward_parts)}; name some of these, or return rl.Score(value=..., parts=...)"
        )
    total_S = sum(w * rl.standardise(reward_parts[name], groups_S) for name, w in weights.items())
    return rl.standardise(total_S, 0 * groups_S)


ADVANTAGES = {"gdpo": gdpo}
