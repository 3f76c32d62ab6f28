"""Flags that follow from options, their help, and the options of a run that is resumed."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.paths import DOCS
from support.scripts import run_script
from support.training_data import make_groups

import roll_lite as rl
from roll_lite.checks import UserError
from roll_lite.cluster.launch import Launch
from roll_lite.command_line import _base, parse
from roll_lite.device_map import Device
from roll_lite.flags import _arguments, all_flags
from roll_lite.options import flatten, from_flat, keywords, open_parts
from roll_lite.other_names import TRL, VERL, ours
from roll_lite.planning.resolve import resolve, with_chosen
from roll_lite.recipes import agentic, distill, dpo, evaluate, rlvr, sft
from roll_lite.report.config_file import read_options, to_json, write_config
from roll_lite.train.advantages import ADVANTAGES
from roll_lite.train.losses import LOSSES
from roll_lite.train.sample_rows import with_advantages

MINE = """
from __future__ import annotations

from typing import Annotated

from typing_extensions import Doc

import roll_lite as rl

Power = Annotated[float, Doc("The power of the ratio."), rl.Above(0)]


def mine(logprobs_R, delta_R, advantages_R, batch, *, power: Power = 2.0, no_ratio: bool = False):
    return -advantages_R * logprobs_R * power


def shifted(rewards_S, groups_S, *, shift: Annotated[float, Doc("Added to all.")] = 0.5) -> (
    rl.PerSample
):
    return rewards_S + shift


