# SPDX-License-Identifier: Apache-2.0
"""Sentences with a list of names."""

from __future__ import annotations

from typing import NamedTuple, Sequence

# Number of listed names.
_NAMED = 4


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
