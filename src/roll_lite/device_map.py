"""The device map: which ranks run which role, written by hand or chosen by `auto_device_map`.

    parse_device_map("train=0-3,tp=2 generate=4-7 reference=0-3", world_size=8)

Roles may be disjoint, share all ranks or overlap in part, and their replicas need not align: every
rank runs the calls to all its roles one by one, in the same order as every other rank.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, NamedTuple

from roll_lite.checks import UserError
from roll_lite.models.config import ModelConfig, tp_problem, tp_sizes
from roll_lite.models.memory import engine_bytes, format_bytes, least_memory, usable_bytes

SYNTAX = "write role=RANKS[,tp=N][,cp=N][,ep=N][,fsdp=N], with RANKS like 0-3, 5, 0-1+4-5 or all"
ENGINE_ROLES = ("generate", "judge")
OPTIONAL_ROLES = ("reference", "critic")
NOT_OFFLOADED = ("train", "judge", "reward_model")
FEED = "feed"  # and a number: see `with_sync`
USEFUL_CACHE_TOKENS = 32768  # least KV cache of each engine under `auto`: 8 samples of 4,096 tokens


class Device(NamedTuple):
    """What a rank computes on."""

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "cpu"
    num_bytes: int | None = None
    """Its memory; None for a CPU."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    ranks: tuple[int, ...]
    """Ascending."""
    tp: int = 1
    """Tensor-parallel size: consecutive ranks that hold one model together."""
    cp: int = 1
    """Context-parallel size: `cp` groups of `tp` ranks are a replica, and share its tokens."""
    fsdp: int | None = None
    """Consecutive replicas over which weights are sharded; None is all of them. With fewer there
    are copies of the sharded weights, such as one on each machine (HSDP)."""
    ep: int = 1
    """Parts that the experts of a mixture are dealt into, whole: over the ranks of an engine, else
    over consecutive data-parallel ranks."""

    @property
    def data_ep(self) -> int:
        """Data-parallel ranks that exchange tokens, as they hold different experts."""
        return 1 if self.name in ENGINE_ROLES else self.ep

    @property
    def largest_ep(self) -> int:
        """The ranks that can hold different experts."""
        return self.tp if self.name in ENGINE_ROLES else self.ranks_per_copy // self.tp

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.cp

    @property
    def num_replicas(self) -> int:
        return len(self.ranks) // self.ranks_per_replica

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold the weights once, in shards."""
        return self.ranks_per_replica * (self.fsdp or self.num_replicas)

    @property
    def num_copies(self) -> int:
        return len(self.ranks) // self.ranks_per_copy

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, in data-parallel order."""
        size = self.ranks_per_replica
        starts = range(0, len(self.ranks), size)
        return tuple(self.ranks[start : start + size] for start in starts)


