"""The rewards of a run: functions in worker processes or inline, a judge, a reward model.

Every reward is awaited by one sample at a time; the judge and the reward model compute together
what arrives together.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count

from roll_lite.chat import Chat
from roll_lite.chat_template import ChatOptions
from roll_lite.checks import above, at_least, read_only_if
from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import RoleHandle, split
from roll_lite.device_map import DeviceMap
from roll_lite.engine.request import Request
from roll_lite.engine.service import EngineService
from roll_lite.envs.env import Player
from roll_lite.envs.play import question_player
from roll_lite.models.config import ModelConfig, read_config
from roll_lite.models.hf import has_value_head
from roll_lite.rewards.file import RewardTables, check_file, read_rewards
from roll_lite.rewards.judge import VERDICTS, VerdictError, judge_messages, parse_verdict
from roll_lite.rollout.engines import EngineClient
from roll_lite.rollout.prompts import derive_seed
from roll_lite.train.batch import TrainingSequence, pack, unpack
from roll_lite.train.scorer import Scorer
from roll_lite.types import AsyncReward, Message, Prompt, Reward, SamplingParams, Score
from roll_lite.workers.pool import RewardWorkers


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards: a file of your own, worker processes, judge, reward model."""

    rewards: str | None = None
    """Python file with REWARDS = {domain: function}, which come before those of the recipe."""
    reward_workers: int = 4
    """Processes that compute rewards; 0 computes them inline, for a debugger."""
    max_async_rewards: int = 256
    """Calls of `async def` rewards at once; waiting for a place does not count as time."""
    reward_seconds: float = 10.0
    """Time limit of one reward; a reward that takes longer has failed."""
    max_error_share: float = 0.2
    """Stop the run when more than this share of the last 200 rewards failed."""
    judge: str | None = None
    """Hugging Face folder of a model that judges replies to prompts of domain judge."""
    judge_tokens: int = 256
    """Longest verdict of the judge, in tokens."""
    judge_cache_gib: float = 1.0
    """KV cache of each judge engine, in GiB."""
    judge_template_args: tuple[str, ...] | None = None
    """NAME=VALUE that the judge's chat template reads, as in enable_thinking=false."""
    reward_model: str | None = None
    """Folder of a model with a scalar head, which scores prompts of domain reward_model."""

    def __post_init__(self):
        at_least(0, self, "reward_workers")
        at_least(1, self, "judge_tokens", "max_async_rewards")
        above(0, self, "reward_seconds", "judge_cache_gib")
        of_judge = ("judge_tokens", "judge_cache_gib", "judge_template_args")
        read_only_if(self.judge is not None, "a judge", self, *of_judge)
        _ = self.judge_chat  # refuses what is not NAME=VALUE
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"max_error_share={self.max_error_share} must be from 0 to 1 (never)")
        if self.rewards is not None:
            check_file(self.rewards)
        _ = self.reward_configs  # refuses a folder that is no model
        if self.reward_model is not None and not has_value_head(self.reward_model):
            raise ValueError(
                f"reward_model={self.reward_model!r} has no tensor score.weight, so it gives no "
                "number; name a sequence classifier with one label"
            )

    @property
    def judge_chat(self) -> ChatOptions:
        return ChatOptions(template_args=self.judge_template_args)

    @property
    def reward_roles(self) -> list[str]:
        """Roles of the device map that rewards need."""
        return [name for name in ("judge", "reward_model") if getattr(self, name) is not None]

    @property
    def reward_configs(self) -> dict[str, ModelConfig]:
        """Model configs of these roles."""
        return {name: read_config(getattr(self, name)) for name in self.reward_roles}

    def with_file(
        self,
        functions: Mapping[str, Reward],
        inline: Mapping[str, Reward],
        domains: Iterable[str] | None = None,
    ) -> RewardTables:
        """A recipe's rewards with those of the file `rewards`, which replace them by domain.

        A file without a reward for any of the `domains`, all that prompts have, is refused.
        """
        if self.rewards is None:
            return RewardTables(dict(functions), dict(inline))
        own = read_rewards(self.rewards)
        names = own.functions.keys() | own.inline.keys()
        if domains is not None and names.isdisjoint(domains):
            raise ValueError(
                f"{self.rewards} has rewards for domain {' and '.join(sorted(names))}, but the "
                f"prompts have {' and '.join(map(repr, sorted(domains)))}; give them the same name"
            )
        kept = ({d: r for d, r in t.items() if d not in names} for t in (functions, inline))
        return RewardTables(*(rest | new for rest, new in zip(kept, own, strict=True)))


