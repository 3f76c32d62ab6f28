"""Questions and environments in one mixture: training, evaluation, replay; teachers in a plan."""

from itertools import islice

import pytest
from support.recipes import call_recipe
from support.runs import comparable, samples_of, toy_options

from roll_lite.chat import Chat
from roll_lite.options import from_flat
from roll_lite.recipes import evaluate, rlvr
from roll_lite.replay import main as replay

LAKE = "frozen_lake:size=2,style=short,max_steps=2"
MIXED = {
    "data": ("reverse:1@0.75", f"{LAKE}@0.25"), "eval_every": 0, "env_workers": 1, "history": 0,
    "samples_per_prompt": 4,
}  # fmt: skip


def test_each_kind_has_its_share_and_its_player(here):
    for row in here("run", steps=2, **MIXED):
        shares = row["rollout/reverse/share"], row[f"rollout/{LAKE}/share"]
        assert shares == (0.75, 0.25)
        assert row["reward/calls"] == 6 * 4 and row["env/episodes"] == 2 * 4
        assert f"reward/{LAKE}/success" in row and "reward/reverse/success" not in row


def test_a_resumed_run_is_the_same(here):
    whole = here("whole", steps=4, **MIXED)
    here("parts", steps=2, **MIXED)
    assert comparable(here("parts", steps=4, **MIXED, resume=True)) == comparable(whole)


def test_samples_of_both_kinds_are_replayed(toy_folder, tmp_path, capsys):
    call_recipe(
        rlvr, from_flat(rlvr.Config, **toy_options(toy_folder, tmp_path / "run", steps=1, **MIXED))
    )
    samples = samples_of(tmp_path / "run", 1)
    for domain in ("reverse", LAKE):
        row = next(sample for sample in samples if sample["domain"] == domain)
        name = f"1/{row['prompt_id']}/{row['index']}"
        capsys.readouterr()
        assert replay([str(tmp_path / "run"), "--sample", name]) == 0
        assert f"tokens: all {len(row['token_ids'])} are equal" in capsys.readouterr().out


def test_evaluate_takes_both_kinds(toy_folder, tmp_path):
    def rates(name, *data):
        options = {
            "model": str(toy_folder), "data": data, "prompts": 16, "max_tokens": 6, "history": 0,
            "env_workers": 0, "device": "cpu", "kv_cache_gib": 0.01, "pass_reward": 0.01,
            "run_dir": str(tmp_path / name),
        }  # fmt: skip
        if LAKE not in data:
            del options["history"], options["env_workers"]
        return call_recipe(evaluate, from_flat(evaluate.Config, **options))

    together = rates("together", "reverse:1", LAKE)
    for domain, source in (("reverse", "reverse:1"), (LAKE, LAKE)):
        assert together[f"eval/{domain}/pass@1"] == rates(source[:3], source)["eval/pass@1"]


def test_a_plan_has_a_role_for_each_teacher(toy_folder, tmp_path, capsys):
    options = {
        "model": str(toy_folder), "data": ("reverse:1", "counting:3"), "plan": True,
        "teacher": (str(toy_folder), f"counting={toy_folder}"), "max_tokens": 6,
        "run_dir": str(tmp_path / "run"), "device": "cpu",
    }  # fmt: skip
    code = rlvr.plan(from_flat(rlvr.Config, **options))
    printed = capsys.readouterr().out
    assert not code, printed
    for role in ("teacher", "teacher_counting"):
        assert role in printed


def test_questions_without_a_reward_are_refused_beside_turn_by_turn_advantages(here, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "domain": "mystery"}\n' * 4)
    data = (f"{tmp_path / 'rows.jsonl'}@0.5", f"{LAKE}@0.5")
    with pytest.raises(ValueError, match="no reward for domain 'mystery'"):
        here("run", steps=1, **MIXED | {"data": data}, advantage="gigpo")


TALKS = """
class Talks:
    def reset(self, seed):
        return "a<|im_end|>b", {}

    def step(self, reply):
        return "c<|im_end|><|im_start|>d", 0.0, False, False, {}

ENVS = {"talks": Talks}
"""


@pytest.mark.parametrize("history", [0, 2])
def test_what_an_environment_says_gives_the_policy_no_control_tokens(toy_folder, tmp_path, history):
    """Neither at the start of a conversation nor behind a reply."""
    (tmp_path / "talks.py").write_text(TALKS)
    options = toy_options(
        toy_folder, tmp_path / "run", steps=1, data=("talks",), code=(str(tmp_path / "talks.py"),),
        max_turns=3, history=history, env_workers=0, prompts_per_step=2,
    )  # fmt: skip
    call_recipe(rlvr, from_flat(rlvr.Config, **options))
    tokenizer = Chat(toy_folder).tokenizer
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    for sample in samples_of(tmp_path / "run", 1):
        ids = iter(sample["token_ids"])
        for turn in sample["turns"]:
            read = list(islice(ids, turn["read"]))
            list(islice(ids, turn["sampled"]))
            assert read.count(start) == 2  # one for the message, one for the reply
