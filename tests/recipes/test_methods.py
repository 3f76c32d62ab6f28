"""The files of recipes/code against their formulas in plain Python, and against transformers."""

import ast
import random
import statistics
import subprocess
import sys
from itertools import chain

import pytest
import torch
from support.launch import start_alone
from support.models import make_reference, make_toy
from support.paths import RECIPES
from support.trainers import make_trainer, step_gradient
from support.training_data import make_groups, make_sample
from transformers import AutoModelForCausalLM

from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.own_files import import_file
from roll_lite.roles import Roles
from roll_lite.rollout.history import History
from roll_lite.train.advantages import ADVANTAGES, INPUTS, AdvantageOptions
from roll_lite.train.batch import pack
from roll_lite.train.losses import PolicyLoss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.sample_rows import ModelScores, Rows
from roll_lite.train.trainer import Trainer
from roll_lite.types import Group, Prompt, Sample, Score, Turn

CODE = RECIPES / "code"
FILES = sorted(CODE.glob("*.py"))


def load(name):
    return import_file(CODE / f"{name}.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    doc, module = ast.get_docstring(ast.parse(text)), import_file(path)
    assert "arXiv" in doc and f"--code recipes/code/{path.name}" in doc
    tables = {"advantage": "ADVANTAGES", "loss": "LOSSES"}
    for flag, table in tables.items():
        for name, function in getattr(module, table, {}).items():
            assert f"--{flag} {name}" in doc and function.__doc__
    for function in getattr(module, "ADVANTAGES", {}).values():
        code = function.__code__
        assert {*code.co_varnames[: code.co_argcount]} <= {*INPUTS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_uses_nothing_private(path):
    for node in ast.walk(ast.parse(path.read_text())):
        modules = node.module.split(".") if isinstance(node, ast.ImportFrom) else []
        names = [alias.name for alias in getattr(node, "names", [])]
        used = [*modules, *names, getattr(node, "attr", "")]
        assert not any(name.startswith("_") for name in used)


def test_the_files_bring_no_torch():
    """They are imported for --help."""
    code = "import sys; from roll_lite.own_files import import_file\n"
    code += "for path in sys.argv[1:]: import_file(path)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, *map(str, FILES)]).returncode == 0


def test_the_folder_does_not_hide_the_module_code_of_python():
    """pdb imports that; a recipe that is run has recipes/ first in its path. So no __init__.py."""
    program = "import code, pdb; code.InteractiveConsole"
    assert subprocess.run([sys.executable, "-c", program], cwd=RECIPES).returncode == 0


# ---- advantages


REWARDS = [[0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 1.0], [0.0, 0.0, 0.0], [0.3], [-2.0, 1.0], [0.5, 0.1]]


def test_maxrl_divides_by_the_mean(monkeypatch):
    rows = Rows(make_groups(REWARDS), AdvantageOptions())
    expected = []
    for group in REWARDS:
        mean = sum(group) / len(group)
        expected += [(r - mean) / mean if mean > 0 else 0.0 for r in group]
    monkeypatch.setitem(ADVANTAGES, "maxrl", load("maxrl").maxrl)
    found = AdvantageOptions(advantage="maxrl").estimate(rows)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert found[:5].tolist() == pytest.approx([-1.0, 1.5, -1.0, -1.0, 1.5])


PARTS = [  # of the samples of each group
    [{"right": 1.0, "format": 0.2}, {"right": 0.0, "format": 0.9}, {"format": 0.4}],
    [{"right": 1.0, "format": 1.0}, {"right": 1.0, "format": 1.0}],
    [{"right": 0.0}, {"right": 1.0, "format": 0.7}, {"right": 1.0}, {"right": 0.0, "format": 0.1}],
    [{"right": 0.0, "format": 0.0}, {}],
]


def groups_with(parts):
    groups = make_groups([[0.0] * len(group) for group in parts])
    for group, of_group in zip(groups, parts, strict=True):
        for sample, of_sample in zip(group.samples, of_group, strict=True):
            sample.score = Score(value=sum(of_sample.values()), parts=of_sample)
    return groups


def z_scores(values):
    spread = statistics.stdev(values)
    if spread < 1e-6:
        return [0.0] * len(values)
    return [(v - statistics.fmean(values)) / (spread + 1e-6) for v in values]


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ((), {"right": 1.0, "format": 1.0}),
        (("right", "format@0.25"), {"right": 1.0, "format": 0.25}),
        (("format",), {"format": 1.0}),
    ],
)
def test_gdpo_standardises_every_part_apart(monkeypatch, parts, weights):
    rows = Rows(groups_with(PARTS), AdvantageOptions())
    sums = []
    for group in PARTS:
        totals = [0.0] * len(group)
        for name, weight in weights.items():
            scaled = z_scores([sample.get(name, 0.0) for sample in group])
            totals = [total + weight * z for total, z in zip(totals, scaled, strict=True)]
        sums += totals
    monkeypatch.setitem(ADVANTAGES, "gdpo", load("gdpo").gdpo)
    found = AdvantageOptions(advantage="gdpo", options={"parts": parts}).estimate(rows)
    assert found.tolist() == pytest.approx(z_scores(sums), abs=1e-9)
    assert found.std().item() == pytest.approx(1.0, abs=1e-5)