class Rewards:
    """Questions with the reward of their domain."""

    def __init__(
        self,
        functions: Mapping[str, Reward],
        inline: Mapping[str, Reward],
        domains: Iterable[str],
        options: RewardOptions,
        cluster: Cluster,
        tokens_per_microbatch: int = 16384,
    ):
        """Has only what the domains need; enter it to start processes. `functions` run in worker
        processes, `inline` ones in the event loop; `tokens_per_microbatch` is for the reward model.
        """
        known = {*functions, *inline, *options.reward_roles}
        if missing := sorted(set(domains) - known):
            raise ValueError(
                f"there is no reward for domain {' and '.join(map(repr, missing))} of the prompts "
                f"(a row without the field has ''); known domains: {', '.join(sorted(known))}. "
                "Add one with --rewards FILE"
            )
        for domain in domains:
            _check_signature(domain, functions.get(domain) or inline.get(domain))
        self.engine_clients: list[Judge] = []
        """Engine roles that rewards query, for the coordinator."""
        self._by_domain: dict[str, AsyncReward] = {}
        self._pools: list[RewardWorkers] = []
        self._exits = ExitStack()
        if unused := sorted(set(options.reward_roles) - set(domains)):
            raise ValueError(
                f"{unused[0]} is given, but no prompt has domain {unused[0]}; leave it out, or "
                "name the domain in the rows that it is to score"
            )
        if options.judge is not None:
            _check_judge_ranks(cluster.device_map)
            self._add({"judge": self._make_judge(options, cluster)}, 0, options)
        if options.reward_model is not None:
            folder = options.reward_model
            scorer = cluster.role("reward_model", Scorer, folder=folder, head="value")
            model = RewardModel(scorer, Chat(folder), tokens_per_microbatch=tokens_per_microbatch)
            self._add({"reward_model": model}, 0, options)
        for chosen, num_workers in ((functions, options.reward_workers), (inline, 0)):
            used = {domain: chosen[domain] for domain in chosen if domain in domains}
            self._add(used, num_workers, options)

    def __enter__(self) -> "Rewards":
        with ExitStack() as exits:  # those that were entered end if the next one cannot
            for pool in self._pools:
                exits.enter_context(pool)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @property
    def play(self) -> Player:
        """Have the model answer a prompt, and score its reply."""
        return question_player(self._by_domain)

    def metrics(self) -> dict[str, float]:
        """Calls, seconds and failures since the last time."""
        totals: dict[str, float] = {}
        for pool in self._pools:
            for name, value in pool.metrics().items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _add(
        self,
        rewards: Mapping[str, Reward | AsyncReward],
        num_workers: int,
        options: RewardOptions,
    ) -> None:
        """Rewards whose failures are counted together; num_workers=0 is in the event loop."""
        if not rewards:
            return
        pool = RewardWorkers(
            rewards,
            num_workers=num_workers,
            max_waiting=options.max_async_rewards,
            seconds=options.reward_seconds,
            max_error_share=options.max_error_share,
        )
        self._pools.append(pool)
        self._by_domain |= dict.fromkeys(rewards, pool.score)

    def _make_judge(self, options: RewardOptions, cluster: Cluster) -> "Judge":
        folder, cache = options.judge, options.judge_cache_gib
        engines = cluster.role("judge", EngineService, folder=folder, kv_cache_gib=cache)
        judge = Judge(
            engines, Chat(folder, **options.judge_chat.arguments), max_tokens=options.judge_tokens
        )
        self.engine_clients.append(judge)
        return judge


def _check_signature(domain: str, reward: Reward | None) -> None:
    try:
        inspect.signature(reward).bind("prompt", "reply") if reward else None
    except TypeError:
        raise ValueError(
            f"the reward of domain {domain!r}, {getattr(reward, '__name__', reward)}"
            f"{inspect.signature(reward)}, must take (prompt, reply)"
        ) from None
    except ValueError:  # a builtin without signature
        return


