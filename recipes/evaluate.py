"""How many replies of a model pass, domain by domain: pass@1, and pass@k of several samples.

python recipes/evaluate.py --model models/SmolLM2-135M-Instruct --data addition:2 --max-tokens 48
python recipes/evaluate.py --model runs/mine/model --data math.jsonl --samples 8 --temperature 0.8
python recipes/evaluate.py --model models/tiny --checkpoint runs/mine/checkpoints/step-00000040
python recipes/evaluate.py --model runs/mine/model --data sokoban frozen_lake:size=8     # episodes
python recipes/evaluate.py --model runs/b/model --data math.jsonl --against runs/evaluation-of-a
torchrun --nproc-per-node 8 recipes/evaluate.py --model ...      # an engine on each rank

Replies are scored by the rewards of recipes/rlvr.py and of --code FILE; episodes are played in the
environments of recipes/agentic.py and of --code FILE. All are written to the run folder as they
come: an interrupted evaluation that is started again with the same --run-dir continues where it
stopped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import roll_lite as rl
from roll_lite import command, data
from roll_lite.checks import UserError, above, at_least, finite, read_only_if
from roll_lite.options import flag_names, flatten
from roll_lite.recipes import agentic
from roll_lite.report.config_file import read_options, to_json
from roll_lite.report.paired import improvement_over
from roll_lite.report.reader import RunFolder

TASK_PROMPTS = 256
"""Questions of a task that are asked, and tasks of an environment, unless `prompts` says."""
MANY = 2**20
"""More prompts than engines answer at once."""


@rl.unique_options
@dataclass(frozen=True, kw_only=True)
class Config(rl.RecipeConfig):
    model: str = "models/tiny"
    """Hugging Face folder, or a name on the Hugging Face Hub, as Qwen/Qwen3-0.6B."""
    data: tuple[str, ...] = ("reverse:5",)
    """Files of prompts, or tasks, whose held-out prompts are used, or environments, whose
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
    pass_reward: float = 1.0
    """A reply passes with at least this reward."""
    against: str | None = None
    """Folder of an evaluation that asked another model the same with the same options: how much
    better this model is, prompt by prompt, with a 95% interval."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "evaluate"))
    """Folder for config.json, metrics.jsonl, events.jsonl and all replies in rollouts/."""
    seed: int = 0
    """Seed for sampling."""
    kv_cache_gib: float | None = None
    """KV cache of each engine, in GiB; None chooses by the model, the prompts and the GPU's memory,
    and prints it. On a CPU it is 1."""
    device: str = "auto"
    """What to compute on: auto, cpu or cuda."""
    device_map: str | None = None
    """Ranks of the engines, as in generate=all,tp=2; None puts every role on all ranks."""
    sampling: rl.SamplingOptions = rl.SamplingOptions()
    chat: rl.ChatOptions = rl.ChatOptions()
    rows: rl.RowOptions = rl.RowOptions()
    own: rl.CodeOptions = rl.CodeOptions()
    scoring: rl.RewardOptions = rl.RewardOptions()
    environments: rl.EnvOptions = rl.EnvOptions()
    episodes: rl.EpisodeOptions = rl.EpisodeOptions()
    tracking: rl.TrackerOptions = rl.TrackerOptions()

    REWARDS: ClassVar = agentic.Config.REWARDS
    INLINE: ClassVar = agentic.Config.INLINE
    ENVS: ClassVar = agentic.Config.ENVS
    FIXED: ClassVar = (
        "model", "checkpoint", "data", "samples", "temperature", "top_k", "top_p", "min_p", "stop",
        "max_tokens", "seed", "code", "code_digests", "judge", "judge_tokens", "reward_model",
        "template_args", "system", "judge_template_args",
        "max_turns", "history", "old_thoughts", "episode_tokens", "at_limit",
        "columns",
    )  # fmt: skip
    SHOWN: ClassVar = {
        "eval/pass@1": "pass@1", "eval/reward": "reward", "eval/failed": "failed",
        "eval/reply_tokens": "tokens",
    }  # fmt: skip

    def __post_init__(self):
        rl.read_config(self.model)
        has_envs = bool(self.players)  # refuses wrong options of environments
        for part in (self.environments, self.episodes):
            names = flag_names(type(part))
            read_only_if(has_envs, "environments in data", part, *names)
        kinds = {entry.kind for entry in data.parse_mixture(self.data, self.env_names)}
        read_only_if("file" in kinds, "a file in data", self.rows, "columns")
        at_least(1, self, "samples")
        above(0, self, "kv_cache_gib")
        finite(self, "pass_reward")
        if self.prompts is not None:
            at_least(1, self, "prompts")
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"samples={self.samples} with temperature=0 are all equal; use samples=1, or a "
                "temperature above 0"
            )
        truncation = ("top_k", "top_p", "min_p")
        is_greedy = self.samples == 1 if self.temperature is None else self.temperature == 0
        read_only_if(not is_greedy, "a temperature above 0", self.sampling, *truncation)
        _ = self.params(())

    @property
    def open_defaults(self) -> dict[str, Any]:
        roles = ["generate", *self.scoring.reward_roles]
        return {
            "device_map": " ".join(f"{role}=all" for role in roles),
            "temperature": float(self.samples > 1),
        }

    @property
    def cluster_options(self) -> dict[str, Any]:
        """Roles and their models."""
        return {
            "roles": ["generate", *self.scoring.reward_roles],
            "config": rl.read_config(self.model),
            "role_configs": self.scoring.reward_configs,
        }

    @property
    def planned(self) -> dict[str, int]:
        """All prompts are asked at once. How many a file has is not known before it is read."""
        entries = data.parse_mixture(self.data, self.env_names)
        counts = [self.prompts or (MANY if e.kind == "file" else TASK_PROMPTS) for e in entries]
        return {"prompts_per_step": sum(counts), "samples_per_prompt": self.samples}

    def check_files(self) -> None:
        """Refuse data and checkpoints that are missing, and a folder with another run; the first
        rank does."""
        data.check_mixture(self.data, self.env_names)
        if self.checkpoint is not None:
            rl.check_checkpoint(self.checkpoint, self.model)
        rl.refuse_old_run(self.run_dir)
        if self.against is not None:
            self._check_against(self.against)

    def _check_against(self, folder: str) -> None:
        """Refuse an evaluation that asked otherwise."""
        if not Path(folder, "rollouts", "step_00000.jsonl").is_file():
            raise UserError(f"against={folder!r} has no complete evaluation of evaluate.py")
        theirs, ours = read_options(f"{folder}/config.json"), to_json(self)
        for name in sorted({*self.FIXED, *self.own.values, "prompts"} - {"model", "checkpoint"}):
            if theirs.get(name) != ours[name]:
                raise UserError(
                    f"against={folder!r} has {name}={theirs.get(name)!r}, and here it is "
                    f"{ours[name]!r}; give the same, or evaluate that model again"
                )

    def read_rows(self, source: str) -> list[rl.Prompt]:
        """Prompts of a file; rows without a domain get that of the only reward."""
        domain = self.own.only_domain(self.scoring.reward_roles)
        return data.read_prompts(source, self.rows.by_name, domain)

    @property
    def env_names(self) -> dict[str, Any]:
        """Environments by name, those of --code included."""
        return {**self.ENVS, **self.own.envs}

    @property
    def players(self) -> dict[str, rl.Player]:
        """For each environment in data, what plays its episodes."""
        entries = data.parse_mixture(self.data, self.env_names)
        specs = [entry.source for entry in entries if entry.kind == "env"]
        return rl.env_players(specs, self.env_names, self.episodes)

    @property
    def default_kinds(self) -> dict[str, str]:
        is_all_played = len(self.players) == len(self.data)
        return {"max_tokens": "turn" if is_all_played else "reply"}

    def params(self, stop_ids: tuple[int, ...]) -> rl.SamplingParams:
        return self.sampling.params(
            max_tokens=self.max_tokens or 1,  # they are checked before they are resolved
            temperature=self.temperature or 0.0,
            stop_ids=stop_ids,
        )


def main(cfg: Config) -> dict[str, float]:
    config = rl.read_config(cfg.model)
    with rl.Cluster(cfg.device_map, cfg.device, options=cfg, **cfg.cluster_options) as cluster:
        cfg.check_files()
        cfg = rl.fit_cache(cfg, cluster)  # lower than asked where other programs use the GPU
        chat = rl.Chat(cfg.model, **cfg.chat.arguments)
        prompts = data.held_out(
            cfg.data, cfg.prompts, of_tasks=TASK_PROMPTS, envs=cfg.env_names, read=cfg.read_rows
        )
        chat.check_prompts(prompts)
        cfg.own.check_domains(prompt.domain for prompt in prompts if prompt.is_question)
        answers = rl.AnswerFile(f"{cfg.run_dir}/answers.jsonl", prompts, asked_with(cfg))
        trackers = [*cfg.tracking.openers, *cfg.own.trackers]
        run = rl.Run(cfg.run_dir, cfg, num_steps=0, shown=cfg.SHOWN, trackers=trackers)
        folder = cfg.model
        if cfg.checkpoint:
            folder = str(rl.export_checkpoint(cfg.checkpoint, cfg.model, f"{cfg.run_dir}/model"))
        options = {"folder": folder, "kv_cache_gib": cfg.kv_cache_gib}
        engines = cluster.role("generate", rl.EngineService, **options)
        print(engines.describe())
        start = time.perf_counter()
        context = min(config.max_positions, rl.cache_tokens(cfg, cluster))
        with rl.make_players(cfg, prompts, (), cluster) as players:
            groups = ask(cfg, prompts, answers, engines, chat, players, run, context)
        rl.refuse_all_failed(groups)
        metrics = rl.pass_rates(groups, cfg.pass_reward)
        metrics["time/rollout"] = time.perf_counter() - start
        run.write_rollouts(0, groups)
        run.log(0, metrics)
        run.close()
        answers.remove()
        print(table(metrics, groups, cfg.samples))
        if cfg.against:
            found = improvement_over(RunFolder(cfg.against), RunFolder(cfg.run_dir))
            none = "too few prompts in common, or none passes"
            print(f"pass@1 over {cfg.against}: {found or none}")
    return metrics


def asked_with(cfg: Config) -> dict[str, Any]:
    """The options and weights that answers and scores depend on."""
    times = {p.name: p.stat().st_mtime_ns for p in sorted(Path(cfg.model).glob("*.safetensors"))}
    options = flatten(cfg)
    fixed = {name: options[name] for name in cfg.FIXED} | cfg.own.values
    return fixed | {"weights_written": times}


def ask(
    cfg: Config, prompts: list[rl.Prompt], answers: rl.AnswerFile, engines: rl.RoleHandle,
    chat: rl.Chat, players: rl.Players, run: rl.Run, context: int,
) -> list[rl.Group]:  # fmt: skip
    """A group for each prompt; prompts that were answered before are not asked again."""
    params = cfg.params(chat.stop_ids)
    with rl.Coordinator(
        engines=engines,
        chat=chat,
        play=players.play,
        prompts=iter(()),
        params=params,
        options=rl.RolloutOptions(samples_per_prompt=cfg.samples),
        seed=cfg.seed,
        reward_engines=players.engine_clients,
        max_length=context,
        episodes=cfg.episodes,
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


def table(metrics: dict[str, float], groups: list[rl.Group], num_samples: int) -> str:
    """A row for each domain and file, and one for all: pass rates, and the mean reward."""
    of_several = [f"pass@{num_samples}"] if num_samples > 1 else []
    rows = [["subset", "prompts", "pass@1", *of_several, "reward"]]
    for subset, members in (rl.subsets_of(groups) | {"": groups}).items():
        prefix = f"eval/{subset}" if subset else "eval"
        rates = [metrics.get(f"{prefix}/{name}") for name in rows[0][2:]]
        shown = ["-" if rate is None else f"{rate:.3f}" for rate in rates]
        rows.append([subset or "all", str(len(members)), *shown])
    return rl.format_table(rows)


if __name__ == "__main__":
    command.run(main, Config, __doc__)
