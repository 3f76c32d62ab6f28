"""The pages of docs/ that hold code or name files."""

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
from support.paths import ROOT

from roll_lite.__main__ import TOOLS, recipe_names
from roll_lite.command_line import parse
from roll_lite.options import keywords
from roll_lite.train.advantages import ADVANTAGES
from roll_lite.train.losses import LOSSES

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


def test_the_example_of_the_code_page_has_flags_and_scores(tmp_path):
    """Its commands that take seconds, as they stand there."""
    page = (ROOT / "docs" / "code.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "mine.py").write_text(code)
    printed = []
    for line in re.findall(r"^ {4}(python recipes/.*--help|roll-lite rewards.*?)\s+#", page, re.M):
        program, *words = shlex.split(line)
        words = ["-m", "roll_lite", *words] if program == "roll-lite" else words
        words = [ROOT / word if word.startswith("recipes/") else word for word in words]
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed.append(done.stdout)
    options, score = printed
    assert "--pull FLOAT" in options and "--focus FLOAT" in options
    assert score.split()[:2] == ["score", "0.333333"]


@pytest.mark.parametrize("recipe", recipe_names())
def test_options_in_commands_of_a_recipe_exist(recipe, capsys):
    """Those of functions, of which --help shows the chosen ones alone, included."""
    config = import_module(f"roll_lite.recipes.{recipe}").Config
    with pytest.raises(SystemExit):
        parse(config, "", ["--help", "all"])
    known = {*re.findall(r"--([a-z][\w-]*)", capsys.readouterr().out), "resume", "config", "debug"}
    functions = [*LOSSES.values(), *ADVANTAGES.values()]
    known |= {name.replace("_", "-") for function in functions for name in keywords(function)}
    known |= {"pull", "focus"}  # of the example in code.md
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"(?:recipes/{recipe}\.py|roll-lite {recipe}) (.*)", text):
            command = re.split(r"[`#;]| -- ", line)[0]
            given = {*re.findall(r"(?<!\S)--([a-z][\w-]*)", command)}
            assert given <= known, page.name


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
