"""Folders of the clone, for tests that start programs or read files."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
RECIPES = ROOT / "recipes"
SCRIPTS = ROOT / "scripts"
DOCS = ROOT / "docs"
SOURCES = str(ROOT / "src")
PYTHONPATH = f"{SOURCES}:{TESTS}:{SCRIPTS}"
"""For processes that import roll_lite, this package and scripts."""
