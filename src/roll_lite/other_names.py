"""Names that options have in TRL and verl, and ours. docs/reference/names.md is their table."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Ours(NamedTuple):
    """What an option of another library is here."""

    names: str
    """Ours; if there are several, the first that the recipe has."""
    note: str = ""
    """What differs, beside the name."""
    notes: Mapping[str, str] = MappingProxyType({})
    """What differs in a recipe that has this option, in place of the note."""


_MUST_FIT = Ours(
    "tokens_per_microbatch",
    "a sample, a dialogue or both texts of a pair must fit",
    {
        "too_long": "a dialogue must fit; --too-long says what if not",
        "long_prompts": "prompt and reply must fit; --long-prompts says what if not",
        "task_pairs": "both texts of a pair must fit together; nothing is truncated or dropped: a "
        "pair that does not fit is refused before training",
    },
)
_ALL_RANKS = "of a step, on all ranks together"
_MICROBATCH = "samples are packed into micro-batches of at most this many tokens"
_BETAS = "both, as in --betas 0.9 0.95"
_COUNTED = "counted in steps"
_FOLDER = "a folder or a name on the Hugging Face Hub"
_KL = "--kl-in says whether it counts in the loss or in the reward"
_CP = 'as in "train=all,cp=2 generate=all"'
_ENGINE_MAP = 'as in "train=all generate=all,tp=2"'

TRL: Mapping[str, Ours] = {
    "model_name_or_path": Ours("model"),
    "dataset_name": Ours("data"),
    "eval_dataset": Ours("eval_data"),
    "output_dir": Ours("run_dir"),
    "max_steps": Ours("steps"),
    "num_train_epochs": Ours("steps", _COUNTED),
    "learning_rate": Ours("lr"),
    "lr_scheduler_type": Ours("schedule"),
    "adam_beta1": Ours("betas", _BETAS),
    "adam_beta2": Ours("betas", _BETAS),
    "warmup_ratio": Ours("warmup_steps", _COUNTED),
    "batch_size": Ours("prompts_per_step rows_per_step", _ALL_RANKS),
    "per_device_train_batch_size": Ours("prompts_per_step rows_per_step", _ALL_RANKS),
    "generation_batch_size": Ours("prompts_per_step", "prompts, not samples"),
    "gradient_accumulation_steps": Ours("tokens_per_microbatch", _MICROBATCH),
    "steps_per_generation": Ours("updates_per_step"),
    "num_iterations": Ours("epochs"),
    "num_generations": Ours("samples_per_prompt samples"),
    "max_completion_length": Ours("max_tokens"),
    "max_new_tokens": Ours("max_tokens"),
    "max_prompt_length": Ours("long_prompts", "what to do with a prompt that leaves no room"),
    "max_length": _MUST_FIT,
    "max_seq_length": _MUST_FIT,
    "reward_funcs": Ours("code", "a file with REWARDS"),
    "reward_model_path": Ours("reward_model", _FOLDER),
    "teacher_model_name_or_path": Ours("teacher", _FOLDER),
    "beta": Ours("kl_coef", _KL),
    "init_kl_coef": Ours("kl_coef", _KL),
    "epsilon": Ours("clip_low"),
    "epsilon_high": Ours("clip_high"),
    "cliprange": Ours("clip_low", "with --clip-high"),
    "cliprange_value": Ours("value_clip"),
    "delta": Ours("dual_clip"),
    "loss_type": Ours("aggregation kind"),
    "importance_sampling_level": Ours("loss", "sequence is --loss gspo"),
    "scale_rewards": Ours("divide_by_std"),
    "mask_truncated_completions": Ours("overlong", "as --overlong mask"),
    "sync_ref_model": Ours("reference", "it stays what it was at the start"),
    "vllm_gpu_memory_utilization": Ours("kv_cache_gib", "in GiB"),
    "vllm_tensor_parallel_size": Ours("device_map", _ENGINE_MAP),
    "vllm_enable_sleep_mode": Ours("engines_sleep"),
    "gradient_checkpointing": Ours("checkpointing", "as --checkpointing full"),
    "lora_r": Ours("lora_rank"),
    "lora_target_modules": Ours("lora_targets"),
    "use_peft": Ours("lora_rank", "above 0"),
    "eval_steps": Ours("eval_every"),
    "save_steps": Ours("checkpoint_every"),
    "save_total_limit": Ours("keep_last"),
    "resume_from_checkpoint": Ours("resume", "the run folder"),
    "report_to": Ours("tracker"),
    "run_name": Ours("run_dir"),
}
VERL: Mapping[str, Ours] = {
    "data.train_files": Ours("data"),
    "data.val_files": Ours("eval_data"),
    "data.train_batch_size": Ours("prompts_per_step rows_per_step", _ALL_RANKS),
    "data.max_prompt_length": TRL["max_prompt_length"],
    "data.max_response_length": Ours("max_tokens"),
    "actor_rollout_ref.model.path": Ours("model"),
    "actor_rollout_ref.model.lora_rank": Ours("lora_rank"),
    "actor_rollout_ref.model.lora_alpha": Ours("lora_alpha"),
    "actor_rollout_ref.model.target_modules": Ours("lora_targets"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": TRL["gradient_checkpointing"],
    "actor_rollout_ref.actor.optim.lr": Ours("lr"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Ours("warmup_steps"),
    "actor_rollout_ref.actor.optim.warmup_style": Ours("schedule"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Ours("schedule"),
    "actor_rollout_ref.actor.optim.betas": Ours("betas", _BETAS),
    "actor_rollout_ref.actor.optim.weight_decay": Ours("weight_decay"),
    "actor_rollout_ref.actor.grad_clip": Ours("max_grad_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Ours("updates_per_step", "how many there are"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Ours(
        "tokens_per_microbatch", _MICROBATCH
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Ours("tokens_per_microbatch"),
    "actor_rollout_ref.actor.ppo_epochs": Ours("epochs"),
    "actor_rollout_ref.actor.clip_ratio": Ours("clip_low", "with --clip-high"),
    "actor_rollout_ref.actor.clip_ratio_low": Ours("clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Ours("clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Ours("dual_clip"),
    "actor_rollout_ref.actor.entropy_coeff": Ours("entropy_coef"),
    "actor_rollout_ref.actor.use_kl_loss": Ours("kl_in", "as --kl-in loss"),
    "actor_rollout_ref.actor.kl_loss_coef": Ours("kl_coef", "with --kl-in loss"),
    "actor_rollout_ref.actor.kl_loss_type": Ours("kl_estimator"),
    "actor_rollout_ref.actor.loss_agg_mode": Ours("aggregation"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Ours("loss"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": Ours("offload"),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": Ours("offload"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Ours("device_map", _CP),
    "actor_rollout_ref.rollout.n": Ours("samples_per_prompt"),
    "actor_rollout_ref.rollout.temperature": Ours("temperature"),
    "actor_rollout_ref.rollout.top_k": Ours("top_k"),
    "actor_rollout_ref.rollout.top_p": Ours("top_p"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": TRL["vllm_gpu_memory_utilization"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Ours("device_map", _ENGINE_MAP),
    "actor_rollout_ref.rollout.free_cache_engine": Ours("engines_sleep"),
    "actor_rollout_ref.rollout.val_kwargs.n": Ours("eval_samples"),
    "algorithm.adv_estimator": Ours("advantage"),
    "algorithm.gamma": Ours("gamma"),
    "algorithm.lam": Ours("lam"),
    "algorithm.norm_adv_by_std_in_grpo": Ours("divide_by_std"),
    "algorithm.use_kl_in_reward": Ours("kl_in", "as --kl-in reward"),
    "algorithm.kl_ctrl.kl_coef": Ours("kl_coef", "with --kl-in reward"),
    "algorithm.filter_groups.enable": Ours("drop_equal"),
    "algorithm.filter_groups.max_num_gen_batches": Ours("max_refills"),
    "critic.optim.lr": Ours("critic_lr"),
    "critic.cliprange_value": Ours("value_clip"),
    "custom_reward_function.path": Ours("code", "a file with REWARDS"),
    "reward_model.model.path": Ours("reward_model", _FOLDER),
    "trainer.critic_warmup": Ours("critic_warmup_steps"),
    "trainer.total_training_steps": Ours("steps"),
    "trainer.total_epochs": Ours("steps", _COUNTED),
    "trainer.test_freq": Ours("eval_every"),
    "trainer.save_freq": Ours("checkpoint_every"),
    "trainer.max_actor_ckpt_to_keep": Ours("keep_last"),
    "trainer.default_local_dir": Ours("run_dir"),
    "trainer.experiment_name": Ours("run_dir"),
    "trainer.resume_mode": Ours("resume", "as --resume auto"),
    "trainer.logger": Ours("tracker"),
}


def ours(arg: str, options: Collection[str], flags: Collection[str]) -> str:
    """What an argument of the command line is called here, of a recipe with these options, some of
    which have flags; empty if it is not known. verl's arguments have no dashes."""
    given = arg.partition("=")[0]
    name = given.lstrip("-+").replace("-", "_")
    is_flag = arg.startswith("--") or (name in VERL and "=" in arg)
    found = TRL.get(name) or VERL.get(name)
    if found is None or not is_flag or name in options:
        return ""
    chosen = next((known for known in found.names.split() if known in options), None)
    if chosen is None:
        return ""
    note = next((text for own, text in found.notes.items() if own in options), found.note)
    note = f": {note}" if note else ""
    flag = f"--{chosen.replace('_', '-')}"
    if chosen in flags:
        return f"{given} is {flag} here{note}"
    return f"{given} is {chosen} here{note}; it has no flag, and {flag} says where it is set"
