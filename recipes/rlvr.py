"""Reinforcement learning with verifiable rewards: GRPO, PPO, on-policy distillation and others.

python recipes/rlvr.py --model models/tiny --data reverse:5
python recipes/rlvr.py --model models/SmolLM2-135M-Instruct --data addition:2 --max-tokens 48 \
        --prompts-per-step 128 --drop-equal --max-refills 0 --updates-per-step 4 --lr 8e-5 \
        --schedule linear --steps 60 --kv-cache-gib 8
torchrun --nproc-per-node 8 recipes/rlvr.py --data math.jsonl@0.7 sokoban@0.3 \
        --device-map "train=0-3 generate=4-7" --max-staleness 1         # asynchronous
python recipes/rlvr.py --advantage gae --loss ppo ...       # PPO with a critic; see --help
python recipes/rlvr.py --advantage opd --teacher BIG ...    # on-policy distillation
python recipes/rlvr.py --data mine.jsonl --code mine.py     # rewards, losses, ... of your own
python -m pdb recipes/rlvr.py ...      # one process: break anywhere, also in a reward

Every rank starts this file. Only rank 0 goes below `with rl.Cluster`: the others wait there, do
what it asks of their roles, such as `roles.train`, and exit. Rank 0 does its own share too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import ClassVar

import roll_lite as rl
from roll_lite import command


def reversed_word(prompt: rl.Prompt, reply: str) -> float:
    """Your own reward looks like this: a number for a reply. `breakpoint()` works here."""
    return float(reply.strip() == prompt.ground_truth)


@rl.unique_options
@dataclass(frozen=True, kw_only=True)
class Config(rl.PolicyConfig):
    """Options of this recipe; rl.PolicyConfig has those of models, rollouts and losses."""

    data: tuple[str, ...] = ("reverse:5",)
    """What to learn: files of prompts, or their names on the Hugging Face Hub, as
    openai/gsm8k:main:train; tasks: addition:N (digits), reverse:N or counting:N (letters),
    instructions:N (how many at once); environments with their options, as in frozen_lake:size=8
    (`roll-lite envs bench` lists them). Several are mixed by weight, as in
    math.jsonl@0.7 sokoban@0.3."""
    run_dir: str = field(default_factory=partial(rl.default_folder, "rlvr"))
    """Folder for config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/ and model/."""

    PREFIX: ClassVar = "rlvr"
    """Prefix of the prompts' seed: recipes with the same --seed draw different prompts."""
    INLINE: ClassVar = {  # rewards on rank 0 by domain, beside those of rl.REWARDS in processes
        "addition": rl.last_number,
        "counting": rl.last_number,
        "reverse": reversed_word,
    }
    SHOWN: ClassVar = {
        "reward/mean": "reward", "eval/pass@1": "eval", "eval/reward": "eval reward",
        "eval/kl": "eval KL", "eval/failed": "eval failed", "rollout/failed": "failed",
        "rollout/missing_groups": "missing groups", "rollout/reply_tokens": "tokens",
        "rollout/staleness": "staleness", "rollout/kl": "KL to teacher",
        "loss/entropy": "entropy", "loss/grad_norm": "grad", "policy/clip_fraction": "clip",
        "loss/skipped_steps": "skipped", "time/step": "step s", "reference/kl": "KL to reference",
        "mismatch/logprob_mean": "mismatch", "whatif/kl": "KL to recorded",
        "critic/explained_variance": "explained variance",
        "time/rollout": "rollout s", "time/train": "train s",
    }  # fmt: skip


