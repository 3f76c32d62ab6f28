"""Scripts of a test, each in an interpreter of its own."""

import os
import subprocess
import sys
from textwrap import dedent

from support.paths import SOURCES


def run_recipe_file(folder, script):
    """Run a recipe as a user does."""
    path = folder / "recipe.py"
    path.write_text(dedent(script))
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": SOURCES},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(script: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": SOURCES}
    command = [sys.executable, "-c", dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def start_script(script: str) -> subprocess.Popen:
    """A script that goes on; what it prints can be read from `stdout`."""
    command = [sys.executable, "-c", dedent(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
