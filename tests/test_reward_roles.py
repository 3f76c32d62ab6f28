"""A judge and a reward model as roles, asked by a coordinator's samples."""

import asyncio
from itertools import islice

import pytest
import torch
import transformers

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.data.tasks import prompts
from roll_lite.engine.service import EngineService
from roll_lite.envs.play import question_player
from roll_lite.reward_roles import Judge, RewardModel, VerdictError, judge_messages, parse_verdict
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.train.scorer import Scorer
from roll_lite.types import SamplingParams


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", 1.0), ("No.", 0.0), ("It is 4.\n**YES**\n", 1.0), ("no\nyes", 1.0),
        ("yes, I think", None), ("", None), ("yes\nI am sure", None), ("maybe", None),
    ],
)  # fmt: skip
def test_only_a_verdict_on_the_last_line_counts(text, value):
    if value is None:
        with pytest.raises(VerdictError):
            parse_verdict(text)
    else:
        assert parse_verdict(text) == value


def test_a_judge_reads_question_reference_and_answer():
    prompt = next(prompts("addition:2", seed=0))
    (message,) = judge_messages(prompt, "It is 7")
    for part in (prompt.messages[0]["content"], prompt.ground_truth, "It is 7"):
        assert part in message["content"]


class Counting(EngineService):
    """Keeps the largest number of samples that ran together."""

    most = 0

    def work(self):
        is_busy = super().work()
        self.most = max(self.most, len(self.engine.scheduler.running))
        return is_busy

    def most_running(self):
        return self.most


def rollout_over(engines, chat, reward, reward_engines=(), **options):
    return Coordinator(
        engines=engines,
        chat=chat,
        play=question_player({"reverse": reward}),
        prompts=iter(()),
        params=SamplingParams(max_tokens=4, stop_ids=chat.stop_ids),
        options=RolloutOptions(**options),
        seed=0,
        reward_engines=reward_engines,
    )


def test_a_judge_is_asked_of_many_samples_at_once(tiny_folder):
    """Any letter is a verdict here: what matters is who is asked, when, and what comes of it."""
    chat = Chat(tiny_folder)
    verdicts = {letter: float(ord(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"}
    asked = list(islice(prompts("reverse:3", seed=0), 6))
    with Cluster("generate=all judge=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=tiny_folder, kv_cache_gib=0.02)
        judges = cluster.role("judge", Counting, folder=tiny_folder, kv_cache_gib=0.02)
        judge = Judge(
            judges, chat, max_tokens=1, max_tries=50, verdicts=verdicts, seed=3,
            messages=lambda prompt, reply: ({"role": "user", "content": f"{prompt.id} {reply}"},),
        )  # fmt: skip
        params = SamplingParams(max_tokens=4, stop_ids=chat.stop_ids)
        with rollout_over(engines, chat, judge, reward_engines=[judge]) as rollout:
            groups = rollout.answer(asked, num_samples=4, params=params)
        most = judges.most_running()
    samples = [sample for group in groups for sample in group.samples]
    assert all(sample.state == "done" for sample in samples)
    assert {sample.score.value for sample in samples} <= set(verdicts.values())
    assert most >= 8  # of 24
    assert all(sample.score.parts["judge_tries"] >= 1 for sample in samples)


def test_a_judge_without_a_verdict_is_an_error_not_a_zero(tiny_folder):
    chat = Chat(tiny_folder)
    with Cluster("generate=all judge=all", "cpu") as cluster:
        options = {"folder": tiny_folder, "kv_cache_gib": 0.05}
        engines = cluster.role("generate", EngineService, **options)
        judge = Judge(cluster.role("judge", EngineService, **options), chat, max_tokens=2)
        with rollout_over(engines, chat, judge, reward_engines=[judge], max_retries=0) as rollout:
            (group,) = rollout.answer(
                islice(prompts("reverse:3", seed=0), 1),
                num_samples=2,
                params=rollout._groups._params,
            )
    assert [sample.state for sample in group.samples] == ["failed"] * 2
    assert all(
        "instead of yes or no" in s.error or "said nothing" in s.error for s in group.samples
    )


def test_a_judge_whom_no_coordinator_knows_says_so(tiny_folder):
    prompt = next(prompts("reverse:3", seed=0))
    with Cluster("judge=all", "cpu") as cluster:
        engines = cluster.role("judge", EngineService, folder=tiny_folder, kv_cache_gib=0.02)
        with pytest.raises(RuntimeError, match="to the Coordinator in reward_engines"):
            asyncio.run(Judge(engines, Chat(tiny_folder))(prompt, "yes"))


def test_a_reward_model_says_what_transformers_says(tiny_folder, reward_folder):
    reference, folder = reward_folder
    chat, asked = Chat(tiny_folder), list(islice(prompts("reverse:3", seed=0), 5))
    with Cluster("generate=all reward_model=all", "cpu") as cluster:
        engines = cluster.role("generate", EngineService, folder=tiny_folder, kv_cache_gib=0.02)
        scorer = cluster.role("reward_model", Scorer, folder=folder, head="value")
        reward = RewardModel(scorer, Chat(folder), tokens_per_microbatch=400)
        params = SamplingParams(max_tokens=6, stop_ids=chat.stop_ids)
        with rollout_over(engines, chat, reward) as rollout:
            groups = rollout.answer(asked, num_samples=3, params=params)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for sample in (sample for group in groups for sample in group.samples):
        said = [*sample.prompt.messages, {"role": "assistant", "content": sample.reply}]
        ids = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)
        ids = ids["input_ids"]
        with torch.no_grad():
            expected = reference(ids, attention_mask=torch.ones_like(ids)).logits.item()
        assert sample.score.value == pytest.approx(expected, abs=1e-4)
        assert sample.score.parts == {"reward_model": sample.score.value}
