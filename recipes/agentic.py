"""Agentic reinforcement learning: episodes of several turns in environments.

python recipes/agentic.py --model models/tiny --data frozen_lake:style=short
python recipes/agentic.py --model models/SmolLM2-135M-Instruct --data frozen_lake sokoban@2 \
        --prompts-per-step 64 --samples-per-prompt 16 --kv-cache-gib 8
torchrun --nproc-per-node 8 recipes/agentic.py --data sokoban --max-staleness 1 \
        --device-map "train=0-3 generate=4-7"                           # asynchronous
python recipes/agentic.py --data frozen_lake --advantage gigpo --history 2      # turn by turn
python recipes/agentic.py --data mine --envs my_envs.py         # an environment of your own
python -m pdb recipes/agentic.py --env-workers 0 ...    # one process: break in an environment

An environment is a class like `Doors` below, or a coroutine: docs/environments.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import ClassVar

from rlvr import FIXED, SHOWN, PolicyConfig, make_roles, train

from roll_lite import command, data
from roll_lite.chat import Chat
from roll_lite.checks import read_only_if
from roll_lite.cluster.cluster import Cluster
from roll_lite.envs.options import EnvOptions
from roll_lite.envs.play import EpisodeOptions
from roll_lite.envs.registry import ENVS
from roll_lite.envs.tasks import env_tasks, held_out_tasks
from roll_lite.options import unique_options
from roll_lite.planning import cache_tokens, choose_memory
from roll_lite.report.run import default_folder
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import Evaluation
from roll_lite.rollout.event_loop import rare_collections
from roll_lite.train.defaults import choose_defaults
from roll_lite.types import Group, Prompt, SamplingParams
from roll_lite.workers.environments import EnvWorkers


class Doors:
    """Your own environment looks like this: text in, text out. `breakpoint()` works here."""

    def reset(self, seed):
        self.prize, self.num_opened = Random(seed).randint(1, 3), 0
        return "A prize is behind door 1, 2 or 3. Reply with the number of a door.", {}

    def step(self, reply):
        self.num_opened += 1
        is_won = reply.strip() == str(self.prize)
        info = {"last": {"success": is_won}, "mean": {"valid": reply.strip() in ("1", "2", "3")}}
        return "Wrong. Try another door.", float(is_won), is_won, self.num_opened == 3, info


OWN = {"doors": Doors}
keep: Callable[[Group], bool] | None = None
"""Your own filter: `def keep(group)` says whether a group of episodes is trained on."""


@unique_options
@dataclass(frozen=True, kw_only=True)
class Config(PolicyConfig):
    data: tuple[str, ...] = ("frozen_lake",)
    """What to learn: environments, mixed by weight, with their options, as in
    frozen_lake:size=8@0.3 sokoban@0.7. `python -m roll_lite.envs bench` lists them."""
    run_dir: str = field(default_factory=partial(default_folder, "agentic"))
    """Folder for config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and model/."""
    environments: EnvOptions = EnvOptions()
    episodes: EpisodeOptions = EpisodeOptions()
    lacking: ClassVar = {"opd": "a teacher"}

    def __post_init__(self):
        super().__post_init__()
        _ = self.players  # refuses unknown environments and options
        read_only_if(False, "files (rlvr.py)", self.evaluation, "eval_share")
        read_only_if(False, "files (rlvr.py)", self.lengths, "long_prompts")
        if self.lengths.overlong == "penalty":
            raise ValueError("overlong='penalty' applies to single replies; use train or mask")
        is_split = self.episodes.history is not None or self.episodes.old_thoughts == "drop"
        if is_split and self.policy_loss.pack_options["by_sample"]:
            raise ValueError(
                f"loss={self.policy_loss.loss!r} or its correction has one number per episode, "
                "whose sequences need not fit a micro-batch with history or old_thoughts=drop; "
                "use loss=ppo, segment or cispo, with corrections by token"
            )

    @property
    def default_kinds(self) -> dict[str, str]:
        return super().default_kinds | {"max_tokens": "turn"}

    @property
    def eval_specs(self) -> list[str]:
        entries = self.evaluation.eval_data or self.data
        return [entry.source for entry in data.parse_mixture(entries)]

    @property
    def players(self) -> dict:
        """For each environment to train or evaluate on, what plays its episodes."""
        specs = [entry.source for entry in data.parse_mixture(self.data)] + self.eval_specs
        return self.environments.players(specs, ENVS | OWN, self.episodes)

    @property
    def held_out(self) -> list[Prompt]:
        """Tasks to evaluate on: the same for all seeds of a run, from seeds never trained on."""
        if self.evaluation.eval_every == 0:
            return []
        return held_out_tasks(self.eval_specs, self.evaluation.eval_prompts)


SHOWN = {
    "reward/mean": "reward", "eval/pass@1": "eval", "reward/success": "success",
    "rollout/turns": "turns", "reward/valid": "valid", "env/errors": "env errors", **SHOWN,
}  # fmt: skip


def main(cfg: Config) -> list[float]:
    """Returns the held-out success rates of this start, in order."""
    with Cluster(cfg.device_map, cfg.device, options=cfg, **cfg.cluster_options) as cluster:
        cfg = choose_memory(choose_defaults(cfg, **cfg.default_kinds), cluster)
        chat = Chat(cfg.model, **cfg.chat.arguments)
        tasks = data.Mixture(cfg.data, seed=f"agentic-{cfg.seed}", envs=ENVS | OWN)
        with EnvWorkers(cfg.players, **cfg.environments.limits) as envs:
            models = make_roles(cfg, cluster)
            params = SamplingParams(
                max_tokens=cfg.lengths.max_tokens,
                temperature=cfg.temperature,
                stop_ids=chat.stop_ids,
            )
            evaluation = Evaluation(cfg.held_out, cfg.evaluation, params)
            rollout = Coordinator(
                engines=models.engines, chat=chat, play=envs.play, prompts=tasks, params=params,
                options=cfg.rollout, min_samples=cfg.min_samples, seed=cfg.seed, keep=keep,
                max_length=min(cfg.longest_sample, cache_tokens(cfg, cluster)),
                episodes=cfg.episodes,
            )  # fmt: skip
            with rollout, rare_collections(cfg.rollout.max_samples_in_flight):
                train(cfg, cluster, models, rollout, evaluation, envs.metrics, SHOWN)
        print(f"model: {models.policy.export(f'{cfg.run_dir}/model')}")
    return evaluation.rates


if __name__ == "__main__":
    command.run(main, Config, __doc__, fixed=FIXED)