@dataclass(frozen=True, slots=True)
class DeviceMap:
    roles: tuple[Role, ...]
    world_size: int

    def __post_init__(self):
        if not self.roles:
            raise UserError("the device map has no roles; name one, as in train=all")
        for name, count in Counter(self.names).items():
            if count > 1:
                raise UserError(f"role {name} appears {count} times; list all its ranks once")
        for role in self.roles:
            _check_ranks(role, self.world_size)

    def __getitem__(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise UserError(f"no role {name} in the device map; it has {listing(self.names, 'and')}")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles)

    @property
    def replicas(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The ranks of each replica of each role."""
        return {role.name: role.replicas for role in self.roles}

    def with_sync(self) -> "DeviceMap":
        """This map plus the roles that move weights from train to generate.

        `sync` has all ranks of both. `feed0` has train's first rank and those ranks of generate
        without a trainer that hold the first tensor-parallel part: they receive it from there.
        `feed1` is for the second part, and so on.
        """
        train = self["train"].ranks
        generate = self["generate"]
        roles = [Role("sync", tuple(sorted({*train, *generate.ranks})))]
        for part in range(generate.tp):
            fed = [rank for rank in generate.ranks[part :: generate.tp] if rank not in train]
            if fed:
                roles.append(Role(f"{FEED}{part}", tuple(sorted((train[0], *fed)))))
        return DeviceMap((*self.roles, *roles), self.world_size)

    @property
    def shares_weights(self) -> bool:
        """Whether every engine is on ranks of the trainer that hold the same parts of the model,
        each part whole: with LoRA one copy of the frozen weights is then enough."""
        if "train" not in self or "generate" not in self:
            return False
        train, generate = self["train"], self["generate"]
        held = {rank: index % train.tp for index, rank in enumerate(train.ranks)}
        used = {rank: index % generate.tp for index, rank in enumerate(generate.ranks)}
        is_whole = train.ranks_per_copy == train.tp == generate.tp and generate.ep == 1
        return is_whole and used.items() <= held.items()

    @property
    def text(self) -> str:
        """The map as `parse_device_map` reads it."""
        return " ".join(self._role_text(role) for role in self.roles)

    def _role_text(self, role: Role) -> str:
        is_all = len(role.ranks) == self.world_size
        ranks = "all" if is_all else format_ranks(role.ranks).replace(",", "+")
        sizes = {n: size for n in ("tp", "cp", "ep") if (size := getattr(role, n)) > 1}
        sizes |= {"fsdp": role.fsdp} if role.fsdp else {}
        return f"{role.name}={ranks}" + "".join(f",{n}={size}" for n, size in sizes.items())

    def is_spare(self, rank: int) -> bool:
        """Whether all ranks of its replica only generate, and another replica can do their work."""
        if [role.name for role in self.roles_of(rank)] != ["generate"]:
            return False
        generate = self["generate"]
        together = next(replica for replica in generate.replicas if rank in replica)
        are_free = all(len(self.roles_of(other)) == 1 for other in together)
        return generate.num_replicas > 1 and are_free and 0 not in together

    def roles_of(self, rank: int) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if rank in role.ranks)

    def __str__(self) -> str:
        columns = {"tp": [role.tp for role in self.roles]}
        for name in ("cp", "ep"):
            if any(getattr(role, name) > 1 for role in self.roles):
                columns[name] = [getattr(role, name) for role in self.roles]
        columns["replicas"] = [role.num_replicas for role in self.roles]
        if any(role.fsdp for role in self.roles):
            columns["fsdp"] = [role.fsdp or "" for role in self.roles]
        rows = [("role", "ranks", *columns)]
        for role, sizes in zip(self.roles, zip(*columns.values(), strict=True), strict=True):
            rows.append((role.name, format_ranks(role.ranks), *map(str, sizes)))
        return format_table(rows)

    def check(
        self,
        config: ModelConfig,
        *,
        required: Sequence[str] = ("train", "generate"),
        role_configs: Mapping[str, ModelConfig] | None = None,
    ) -> None:
        """Raise ValueError if a recipe with these roles cannot run this map with this model.

        `role_configs` are the configs of roles with a model of their own, such as a judge.
        """
        known = tuple(dict.fromkeys((*required, *OPTIONAL_ROLES)))
        for role in self.roles:
            if role.name not in known:
                raise UserError(f"role {role.name} is not known; use {listing(known, 'or')}")
        for name in required:
            if name not in self:
                raise UserError(f"role {name} is missing; add it, as in {name}=all")
        for role in self.roles:
            _check_sizes(role, (role_configs or {}).get(role.name, config))
            if role.name in ENGINE_ROLES:
                _check_engine(role)
            if "generate" in self:
                _check_leaders(self["generate"], role)
        idle = set(range(self.world_size)).difference(*(role.ranks for role in self.roles))
        if idle:
            raise UserError(
                f"ranks {format_ranks(sorted(idle))} have no role and would idle; give them to a "
                f"role, or start {self.world_size - len(idle)} ranks"
            )


def _check_ranks(role: Role, world_size: int) -> None:
    """Raise ValueError for ranks that cannot work at this world size, whatever the model."""
    if not role.ranks:
        raise UserError(f"role {role.name} has no ranks; give it some, as in {role.name}=all")
    for rank in role.ranks:
        if not 0 <= rank < world_size:
            raise _unknown_rank(role.name, rank, world_size)
    if list(role.ranks) != (ascending := sorted(set(role.ranks))):
        ranks = format_ranks(ascending).replace(",", "+")
        raise UserError(f"role {role.name}: ranks must ascend; use {role.name}={ranks}")
    if role.tp < 1:
        raise UserError(f"role {role.name}: tp={role.tp} must be at least 1")
    if len(role.ranks) % role.tp:
        raise UserError(
            f"role {role.name}: tp={role.tp} does not divide its {len(role.ranks)} ranks; "
            f"use {listing(divisors(len(role.ranks)), 'or')}"
        )
    if role.cp < 1 or len(role.ranks) % role.ranks_per_replica:
        groups = len(role.ranks) // role.tp
        of_tp = f" groups of tp={role.tp}" if role.tp > 1 else " ranks"
        raise UserError(
            f"role {role.name}: cp={role.cp} does not divide its {groups}{of_tp}; "
            f"use {listing(divisors(groups), 'or')}"
        )
    if role.fsdp is not None and (role.fsdp < 1 or role.num_replicas % role.fsdp):
        raise UserError(
            f"role {role.name}: fsdp={role.fsdp} does not divide its {role.num_replicas} replicas; "
            f"use {listing(divisors(role.num_replicas), 'or')}"
        )
    if role.ep < 1 or role.largest_ep % role.ep:
        which = "ranks of an engine" if role.name in ENGINE_ROLES else "data-parallel ranks"
        raise UserError(
            f"role {role.name}: ep={role.ep} does not divide its {role.largest_ep} {which}; "
            f"use {listing(divisors(role.largest_ep), 'or')}"
        )


def _check_engine(role: Role) -> None:
    if role.fsdp:
        raise UserError(
            f"role {role.name}: fsdp={role.fsdp} is for models that are sharded, and an "
            "engine holds its model whole, or in tp parts; leave it out"
        )
    if role.cp > 1:
        raise UserError(
            f"role {role.name}: cp={role.cp} is for models that are trained or scored, and an "
            "engine reads its sequences on one replica; leave it out, or use tp"
        )


def _unknown_rank(name: str, rank: int, world_size: int) -> UserError:
    known = format_ranks(range(world_size))
    return UserError(f"role {name}: there is no rank {rank}; world size {world_size} has {known}")


def _check_sizes(role: Role, config: ModelConfig) -> None:
    if problem := tp_problem(config, role.tp):
        working = [tp for tp in tp_sizes(config) if len(role.ranks) % tp == 0]
        raise UserError(f"role {role.name}: tp={role.tp} {problem}; use {listing(working, 'or')}")
    if role.ep > 1 and config.experts is None:
        raise UserError(
            f"role {role.name}: ep={role.ep} is for mixtures of experts, and this model has no "
            "experts; leave it out, or use tp"
        )
    if role.ep > 1 and (num_experts := config.experts.num_experts) % role.ep:
        working = [ep for ep in divisors(role.largest_ep) if num_experts % ep == 0]
        raise UserError(
            f"role {role.name}: ep={role.ep} does not divide {num_experts} experts; "
            f"use {listing(working, 'or')}"
        )


def _check_leaders(generate: Role, other: Role) -> None:
    """Check that the first rank of each engine is in every role that one of its other ranks is in.

    It tells the other ranks when to decode and when to pause for a call, and it gets no calls to
    roles that it is not in: it would go on decoding and wait for the paused ranks forever.
    """
    ranks = set(other.ranks)
    for replica in generate.replicas:
        followers = [rank for rank in replica[1:] if rank in ranks]
        if followers and replica[0] not in ranks:
            raise UserError(
                f"rank {replica[0]} leads the engine on ranks {format_ranks(replica)} but is not "
                f"in {other.name}, while ranks {format_ranks(followers)} are: it could not pause "
                f"for calls to {other.name}; add rank {replica[0]} to {other.name}, or choose "
                f"generate's ranks and tp so that an engine starts at rank {followers[0]}"
            )


def parse_device_map(text: str, world_size: int) -> DeviceMap:
    """Parse a map such as `train=0-3,tp=2 generate=4-7 reference=0-3`."""
    return DeviceMap(tuple(_parse_role(entry, world_size) for entry in text.split()), world_size)


def _parse_role(entry: str, world_size: int) -> Role:
    sizes = r"(?:,tp=(\d+))?(?:,cp=(\d+))?(?:,ep=(\d+))?(?:,fsdp=(\d+))?"
    match = re.fullmatch(rf"([a-z][a-z0-9_]*)=([^,=]+){sizes}", entry)
    if not match or match[1] in ("tp", "cp", "ep", "fsdp"):
        raise UserError(f"{entry!r} in the device map is not understood; {SYNTAX}")
    name, ranks, tp, cp, ep, fsdp = match.groups()
    ranks = _parse_ranks(name, ranks, world_size)
    sizes = int(tp or 1), int(cp or 1), int(fsdp) if fsdp else None
    return Role(name, ranks, *sizes, ep=int(ep or 1))


def _parse_ranks(name: str, text: str, world_size: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(world_size))
    ranks: list[int] = []
    for span in text.split("+"):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UserError(f"{span!r} in {name}={text} is not a range of ranks; {SYNTAX}")
        if last >= world_size:  # before a typo makes a range of billions
            raise _unknown_rank(name, last, world_size)
        ranks += range(first, last + 1)
    return tuple(ranks)


def auto_device_map(
    world_size: int,
    config: ModelConfig,
    device_bytes: int | None,
    roles: Sequence[str],
    ranks_per_node: int = 8,
    *,
    engines_sleep: bool = False,
    offload: bool = False,
    must_fit: bool = True,
    **train: Any,
) -> tuple[DeviceMap, list[str]]:
    """All roles on all ranks, with the smallest tp for generate that fits; also the reasons.

    Where several machines train a mixture, its experts are dealt to the ranks of each.
    `device_bytes` is the memory of one device, None on a CPU; `train` are options of
    `train_memory`. If no tp fits, it is a ValueError, or without `must_fit` the largest.
    """
    tp = ep = 1
    why = "tp=1: on a CPU there is no device memory to save"
    if device_bytes is not None:
        if config.experts and "train" in roles and world_size > ranks_per_node:
            ep = gcd(config.experts.num_experts, world_size, ranks_per_node)
        others = least_memory(config, roles, world_size, ep, **train)
        frozen = 0
        if world_size == 1 and train.get("lora_rank") and {"train", "generate"} <= {*roles}:
            frozen = engine_bytes(config, 1, 0)  # the engine shares them
        idle = (others.idle.total if engines_sleep else others.total) - frozen
        if offload:  # roles.py: only a policy without adapters is there during a sync
            stays = NOT_OFFLOADED[bool(train.get("lora_rank")) :]
            beside = [name for name in roles if name in stays]
            idle = least_memory(config, beside, world_size, **train).idle.total
        tp, why, fits = _smallest_tp(
            _engine_sizes(world_size, config, roles, ranks_per_node),
            others.total, idle, usable_bytes(device_bytes),
        )  # fmt: skip
        if must_fit and not fits:
            raise UserError(
                f"{listing(roles, 'and')} do not fit on {world_size} ranks: with tp={tp}, the "
                f"largest possible, {why}; use more ranks, larger devices or a smaller model "
                "(`roll-lite plan` says which options help)"
            )
        why = f"tp={tp}: {why}"
    ranks = tuple(range(world_size))
    sizes = {"generate": {"tp": tp}, "train": {"ep": ep}}
    chosen = tuple(Role(name, ranks, **sizes.get(name, {})) for name in roles)
    device_map = DeviceMap(chosen, world_size)
    device_map.check(config, required=roles)
    where = "rank 0" if world_size == 1 else f"all {world_size} ranks: they take turns, none idles"
    reasons = [f"{listing(roles, 'and')} on {where}", why]
    if ep > 1:
        reasons.append(f"ep={ep}: between machines a rank gathers 1/{ep} of a layer's experts")
    return device_map, reasons


def _engine_sizes(
    world_size: int, config: ModelConfig, roles: Sequence[str], node: int
) -> dict[int, int]:
    """Bytes of an engine by its tp, for each power of two that is possible."""
    if "generate" not in roles:
        return {1: 0}
    largest = gcd(world_size, node) if world_size > node else world_size  # within a node
    powers = [tp for tp in tp_sizes(config) if largest % tp == 0 and tp & (tp - 1) == 0]
    return {tp: engine_bytes(config, tp, USEFUL_CACHE_TOKENS) for tp in powers}


def _smallest_tp(
    engines: Mapping[int, int], others: int, idle: int, usable: int
) -> tuple[int, str, bool]:
    """The smallest tp at which an engine fits next to the other roles; why; whether one fits.

    `idle` is what the other roles hold while the engine is awake.
    """
    tried = ""
    for tp, engine in engines.items():
        total = max(others, idle + engine)
        needed = f"{format_bytes(others)} to train before any micro-batch"
        if engine:
            needed += f" and {format_bytes(engine)} to generate with {USEFUL_CACHE_TOKENS} tokens"
        needed += " in turn" if idle < others else ""
        needed += f" take {format_bytes(total)} of {format_bytes(usable)} per rank"
        if total <= usable:
            return tp, needed + tried, True
        tried = f"; tp={tp} would take {format_bytes(total)}"
    return tp, needed, False


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def listing(items: Sequence[object], word: str) -> str:
    """a, b and c"""
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks as 0-3,6."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)