def test_gdpo_knows_which_groups_teach_nothing(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "gdpo", load("gdpo").gdpo)
    nothing = AdvantageOptions.of(advantage="gdpo").nothing_to_learn
    found = [nothing(group) for group in groups_with(PARTS)]
    assert found == [False, True, False, True]
    trade = groups_with([[{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 1.0}]])
    assert not nothing(trade[0])  # though the scores are equal
    only_right = AdvantageOptions.of(advantage="gdpo", parts=("right",)).nothing_to_learn
    same = groups_with([[{"right": 1.0, "format": 0.0}, {"right": 1.0, "format": 1.0}]])
    assert only_right(same[0]) and not nothing(same[0])


def test_gdpo_names_parts_that_are_missing():
    module = load("gdpo")
    rows = Rows(groups_with(PARTS), AdvantageOptions())
    with pytest.raises(ValueError, match=r"\('wrong',\) .* have \('right', 'format'\); name some"):
        module.gdpo(rows.reward_parts, rows.groups_S, parts=("wrong",))
    plain = Rows(make_groups([[0.0, 1.0]]), AdvantageOptions())
    with pytest.raises(ValueError, match=r"have \(\); .*return rl.Score"):
        module.gdpo(plain.reward_parts, plain.groups_S)


# ---- ECHO


