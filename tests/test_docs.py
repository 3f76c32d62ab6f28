"""The pages of docs/ that hold code or name files."""

import re

import pytest
from support.paths import ROOT

from roll_lite.__main__ import TOOLS, recipe_names

MADE = ("runs/", "models/", "checkpoints/", "rollouts/", "tensorboard/")  # by runs
COMMANDS = {*recipe_names(), *TOOLS, "eject", "RECIPE"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_of_the_library_page_runs(tiny_folder, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 24
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_folder)
    names = {}
    exec(code, names)
    steps = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1] in "12"]
    assert [step for step, *_ in steps] == ["1", "2"]
    assert all(float(mismatch) < 1e-4 for *_, mismatch in steps)  # the new weights arrived
    assert names["trainer"].state()["embedding"].equal(names["engine"].model.embedding)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    """Names in backticks that look like files or folders of the repository, and links."""
    text = page.read_text()
    for name in re.findall(r"`((?:\w+/)*(?:\w+\.(?:py|sh|toml|cfg)|\w+/))`", text):
        if name.endswith("/") and name.startswith(MADE):
            continue
        found = (ROOT / name).exists() or any((ROOT / "src").glob(f"**/{name}"))
        assert found or any((ROOT / "recipes").glob(name)), f"{page.name}: {name}"
    for link in re.findall(r"\]\(((?!http)[^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "scripts").glob("*.sh"))], ids=lambda page: page.name
)
def test_commands_that_a_page_names_exist(page):
    text = page.read_text()
    assert set(re.findall(r"(?<![\w/])roll-lite (\w+)", text)) <= COMMANDS
    assert not re.findall(r"python -m roll_lite\.[\w.]+", text)
