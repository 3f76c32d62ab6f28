"""The page of options is what the code says, and lacks none."""

import re
import subprocess
import sys

import pytest
from support.paths import DOCS, SCRIPTS

from roll_lite.flags import _arguments, all_flags
from roll_lite.options import from_flat
from roll_lite.recipes import agentic, distill, dpo, evaluate, rlvr, sft

PAGE = (DOCS / "reference" / "options.md").read_text()
NOTED = {"chosen", "from_hub"}  # by the program, never given


def test_the_page_of_docs_is_that_of_the_code():
    command = [sys.executable, SCRIPTS / "options_page.py"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == PAGE


@pytest.mark.parametrize("recipe", [rlvr, agentic, sft, dpo, distill, evaluate])
def test_every_option_of_a_recipe_has_a_row_with_its_meaning(recipe):
    rows = dict(re.findall(r"^\| `(?:--)?([\w-]+)` \| .* \| (.*) \|$", PAGE, re.M))
    flags = all_flags(from_flat(recipe.Config, check=False))
    names = {flag.name.replace("_", "-") for listed in flags.values() for flag in listed}
    names |= _arguments(recipe.Config) - NOTED
    assert not {name for name in names if not rows.get(name)}


def test_a_default_that_depends_says_on_what():
    row = next(line for line in PAGE.splitlines() if "warmup-steps" in line)
    assert "`0` (rlvr, agentic); `20` (sft); `5` (dpo); `10` (distill)" in row
    assert "| `0.2` (ppo, segment, raft++, cispo); `0.0003` (gspo) |" in PAGE
