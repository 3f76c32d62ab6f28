"""Fixtures that tests of several packages use; functions that they share are in support."""

import fcntl
import os
import runpy
import signal
import sys
import textwrap

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a model hub; those of names have their own
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


import transformers
from support.launch import start_alone
from support.models import FAMILIES, make_reference, make_toy
from support.process_checks import new_sandbox_processes
from support.recipes import call_recipe, shorten_collection
from support.rlvr_program import share_of_good_letters
from support.runs import steps_of, toy_options

from roll_lite.characters import character_tokenizer
from roll_lite.code_files import BUILT_IN
from roll_lite.models.tiny import build_tiny
from roll_lite.options import from_flat
from roll_lite.recipes import rlvr, sft
from roll_lite.sandbox.sandbox import Sandbox, SandboxUnavailable

# a shell starts what runs in the background with SIGINT ignored; tests of Ctrl-C need it
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """What is kept for later runs, here for later tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    """(reference model, folder) of each family."""
    reference, folder = make_reference(request.param), tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all workers of this test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """Twice as wide as the toy: it learns to reverse two letters."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_toy(tmp_path_factory.mktemp("models") / "small", **sizes)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def place():
    with start_alone("cpu") as place:
        yield place


@pytest.fixture(scope="session")
def imitator(small_folder, shared_folder):
    """The run folder of a fine-tuning on two-letter words, mostly on careless replies.

    As in the quickstart, but for a model that is small enough to get there in a few seconds.
    """
    run_dir = shared_folder / "imitator"
    options = {
        "model": str(small_folder), "data": "reverse:2", "careless": 0.7, "steps": 150,
        "rows_per_step": 64, "warmup_steps": 5, "lr": 1e-2, "eval_every": 50,
        "eval_rows": 64, "run_dir": str(run_dir),
    }  # fmt: skip
    with (shared_folder / "imitator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker makes it, or has made it
        if not (run_dir / "model").exists():
            call_recipe(sft, from_flat(sft.Config, **options))
    return run_dir


@pytest.fixture(scope="session")
def full():
    """The sandbox, where the kernel has all that it needs."""
    try:
        with Sandbox("full") as sandbox:
            yield sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def rlimits():
    with Sandbox("rlimits") as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def either(request):
    """A sandbox for tests that are not about isolation."""
    try:
        return request.getfixturevalue("full")
    except pytest.skip.Exception:
        return request.getfixturevalue("rlimits")


@pytest.fixture(params=["full", "rlimits"])
def sandbox(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def started():
    """A function that finds the sandbox processes which began in the test."""
    with new_sandbox_processes() as started:
        yield started


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a script as a command does, but in this process; returns exit code and output.

    Of the output, first the errors, among them the progress of a slow run, then what it printed.
    """

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        capsys.readouterr()
        shorten_collection()
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, err + out

    return run


@pytest.fixture
def code_file(tmp_path, monkeypatch):
    """Writes files for --code, whose losses and advantages are forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {name: dict(table) for name, table in BUILT_IN.items()}

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    yield write
    for name, table in BUILT_IN.items():
        table.clear()
        table |= before[name]


@pytest.fixture
def here(toy_folder, tmp_path, monkeypatch):
    """Runs the recipe in this process."""
    monkeypatch.setitem(rlvr.Config.INLINE, "reverse", share_of_good_letters)

    def run(name, **changes):
        call_recipe(
            rlvr, from_flat(rlvr.Config, **toy_options(toy_folder, tmp_path / name, **changes))
        )
        return steps_of(tmp_path / name)

    return run


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory):
    """A sequence classifier of transformers' own, which says what each reply is worth."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "reward", character_tokenizer()
    base = make_reference("qwen3", vocab_size=len(tokenizer)).config
    base.update({"num_labels": 1, "pad_token_id": tokenizer.convert_tokens_to_ids("~")})
    torch.manual_seed(0)
    model = transformers.Qwen3ForSequenceClassification(base).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder
