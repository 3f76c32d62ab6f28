"""By which metric the best checkpoint is chosen."""

from itertools import islice

import pytest
from support.fake_engines import PARAMS, FakeChat, FakeEngines, fake_prompts

from roll_lite.checks import UserError
from roll_lite.envs.play import question_player
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import Evaluation, EvaluationOptions
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.types import Score

GRADED = Score(value=0.25)
FAILED = Score(value=0.25, parts={"success": 0.0})
"""Of a game: success comes with time, whatever the return."""


@pytest.mark.parametrize(
    ("score", "pass_reward", "best"),
    [
        (GRADED, None, "eval/reward"),
        (GRADED, 0.5, "eval/pass@1"),
        (Score(value=1.0), None, "eval/pass@1"),
        (FAILED, None, "eval/pass@1"),
    ],
)
def test_the_first_evaluation_decides(score, pass_reward, best):
    prompts = list(islice(fake_prompts(), 4))
    evaluation = Evaluation(prompts, EvaluationOptions(pass_reward=pass_reward), PARAMS)
    with (
        FakeEngines(1) as engines,
        Coordinator(
            engines=engines, chat=FakeChat(), prompts=iter(prompts), params=PARAMS, seed=0,
            play=question_player({"fake": lambda prompt, reply: score}),
            options=RolloutOptions(samples_per_prompt=2, prompts_per_step=2),
        ) as rollout,
    ):  # fmt: skip
        evaluation.run(rollout)
    assert evaluation.best == best
    resumed = Evaluation(prompts, EvaluationOptions(pass_reward=pass_reward), PARAMS)
    resumed.load_state_dict(evaluation.state_dict())
    assert resumed.best == best


def test_a_pass_reward_comes_too_late_for_a_run_that_goes_by_rewards():
    evaluation = Evaluation([], EvaluationOptions(pass_reward=0.5), PARAMS)
    with pytest.raises(UserError, match=r"pass_reward=0\.5 with --resume"):
        evaluation.load_state_dict({"best": "eval/reward", "is_decided": True})
