"""Questions of reasoning-gym as data of a run; most tests need the package."""

import importlib.util
import sys

import pytest

from roll_lite.data import Mixture, check_mixture, held_out, parse_mixture, tasks
from roll_lite.data.sources import task_dialogues
from roll_lite.rewards.reasoning_gym import open_dataset, question, reasoning_gym_answer
from roll_lite.rewards.registry import check_prompts
from roll_lite.types import Prompt

SOURCE = "rg:spell_backward:min_word_len=3,max_word_len=5"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


def questions(count, split="train", seed=0, source=SOURCE):
    return [question(source, number, seed=seed, split=split) for number in range(count)]


@needs_package
def test_the_datasets_own_answers_score_one():
    for source in (SOURCE, "rg:chain_sum", "rg:gsm_symbolic"):
        for prompt in questions(5, source=source):
            answer = prompt.ground_truth
            assert reasoning_gym_answer(prompt, f"<answer> {answer} </answer>") == 1
            twice = f"<answer>no</answer> rather <answer>{answer}</answer>"
            assert reasoning_gym_answer(prompt, twice) == 1
            assert reasoning_gym_answer(prompt, "<answer>?</answer>") < 1
            assert reasoning_gym_answer(prompt, answer) == 0
            assert reasoning_gym_answer(prompt, f"<answer>{answer}") == 0
            assert reasoning_gym_answer(prompt, f"{answer}</answer>") == 0


@needs_package
def test_a_right_answer_with_more_behind_it_is_not_whole():
    """The dataset adds up shares of letters, which are not exactly 1 for most lengths."""
    for prompt in questions(100, source="rg:spell_backward:min_word_len=3,max_word_len=10"):
        longer = f"<answer>{prompt.ground_truth}s</answer>"
        assert reasoning_gym_answer(prompt, longer) == 0.8


@needs_package
def test_the_options_of_a_dataset():
    words = [prompt.ground_truth for prompt in questions(50)]
    assert all(3 <= len(word) <= 5 for word in words)
    assert questions(1)[0].messages[0]["content"].endswith("<answer> [your answer] </answer>.")


@needs_package
def test_splits_share_no_question_whatever_the_seed():
    train, held_out = (
        {p.messages[0]["content"] for seed in (0, 1) for p in questions(200, split, seed)}
        for split in ("train", "held_out")
    )
    assert len(train) > 100 and len(held_out) > 50 and not train & held_out
    assert questions(5, seed=0) == questions(5, seed=0) != questions(5, seed=1)


@needs_package
def test_a_mixture_resumes_without_drawing_what_came_before(monkeypatch):
    mixture = Mixture([SOURCE, "addition:2"], seed=3)
    drawn = [next(mixture) for _ in range(20)]
    state = mixture.state_dict()
    following = [next(mixture) for _ in range(4)]
    assert {prompt.domain for prompt in drawn} == {"reasoning_gym", "addition"}
    check_prompts(drawn, {"reasoning_gym": reasoning_gym_answer})
    numbers = []

    def counted(source, number, **options):
        numbers.append(number)
        return question(source, number, **options)

    monkeypatch.setattr("roll_lite.rewards.reasoning_gym.question", counted)
    again = Mixture([SOURCE, "addition:2"], seed=3)
    again.load_state_dict(state)
    assert [next(again) for _ in range(4)] == following and numbers == [10, 11]
    evaluated = held_out([SOURCE], 3)
    assert [prompt.id for prompt in evaluated] == [f"{SOURCE}/held_out/0/{n}" for n in range(3)]


@needs_package
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rg:spell_backwards", "is not known; use one of spell_backward"),
        ("rg:spell_backward:word_len=3", "word_len"),
        ("rg:spell_backward:min_word_len=0", "min_word_len"),
    ],
)
def test_bad_sources_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        check_mixture([source])


def test_a_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        open_dataset.__wrapped__(SOURCE)


def test_sources_are_told_apart():
    assert tasks.is_task("rg:chain_sum") and not tasks.is_task("rg.jsonl")
    (entry,) = parse_mixture(["rg:chain_sum:min_terms=2@0.5"])
    assert entry.source == "rg:chain_sum:min_terms=2" and entry.weight == 0.5
    with pytest.raises(ValueError, match="is the same source as"):
        parse_mixture(["rg:chain_sum", "rg:chain_sum@2"])
    with pytest.raises(ValueError, match="no replies to imitate"):
        next(task_dialogues("rg:chain_sum", seed=0))


def test_a_prompt_of_another_source_is_refused():
    prompt = Prompt(id="a", messages=(), domain="reasoning_gym", ground_truth="1")
    with pytest.raises(ValueError, match="prompt a has no source and index of reasoning-gym"):
        check_prompts([prompt], {"reasoning_gym": reasoning_gym_answer})
