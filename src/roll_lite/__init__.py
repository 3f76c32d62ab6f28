"""roll_lite: reinforcement learning for language models in one torchrun program.

    import roll_lite as rl

`rl.Cluster` and the names below are imported when they are first used: torch takes seconds.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors, which find names here; _HOMES is read from these lines
    from roll_lite.chat import Chat
    from roll_lite.chat_template import ChatOptions
    from roll_lite.checks import Above, AtLeast, AtMost, UserError
    from roll_lite.cluster.cluster import Cluster
    from roll_lite.cluster.role import RoleHandle, split
    from roll_lite.code_files import CodeOptions, load_code
    from roll_lite.data import HeldOutOptions, Mixture, PromptLimit, RowOptions
    from roll_lite.device_map import format_table
    from roll_lite.engine.service import EngineService
    from roll_lite.envs.env import Player
    from roll_lite.envs.play import EpisodeOptions
    from roll_lite.envs.specs import ENVS, EnvOptions, env_players
    from roll_lite.hub import model_folder
    from roll_lite.loop import Loop, Validation
    from roll_lite.models.config import read_config
    from roll_lite.models.cost import SequenceCost
    from roll_lite.options import RecipeConfig, unique_options
    from roll_lite.planning import cache_tokens, print_plan
    from roll_lite.planning.resolve import fit_cache, resolve, resolved, with_epochs
    from roll_lite.players import Players, make_players
    from roll_lite.policy import PolicyConfig, TeacherOptions
    from roll_lite.profiling import ProfileOptions
    from roll_lite.report.run import Run, default_folder, refuse_old_run
    from roll_lite.report.trackers import TrackerOptions
    from roll_lite.rewarding import RewardOptions
    from roll_lite.rewards.maths import last_number
    from roll_lite.rewards.registry import REWARDS
    from roll_lite.roles import Roles
    from roll_lite.rollout.coordinator import Coordinator
    from roll_lite.rollout.evaluation import (
        AnswerFile,
        Evaluation,
        EvaluationOptions,
        pass_rates,
        refuse_all_failed,
        subsets_of,
    )
    from roll_lite.rollout.history import History, Visits
    from roll_lite.rollout.rollout_options import RolloutOptions, SamplingOptions
    from roll_lite.train.advantages import (
        ADVANTAGES,
        AdvantageFacts,
        AdvantageOptions,
        PerSample,
        PerToken,
        PerTurn,
        mean_by_group,
        standardise,
    )
    from roll_lite.train.batch import pack, pack_pairs
    from roll_lite.train.checkpoint import CheckpointOptions
    from roll_lite.train.distillation import DistillLoss
    from roll_lite.train.encoding import (
        check_vocabulary,
        encode_dialogues,
        encode_fitting,
        encode_preferences,
        fit,
    )
    from roll_lite.train.export import check_checkpoint, export_checkpoint
    from roll_lite.train.kl import KLOptions
    from roll_lite.train.losses import (
        LOSSES,
        CriticOptions,
        LossFacts,
        LossOptions,
        PolicyLoss,
        ValueLoss,
        sft_loss,
    )
    from roll_lite.train.optimizer import TrainingOptions
    from roll_lite.train.preference import DPOLoss, with_reference
    from roll_lite.train.sample_rows import AdvantageState, ModelScores, Rows, with_advantages
    from roll_lite.train.scorer import Scorer, pack_taught, score_over_ranks
    from roll_lite.train.sequences import (
        Pair,
        TrainingSequence,
        equal_parts,
        plain_sequences,
        sample_runs,
        with_field,
    )
    from roll_lite.train.shaping import LengthOptions
    from roll_lite.train.totals import combine, critic_metrics
    from roll_lite.train.trainer import Trainer
    from roll_lite.types import Group, Prompt, Sample, SamplingParams, Score, Turn

_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("roll_lite.")
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"roll_lite has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
