"""roll_lite: reinforcement learning for language models in one torchrun program.

    import roll_lite as rl

`rl.Cluster` and the names below are imported when they are first used: torch takes seconds.
"""

import os
from importlib import import_module
from typing import Any

_NAMES = {
    "chat": "Chat",
    "chat_template": "ChatOptions",
    "cluster.cluster": "Cluster",
    "cluster.role": "RoleHandle split",
    "data": "HeldOutOptions Mixture PromptLimit",
    "device_map": "format_table",
    "engine.service": "EngineService",
    "envs.env": "Player",
    "envs.play": "EpisodeOptions",
    "envs.specs": "ENVS EnvOptions",
    "loop": "Loop Validation",
    "models.config": "read_config",
    "models.cost": "SequenceCost",
    "options": "unique_options",
    "planning": "cache_tokens choose_memory print_plan",
    "policy": "Players PolicyConfig make_players",
    "report.run": "Run default_folder refuse_old_run",
    "rewarding": "RewardOptions",
    "rewards.maths": "last_number",
    "rewards.registry": "REWARDS",
    "roles": "Roles",
    "rollout.coordinator": "Coordinator",
    "rollout.evaluation": "Evaluation EvaluationOptions refuse_all_failed",
    "rollout.metrics": "pass_rates subsets_of",
    "rollout.record": "AnswerFile",
    "rollout.rollout_options": "RolloutOptions",
    "train.advantages": "AdvantageOptions",
    "train.batch": "TrainingSequence equal_parts pack sample_runs",
    "train.checkpoint": "CheckpointOptions",
    "train.defaults": "choose_defaults paper_advantages",
    "train.distillation": "DistillLoss pack_taught",
    "train.encoding": "check_vocabulary encode_dialogues encode_fitting encode_preferences fit",
    "train.export": "check_checkpoint export_checkpoint",
    "train.losses": "LossOptions PolicyLoss ValueLoss critic_metrics sft_loss",
    "train.optimizer": "TrainingOptions",
    "train.preference": "DPOLoss Pair pack_pairs with_reference",
    "train.profiling": "ProfileOptions",
    "train.scorer": "Scorer score_over_ranks",
    "train.sequences": "AdvantageState ModelScores Rows plain_sequences with_advantages with_field",
    "train.totals": "combine",
    "train.trainer": "Trainer",
    "types": "Group Prompt Sample SamplingParams Score Turn",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"roll_lite has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(f"roll_lite.{_HOMES[name]}"), name)


if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process, or one of its ancestors
    from roll_lite.processes import end_with_launcher

    end_with_launcher()  # before anything that takes time to import
