"""Small models of every family, made by transformers, which is the reference throughout."""

import fcntl
import os
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import transformers

from roll_lite.cluster.groups import choose_device, make_places, start_group
from roll_lite.cluster.rendezvous import read_launch
from roll_lite.device_map import DeviceMap, Role
from roll_lite.models.tiny import build_tiny, character_tokenizer
from roll_lite.options import from_flat
from roll_lite.sandbox.sandbox import Sandbox, SandboxUnavailable

# a shell starts what runs in the background with SIGINT ignored; tests of Ctrl-C need it
signal.signal(signal.SIGINT, signal.default_int_handler)

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, 
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "smollm2": (
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", {"num_attention_heads": 8, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@contextmanager
def start_alone(device):
    """The place of a process that runs everything itself."""
    chosen = choose_device(device, read_launch())
    start_group(chosen, read_launch(), dist.HashStore(), seconds=300)
    try:
        alone = DeviceMap((Role("all", (0,)),), 1)
        yield make_places(alone, 0, chosen, report=print, lost=set(), regroup=None)["all"]
    finally:
        dist.destroy_process_group()


def make_reference(family: str, seed: int = 0, **more):
    """A transformers model of the family with random weights, biases and norms included."""
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes | more))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, 0.08)
    return model


@pytest.fixture(scope="session", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    """(reference model, folder) of each family."""
    reference, folder = make_reference(request.param), tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, folder


def make_toy(folder, **changes):
    """One layer, random weights, one token per character: it learns easy things in a second."""
    tokenizer = character_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 64,
    } | changes  # fmt: skip
    config = transformers.Qwen3Config(
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    import sft  # a recipe: only now is its folder on the path

    run_dir = shared_folder / "imitator"
    options = {
        "model": str(small_folder), "data": "reverse:2", "careless": 0.7, "steps": 150,
        "rows_per_step": 64, "warmup_steps": 5, "lr": 1e-2, "eval_every": 50,
        "eval_rows": 64, "run_dir": str(run_dir),
    }  # fmt: skip
    with (shared_folder / "imitator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker makes it, or has made it
        if not (run_dir / "model").exists():
            sft.main(from_flat(sft.Config, **options))
    return run_dir


@pytest.fixture(scope="session")
def full():
    """The sandbox, where the kernel has all that it needs."""
    try:
        sandbox = Sandbox("full")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def rlimits():
    with Sandbox("rlimits") as sandbox:
        yield sandbox


@pytest.fixture(params=["full", "rlimits"])
def sandbox(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a script as a command does, but in this process; returns exit code and output.

    Of the output, first the errors, among them the progress of a slow run, then what it printed.
    """

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        capsys.readouterr()
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, err + out

    return run


def run_recipe(recipe, *arguments, num_ranks=1):
    """As a user does: python, or torchrun for several ranks; returns what was printed."""
    return run_torchrun(num_ranks, RECIPES / f"{recipe}.py", *arguments)


def run_torchrun(num_ranks, program, *arguments):
    """forked_ranks.py starts ranks faster."""
    launch = [sys.executable]
    if num_ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launch, program, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,  # only for a hang: a busy machine is slow
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
