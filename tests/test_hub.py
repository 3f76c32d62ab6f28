"""Names on the Hugging Face Hub, from a hub on this machine: what is downloaded, when and by which
rank, and what errors say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub import serve_hub
from support.launch import run_torchrun
from support.paths import RECIPES, SOURCES

from roll_lite import hub as names
from roll_lite.checks import UserError
from roll_lite.command_line import parse
from roll_lite.data import Mixture, held_out, parse_mixture
from roll_lite.hub_options import with_hub
from roll_lite.planning.__main__ import main as plan
from roll_lite.recipes import rlvr
from roll_lite.replay import main as replay
from roll_lite.train.export import main as export

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


WEIGHTS = "model.safetensors"


def test_a_killed_download_is_never_used_as_whole_and_comes_again(hub, toy_folder, monkeypatch):
    hub.stalls_at = WEIGHTS
    code = "from roll_lite import hub; hub.model_folder('me/toy')"
    env = os.environ | hub.environment | {"PYTHONPATH": SOURCES}
    killed = subprocess.Popen([sys.executable, "-c", code], env=env)
    assert hub.has_stalled.wait(60)
    killed.kill()
    killed.wait()
    (folder,) = Path(constants.HF_HUB_CACHE).glob("models--me--toy/snapshots/*")
    assert (folder / "config.json").is_file() and names.missing_weights(folder) == [WEIGHTS]
    with monkeypatch.context() as without_network:
        without_network.setattr(constants, "HF_HUB_OFFLINE", True)
        for listing in Path(constants.HF_HUB_CACHE).glob("models--me--toy/trees"):
            shutil.rmtree(listing)  # as of what another program has put into the cache
            with pytest.raises(UserError, match=rf"has no {WEIGHTS}; fill the cache by `hf downl"):
                names.model_folder("me/toy")
    hub.stalls_at = ""
    assert names.model_folder("me/toy") == str(folder)
    assert (folder / WEIGHTS).read_bytes() == (toy_folder / WEIGHTS).read_bytes()


def test_shards_that_the_index_names_are_downloaded(hub, toy_folder, tmp_path):
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) for n in (1, 2)}
    index = json.dumps({"weight_map": {"a": min(shards), "b": max(shards)}}).encode()
    (folder := tmp_path / "sharded").mkdir()
    (folder / "config.json").write_bytes((toy_folder / "config.json").read_bytes())
    hub.add_model("me/sharded", folder, **shards, **{names.INDEX: index})
    found = Path(names.model_folder("me/sharded"))
    (found / max(shards)).unlink()
    assert names.missing_weights(found) == [max(shards)]
    hub.requests.clear()
    names.download_weights(str(found))
    assert not names.missing_weights(found) and {*hub.downloads} <= {max(shards)}


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
    with pytest.raises(
        UserError, match=r"the Hugging Face Hub has not converted it; name its files"
    ):
        names.pinned_data("me/rows")


def test_data_that_the_cache_has_in_part_are_downloaded_again(hub, monkeypatch):
    hub.add_data("me/rows", {"1.jsonl": ROWS, "2.jsonl": ROWS})
    pinned = names.pinned_data("me/rows:*.jsonl")
    first, second = names.data_files(pinned)
    second.unlink()
    names.data_files.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"me/rows is neither on this machine nor whole in the cach"
    ):
        names.data_files(pinned)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert names.data_files(pinned) == (first, second) and second.read_bytes() == ROWS
    with pytest.raises(UserError, match=r"names no file: me/rows has no 3\.jsonl there"):
        names.data_files(pinned.replace("*", "3"))


def test_data_of_several_owners_have_names_of_their_own(hub, tmp_path):
    """In a mixture and in metrics; as short as they can be, and without the commit."""
    owners = "ann", "bob"
    files = {"train.jsonl": ROWS, "test.jsonl": ROWS}
    for owner in owners:
        hub.add_data(f"{owner}/maths", files)
    hub.add_data("bob/code", files)
    (tmp_path / "code.jsonl").write_bytes(ROWS)

    def sources_of(*entries):
        found = held_out([names.pinned_data(e) if ":" in e else e for e in entries], None)
        return list(dict.fromkeys(prompt.source for prompt in found))

    both = [f"{owner}/maths:train.jsonl" for owner in owners]
    assert sources_of(*both) == ["ann-maths", "bob-maths"]
    assert sources_of(both[0], "bob/code:test.jsonl") == ["maths", "code"]
    assert sources_of(both[0], "ann/maths:test.jsonl") == [
        "maths-train.jsonl", "maths-test.jsonl"
    ]  # fmt: skip
    assert sources_of(*both, "bob/maths:test.jsonl", "bob/code:train.jsonl", "code.jsonl") == [
        "ann-maths", "bob-maths-train.jsonl", "maths-test.jsonl", "code-train.jsonl", "code.jsonl"
    ]  # fmt: skip


def test_another_commit_of_the_same_rows_has_the_same_order(hub):
    repo = hub.add_data("ann/maths", {"train.jsonl": ROWS * 1})

    def order():
        mixture = Mixture([names.pinned_data("ann/maths:train.jsonl")], seed=0)
        return [next(mixture).messages[0]["content"] for _ in range(12)]

    before = order()
    repo.commit_more(**{"README.md": b"new"})
    assert order() == before


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


@pytest.mark.parametrize("lost", ["weights", "cache"])
def test_a_resumed_run_restores_what_the_cache_has_lost(hub, command, toy_folder, lost):
    hub.add_data("me/rows", {"rows.jsonl": ROWS})
    arguments = ["--model", "me/toy", "--data", "me/rows:rows.jsonl", *SFT, "--run-dir", "runs/a"]
    code, said = command(RECIPES / "sft.py", *arguments)
    assert not code, said
    folder = Path(names.model_folder("me/toy"))
    hub.repos["me/toy"].commit_more(**{"README.md": b"new"})
    if lost == "weights":
        (folder / WEIGHTS).unlink()
    else:
        shutil.rmtree(constants.HF_HUB_CACHE)
        names.data_files.cache_clear()
    again = ["--resume", "runs/a"] if lost == "cache" else [*arguments, "--resume", "auto"]
    code, said = command(RECIPES / "sft.py", *again, "--steps", 4)
    assert not code and "resum" in said, said
    assert (folder / WEIGHTS).read_bytes() == (toy_folder / WEIGHTS).read_bytes()


BRIEF = ["--data", "reverse:2", "--max-tokens", 4]


def test_options_are_checked_before_weights_are_downloaded(hub, command):
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/metrics.jsonl").write_text("{}\n")
    for wrong, problem in (
        (["--max-tokens", 10**6], "max_tokens=1000000 must be below the model's"),
        (["--loss", "gpso"], "gpso"),
        (["--device-map", "generate=0"], "train"),
        (["--eval-data", "nowhere.jsonl"], "'nowhere.jsonl' is neither a file"),
        (["--run-dir", "runs/old"], "runs/old"),
    ):
        code, said = command(RECIPES / "rlvr.py", "--model", "me/toy", *BRIEF, *wrong)
        assert code == 2 and problem in said, said
    assert WEIGHTS not in hub.downloads


def test_a_plan_downloads_no_weights(hub, command):
    code, said = command(RECIPES / "rlvr.py", "--model", "me/toy", *BRIEF, "--plan")
    assert not code and "parameters" in said, said
    assert {*hub.downloads} & {"config.json", "tokenizer.json", WEIGHTS} == {
        "config.json", "tokenizer.json"
    }  # fmt: skip


def test_roll_lite_plan_takes_a_name(hub, capsys):
    arguments = ["--world-size", "1", "--device-gib", "80", "--max-tokens", "16"]
    assert plan(["--model", "me/toy", "--prompt-tokens", "16", *arguments]) == 0
    said = capsys.readouterr().out
    assert "--model me/toy " in said and WEIGHTS not in hub.downloads
    assert plan(["--model", "me/gone", *arguments]) == 2
    assert "me/gone is neither on this machine nor a model at" in capsys.readouterr().err


def test_replay_and_export_take_names_and_restore_what_is_gone(hub, tmp_path, command, capsys):
    small = ["--steps", 1, "--prompts-per-step", 2, "--samples-per-prompt", 2, "--eval-every", 0]
    small += ["--kv-cache-gib", 0.02, "--checkpoint-every", 1, "--device", "cpu"]
    run = ["--model", "me/toy", *BRIEF, *small, "--run-dir", "runs/a"]
    code, said = command(RECIPES / "rlvr.py", *run, "--lora-rank", 2)
    assert not code, said
    row = json.loads(Path("runs/a/rollouts/step_00001.jsonl").read_text().splitlines()[0])
    sample = ["--sample", f"1/{row['prompt_id']}/{row['index']}"]
    (checkpoint,) = map(str, Path("runs/a/checkpoints").glob("step-*"))
    cache = Path(constants.HF_HUB_CACHE)
    for model in ([], ["--model", "me/toy"]):
        shutil.rmtree(cache)
        assert replay(["runs/a", *sample, *model]) == 0, capsys.readouterr()
        shutil.rmtree(cache)
        out = tmp_path / f"out{len(model)}"
        assert export([checkpoint, str(out), *model]) == 0, capsys.readouterr()
        exported = (out / WEIGHTS).read_bytes()
        assert exported == Path("runs/a/model", WEIGHTS).read_bytes()
    assert export([checkpoint, "out", "--model", "me/gone"]) == 2
    assert "me/gone is neither on this machine nor a model at" in capsys.readouterr().err


def test_an_evaluation_takes_names(hub, command, toy_folder, tmp_path):
    hub.add_data("me/rows", {"rows.json": b'[{"q": "Reverse ab", "a": 1e1}, {"q": "4", "a": 4}]'})
    command_line = ["--model", "me/toy", "--data", "me/rows:rows.json", "--max-tokens", 4]
    command_line += [
        "--columns",
        "prompt=q",
        "ground_truth=a",
        "domain=math",
        "--run-dir",
        "runs/a",
    ]
    code, said = command(RECIPES / "evaluate.py", *command_line, "--device", "cpu")
    assert not code and "pass@1" in said, said
    lines = Path("runs/a/rollouts/step_00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["ground_truth"] for line in lines] == ["1e1", "4"]
    saved = json.loads(Path("runs/a/config.json").read_text())
    assert saved["from_hub"].keys() == {"me/toy", "datasets/me/rows:rows.json"}


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


RANK = """
import json, sys
from roll_lite.hub_options import with_hub

