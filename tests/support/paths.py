"""Folders of the clone, for tests that start programs or read files."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
RECIPES = ROOT / "recipes"
SCRIPTS = ROOT / "scripts"
DOCS = ROOT / "docs"
SOURCES = str(ROOT / "src")
_OUTER = os.environ.get("PYTHONPATH", "").split(os.pathsep)
PYTHONPATH = os.pathsep.join(filter(None, [SOURCES, str(TESTS), str(SCRIPTS), *_OUTER]))
"""For processes that import roll_lite, this package and scripts, and what this one can import."""