def main(cfg: Config) -> list[float]:
    """Returns the held-out pass rates since the start or resume, one for each evaluation.

    `cfg` is resolved (roll_lite/planning/resolve.py): nothing is left open, and it is only read.
    """
    with rl.Cluster(cfg.device_map, cfg.device, options=cfg, **cfg.cluster_options) as cluster:
        cfg.check_files()
        cfg = rl.fit_cache(cfg, cluster)  # lower than asked where other programs use the GPU
        chat = rl.Chat(cfg.model, **cfg.chat.arguments)
        context = min(cfg.longest_sample, rl.cache_tokens(cfg, cluster))
        prompts, held_out = read_prompts(cfg, chat, context)
        with rl.make_players(
            cfg, [*prompts.rows, *held_out], prompts.domains, cluster,
            needs_rewards=cfg.advantages.needs_rewards,
            tokens_per_microbatch=cfg.training.tokens_per_microbatch,
        ) as players:  # fmt: skip
            roles = make_roles(cfg, cluster)
            params = cfg.sampling.params(
                max_tokens=cfg.lengths.max_tokens,
                temperature=cfg.temperature,
                stop_ids=chat.stop_ids,
            )
            evaluation = rl.Evaluation(
                held_out, cfg.evaluation, params,
                kl_to_teacher=roles.kl_to_teacher if cfg.advantages.needs_teacher else None,
            )  # fmt: skip
            rollout = rl.Coordinator(
                engines=roles.engines, chat=chat, prompts=prompts, params=params,
                play=players.play, reward_engines=players.engine_clients,
                play_metrics=players.metrics, options=cfg.rollout, seed=cfg.seed,
                keep=cfg.own.keep, choose=cfg.own.prompts, pass_reward=cfg.evaluation.least_to_pass,
                nothing_to_learn=cfg.advantages.nothing_to_learn, min_samples=cfg.min_samples,
                max_length=context, episodes=cfg.episodes,
            )  # fmt: skip
            # Loop resumes from the last checkpoint, evaluates before the first step and every
            # --eval-every, records, writes checkpoints (on Ctrl-C of the last complete step), and
            # exports the model at the end.
            with rl.Loop(
                cfg, roles, rollout, evaluation,
                trackers=cfg.own.trackers, group_metrics=cfg.own.metrics,
                passed_by_nothing=players.check_tests(),
            ) as loop:  # fmt: skip
                for step in loop:
                    groups = rollout.collect()
                    sequences = prepare(groups, cfg, roles, loop.state, chat)
                    metrics = update(sequences, cfg, roles, step)
                    roles.sync(step, rollout)  # new weights to the engines, as version `step`
                    loop.end(step, metrics, groups, sequences)
    return evaluation.rates


def read_prompts(cfg: Config, chat: rl.Chat, context: int) -> tuple[rl.Mixture, list[rl.Prompt]]:
    """What to train on, and what to evaluate on."""
    fitting = rl.PromptLimit(
        count=lambda prompt: len(chat.encode(prompt.messages)),
        longest_sample=context,
        reply_tokens=cfg.lengths.max_tokens,
        policy=cfg.lengths.long_prompts,
    )
    read = cache(cfg.read_rows)  # a file may be in both
    prompts = rl.Mixture(
        cfg.data, seed=f"{cfg.PREFIX}-{cfg.seed}", held_out_share=cfg.evaluation.eval_share,
        fitting=fitting, envs=cfg.env_names, read=read,
    )  # fmt: skip
    held_out = fitting(cfg.evaluation.prompts(cfg.data, cfg.env_names, read))
    if prompts.rows:
        rows = "1 row" if len(prompts.rows) == 1 else f"{len(prompts.rows):,} rows"
        print(f"{rows} to train on, {len(held_out):,} to evaluate on")
    if not held_out and cfg.evaluation.eval_every:
        print("no evaluation: files hold nothing out; name --eval-share or --eval-data")
    chat.check_prompts([*prompts.rows, *held_out])
    asked = {*prompts.domains, *(prompt.domain for prompt in held_out)}
    cfg.teaching.check_domains(asked, cfg.advantages)
    cfg.own.check_domains(asked - cfg.players.keys())
    return prompts, held_out


def plan(cfg: Config) -> int:
    """--plan, for some prompts; those of environments are not known, and taken as 256 tokens."""
    chat = rl.Chat(cfg.model, **cfg.chat.arguments)
    prompts = islice(rl.Mixture(cfg.data, seed=0, envs=cfg.env_names, read=cfg.read_rows), 64)
    lengths = [len(chat.encode(p.messages)) if p.is_question else 256 for p in prompts]
    return rl.print_plan(cfg, lengths)


def make_roles(cfg: Config, cluster: rl.Cluster) -> rl.Roles:
    """The policy with its loss, the engines, and only those other models that the options need."""
    roles = rl.Roles(
        cluster, engines_sleep=cfg.engines_sleep, offload=cfg.offload,
        on_new_weights=cfg.on_new_weights,
        tokens_per_microbatch=cfg.training.tokens_per_microbatch,
    )  # fmt: skip
    roles.policy = roles.add(
        "train", rl.Trainer, folder=cfg.model,
        # A loss of your own: rl.PolicyLoss(cfg.policy_loss, cfg.kl, mine), a function of this file,
        # or --loss mine of a file given with --code.
        # mine(logprobs_R, log_ratio_R, advantages_R, batch) returns a loss for each row (a sampled
        # token), as in -log_ratio_R.exp() * advantages_R; the trainer averages. Corrections, KL and
        # entropy of the options are added. train/losses.py has the built-in ones.
        loss=rl.PolicyLoss(cfg.policy_loss, cfg.kl),
        schedule=cfg.training.schedule_over(cfg.steps - cfg.critic.critic_warmup_steps),
        temperature=cfg.temperature, truncation=cfg.sampling.truncation,
        stays_for_sync=not cfg.training.lora_rank, replays_experts=cfg.replays_experts,
        **cfg.training.policy_options,
    )  # fmt: skip
    if cfg.advantages.needs_critic:
        roles.critic = roles.add(
            "critic", rl.Trainer, folder=cfg.model, head="value",
            loss=rl.ValueLoss(clip=cfg.critic.value_clip),
            schedule=cfg.training.schedule_over(cfg.steps, cfg.critic.critic_lr),
            **cfg.training.trainer_options,
        )  # fmt: skip
    scorer = partial(roles.add, kind=rl.Scorer, temperature=cfg.temperature)
    if cfg.loads_reference:
        roles.reference = scorer("reference", folder=cfg.kl.reference or cfg.model)
    for name, domain in cfg.teaching.roles.items():
        roles.teachers[domain] = scorer(name, folder=cfg.teaching.folders[domain])
    roles.engines = roles.add_engines(
        folder=cfg.model, kv_cache_gib=cfg.kv_cache_gib, records_experts=cfg.replays_experts
    )
    return roles