print("asks", flush=True)
print(with_hub(json.loads(sys.argv[1]))["model"])
"""


@pytest.mark.parametrize("is_resumed", [False, True])
def test_ranks_wait_for_the_first_of_their_node(hub, monkeypatch, tmp_path, is_resumed):
    """The second cannot reach the hub, and need not: when a run is started, and when it is resumed
    without its snapshot."""
    folder = names.config_folder("me/toy")
    shutil.rmtree(constants.HF_HUB_CACHE)
    options = {"model": "me/toy", "from_hub": {"me/toy": folder} if is_resumed else {}}
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "-", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)

    def about(rank):
        (folder := tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        file = str(folder / "error.json")
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": file}

    command = [sys.executable, "-c", RANK, json.dumps(options)]
    alone = {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": SOURCES}
    env = os.environ | hub.environment | about(1) | alone
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout.readline() == "asks\n"
        for name, value in about(0).items():
            monkeypatch.setenv(name, value)
        assert with_hub(options)["model"] == folder
        assert second.stdout.read().splitlines() == [folder]
    assert second.returncode == 0 and Path(folder, "config.json").is_file()


@pytest.mark.slow
def test_one_rank_of_a_node_asks_for_all(hub, monkeypatch):
    """With HF_ENDPOINT, as users set it; then from the cache with HF_HUB_OFFLINE=1."""
    hub.add_data("me/rows", {"rows.jsonl": ROWS})
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    arguments = [RECIPES / "sft.py", "--model", "me/toy", "--data", "me/rows:rows.jsonl", *SFT]
    said = run_torchrun(2, *arguments, "--run-dir", "runs/a")
    assert said.count("me/toy is /") == 1
    asked = [path for path in hub.requests if "/revision/" in path or path.endswith("/me/rows")]
    assert len(asked) == 2 and hub.downloads.count(WEIGHTS) == 1
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_torchrun(2, *arguments, "--run-dir", "runs/b")
    assert not hub.requests
    shutil.rmtree(constants.HF_HUB_CACHE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    run_torchrun(2, RECIPES / "sft.py", "--resume", "runs/a", "--steps", 3)
    assert {hub.downloads.count(name) for name in ("config.json", WEIGHTS, "rows.jsonl")} == {1}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AssertionError) as failed:
        run_torchrun(2, RECIPES / "sft.py", "--model", "me/gone", *SFT, "--run-dir", "runs/c")
    said = str(failed.value)
    # By one rank, and again after torchrun's own traceback.
    assert said.count("error: model='me/gone': me/gone is neither on this machine nor whole") == 2
