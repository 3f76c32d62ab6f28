"""The table of metrics: every metric of a run is in it, and the page of docs/ is made of it."""

from support.models import make_toy
from support.paths import ROOT
from support.recipes import call_recipe
from support.runs import toy_options

from roll_lite.options import from_flat
from roll_lite.recipes import agentic, distill, dpo, rlvr, sft
from roll_lite.report.metrics import METRICS, find, page
from roll_lite.report.reader import RunFolder


def test_the_page_of_docs_is_that_of_the_table():
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text() == page() + "\n"


def test_names_are_there_once_and_find_themselves():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(find(metric.name).name == metric.name for metric in METRICS)


def test_placeholders_are_filled():
    assert find("reward/maths/boxed").title == "boxed of maths"
    p90 = find("rollout/reply_tokens_p90")
    assert p90.meaning == "90 percent of the samples have at most this many"
    assert find("eval/pass@8").title == "pass@8" and find("eval/pass@1").title == "pass rate"
    assert find("loss/kl").meaning.startswith("the KL that")
    assert find("loss/mine") is None


def names_in(recipe, run_dir, config=None, **options):
    """Of the metrics of a run; all have an entry."""
    config = config or recipe.Config
    call_recipe(recipe, from_flat(config, run_dir=str(run_dir), **options))
    names = {name for row in RunFolder(run_dir).rows for name in row} - {"step", "time"}
    assert not [name for name in sorted(names) if find(name) is None]
    return names


def parts_of_rewards(names):
    """Names that only the entry of any part fits."""
    return {name for name in names if name.startswith("reward/")} - {m.name for m in METRICS}


def test_every_metric_of_rlvr(toy_folder, tmp_path):
    options = toy_options(toy_folder, "", steps=2, eval_every=1, eval_samples=2)
    del options["run_dir"]
    names = names_in(
        rlvr, tmp_path / "a", **options, kl_coef=0.1, denominator="old", rejection="token"
    )
    assert not parts_of_rewards(names)
    wanted = {"reward/std", "reward/min", "reward/max", "advantage/abs_mean", "advantage/std"}
    wanted |= {"advantage/zero_share", "rollout/tokens_per_second", "rollout/tokens_total"}
    wanted |= {"train/tokens_total", "reference/kl", "loss/kl", "policy/ratio", "policy/kl"}
    wanted |= {"policy/clip_fraction", "mismatch/logprob_mean", "rollout/reply_tokens_p99"}
    assert wanted <= names


def test_every_metric_of_agentic(tmp_path):
    """With a critic, the KL in the reward, and two environments."""
    folder = make_toy(tmp_path / "toy", max_position_embeddings=4096)
    names = names_in(
        rlvr, tmp_path / "a", agentic.Config, model=str(folder), steps=1,
        data=("frozen_lake", "doors"), prompts_per_step=2, samples_per_prompt=2, max_tokens=4,
        kv_cache_gib=0.05, device="cpu", eval_prompts=2, advantage="gae", kl_coef=0.1,
        kl_in="reward", env_workers=1,
    )  # fmt: skip
    assert {"critic/explained_variance", "reference/kl", "loss/kl_coef", "env/episodes"} <= names


def test_every_metric_of_the_other_recipes(toy_folder, tmp_path):
    options = {"model": str(toy_folder), "data": "reverse:2", "steps": 1, "rows_per_step": 4}
    options |= {"eval_rows": 4, "eval_every": 1, "device": "cpu"}
    names = names_in(sft, tmp_path / "sft", **options)
    assert {"train/tokens_total", "eval/loss"} <= names and "rollout/tokens_total" not in names
    assert not parts_of_rewards(names_in(dpo, tmp_path / "dpo", **options, task_pairs=8))
    names_in(distill, tmp_path / "distill", **options, teacher=str(toy_folder))