@pytest.fixture
def qwen_folder(tmp_path):
    make_reference("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def echo_sequences():
    """Episodes of several turns, and questions; behaviour logprobs that make PPO clip."""
    groups = [*make_groups([[0.0, 1.0], [1.0, 0.0, 0.5]], num_turns=3), *make_groups([[0.0, 1.0]])]
    generator = random.Random(0)
    for sample in chain(*(group.samples for group in groups)):
        for sequence in sample.sequences:
            sequence.token_ids[:] = [generator.randrange(199) for _ in sequence.token_ids]
            drawn = [generator.uniform(-7, -4) for _ in sequence.token_ids]
            sequence.logprobs[:] = [
                x if m else 0.0 for x, m in zip(drawn, sequence.loss_mask, strict=True)
            ]
    rows = Rows(groups, AdvantageOptions())
    return groups, rows.sequences(rows.rewards_S - 0.4, with_observations=True)


@pytest.mark.parametrize("weight", [0.1, 0.7])
@pytest.mark.parametrize("budget", [30, 10**6])
def test_echo_is_ppo_and_the_cross_entropy_of_what_the_environment_wrote(
    place, qwen_folder, weight, budget
):
    module = load("echo")
    groups, sequences = echo_sequences()

    def loss(*arguments):
        return module.echo(*arguments, observation_weight=weight)

    own = module.echo if weight == 0.1 else loss  # the default
    trainer = make_trainer(place, qwen_folder, PolicyLoss(function=own))
    grads, metrics = step_gradient(trainer, pack(sequences, budget, num_shards=2))
    reference, said, sampled, clipped = make_reference("qwen3"), [], [], []
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        (sequence,) = sample.sequences
        ids = torch.tensor(sequence.token_ids)
        logp = torch.log_softmax(reference(ids[None]).logits[0].double(), -1)
        at = 0
        for turn in sample.turns:
            read = len(turn.prompt_ids) - at  # tokens since the last turn
            if at:
                said += [-logp[t - 1, ids[t]] for t in range(at, at + read)]
            at += read
            for t in range(at, at + len(turn.token_ids)):
                ratio = (logp[t - 1, ids[t]] - sequence.logprobs[t]).exp()
                advantage = sample.score.value - 0.4
                kept = min(max(ratio.item(), 0.8), 1.2)
                clipped.append(min(kept * advantage, ratio.item() * advantage) == kept * advantage)
                sampled.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            at += len(turn.token_ids)
    assert len(said) == 2 * 2 * 5 and any(clipped) and not all(clipped)
    cross_entropy = sum(said) / len(said)
    total = sum(sampled) / len(sampled) + weight * cross_entropy
    total.backward()
    assert metrics["loss/loss"] == pytest.approx(total.item(), rel=1e-5)
    found = metrics["loss/cross_entropy_observed"]
    assert found == pytest.approx(cross_entropy.item(), rel=1e-5)
    for name, expected in {
        "embedding": reference.model.embed_tokens.weight.grad,
        "blocks.1.mlp.down": reference.model.layers[1].mlp.down_proj.weight.grad,
    }.items():
        assert (grads[name] - expected).abs().max() <= 2e-5 * expected.abs().max()


# ---- SDFT


def asked(number, **more):
    message = {"role": "user", "content": f"question {number}?"}
    system = {"role": "system", "content": "Be short."}
    messages = (system, message) if number else (message,)
    return Prompt(id=f"p{number}", messages=messages, domain="d", **{"ground_truth": ""} | more)


def test_sdft_shows_the_demonstration_where_there_is_one():
    module = load("sdft")
    shown = module.with_demonstration(asked(1, extra={"demonstration": "like {this}"}))
    assert shown[0] == {"role": "system", "content": "Be short."} and len(shown) == 2
    assert shown[1]["role"] == "user" and shown[1]["content"].startswith("question 1?\n")
    assert "like {this}" in shown[1]["content"]
    assert "42" in module.with_demonstration(asked(0, ground_truth="42"))[0]["content"]
    assert module.with_demonstration(asked(0)) is None
    played = Prompt(id="p", messages=(), domain="d", ground_truth="", extra={"demonstration": "x"})
    assert module.with_demonstration(played) is None
    assert module.sdft.facts.reprompt is module.with_demonstration


def logprobs_after(model, prompt_ids, tail):
    """Of every token of the tail, with a gradient."""
    ids = torch.tensor(prompt_ids + tail)
    logp = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
    return torch.stack([logp[i - 1, ids[i]] for i in range(len(prompt_ids), len(ids))])


def replies(chat, model, prompts):
    """Two samples for each prompt, the second of two turns, with the model's own logprobs."""
    groups = []
    for prompt in prompts:
        group = Group(prompt=prompt, samples=[])
        for index in range(2):
            sample = Sample(prompt=prompt, index=index)
            for text in ("aba", "cab?")[: index + 1]:
                prompt_ids = [*sample.token_ids, *chat.encode(prompt.messages)]
                token_ids = chat.tokenizer.encode(text)
                with torch.no_grad():
                    own = logprobs_after(model, prompt_ids, token_ids).tolist()
                turn = {"finish_reason": "stop", "versions": [(0, 0)]}
                turn |= {"token_ids": token_ids, "logprobs": own}
                sample.add_turn(Turn(prompt_ids=prompt_ids, **turn))
            group.samples.append(sample)
        groups.append(group)
    return groups


def test_sdft_pulls_towards_the_model_that_has_seen_a_demonstration(tmp_path, monkeypatch):
    """From prompts to the gradient: tokens by hand, logprobs and gradient of transformers."""
    module, folder = load("sdft"), make_toy(tmp_path / "toy", max_position_embeddings=512)
    model, chat = AutoModelForCausalLM.from_pretrained(folder), Chat(folder)
    groups = replies(chat, model, [asked(0, extra={"demonstration": "bab"}), asked(1)])
    monkeypatch.setitem(ADVANTAGES, "sdft", module.sdft)
    options = AdvantageOptions(advantage="sdft")
    with Cluster("train=0", "cpu") as cluster:
        roles = Roles(cluster, tokens_per_microbatch=512)
        loss = {"loss": PolicyLoss(), "schedule": Schedule(lr=1e-3)}
        roles.policy = roles.add("train", Trainer, folder=folder, **loss)
        scores = roles.score_reprompted("policy", groups, chat, module.with_demonstration)
    assert scores[2:] == [None, None]
    rows = Rows(groups, options, ModelScores(reprompted_logprobs=scores))
    sequences = rows.sequences(options.estimate(rows))
    (question,) = groups[0].prompt.messages
    shown = module.SHOWN.format(question=question["content"], demonstration="bab")
    other_ids = chat.encode([{"role": "user", "content": shown}])
    terms = []
    for g, group in enumerate(groups):
        for i, sample in enumerate(group.samples):
            first = len(sample.turns[0].prompt_ids)
            tail, mask = sample.token_ids[first:], torch.tensor(sample.loss_mask[first:])
            with torch.no_grad():
                seen = logprobs_after(model, other_ids, tail)[mask]
            mu = torch.tensor([x for turn in sample.turns for x in turn.logprobs]).double()
            wanted = seen - mu if g == 0 else 0 * mu
            found = torch.tensor(sequences[2 * g + i].advantages[first:])[mask]
            assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
            own = logprobs_after(model, sample.token_ids[:first], tail)[mask]
            terms.append(-wanted * (own - mu).exp())
    assert torch.cat(terms).abs().max() > 1e-3
    total = torch.cat(terms).mean()
    total.backward()
    with start_alone("cpu") as place:
        grads, metrics = step_gradient(make_trainer(place, folder), pack(sequences, 512))
    assert metrics["loss/loss"] == pytest.approx(total.item(), rel=1e-3)
    expected = model.model.layers[0].mlp.down_proj.weight.grad
    assert (grads["blocks.0.mlp.down"] - expected).abs().max() <= 1e-3 * expected.abs().max()


# ---- curriculum


def test_the_curriculum_takes_what_succeeds_half_of_the_time():
    prompts, history = load("curriculum").prompts, History(pass_reward=1.0)
    passed = {"a": 8, "b": 0, "c": 7, "d": 3, "e": 6, "f": 5}  # of 8; variances 0 0 7 15 12 15
    for number, (name, num_passed) in enumerate(passed.items()):
        rewards = [float(i < num_passed) for i in range(8)]
        samples = [make_sample(reward, prompt_id=name) for reward in rewards]
        history.note(number, Group(prompt=samples[0].prompt, samples=samples))
    history.update()

    def drawn(names, **options):
        source = iter([make_sample(0.0, prompt_id=name).prompt for name in names])
        return prompts(source, history, **options).id, [prompt.id for prompt in source]

    assert drawn("abcefg") == ("e", ["f", "g"])
    assert drawn("abcefg", candidates=5) == ("f", ["g"])
    assert drawn("abcefg", candidates=6) == ("g", [])  # never sampled
    assert drawn("afdgh", candidates=3) == ("f", ["g", "h"])  # the first of two
    assert drawn("ab", candidates=1) == ("a", ["b"])
