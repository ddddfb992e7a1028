# SPDX-License-Identifier: Apache-2.0
"""Causes of faults that no loss scale can fix, each told once, and notes: sentences with lists of names."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

_NAMED = 4  # number of listed names


class Cause(NamedTuple):
    """Fault that no loss scale can fix, and its remedy."""

    kind: str  # such as "dead_relu"
    function: str  # its name in the updater
    what: str
    remedy: str
    fatal: bool = True  # True if nothing is learned before it is fixed
    spoils: Tuple[str, ...] = ()  # layers whose gradients no scale keeps because of it
    parameters: Tuple[str, ...] = ()  # those at fault, or without a gradient
    as_stored: bool = False  # True if fp32 does not have it

    def __str__(self) -> str:
        return f"{self.function}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}."


def distinct(causes: Sequence[Cause]) -> Dict[Tuple[str, str], Cause]:
    """First cause of each kind and function, by these."""
    found: Dict[Tuple[str, str], Cause] = {}
    for cause in causes:
        found.setdefault((cause.kind, cause.function.partition("#")[0]), cause)
    return found


def summed_up(causes: Sequence[Cause]) -> Iterator[Cause]:
    """Causes; three or more of one kind and remedy become one, at the first function."""
    alike: Dict[Tuple[str, str, bool], List[Cause]] = {}
    for cause in causes:
        alike.setdefault((cause.kind, cause.remedy, cause.fatal), []).append(cause)
    for found in alike.values():
        if len(found) < 3:
            yield from found
            continue
        what = f"{found[0].what}; likewise {listed([cause.function for cause in found[1:]])}"
        spoils = tuple(dict.fromkeys(name for cause in found for name in cause.spoils))
        parameters = tuple(dict.fromkeys(name for cause in found for name in cause.parameters))
        yield found[0]._replace(what=what, spoils=spoils, parameters=parameters)


class Note(NamedTuple):
    """Sentence with a list of names in the middle."""

    begin: str
    names: Sequence[str] = ()
    end: str = ""

    def __str__(self) -> str:
        return f"{self.begin}{listed(self.names)}{self.end}"

    def in_full(self) -> str:
        """Sentence with all names."""
        return f"{self.begin}{', '.join(self.names)}{self.end}"


def listed(names: Sequence[str]) -> str:
    """List the first few names, and the number of others."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    *first, last = [*names[:_NAMED], *more] or [""]
    return f"{', '.join(first)} and {last}" if first else last
