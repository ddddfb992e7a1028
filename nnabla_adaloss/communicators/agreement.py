# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of collective calls and of arrays, and descriptions of a difference."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from functools import lru_cache
from typing import Any, Dict, Hashable, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt


class CollectiveMismatchError(RuntimeError):
    """Ranks made different collective calls, or the same call with arrays of different shapes."""


class RankDisagreementError(RuntimeError):
    """Values that must be equal on all ranks are not."""


class Call(NamedTuple):
    """A collective call as every rank must make it."""

    operation: str
    options: Tuple[Tuple[str, Hashable], ...] = ()
    entries: Tuple[Hashable, ...] = ()  # shapes of the arrays, or names of the values

    def __str__(self) -> str:
        arguments = [f"{len(self.entries)} entries"] if self.entries else []
        arguments += [f"{name}={value!r}" for name, value in self.options]
        return f"{self.operation}({', '.join(arguments)})"


@lru_cache(maxsize=64)
def fingerprint(call: Call) -> int:
    """A signed 64-bit number equal on all ranks that make the same call (unlike `hash`, which is salted)."""
    return _int64_digest(repr(call).encode())


def checksum(array: npt.NDArray[Any]) -> int:
    """A signed 64-bit number of an array's bits, dtype and element count: -0 and +0 differ, NaNs compare."""
    return _int64_digest(f"{array.dtype.str}{array.size}".encode(), np.ascontiguousarray(array).data)


def _int64_digest(*parts: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


_LARGEST = np.int64(np.iinfo(np.int64).max)  # also the mask of all bits but the sign


def to_ordered_int(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """float64 values as integers in the same order, every NaN above +inf.

    A MAX reduction of floats loses a NaN that is on one rank only (comparisons with NaN are false); of these
    integers it keeps it.
    """
    floats = np.array(values, np.float64, order="C")
    bits = floats.view(np.int64)
    ordered = bits ^ ((bits >> 63) & _LARGEST)
    return np.where(np.isnan(floats), _LARGEST, ordered)


def from_ordered_int(ordered: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The inverse of `to_ordered_int`."""
    integers = np.array(ordered, np.int64, order="C")
    bits = np.asarray(integers ^ ((integers >> 63) & _LARGEST))
    return bits.view(np.float64)


def ranks_by_value(values: Iterable[Tuple[int, Hashable]]) -> str:
    """The ranks that hold each value: `"16.0 on ranks 0, 2; 8.0 on rank 1"`."""
    holders: Dict[Hashable, List[int]] = defaultdict(list)
    for rank, value in values:
        holders[value].append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )


def describe_mismatch(ranks: Sequence[int], calls: Sequence[Call]) -> str:
    """The first difference between the calls of the ranks, with the ranks of each, and a likely cause."""

    def held(values: Iterable[Hashable]) -> str:
        return ranks_by_value(zip(ranks, values))

    if len({(call.operation, call.options) for call in calls}) > 1:
        difference = held(map(str, calls))
    else:
        lists = [call.entries for call in calls]
        longest = max(map(len, lists))
        position = next(i for i in range(longest) if len({entries[i : i + 1] for entries in lists}) > 1)
        entries = [one[position] if position < len(one) else "missing" for one in lists]
        counts = held(map(len, lists))
        difference = f"entry {position} given to {calls[0].operation} is {held(entries)}; entries: {counts}"
    return (
        f"ranks made different collective calls: {difference}. Every rank must make the same calls in the "
        "same order with arrays of the same shapes: look for a network, a parameter scope or a branch that "
        "depends on the rank."
    )
