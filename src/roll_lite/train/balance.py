"""Bin packing: which sequences share a micro-batch, and which micro-batches a rank."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

Bin = list[int]
"""Indices of the items in it."""


def spread(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, num_shards: int
) -> list[Bin]:
    """Items in bins of at most `capacity` in length, the same number of bins for every shard.

    As few bins as best-fit-decreasing finds; shards of even cost among those. Shard i has the i-th
    contiguous part of the result, its costliest bin first, so that shards stay in step.
    """
    items = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    tight = _best_fit(items, lengths, capacity)
    num_bins = -(-len(tight) // num_shards)
    shards = _even(items, costs, lengths, num_shards, num_bins * capacity) or []
    filled = [_fill(shard, costs, lengths, num_bins, capacity) for shard in shards]
    if not filled or None in filled:  # too little slack to be even: deal out the tight bins
        filled = _deal(tight, costs, num_shards, num_bins)

    def cost_of(members: Bin) -> float:
        return sum(costs[i] for i in members)

    return [sorted(b) for bins in filled for b in sorted(bins, key=cost_of, reverse=True)]


def _best_fit(items: Bin, lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Longest first, each into the fullest bin that has room."""
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for i in sorted(items, key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(i)
        insort(rooms, (room - lengths[i], chosen))
    return bins


def _even(
    items: Bin, costs: Sequence[float], lengths: Sequence[int], num_bins: int, capacity: int
) -> list[Bin] | None:
    """Items come costliest first; each goes into the cheapest bin with room. None: no room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    cheapest = [(0.0, b) for b in range(num_bins)]  # a heap
    for i in items:
        full = []
        while cheapest and room[cheapest[0][1]] < lengths[i]:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, chosen = cheapest[0]
        heapreplace(cheapest, (cost + costs[i], chosen))
        bins[chosen].append(i)
        room[chosen] -= lengths[i]
        for entry in full:
            heappush(cheapest, entry)
    return bins


def _fill(
    items: Bin, costs: Sequence[float], lengths: Sequence[int], num_bins: int, capacity: int
) -> list[Bin] | None:
    """One shard's items in exactly `num_bins` bins: even ones, else tight ones, or None."""
    bins = _even(items, costs, lengths, num_bins, capacity) or _best_fit(items, lengths, capacity)
    return bins + [[] for _ in range(num_bins - len(bins))] if len(bins) <= num_bins else None


def _deal(
    bins: list[Bin], costs: Sequence[float], num_shards: int, num_bins: int
) -> list[list[Bin]]:
    """Whole bins to shards, at most `num_bins` to each, costliest first."""
    totals = [sum(costs[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-totals[b], b))
    shards = _even(order, totals, [1] * len(bins), num_shards, num_bins)
    return [[bins[b] for b in shard] + [[]] * (num_bins - len(shard)) for shard in shards]
