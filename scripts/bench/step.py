"""Steps of recipes/rlvr.py with a model of random weights: peak memory and seconds beside the plan.

python scripts/bench/step.py qwen3-8b --moments bfloat16 --kv-cache-gib 60 --checkpointing full \
        --max-tokens 512 --steps 10
python scripts/bench/step.py qwen3-32b --lora-rank 16 --kv-cache-gib 40 --checkpointing full

The loop is the recipe's. Every reply has its full length and a random reward; no checkpoint and no
model is written. Medians leave out the first two steps, which capture graphs and pin host memory.
The last line is JSON.
"""

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from roll_lite import data, loop
from roll_lite.chat import Chat
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.launch import read_launch
from roll_lite.cluster.places import find_device
from roll_lite.device_map import format_table
from roll_lite.envs.play import question_player
from roll_lite.models.tiny import build_tiny
from roll_lite.options import from_flat
from roll_lite.planning.plan import Plan
from roll_lite.planning.render import render, seconds_table
from roll_lite.planning.resolve import fit_cache, plan_run, resolved
from roll_lite.planning.speed import WARM_UP, known_machine, measured_seconds, step_seconds
from roll_lite.recipes import rlvr
from roll_lite.roles import Roles
from roll_lite.rollout.coordinator import Coordinator
from roll_lite.rollout.evaluation import Evaluation
from roll_lite.train.checkpoint import RunState
from roll_lite.types import SHAPE, SamplingParams

POLL_SECONDS = 0.02


@dataclass(kw_only=True)
class Config:
    model: tyro.conf.Positional[str] = "qwen3-0.6b"
    """A shape, or a folder."""
    steps: int = 10
    """Steps of the recipe."""
    max_tokens: int = 512
    """Length of every reply."""
    prompts_per_step: int = 32
    """Prompts per step."""
    samples_per_prompt: int = 8
    """Group size."""
    tokens_per_microbatch: int = 16384
    """Packed tokens of one forward and backward pass."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of AdamW's moments."""
    lora_rank: int = 0
    """Train adapters of this rank instead of all weights."""
    kv_cache_gib: float = 1.0
    """KV cache of each engine."""
    kl_coef: float = 0.0
    """Above 0 the run has a reference."""
    engines_sleep: bool = False
    """As in rlvr.py, which turns it on by itself where memory asks for it."""
    offload: bool = False
    """Likewise."""
    device_map: str = "auto"
    """As in rlvr.py."""
    device: str = "auto"
    """auto, cpu or cuda."""


class Unsaved(RunState):
    """Masters and moments of 8B take 61 GiB, which nothing reads here."""

    def _save(self, run, *, beside: bool = False) -> None:
        pass


@dataclass
class DeviceMemory:
    """The most bytes in use on the controller's GPU in each phase, by any process and allocator."""

    device: torch.device
    peaks: dict[str, int] = field(default_factory=dict)
    phase: str = "generating"

    @contextmanager
    def watched(self, roles: Roles) -> Iterator[None]:
        """Polls in a thread of its own."""
        to_training, sync = roles.to_training, roles.sync
        roles.to_training = lambda: self._in("training", to_training)
        roles.sync = lambda *args: self._in("syncing", sync, *args)
        is_over = threading.Event()
        thread = threading.Thread(target=self._poll, args=(is_over,), daemon=True)
        if self.device.type == "cuda":
            thread.start()
        yield
        is_over.set()

    def _in(self, phase: str, hand_over, *args) -> None:
        self.phase = phase
        hand_over(*args)
        self.phase = "generating" if phase == "syncing" else phase

    def _poll(self, is_over: threading.Event) -> None:
        while not is_over.wait(POLL_SECONDS):
            free, total = torch.cuda.mem_get_info(self.device)
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), total - free)


