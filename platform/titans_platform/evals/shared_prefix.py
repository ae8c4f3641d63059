"""Rows that begin alike read their beginning once: the choices of a question, whose context is the same.

Neighbours in sorted order make a group. A batch reads the beginnings of its groups together, the longer ones
on after the shorter ones have ended, and copies the state at its `forks` for the rows of the groups that end
there. A fork lies before the end of a beginning where each row of its group reading the rest costs less than
another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

PASS_TOKENS = 256
"""What a pass costs beside its tokens, in tokens: what would save fewer is not worth a pass of its own."""


class Group(NamedTuple):
    """Rows that begin alike."""

    shared: int
    """Tokens of the common beginning."""
    rows: tuple[int, ...]


class Fork(NamedTuple):
    """Where a batch copies states, and for which groups."""

    position: int
    groups: tuple[Group, ...]


def group_rows(rows: Sequence[list[int]], most: Sequence[int]) -> list[Group]:
    """Each row in one group, so that few tokens are read.

    Args:
        rows: tokens.
        most: of each row, how many of its tokens may be shared.
    """
    groups: list[Group] = []
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        if groups:
            shared, members = groups[-1]
            common = _common(rows[members[-1]], rows[i], min(shared, most[i]))
            # the members read on from an earlier place; the new one saves what it shares
            if common > (len(members) - 1) * (shared - common):
                groups[-1] = Group(common, (*members, i))
                continue
        groups.append(Group(most[i], (i,)))
    return [group if len(group.rows) > 1 else group._replace(shared=0) for group in groups]


def batch_groups(groups: Sequence[Group], lengths: Sequence[int], budget: int) -> list[list[Group]]:
    """Groups of like lengths together, the longest beginnings first, up to ``budget`` tokens a batch."""

    def tokens(group: Group) -> int:
        return group.shared + sum(lengths[row] - group.shared for row in group.rows)

    order = sorted(groups, key=lambda group: (-group.shared, -lengths[group.rows[0]]))
    batches: list[list[Group]] = []
    left = 0
    for group in order:
        if not batches or tokens(group) > left:
            batches.append([])
            left = budget
        batches[-1].append(group)
        left -= tokens(group)
    return batches


def forks(batch: Sequence[Group]) -> list[Fork]:
    """Where the states of a batch are copied, in order."""
    order = sorted(batch, key=lambda group: group.shared)
    parts = _parts(order, lambda first, group: (group.shared - first.shared) * (len(group.rows) - 1))
    return [Fork(part[0].shared, tuple(part)) for part in parts]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Which rows of these lengths one pass takes, the longest first; shorter ones are padded."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _parts(order, lambda first, row: lengths[first] - lengths[row])


def _parts(order: Sequence[T], waste: Callable[[T, T], int]) -> list[list[T]]:
    """``order`` cut wherever a part would waste more than a pass; ``waste(first of the part, another)``."""
    parts: list[list[T]] = []
    wasted = 0
    for item in order:
        wasted += waste(parts[-1][0], item) if parts else 0
        if not parts or wasted > PASS_TOKENS:
            parts.append([])
            wasted = 0
        parts[-1].append(item)
    return parts


def _common(a: list[int], b: list[int], most: int) -> int:
    """Tokens that ``a`` and ``b`` begin with alike, ``most`` at most."""
    low, high = 0, min(most, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
