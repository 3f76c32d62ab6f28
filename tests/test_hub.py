"""Names of the hub, from a hub on this machine: what is downloaded, when, and what errors say."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub import serve_hub
from support.launch import run_torchrun
from support.paths import RECIPES

from roll_lite import hub as names
from roll_lite.checks import UserError
from roll_lite.command_line import parse
from roll_lite.data import parse_mixture
from roll_lite.recipes import rlvr

PARQUET = "refs/convert/parquet"
ROWS = b"".join(
    b'{"prompt": "Reverse %s", "reply": "b"}\n' % word for word in (b"ab", b"cb", b"db")
)


@pytest.fixture
def hub(tmp_path, monkeypatch, toy_folder):
    """A hub with the toy as me/toy; the cache is empty, and in tmp_path."""
    names.data_files.cache_clear()
    with serve_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.chdir(tmp_path)
        found.add_model("me/toy", toy_folder, **{"README.md": b"# toy", "pytorch_model.bin": b"x"})
        found.environment = {
            "HF_ENDPOINT": found.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"
        }  # fmt: skip
        yield found


def test_a_model_is_downloaded_once_and_only_what_is_read(hub, toy_folder, tmp_path):
    folder = Path(names.model_folder("me/toy"))
    assert folder.name == hub.repos["me/toy"].commit and tmp_path in folder.parents
    read = {path.name for path in toy_folder.iterdir()}
    assert {*hub.downloads} == {path.name for path in folder.iterdir()} == read
    hub.requests.clear()
    assert names.model_folder("me/toy") == str(folder) and not hub.downloads


def test_a_newer_commit_comes_unless_one_is_named(hub):
    old = names.model_folder("me/toy")
    before = hub.repos["me/toy"].commit
    hub.repos["me/toy"].files["generation_config.json"] = b'{"eos_token_id": 2}'
    assert names.model_folder("me/toy") != old
    assert names.model_folder(f"me/toy@{before}") == old


def test_without_network_the_cache_is_used(hub, monkeypatch):
    folder = names.model_folder("me/toy")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert names.model_folder("me/toy") == folder and not hub.requests
    problem = r"nor whole in the cache .*/hf/hub, and HF_HUB_OFFLINE=1 forbids .*download me/other`"
    with pytest.raises(UserError, match=problem):
        names.model_folder("me/other")


def test_a_local_folder_wins(hub, tmp_path):
    assert names.is_model_name("me/toy") and names.is_data_name("me/rows:main:train")
    (tmp_path / "me/toy").mkdir(parents=True)
    (tmp_path / "me/rows").write_text("")
    assert not names.is_model_name("me/toy") and not names.is_data_name("me/rows")


@pytest.mark.parametrize("text", ["toy", "a/b/c", "/a/b", "shape:qwen3-0.6b", "runs/a/model"])
def test_paths_are_no_names_of_models(text):
    assert not names.is_model_name(text)


@pytest.mark.parametrize(
    "text", ["rows.jsonl", "data/rows.jsonl", "a/b/c", "reverse:5", "mine:x=1"]
)
def test_paths_and_tasks_are_no_names_of_data(text):
    assert not names.is_data_name(text)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("me/gone", r"me/gone is neither on this machine nor a model at http.*set HF_TOKEN"),
        ("me/toy@v2", r"me/toy has no revision 'v2'; http.*/me/toy/tree/main lists them"),
        ("me/gated", r"me/gated is gated: ask for access at http.*/me/gated, and set HF_TOKEN"),
    ],
)
def test_errors_of_models_name_the_remedy(hub, toy_folder, name, problem):
    hub.add_model("me/gated", toy_folder).is_gated = True
    with pytest.raises(UserError, match=problem):
        names.model_folder(name)


def test_a_hub_that_cannot_be_reached(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match=r"http://127.0.0.1:9 cannot be reached .*tiny FOLDER`, or fill the cache"
    ):
        names.model_folder("me/toy")
    with pytest.raises(UserError, match=r"cannot be reached .*`hf download me/x --repo-type data"):
        names.pinned_data("me/x:main:train")


def test_data_are_files_of_a_repository(hub):
    commit = hub.add_data(
        "me/rows", {"a/1.jsonl": ROWS, "a/2.jsonl": ROWS * 2, "b.json": b"[]"}
    ).commit
    pinned = names.pinned_data("me/rows:a/*.jsonl")
    assert pinned == f"me/rows@{commit}:a/*.jsonl" and names.is_pinned(pinned)
    assert [path.name for path in names.data_files(pinned)] == ["1.jsonl", "2.jsonl"]
    assert hub.downloads.count("1.jsonl") == 1 and "b.json" not in hub.downloads
    assert names.data_label(pinned) == "me/rows:a/*.jsonl"
    with pytest.raises(
        UserError, match=r"has no file c\.jsonl; it has a/1\.jsonl, a/2\.jsonl, b\."
    ):
        names.pinned_data("me/rows:c.jsonl")
    with pytest.raises(UserError, match=r"the hub has not converted it; name its files, as OWNER"):
        names.pinned_data("me/rows")


def test_data_are_a_config_and_a_split(hub, monkeypatch):
    files = {
        f"{place}/0000.parquet": b"PAR1" for place in ("main/train", "main/test", "other/test")
    }
    commit = hub.add_data("me/sums", files, PARQUET).commit
    whole = f"me/sums@{commit}:main:train"
    assert names.pinned_data("me/sums:main") == names.pinned_data("me/sums:main:train") == whole
    (path,) = names.data_files(whole)
    assert path.parts[-4:] == (commit, "main", "train", "0000.parquet")
    with pytest.raises(
        UserError, match="config 'default' with a split 'train'; use me/sums:main:test, "
    ):
        names.pinned_data("me/sums")
    hub.add_data("me/one", {"default/train/0000.parquet": b"PAR1"}, PARQUET)
    assert names.pinned_data("me/one").endswith(":default:train")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert names.pinned_data("me/sums:main:train") == whole
    names.data_files.cache_clear()
    assert names.data_files(whole) == (path,)


SFT = ["--steps", "2", "--rows-per-step", "2", "--lr", "1e-3"]


def test_a_run_names_both_and_is_resumed_with_the_same(hub, command):
    """Though the hub has newer commits by then, and the same names are given again."""
    first = hub.add_data("me/rows", {"rows.jsonl": ROWS})
    arguments = ["--model", "me/toy", "--data", "me/rows:rows.jsonl", *SFT, "--run-dir", "runs/a"]
    code, said = command(RECIPES / "sft.py", *arguments)
    assert not code, said
    folder = names.model_folder("me/toy")
    pinned = f"me/rows@{first.commit}:rows.jsonl"
    assert f"me/toy is {folder}\nme/rows:rows.jsonl is {pinned}" in said
    saved = json.loads(Path("runs/a/config.json").read_text())
    assert (saved["model"], saved["data"]) == (folder, pinned)
    assert saved["from_hub"] == {"me/toy": folder, "datasets/me/rows:rows.jsonl": pinned}

    hub.repos["me/toy"].files["README.md"] = b"new"
    hub.add_data("me/rows", {"rows.jsonl": ROWS * 2})
    hub.requests.clear()
    arguments = [*arguments, "--resume", "auto", "--steps", "4"]
    code, said = command(RECIPES / "sft.py", *arguments)
    assert not code and "resum" in said, said
    assert not hub.requests
    saved = json.loads(Path("runs/a/config.json").read_text())
    assert saved["from_hub"] == {"me/toy": folder, "datasets/me/rows:rows.jsonl": pinned}


def test_every_option_of_a_model_takes_a_name(hub, toy_folder):
    args = ["--model", "me/toy", "--data", "reverse:2", "--advantage", "opd"]
    args += ["--teacher", "math=me/toy"]
    args += ["--judge", "me/toy", "--kl-coef", "0.1", "--reference", "me/toy", "--max-tokens", "4"]
    cfg = parse(rlvr.Config, "", args)
    folder = names.model_folder("me/toy")
    assert cfg.teaching.teacher == (f"math={folder}",)
    assert {cfg.model, cfg.scoring.judge, cfg.kl.reference} == {folder}
    with pytest.raises(UserError, match=r"^teacher='me/gone': me/gone is neither on this machine"):
        parse(rlvr.Config, "", [*args, "--teacher", "me/gone"])


def test_weights_of_a_mixture_stay(hub):
    commit = hub.add_data("me/rows", {"rows.jsonl": ROWS}).commit
    args = [
        "--model",
        "me/toy",
        "--max-tokens",
        "4",
        "--data",
        "me/rows:rows.jsonl@0.3",
        "reverse:2",
    ]
    data = parse(rlvr.Config, "", args).data
    assert data == (f"me/rows@{commit}:rows.jsonl@0.3", "reverse:2")
    assert [(e.source, float(e.weight)) for e in parse_mixture(data)] == [
        (f"me/rows@{commit}:rows.jsonl", 0.3), ("reverse:2", 1.0)
    ]  # fmt: skip
    (entry,) = parse_mixture(data[:1] and (f"me/rows@{commit}:rows.jsonl",))
    assert (entry.source, entry.kind, entry.weight) == (f"me/rows@{commit}:rows.jsonl", "file", 1)


def test_one_rank_of_a_node_asks_for_all(hub, monkeypatch):
    """With HF_ENDPOINT, as users set it; then from the cache with HF_HUB_OFFLINE=1."""
    hub.add_data("me/rows", {"rows.jsonl": ROWS})
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    arguments = [RECIPES / "sft.py", "--model", "me/toy", "--data", "me/rows:rows.jsonl", *SFT]
    said = run_torchrun(2, *arguments, "--run-dir", "runs/a")
    assert said.count("me/toy is /") == 1
    asked = [path for path in hub.requests if "/revision/" in path or path.endswith("/me/rows")]
    assert len(asked) == 2 and hub.downloads.count("model.safetensors") == 1
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_torchrun(2, *arguments, "--run-dir", "runs/b")
    assert not hub.requests
    with pytest.raises(AssertionError) as failed:
        run_torchrun(2, RECIPES / "sft.py", "--model", "me/gone", *SFT, "--run-dir", "runs/c")
    said = str(failed.value)
    # By one rank, and again after torchrun's own traceback.
    assert said.count("error: model='me/gone': me/gone is neither on this machine nor whole") == 2