def recipe_config(cfg: Config, run_dir: str) -> rlvr.Config:
    is_folder = Path(cfg.model).is_dir()
    given = {name: getattr(cfg, name) for name in vars(cfg)}
    given |= {"model": cfg.model if is_folder else f"{SHAPE}{cfg.model}", "lr": 1e-6}
    return from_flat(
        rlvr.Config, **given, data=("addition:2",), run_dir=run_dir, eval_every=0, rollouts_every=0
    )


def random_reward(prompt, reply: str) -> float:
    return float(random.random() < 0.5)


def run_steps(run: rlvr.Config, cluster: Cluster, chat: Chat, memory: DeviceMemory) -> None:
    """The recipe's loop, without what surrounds it."""
    roles = rlvr.make_roles(run, cluster)
    params = SamplingParams(max_tokens=run.lengths.max_tokens, temperature=run.temperature)
    prompts = data.Mixture(run.data, seed="bench")
    play = question_player({"addition": random_reward})
    rollout = Coordinator(
        engines=roles.engines, chat=chat, play=play, prompts=prompts, params=params,
        options=run.rollout, min_samples=run.min_samples, seed=run.seed,
        max_length=run.longest_sample,
    )  # fmt: skip
    loop.RunState = Unsaved
    evaluation = Evaluation([], run.evaluation, params)
    with loop.Loop(run, roles, rollout, evaluation) as steps, memory.watched(roles):
        for step in steps:
            groups = rollout.collect()
            sequences = rlvr.prepare(groups, run, roles, steps.state, chat)
            metrics = rlvr.update(sequences, run, roles, step)
            roles.sync(step, rollout)
            steps.end(step, metrics, groups, sequences)


def memory_table(plan: Plan, memory: DeviceMemory, rows: list[dict[str, float]]) -> list[list[str]]:
    """Planned and measured GiB of the controller's rank, by phase."""
    table = [["memory", "planned GiB", "used on the device", "allocated by torch"]]
    phases = next(part for part in plan.ranks if 0 in part.ranks).phases
    allocated = max((row.get("train/peak_gib", 0.0) for row in rows), default=0.0)
    for name, held in phases.items():
        found = [peak for phase, peak in memory.peaks.items() if phase in name] or [
            max(memory.peaks.values(), default=0)
        ]
        is_training = "training" in name or len(phases) == 1
        torch_peak = f"{allocated:.1f}" if allocated and is_training else ""
        table.append([name, f"{held.total / 2**30:.1f}", f"{found[0] / 2**30:.1f}", torch_peak])
    return table


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = resolved(recipe_config(cfg, f"{folder}/run"))
        with Cluster(run.device_map, run.device, **run.cluster_options) as cluster:
            run, launch = fit_cache(run, cluster), read_launch()
            chat = Chat(cfg.model if Path(cfg.model).is_dir() else build_tiny(f"{folder}/tiny"))
            prompts = data.Mixture(run.data, seed="bench")
            longest = max(len(chat.encode(next(prompts).messages)) for _ in range(64))
            device = find_device(run.device, launch, measures=True)
            plan = plan_run(run, cluster.device_map, device, longest)
            machine = known_machine(device.name, launch.local_world_size)
            print(render(plan, machine), flush=True)
            memory, start = DeviceMemory(cluster.device), time.perf_counter()
            run_steps(run, cluster, chat, memory)
            lines = (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if "time/step" in row]
            measured = measured_seconds(rows[min(WARM_UP, len(rows) - 1) :])
            print(f"\n{format_table(memory_table(plan, memory, rows))}\n")
            planned = step_seconds(plan, machine) if machine else {}
            print(f"{seconds_table(planned, measured)}\n")
            result = {"model": cfg.model, "steps": len(rows), "seconds": measured}
            result |= {"peak_gib": {k: round(v / 2**30, 2) for k, v in memory.peaks.items()}}
            result |= {"planned_gib": round(plan.needed / 2**30, 2)}
            print(json.dumps(result | {"all_seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__.split("\n\n")[0]))
