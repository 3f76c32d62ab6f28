"""The pages that people read: their code runs, their options exist, their links lead somewhere."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib import import_module
from itertools import count

import pytest
from support.paths import DOCS, ROOT

from roll_lite.__main__ import TOOLS, recipe_names
from roll_lite.command_line import parse
from roll_lite.options import keywords
from roll_lite.own_files import import_file
from roll_lite.train.advantages import ADVANTAGES
from roll_lite.train.losses import LOSSES

MADE = (
    "runs/",
    "contracts/",
    "model/",
    "models/",
    "checkpoints/",
    "rollouts/",
    "tensorboard/",
    "wandb/",
)  # by runs
COMMANDS = {*recipe_names(), *TOOLS, "eject", "RECIPE"}
README = ROOT / "README.md"
NOTEBOOK = DOCS / "notebook"
ALL_PAGES = [README, *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in ALL_PAGES if NOTEBOOK not in page.parents]
GUIDES = [README, DOCS / "quickstart.md", DOCS / "concepts.md", *sorted(DOCS.glob("howto/*.md"))]
MAX_LINES = {
    "README.md": 150, "docs/results.md": 90, "docs/benchmarks.md": 90,
    "docs/reference/options.md": 420,  # a row for each option, made by a script
}  # fmt: skip
MAX_LINES_OF_A_GUIDE = 180
TOOLS_THAT_RUN = ("rewards try", "rewards check", "envs bench", "envs play", "plan")
"""Commands of guides that take seconds."""
MADE_MODEL = re.compile(r"--(?:model|teacher|reference) ((?:runs|models)/\S+)")
"""Folders of models that earlier commands of a page make."""
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands(page):
    """Lines of the page's shell blocks, without comments, joined where they go on."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    found = (shlex.split(line, comments=True) for line in text.splitlines())
    return [words for words in found if words]


# ---- code


@pytest.fixture
def folder_of(tmp_path, monkeypatch, tiny_folder):
    """Makes a folder with the files of a page that say their names, and the models it names."""

    def make(page):
        monkeypatch.chdir(tmp_path)
        for folder in {"models/tiny", "FOLDER", *MADE_MODEL.findall(page.read_text())}:
            (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder).symlink_to(tiny_folder)
        for language in ("python", "json"):
            for code in blocks(page, language):
                if name := re.match(r"# (\w+\.(?:py|jsonl))\n", code):
                    lines = code.removeprefix(name[0]) if language == "json" else code
                    (tmp_path / name[1]).write_text(lines)
        return tmp_path

    return make


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_the_python_of_a_guide_runs(page, folder_of):
    folder = folder_of(page)
    numbers = count()
    for code in blocks(page, "python"):
        path = folder / f"block_{next(numbers)}.py"
        path.write_text(code)
        import_file(path)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_the_commands_of_a_guide_are_understood(page, folder_of):
    """Options of recipes are read and checked, with the files of --code; short tools run."""
    folder_of(page)
    own = own_options(page)
    for words in commands(page):
        words = words[: words.index("|")] if "|" in words else words
        recipe = next((i for i, w in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", w)), None)
        if recipe is not None:
            name = words[recipe].removeprefix("recipes/").removesuffix(".py")
            assert_options_hold(name, words[recipe + 1 :], own)
        elif words[:1] == ["roll-lite"] and words[1] in recipe_names():
            assert_options_hold(words[1], words[2:], own)
        elif " ".join(words[:3]).startswith(tuple(f"roll-lite {tool}" for tool in TOOLS_THAT_RUN)):
            command = [sys.executable, "-m", "roll_lite", *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, f"{words}: {done.stderr}"


def assert_options_hold(recipe, words, own):
    """What --resume and --config name was written by a run that no test repeats."""
    if {"--resume", "--config", "--help", "..."} & {*words}:
        assert_options_exist(recipe, words, own)
    else:
        parse(import_module(f"roll_lite.recipes.{recipe}").Config, "", words)


@cache
def options_of(recipe):
    """Those of all functions included, of which --help shows the chosen ones alone."""
    config = import_module(f"roll_lite.recipes.{recipe}").Config
    base = re.findall(r"--([a-z][\w-]*)", help_of(config))
    functions = [*LOSSES.values(), *ADVANTAGES.values()]
    more = {name.replace("_", "-") for function in functions for name in keywords(function)}
    return {*base, *more, "resume", "config", "debug"}


def own_options(page):
    """Those that functions of the page's code bring."""
    nodes = [node for code in blocks(page, "python") for node in ast.walk(ast.parse(code))]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    own = [arg.arg for n in nodes if isinstance(n, kinds) for arg in n.args.kwonlyargs]
    return {name.replace("_", "-") for name in own}


def help_of(config):
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as out, pytest.raises(SystemExit):
        parse(config, "", ["--help", "all"])
    return out.getvalue()


def assert_options_exist(recipe, words, own):
    given = {re.split("[= ]", word)[0][2:] for word in words if re.match(r"--[a-z]", word)}
    known = options_of(recipe) | own
    assert given <= known, given - known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_a_page_names_exist(page):
    text = page.read_text().replace("\\\n", " ")
    own = own_options(page)
    for recipe in recipe_names():
        for line in re.findall(rf"(?:recipes/{recipe}\.py|roll-lite {recipe}) (.*)", text):
            command = re.split(r"[`#;]| -- ", line)[0]
            assert_options_exist(recipe, re.findall(r"(?<!\S)--[a-z][\w-]*", command), own)


def test_the_example_of_the_python_page_runs(tiny_folder, tmp_path, monkeypatch, capsys):
    (code,) = blocks(DOCS / "reference" / "python.md", "python")
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


# ---- links, names and sizes


def anchors(page):
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,4} (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    """Names in backticks that look like files or folders of the repository."""
    for name in re.findall(r"`((?:\w+/)*(?:\w+\.(?:py|sh|toml|cfg)|\w+/))`", page.read_text()):
        is_made = name.endswith("/") and name.startswith(MADE)
        of_example = name in ("mine.py", "my_agent.py")
        found = (ROOT / name).exists() or any((ROOT / "src").glob(f"**/{name}"))
        assert is_made or of_example or found or any((ROOT / "recipes").glob(name)), name


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "scripts").glob("*.sh"))], ids=lambda page: page.name
)
def test_commands_that_a_page_names_exist(page):
    text = page.read_text()
    assert set(re.findall(r"(?<![\w/])roll-lite (\w+)", text)) <= COMMANDS
    assert not re.findall(r"python -m roll_lite\.[\w.]+", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_history_and_ends_in_time(page):
    is_of_results = page.name in ("results.md", "benchmarks.md", "records.md")
    assert is_of_results or not COMMIT.findall(page.read_text())
    most = MAX_LINES.get(name_of(page), MAX_LINES_OF_A_GUIDE if page in GUIDES else 250)
    assert len(page.read_text().splitlines()) <= most


@pytest.mark.parametrize("page", [README, DOCS / "results.md", DOCS / "benchmarks.md"], ids=name_of)
def test_rows_with_numbers_link_to_what_they_were_taken_from(page):
    """In tables of results: a page of the notebook, or a log."""
    text = page.read_text()
    results = text.split("## Results")[1].split("\n## ")[0] if page == README else text
    rows = [row for row in re.findall(r"^\|.*\|$", results, re.M) if re.search(r"\d", row)]
    assert rows
    for row in rows:
        assert re.search(r"\]\((docs/)?notebook/[^)]+\)", row), row
