# SPDX-License-Identifier: Apache-2.0
"""Selection of the layers that are scaled, by patterns of their names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import List, NamedTuple, Sequence, Tuple


class LayerSelection(NamedTuple):
    """Patterns of layer names, as in `fnmatch`; `exclude` wins. A name as printed matches itself."""

    include: Tuple[str, ...] = ("*",)
    exclude: Tuple[str, ...] = ()

    def selects(self, *names: str) -> bool:
        """True if the layer with these names, its own and its function's, is to be scaled."""
        return _any_matches(self.include, names) and not _any_matches(self.exclude, names)

    def check(self, layers: Sequence[str]) -> None:
        """Raise ValueError unless every pattern, except `*`, matches one of the `layers`."""
        for argument, patterns in zip(self._fields, self):
            for pattern in unmatched(patterns, layers):
                raise ValueError(pattern_error(argument, pattern, layers))


def pattern_error(argument: str, pattern: str, layers: Sequence[str], match: str = "no layer") -> str:
    """Error message for a pattern that selects none of the `layers`; `match`: the layers that it matches."""
    names = ", ".join(layers) or "none: it has no matrix product that can be scaled"
    return f"{argument} has the pattern {pattern!r}, which matches {match}; the network's layers are {names}"


def unmatched(patterns: Sequence[str], layers: Sequence[str]) -> List[str]:
    """List the patterns that match none of the names `layers`, except those for every name."""
    return [one for one in patterns if not (matches_all(one) or _any_matches((one,), layers))]


def matches_all(pattern: str) -> bool:
    """True if a pattern matches every name."""
    return bool(pattern) and not pattern.strip("*")


def matches(pattern: str, name: str) -> bool:
    """True if a name matches a pattern."""
    return name == pattern or fnmatchcase(name, pattern)


def _any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return "*" in patterns or any(matches(pattern, name) for pattern in patterns for name in names)