def _check_judge_ranks(device_map: DeviceMap) -> None:
    """Ranks of a tensor-parallel engine follow its first rank, and receive nothing else."""
    for replica in device_map["generate"].replicas:
        if followers := sorted(set(replica[1:]) & set(device_map["judge"].ranks)):
            raise ValueError(
                f"judge is on rank {followers[0]}, which follows rank {replica[0]} in generate and "
                "cannot receive requests meanwhile; give the judge other ranks"
            )


class Judge(EngineClient):
    """Asks a model whether a reply is right. Pass it to the Coordinator in `reward_engines`."""

    def __init__(
        self,
        engines: RoleHandle,
        chat: Chat,
        *,
        max_tokens: int = 256,
        max_tries: int = 3,
        messages: Callable[[Prompt, str], tuple[Message, ...]] = judge_messages,
        verdicts: Mapping[str, float] = VERDICTS,
        seed: int = 0,
    ):
        """The first verdict is greedy. One that cannot be parsed is sampled again, up to
        `max_tries` tries in all.
        """
        super().__init__(engines)
        self._chat, self._messages, self._verdicts = chat, messages, verdicts
        self._max_tries, self._seed = max_tries, seed
        greedy = SamplingParams(max_tokens=max_tokens, stop_ids=chat.stop_ids, temperature=0.0)
        self._params = [greedy, replace(greedy, temperature=1.0)]

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        token_ids = self._chat.encode_quoted(self._messages(prompt, reply))
        for attempt in range(1, self._max_tries + 1):
            seed = derive_seed(self._seed, prompt.id, reply, attempt)
            params = self._params[attempt > 1]
            request = Request(prompt_ids=token_ids, params=params, seed=seed)
            turn = await self.ask(request)
            try:
                value = parse_verdict(self._chat.decode(turn.token_ids), self._verdicts)
            except VerdictError:
                if attempt == self._max_tries:
                    raise
            else:
                return Score(value=value, parts={"judge": value, "judge_tries": float(attempt)})
        raise AssertionError("the last try returns or raises")


class RewardModel:
    """Scores a reply by a model with a scalar head, at the reply's last token."""

    def __init__(self, scorer: RoleHandle, chat: Chat, *, tokens_per_microbatch: int = 16384):
        """`scorer` is a role of `Scorer(head="value")`; `chat` has the same folder."""
        self._values, self._chat = scorer.values, chat
        self._budget = tokens_per_microbatch
        self._waiting: list[tuple[TrainingSequence, asyncio.Future]] = []
        self._task: asyncio.Task | None = None
        self._numbers = count()

    async def __call__(self, prompt: Prompt, reply: str) -> Score:
        said = (*prompt.messages, {"role": "assistant", "content": reply})
        token_ids = self._chat.encode_quoted(said, add_generation_prompt=False)
        if len(token_ids) > self._budget:
            raise ValueError(
                f"prompt {prompt.id} and its reply have {len(token_ids)} tokens, more than the "
                f"reward model's tokens_per_microbatch={self._budget}"
            )
        # A row predicts the next token, so one more token makes the last one a row.
        sequence = TrainingSequence(
            id=f"reply {next(self._numbers)} to prompt {prompt.id}",
            token_ids=[*token_ids, token_ids[-1]],
            loss_mask=[*([False] * len(token_ids)), True],
        )
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((sequence, future))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._answer_all())
        value = await future
        return Score(value=value, parts={"reward_model": value})

    async def _answer_all(self) -> None:
        """Requests that arrive while the model is busy form its next batch."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            sequences = [sequence for sequence, _ in batch]
            try:
                values = await self._score(sequences)
            except Exception as error:  # of any kind: every waiting sample must get it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), value in zip(batch, values, strict=True):
                    if not future.done():
                        future.set_result(value)

    async def _score(self, sequences: list[TrainingSequence]) -> list[float]:
        packed = pack(sequences, self._budget, num_shards=self._values.role.num_replicas)
        replicas = await asyncio.wrap_future(self._values.start(split(packed)))
        rows = [rows_R for replica in replicas for rows_R in replica]
        return [numbers[-1] for numbers in unpack(packed, rows, sequences)]
