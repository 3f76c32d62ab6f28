"""How many replies of a model pass, domain by domain: pass@1, and pass@k of several samples.

python recipes/evaluate.py --model models/SmolLM2-135M-Instruct --data addition:2 --max-tokens 48
python recipes/evaluate.py --model runs/mine/model --data math.jsonl --samples 8 --temperature 0.8
python recipes/evaluate.py --model models/tiny --checkpoint runs/mine/checkpoints/step-00000040
python recipes/evaluate.py --model runs/mine/model --data sokoban frozen_lake:size=8     # episodes
torchrun --nproc-per-node 8 recipes/evaluate.py --model ...      # an engine on each rank

Replies are scored by the rewards of recipes/rlvr.py and of --rewards FILE; episodes are played in
the environments of recipes/agentic.py and of --envs FILE. All are written to the run folder as they
come: an interrupted evaluation that is started again with the same --run-dir continues where it
stopped.
"""

import time
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentic import OWN
from rlvr import INLINE, REWARDS

from roll_lite import command, data
from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import above, at_least, finite, read_only_if
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle
from roll_lite.device_map import format_table
from roll_lite.engine.service import EngineService
from roll_lite.envs.env import Player
from roll_lite.envs.options import EnvOptions
from roll_lite.envs.play import ONE_TURN, EpisodeOptions
from roll_lite.envs.registry import ENVS
from roll_lite.envs.tasks import held_out_tasks
from roll_lite.models.config import read_config
from roll_lite.options import flatten, unique_options
from roll_lite.planning import cache_tokens
from roll_lite.report.run import Run, default_folder, refuse_old_run
from roll_lite.rewarding import RewardOptions, Rewards
from roll_lite.rewards import registry
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.groups import refuse_all_failed
from roll_lite.rollout.metrics import pass_rates, subsets_of
from roll_lite.rollout.record import AnswerFile
from roll_lite.rollout.rollout_options import RolloutOptions
from roll_lite.train.defaults import choose_defaults
from roll_lite.train.export import check_checkpoint, export_checkpoint
from roll_lite.types import Group, Prompt, SamplingParams
from roll_lite.workers.environments import EnvWorkers


@unique_options
@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "models/tiny"
    """Hugging Face folder."""
    data: tuple[str, ...] = ("reverse:5",)
    """Files of prompts, or tasks, whose held-out questions are asked, or environments, whose
    held-out tasks are played."""
    checkpoint: str | None = None
    """Evaluate this checkpoint of a run that started from `model`."""
    prompts: int | None = None
    """At most this many prompts of each source; None is all of a file and 256 of a task."""
    samples: int = 1
    """Replies to each prompt; more than one adds pass@k."""
    max_tokens: int | None = None
    """Longest reply, in tokens; None chooses by the model's size, and prints it."""
    temperature: float | None = None
    """Sampling temperature; None is greedy for one sample and 1 for several."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Sample among tokens at least this likely, relative to the likeliest."""
    pass_reward: float = 1.0
    """A reply passes with at least this reward."""
    run_dir: str = field(default_factory=partial(default_folder, "evaluate"))
    """Folder for config.json, metrics.jsonl, events.jsonl and all replies in rollouts/."""
    seed: int = 0
    """Seed for sampling."""
    kv_cache_gib: float = 1.0
    """KV cache of each engine, in GiB."""
    device: str = "auto"
    """auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks of the engines, as in generate=all,tp=2; None puts every role on all ranks."""
    chat: ChatOptions = ChatOptions()
    scoring: RewardOptions = RewardOptions()
    environments: EnvOptions = EnvOptions()
    episodes: EpisodeOptions = EpisodeOptions()

    def __post_init__(self):
        read_config(self.model)
        if self.is_played:
            _ = self.players  # refuses wrong options of environments
        else:
            data.check_mixture(self.data)
        for part in (self.environments, self.episodes):
            names = (field.name for field in fields(part))
            read_only_if(self.is_played, "environments in data", part, *names)
        at_least(1, self, "samples")
        above(0, self, "kv_cache_gib")
        finite(self, "pass_reward")
        if self.prompts is not None:
            at_least(1, self, "prompts")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} with temperature=0 are all equal; use samples=1, or a "
                "temperature above 0"
            )
        truncation = ("top_k", "top_p", "min_p")
        read_only_if(self.chosen_temperature > 0, "a temperature above 0", self, *truncation)
        _ = self.params
        if self.checkpoint is not None:
            check_checkpoint(self.checkpoint, self.model)
        refuse_old_run(self.run_dir)

    @property
    def specs(self) -> list[str]:
        return [entry.source for entry in data.parse_mixture(self.data)]

    @property
    def is_played(self) -> bool:
        """Whether the data are environments."""
        return all(self.environments.knows(spec, ENVS | OWN) for spec in self.specs)

    @property
    def players(self) -> dict[str, Player]:
        return self.environments.players(self.specs, ENVS | OWN, self.episodes)

    @property
    def chosen_temperature(self) -> float:
        return float(self.samples > 1) if self.temperature is None else self.temperature

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens or 1,  # chosen in main
            temperature=self.chosen_temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