def prepare(
    groups: list[rl.Group],
    cfg: Config,
    roles: rl.Roles,
    state: rl.AdvantageState,
    chat: rl.Chat,
) -> list[rl.TrainingSequence]:
    """Advantages, from rewards and from logprobs and values before the step's first update.

    `rl.Rows` empties `state.metrics`; what you add to it afterwards is logged with the step.
    """
    roles.to_training()  # the device changes hands where --engines-sleep or --offload is on
    if not (groups := cfg.lengths.shape_rewards(groups)):
        return []  # all were dropped: the step is skipped
    options = cfg.advantages
    score = partial(roles.score, groups=groups)
    reference = score("reference") if cfg.kl.has_reference else None
    scores = rl.ModelScores(
        values=score("critic") if roles.critic else None,
        reference_logprobs=reference if cfg.kl.is_in("reward") else None,
        teacher_logprobs=score("teacher") if roles.teachers else None,
        reprompted_logprobs=roles.score_reprompted(
            "policy", groups, chat, options.facts.reprompt
        ) if options.needs_reprompts else None,
    )  # fmt: skip
    rows = rl.Rows(groups, options, scores, state)
    if reference:
        rows.measure_reference(reference)
    # Rewards become advantages: a number for each sample (S), turn or token (R). A formula of your
    # own may stand here, as in rows.rewards_S - rows.mean_of_group(rows.rewards_S), which equals
    # --advantage grpo --no-divide-by-std. rows.rewards_S have gone through --reward-norm (none
    # by default) and --reward-clip, and with --kl-in reward the KL is taken off; rows.sequences
    # adds whitening, teachers and --advantage-clip. train/advantages.py lists what rows have.
    advantages = options.estimate(rows)
    sequences = rows.sequences(
        advantages, teacher_weight=cfg.teaching.weight_beside(options),
        with_observations=cfg.policy_loss.facts.reads_observations,
    )  # fmt: skip
    if cfg.kl.is_in("loss"):
        sequences = rl.with_field(sequences, "reference_logprobs", reference)
    if cfg.policy_loss.denominator == "old":  # not the engines' logprobs: the policy's, once more
        sequences = rl.with_field(sequences, "old_logprobs", score("policy"))
    return cfg.lengths.shape_sequences(sequences, groups)


def update(
    sequences: list[rl.TrainingSequence], cfg: Config, roles: rl.Roles, step: int
) -> dict[str, float]:
    """The step's optimizer updates: `epochs` passes over the same parts in the same order, of which
    there are `updates_per_step`, or half as many where half of the samples are missing."""
    wanted = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    share = len(rl.sample_runs(sequences)) / wanted
    parts = rl.equal_parts(sequences, max(1, round(share * cfg.updates_per_step)))
    cost = rl.SequenceCost.of(rl.read_config(cfg.model))
    train = partial(roles.train, cost=cost)
    policy_step = step - 1 - cfg.critic.critic_warmup_steps
    policy_updates, critic_updates = [], []
    for part in cfg.epochs * parts:
        if roles.critic:
            critic_updates.append(train(roles.critic, part, scheduled_at=step - 1))
        if policy_step >= 0:
            policy_updates.append(train(
                roles.policy, part, scheduled_at=policy_step,
                is_recorded=cfg.is_recorded(step), **cfg.policy_loss.pack_options,
            ))  # fmt: skip
    critic_metrics = rl.critic_metrics(rl.combine(critic_updates)) if critic_updates else {}
    return rl.combine(policy_updates) | critic_metrics


if __name__ == "__main__":
    command.run(main, Config, __doc__, plan)