LOSSES = {"mine": mine}
ADVANTAGES = {"shifted": shifted}
"""
NAMED = ("--loss", "mine", "--advantage", "shifted")


@pytest.fixture
def mine(code_file):
    return code_file(MINE)


@pytest.fixture
def read(toy_folder, tmp_path):
    """The options of a command line of rlvr.py."""

    def parsed(*args, config=rlvr.Config, fixed=rlvr.Config.FIXED):
        common = [] if "--resume" in args else ["--run-dir", str(tmp_path / "run")]
        return parse(config, rlvr.__doc__, ["--model", str(toy_folder), *common, *args], fixed)

    return parsed


def flags_of(text):
    """Those that a --help shows, with the words that follow."""
    parts = re.split(r"^[ │] (?:-h, )?--", text, flags=re.MULTILINE)[1:]
    blocks = [re.sub(r"[\s│]+", " ", part) for part in parts]
    names = [re.match(r"[\w-]+", block)[0].replace("-", "_") for block in blocks]
    return {n: block for n, block in zip(names, blocks, strict=True) if n != "help"}


@pytest.fixture
def shown(read, capsys):
    """The flags of a --help, each with its words, and the whole text."""

    def helped(*args, **options):
        with pytest.raises(SystemExit) as end:
            read(*args, "--help", **options)
        assert not end.value.code
        text = capsys.readouterr().out
        return flags_of(text), re.sub(r"[\s│]+", " ", text)

    return helped


# ---- options of functions


def test_options_of_ones_own_functions_are_flags(shown, mine):
    flags, text = shown("--code", mine, *NAMED)
    assert "no_ratio" in flags and "clip_low" not in flags
    assert flags["power"].startswith("power FLOAT mine: The power of the ratio. (default: 2.0)")
    assert flags["shift"].startswith("shift FLOAT shifted: Added to all. (default: 0.5)")
    assert ",mine}" in flags["loss"] and ",shifted}" in text
    flags, _ = shown("--code", mine)
    assert not {"power", "shift"} & {*flags} and "clip_low" in flags


def test_values_of_ones_own_options_reach_the_function_and_the_record(read, mine):
    cfg = read("--code", mine, *NAMED, "--power", "3", "--no-ratio", "--shift=-1.5")
    assert cfg.policy_loss.function(1.0, 0.0, 2.0, None) == -6.0
    assert cfg.policy_loss.values == {"power": 3.0, "no_ratio": True}
    low, high = with_advantages(make_groups([[0.0, 1.0]]), cfg.advantages)
    assert (low.advantages[-1], high.advantages[-1]) == (-1.5, -0.5)
    assert {"power": 3.0, "no_ratio": True, "shift": -1.5}.items() <= to_json(cfg).items()
    plain = read("--code", mine, *NAMED)
    assert {"power": 2.0, "no_ratio": False, "shift": 0.5}.items() <= flatten(plain).items()
    with pytest.raises(UserError, match=r"power=0\.0 must be above 0"):
        read("--code", mine, *NAMED, "--power", "0")


def test_options_of_other_functions_are_explained(read, mine):
    with pytest.raises(UserError, match="--tau is read by loss kimi; loss='ppo' does not: choose"):
        read("--tau", "0.5")
    with pytest.raises(UserError, match=r"--clip-low is read by loss ppo, .*; loss='tis' does not"):
        read("--loss", "tis", "--clip-low=0.1")
    with pytest.raises(UserError, match="--lam is read by advantage gae; advantage='grpo' does no"):
        read("--lam", "0.9")
    with pytest.raises(UserError, match="--power is read by loss mine; loss='ppo' does not"):
        read("--code", mine, "--power", "3")
    with pytest.raises(UserError, match="--divide-by-std is read by advantage grpo, gigpo"):
        read("--code", mine, *NAMED, "--divide-by-std")


def test_options_without_a_flag_are_explained(read, toy_folder, monkeypatch):
    with pytest.raises(UserError) as error:
        read("--lora-alpha", "16")
    said, line = str(error.value).split("\n")
    assert said.startswith("lora_alpha has no flag") and "roll-lite eject rlvr mine" in said
    assert line.strip() == "training: rl.TrainingOptions = rl.TrainingOptions(lora_alpha=...)"
    with pytest.raises(UserError) as error:
        parse(sft.Config, "", ["--model", str(toy_folder), "--max-grad-norm", "2"])
    line = str(error.value).split("\n")[1].strip()
    assert line == (
        "training: rl.TrainingOptions = rl.TrainingOptions(warmup_steps=20, max_grad_norm=...)"
    )

    @rl.unique_options
    @dataclass(frozen=True, kw_only=True)
    class Config(rlvr.Config):
        training: rl.TrainingOptions = rl.TrainingOptions(max_grad_norm=0.5)

    assert read(config=Config).training.max_grad_norm == 0.5


def test_a_recipe_may_have_other_defaults_of_functions(read, shown):
    @dataclass(frozen=True, kw_only=True)
    class Config(rlvr.Config):
        """A copy."""

        policy_loss: rl.LossOptions = rl.LossOptions.of(loss="gspo", clip_low=0.01)

    cfg = read(config=Config)
    assert cfg.policy_loss.values == {"clip_low": 0.01, "clip_high": 4e-4}
    assert read("--clip-high", "1", config=Config).policy_loss.values == {
        "clip_low": 0.01, "clip_high": 1.0,
    }  # fmt: skip
    assert "below 1 - clip_low. (default: 0.01)" in shown(config=Config)[0]["clip_low"]
    assert read("--loss", "ppo", config=Config).policy_loss.values["clip_low"] == 0.2


def test_no_loss_or_estimator_has_an_option_that_is_another_one():
    """Nor have two that may stand together the same."""
    of_losses = {name for function in LOSSES.values() for name in keywords(function)}
    of_estimators = {name for function in ADVANTAGES.values() for name in keywords(function)}
    functions = {"loss": "reinforce", "advantage": "rloo"}  # without options
    others = flatten(from_flat(rlvr.Config, check=False, **functions)).keys()
    assert {"clip_low", "tau"} < of_losses and {"gamma", "lam"} < of_estimators
    assert not of_losses & of_estimators and not (of_losses | of_estimators) & others


@pytest.mark.parametrize(
    ("args", "value"), [([], None), (["--whiten"], True), (["--no-whiten"], False)]
)
def test_whitening_is_on_off_or_left_open(read, args, value):
    cfg = read("--advantage", "reinforce++", *args)
    assert cfg.advantages.whiten is value
    found, _ = resolve(cfg, Launch(), Device())
    assert found.advantages.whiten is (value is not False)


@pytest.mark.parametrize(
    ("args", "value"), [([], False), (["--divide-by-std"], True), (["--no-divide-by-std"], False)]
)
def test_an_explicit_flag_wins_over_the_loss(read, args, value):
    found, _ = resolve(read("--loss", "kimi", *args), Launch(), Device())
    assert found.advantages.values == {"divide_by_std": value}
    assert ("divide_by_std" in found.chosen) == (not args)


# ---- help


def test_help_shows_what_most_need_and_help_all_the_rest(shown, read):
    flags, text = shown()
    everything, _ = shown("all")
    assert len(flags) <= 30 and {*flags} < {*everything}
    assert f"--help all shows all {len(everything)} options" in text
    cfg = read()
    of_functions = {*cfg.policy_loss.keywords, *cfg.advantages.keywords}
    assert [name for name in flags if name not in of_functions] == [*rlvr.Config.COMMON]
    order = " ".join(flags)
    assert " advantage divide_by_std loss clip_low clip_high dual_clip kl_coef " in order
    assert len({*everything} - of_functions) <= 91


def test_help_has_the_options_of_a_file_behind_it(shown, mine):
    flags, _ = shown("--code", mine, *NAMED)
    assert " advantage shift loss power no_ratio " in " ".join(flags)


def test_help_shows_what_the_function_says_of_an_open_option(shown):
    for loss, expected in (("ppo", "token_mean"), ("gspo", "seq_mean_token_mean")):
        assert f"(default: {expected})" in shown("--loss", loss, "all")[0]["aggregation"]
    assert "(default: True)" in shown("--advantage", "reinforce++", "all")[0]["whiten"]


@pytest.mark.parametrize("recipe", [rlvr, agentic, sft, dpo, distill, evaluate])
def test_every_option_has_a_help_and_common_ones_exist(recipe, capsys):
    with pytest.raises(SystemExit):
        parse(recipe.Config, recipe.__doc__, ["--help", "all"])
    flags = flags_of(capsys.readouterr().out)
    assert {*recipe.Config.COMMON} <= {*flags} and len(flags) > 25
    for words in flags.values():
        kind_and_help = re.split(r" \((?:default|required)", words)[0].replace(" [STR ...]", "")
        assert len(kind_and_help.split()) > 2, words


def test_a_misspelt_flag_is_named_with_the_nearest(read, capsys):
    with pytest.raises(SystemExit) as end:
        read("--clip-lo", "0.1")
    assert end.value.code == 2
    assert re.search(r"--clip-lo\b.*--clip-low", capsys.readouterr().err, re.DOTALL)


def test_help_and_errors_load_no_torch(mine):
    """With a file whose losses need torch only when they are called."""
    done = run_script(f"""
        import sys
        from roll_lite import command
        from roll_lite.recipes import rlvr
        for args in (["--clip-lo", "0.1"], ["--help"], ["--help", "all"]):
            sys.argv = ["rlvr.py", "--code", {mine!r}, *{NAMED!r}, *args]
            try:
                command.run(rlvr.main, rlvr.Config, rlvr.__doc__, rlvr.plan)
            except SystemExit as end:
                print("code", end.code or 0, "torch" in sys.modules, "transformers" in sys.modules)
    """)
    end = r"^code (\d .*)$"
    assert re.findall(end, done.stdout, re.MULTILINE) == [f"{n} False False" for n in (2, 0, 0)]
    shown = re.split(end, done.stdout, flags=re.MULTILINE)[::2]
    assert ["--power" in text for text in shown] == [False, True, True, False], done.stderr


# ---- names of other libraries


def options_of(recipe):
    base = _base(recipe.Config, {})
    flags = {flag.name for listed in all_flags(base).values() for flag in listed}
    tables = [part.TABLE for _, part in open_parts(base) if hasattr(part, "TABLE")]
    return flags | {
        n for table in tables for function in table.values() for n in keywords(function)
    }


def test_names_of_other_libraries_lead_to_options_that_exist():
    recipes = (rlvr, agentic, sft, dpo, distill, evaluate)
    flags = set().union(*map(options_of, recipes))
    arguments = set().union(*(_arguments(recipe.Config) for recipe in recipes))
    for name, found in [*TRL.items(), *VERL.items()]:
        assert {*found.names.split()} <= flags | arguments, name
        noted = re.findall(r"--([a-z-]+)", found.note)
        assert {each.replace("-", "_") for each in noted} <= flags, name


@pytest.mark.parametrize("recipe", [rlvr, agentic, sft, dpo, distill, evaluate])
def test_what_is_said_of_a_name_is_true_of_the_recipe(recipe):
    """It names no option that the recipe lacks."""
    known = options_of(recipe) | _arguments(recipe.Config)
    for name in (*(f"--{name}" for name in TRL), *(f"{name}=1" for name in VERL)):
        said = ours(name, known, known).removeprefix(name.partition("=")[0])
        noted = {each.replace("-", "_") for each in re.findall(r"--([a-z-]+)", said)}
        assert noted <= known, said


@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        (sft, "a dialogue must fit; --too-long says what if not"),
        (dpo, "both texts of a pair must fit together; nothing is truncated or dropped: a pair "),
        (distill, "a sample, a dialogue or both texts of a pair must fit"),
        (rlvr, "prompt and reply must fit; --long-prompts says what if not"),
    ],
)
@pytest.mark.parametrize("name", ["--max-seq-length", "--max-length"])
def test_the_longest_sequence_is_explained_recipe_by_recipe(recipe, note, name):
    expected = f"{name} is --tokens-per-microbatch here: {note}"
    with pytest.raises(UserError, match=re.escape(expected)):
        parse(recipe.Config, "", [name, "512", "--data", "me/rows:rows.jsonl"])


def test_a_page_lists_the_names_of_other_libraries():
    page = (DOCS / "reference" / "names.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (.*) \| (.*) \|$", page, re.M)
    expected = [
        (name, ", ".join(f"`{each}`" for each in found.names.split()), found.note)
        for name, found in [*TRL.items(), *VERL.items()]
    ]
    assert rows == expected


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        ("--learning-rate", "--learning-rate is --lr here"),
        ("--learning_rate=1e-6", "--learning_rate is --lr here"),
        ("--num-generations", "--num-generations is --samples-per-prompt here"),
        ("--beta", "--beta is --kl-coef here: --kl-in says whether"),
        ("--batch-size", "--batch-size is --prompts-per-step here: of a step, on all ranks"),
        ("--cliprange-value", "is value_clip here; it has no flag, and --value-clip says where"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr is --lr here"),
        ("+trainer.save_freq=5", "+trainer.save_freq is --checkpoint-every here"),
        ("--algorithm.lam", "--algorithm.lam is --lam here"),  # though grpo does not read it
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(read, arg, text):
    with pytest.raises(UserError, match=re.escape(text)):
        read(arg, "1")


def test_all_names_of_other_libraries_are_answered_at_once_by_the_recipe_that_has_them(toy_folder):
    args = ["--learning-rate", "1", "--batch-size", "4"]
    with pytest.raises(UserError, match=r"^--learning-rate is --lr here\n.* --rows-per-step here"):
        parse(sft.Config, "", args)
    cfg = parse(dpo.Config, "", ["--model", str(toy_folder), "--beta", "0.2"])  # its own
    assert flatten(cfg)["beta"] == 0.2


# ---- names that meet


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("steps", "a flag"), ("lora_alpha", "one without a flag"), ("divide_by_std", "another's"),
        ("config", "one of every recipe"), ("loss", "the choice itself"),
    ],
)  # fmt: skip
def test_an_option_whose_name_exists_is_refused_with_its_place(read, code_file, name, kind):
    path = code_file(f"""
        def mine(logprobs_R, delta_R, advantages_R, batch, *, {name}: int = 1):
            return delta_R

        LOSSES = {{"mine": mine}}
    """)
    with pytest.raises(
        UserError,
        match=rf"{path} line 2: option {name} of mine is also another option of the recipe; rename",
    ):
        read("--code", path, "--loss", "mine")
    read("--code", path)  # it is not in the way of other losses


def test_options_that_are_always_read_may_not_take_a_name_either(read, code_file):
    path = code_file("""
        def mine(prompt, reply, *, lr: float = 1.0): ...
        REWARDS = {"reverse": mine}
    """)
    with pytest.raises(UserError, match=rf"{path} line 2: option lr of mine is also another opt"):
        read("--code", path)


# ---- options that were saved


@pytest.fixture
def started(tmp_path, read):
    """The folder of a run with these options, as far as a resume reads it; returns its path."""

    def start(*args):
        cfg, _ = resolve(read(*args), Launch(), Device())
        (tmp_path / "run").mkdir(exist_ok=True)
        write_config(tmp_path / "run", cfg, None)
        return str(tmp_path / "run")

    return start


def test_options_of_a_function_go_with_it(read, started):
    folder = started("--loss", "ppo", "--clip-low", "0.1", "--entropy-coef", "0.01")
    same = read("--resume", folder)
    assert same.policy_loss.values == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None}
    assert read("--resume", folder, "--loss", "ppo").policy_loss == same.policy_loss
    other = read("--resume", folder, "--loss", "gspo")
    assert other.policy_loss.values == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert other.policy_loss.entropy_coef == 0.01
    other = read("--resume", folder, "--loss", "kimi", "--tau", "0.3")
    assert other.policy_loss.values == {"tau": 0.3}


def test_ones_own_functions_are_resumed(read, started, mine):
    folder = started("--code", mine, *NAMED, "--power", "3")
    same = read("--resume", folder)
    assert same.own.code == (mine,) and same.policy_loss.values["power"] == 3.0
    assert read("--resume", folder, "--power", "4").policy_loss.values["power"] == 4.0
    other = read("--resume", folder, "--loss", "ppo")
    assert other.own.code == (mine,) and other.policy_loss.values["clip_low"] == 0.2
    with pytest.raises(UserError, match=r"cannot be resumed with advantage='grpo' \(was 'shifted'"):
        read("--resume", folder, "--advantage", "grpo")


def test_options_that_a_file_no_longer_has_are_left_out(read, started, mine, code_file, capsys):
    folder = started("--code", mine, "--loss", "mine", "--power", "3")
    del LOSSES["mine"], ADVANTAGES["shifted"]  # as in another process
    other = code_file("""
        def theirs(logprobs_R, delta_R, advantages_R, batch, *, force: float = 1.0): ...
        LOSSES = {"theirs": theirs}
    """, "other.py")  # fmt: skip
    capsys.readouterr()
    cfg = read("--resume", folder, "--code", other, "--loss", "theirs", "--force", "2")
    assert cfg.own.code == (other,) and cfg.policy_loss.values == {"force": 2.0}
    assert "dropped: power 3.0, which nothing reads now\n" in capsys.readouterr().out
    cfg = read("--resume", folder, "--code", "--loss", "ppo")
    assert cfg.own.code == () and cfg.policy_loss.values["clip_low"] == 0.2
    with pytest.raises(UserError, match="loss='mine' is not known; use one of ppo"):
        read("--resume", folder, "--code", other)


def test_a_file_that_changed_is_named(read, started, mine, capsys):
    folder = started("--code", mine, *NAMED)
    read("--resume", folder)
    assert "changed" not in capsys.readouterr().out
    with open(mine, "a") as file:
        file.write("# more\n")
    read("--resume", folder)
    said = f"changed: {mine}\n"
    assert capsys.readouterr().out == said


def test_what_was_chosen_is_chosen_again(read, started):
    folder = started("--advantage", "reinforce", "--lr", "1e-4")
    written = read_options(f"{folder}/config.json")
    assert written["whiten"] is True and written["device_map"] == "train=all generate=all"
    again = read("--resume", folder)
    assert again.advantages.whiten is None and again.policy_loss.aggregation is None
    assert again.device_map == "auto" and again.lengths.max_tokens is None
    assert again.training.lr == 1e-4 and again.chosen == {}
    other = read("--resume", folder, "--loss", "topr")
    found, _ = resolve(other, Launch(), Device())
    assert found.policy_loss.aggregation == "seq_mean_token_sum"


def test_another_loss_brings_its_defaults_to_a_resumed_run(read, started):
    folder = started()
    assert resolve(read("--resume", folder), Launch(), Device())[0].advantages.values == {
        "divide_by_std": True
    }
    other, _ = resolve(read("--resume", folder, "--loss", "kimi"), Launch(), Device())
    assert other.advantages.values == {"divide_by_std": False}
    given = read("--resume", folder, "--loss", "kimi", "--divide-by-std")
    assert resolve(given, Launch(), Device())[0].advantages.values == {"divide_by_std": True}


def test_a_cache_that_was_lowered_is_what_was_asked_when_resumed(read, started):
    folder = started("--kv-cache-gib", "8")
    path = Path(folder, "config.json")
    lowered = with_chosen(from_flat(rlvr.Config, **read_options(path)), {"kv_cache_gib": 6.5})
    write_config(path.parent, lowered, None)
    assert read_options(path)["kv_cache_gib"] == 6.5
    assert read("--resume", folder).kv_cache_gib == 8.0


def test_changes_are_shown(read, started, capsys):
    folder = started("--clip-low", "0.1")
    capsys.readouterr()
    read("--resume", folder, "--clip-low", "0.3", "--steps", "50")
    assert capsys.readouterr().out == "changed: clip_low 0.1 -> 0.3\nchanged: steps 40 -> 50\n"
