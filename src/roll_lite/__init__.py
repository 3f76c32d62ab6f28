"""roll_lite: reinforcement learning for language models in one torchrun program.

    import roll_lite as rl

`rl.Cluster` and the names below are imported when they are first used: torch takes seconds.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "chat": "Chat",
    "chat_template": "ChatOptions",
    "checks": "Above AtLeast AtMost UserError",
    "cluster.cluster": "Cluster",
    "code_files": "CodeOptions load_code",
    "cluster.role": "RoleHandle split",
    "data": "HeldOutOptions Mixture PromptLimit",
    "device_map": "format_table",
    "engine.service": "EngineService",
    "envs.env": "Player",
    "envs.play": "EpisodeOptions",
    "envs.specs": "ENVS EnvOptions env_players",
    "loop": "Loop Validation",
    "models.config": "read_config",
    "models.cost": "SequenceCost",
    "options": "RecipeConfig unique_options",
    "planning": "cache_tokens print_plan",
    "planning.resolve": "fit_cache resolve resolved",
    "players": "Players make_players",
    "policy": "PolicyConfig TeacherOptions",
    "profiling": "ProfileOptions",
    "report.run": "Run default_folder refuse_old_run",
    "rewarding": "RewardOptions",
    "rewards.maths": "last_number",
    "rewards.registry": "REWARDS",
    "roles": "Roles",
    "rollout.coordinator": "Coordinator",
    "rollout.evaluation": (
        "AnswerFile Evaluation EvaluationOptions pass_rates refuse_all_failed subsets_of"
    ),
    "rollout.history": "History Visits",
    "rollout.rollout_options": "RolloutOptions",
    "train.advantages": (
        "ADVANTAGES AdvantageFacts AdvantageOptions PerSample PerToken PerTurn mean_by_group "
        "standardise"
    ),
    "train.kl": "KLOptions",
    "train.batch": "pack pack_pairs",
    "train.checkpoint": "CheckpointOptions",
    "train.distillation": "DistillLoss",
    "train.encoding": "check_vocabulary encode_dialogues encode_fitting encode_preferences fit",
    "train.export": "check_checkpoint export_checkpoint",
    "train.losses": "LOSSES CriticOptions LossFacts LossOptions PolicyLoss ValueLoss sft_loss",
    "train.optimizer": "TrainingOptions",
    "train.preference": "DPOLoss with_reference",
    "train.shaping": "LengthOptions",
    "train.scorer": "Scorer pack_taught score_over_ranks",
    "train.sample_rows": "AdvantageState ModelScores Rows with_advantages",
    "train.sequences": "Pair TrainingSequence equal_parts plain_sequences sample_runs with_field",
    "train.totals": "combine critic_metrics",
    "train.trainer": "Trainer",
    "types": "Group Prompt Sample SamplingParams Score Turn",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"roll_lite has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(f"roll_lite.{_HOMES[name]}"), name)