FIXED = (
    "model", "checkpoint", "data", "samples", "temperature", "top_k", "top_p", "min_p",
    "max_tokens", "seed", "rewards", "judge", "judge_tokens", "reward_model",
    "template_args", "judge_template_args",
    "envs", "max_turns", "history", "old_thoughts", "episode_tokens", "at_limit",
)  # fmt: skip
SHOWN = {
    "eval/pass@1": "pass@1", "eval/reward": "reward", "eval/failed": "failed",
    "eval/reply_tokens": "tokens",
}  # fmt: skip
TRACKERS = ()  # yours, beside TensorBoard: docs/tutorial.md has wandb and trackio


def main(cfg: Config) -> dict[str, float]:
    roles = ["generate", *cfg.scoring.reward_roles]
    device_map = cfg.device_map or " ".join(f"{role}=all" for role in roles)
    configs = {"config": read_config(cfg.model), "role_configs": cfg.scoring.reward_configs}
    with Cluster(device_map, cfg.device, roles=roles, options=cfg, **configs) as cluster:
        cfg = choose_defaults(cfg, max_tokens="turn" if cfg.is_played else "reply")
        chat = Chat(cfg.model, **cfg.chat.arguments)
        prompts = read_prompts(cfg, chat)
        answers = AnswerFile(f"{cfg.run_dir}/answers.jsonl", prompts, asked_with(cfg))
        run = Run(cfg.run_dir, cfg, num_steps=0, shown=SHOWN, trackers=TRACKERS)
        folder = cfg.model
        if cfg.checkpoint:
            folder = str(export_checkpoint(cfg.checkpoint, cfg.model, f"{cfg.run_dir}/model"))
        options = {"folder": folder, "kv_cache_gib": cfg.kv_cache_gib}
        engines = cluster.role("generate", EngineService, **options)
        print(engines.describe())
        start = time.perf_counter()
        with make_scoring(cfg, prompts, cluster) as scoring:
            context = min(read_config(cfg.model).max_positions, cache_tokens(cfg, cluster))
            groups = ask(cfg, prompts, answers, engines, chat, scoring, run, context)
        refuse_all_failed(groups)
        metrics = pass_rates(groups, cfg.pass_reward)
        metrics["time/rollout"] = time.perf_counter() - start
        run.write_rollouts(0, groups)
        run.log(0, metrics)
        run.close()
        answers.remove()
        print(table(metrics, groups, cfg.samples))
    return metrics


def read_prompts(cfg: Config, chat: Chat) -> list[Prompt]:
    if cfg.is_played:
        return held_out_tasks(cfg.specs, cfg.prompts or 256)
    prompts = data.held_out(cfg.data, cfg.prompts, of_tasks=256)
    chat.check_prompts(prompts)
    return prompts


def make_scoring(cfg: Config, prompts: list[Prompt], cluster: Cluster) -> Rewards | EnvWorkers:
    if cfg.is_played:
        return EnvWorkers(cfg.players, **cfg.environments.limits)
    domains = {prompt.domain for prompt in prompts}
    functions, inline = cfg.scoring.with_file(REWARDS, INLINE, domains)
    registry.check_prompts(prompts, functions | inline)
    return Rewards(functions, inline, domains, cfg.scoring, cluster)


def asked_with(cfg: Config) -> dict[str, Any]:
    """The options and weights that answers and scores depend on."""
    times = {p.name: p.stat().st_mtime_ns for p in sorted(Path(cfg.model).glob("*.safetensors"))}
    options = flatten(cfg)
    return {name: options[name] for name in FIXED} | {"weights_written": times}


def ask(
    cfg: Config, prompts: list[Prompt], answers: AnswerFile,
    engines: RoleHandle, chat: Chat, scoring: Rewards | EnvWorkers, run: Run, context: int,
) -> list[Group]:  # fmt: skip
    """A group for each prompt; prompts that were answered before are not asked again."""
    params = replace(cfg.params, stop_ids=chat.stop_ids)
    with Coordinator(
        engines=engines,
        chat=chat,
        play=scoring.play,
        prompts=iter(()),
        params=params,
        options=RolloutOptions(samples_per_prompt=cfg.samples),
        seed=cfg.seed,
        reward_engines=getattr(scoring, "engine_clients", ()),
        max_length=context if cfg.is_played else None,
        episodes=cfg.episodes if cfg.is_played else ONE_TURN,
    ) as rollout:
        places = answers.missing
        try:
            rollout.answer(
                [prompts[place] for place in places],
                num_samples=cfg.samples,
                params=params,
                on_group=lambda number, group: answers.keep(places[number], group),
            )
        finally:
            run.note_samples(0, rollout.dropped())
            run.flush()
    return [answers.groups[place] for place in range(len(prompts))]


def table(metrics: dict[str, float], groups: list[Group], num_samples: int) -> str:
    """A row for each domain and file, and one for all: pass rates, and the mean reward."""
    of_several = [f"pass@{num_samples}"] if num_samples > 1 else []
    rows = [["subset", "prompts", "pass@1", *of_several, "reward"]]
    for subset, members in (subsets_of(groups) | {"": groups}).items():
        prefix = f"eval/{subset}" if subset else "eval"
        rates = [metrics.get(f"{prefix}/{name}") for name in rows[0][2:]]
        shown = ["-" if rate is None else f"{rate:.3f}" for rate in rates]
        rows.append([subset or "all", str(len(members)), *shown])
    return format_table(rows)


if __name__ == "__main__":
    command.run(main, Config, __doc__)
