"""recipes/rlvr.py on a task of the tests, under python or torchrun: rlvr_program.py OPTIONS."""

import json
import sys

from roll_lite.options import from_flat
from roll_lite.recipes import rlvr
from support.recipes import call_recipe

GOOD = "abcdefghijklm"  # 13 of 98 tokens
REPLY_TOKENS = 4


def share_of_good_letters(prompt, reply):
    return sum(letter in GOOD for letter in reply) / REPLY_TOKENS


if __name__ == "__main__":
    rlvr.Config.INLINE["reverse"] = share_of_good_letters
    options = json.loads(sys.argv[1])
    call_recipe(rlvr, from_flat(rlvr.Config, **options | {"data": tuple(options["data"])}))
