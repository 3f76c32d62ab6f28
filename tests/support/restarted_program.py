"""The command rlvr.py whose ranks are killed while rewards are computed, once in every start of the
plan: restarted_program.py PLAN.json OPTIONS. The plan is {restart count: [rank, call]}.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

from roll_lite import command
from roll_lite.recipes import rlvr
from support.process_checks import child_of_rank
from support.rlvr_program import share_of_good_letters

CALLS = itertools.count(1)


def deadly(plan, log):
    """The reward of rank 0, which kills a rank at a call of it."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, number = plan.get(count, (0, 0))

    def reward(prompt, reply):
        call = next(CALLS)
        with log.open("a") as file:
            file.write(f"{prompt.id} {reply!r}\n")
        if call == number:
            os.kill(child_of_rank(os.getppid(), rank), signal.SIGKILL)
        return share_of_good_letters(prompt, reply)

    return reward


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1))
    rlvr.Config.INLINE["reverse"] = deadly(json.loads(plan.read_text()), plan.with_suffix(".calls"))
    command.run(rlvr.main, rlvr.Config, rlvr.__doc__)
