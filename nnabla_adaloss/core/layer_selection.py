# SPDX-License-Identifier: Apache-2.0
"""Selection of the layers that are scaled, by patterns of their names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import List, NamedTuple, Sequence, Tuple


class LayerSelection(NamedTuple):
    """Patterns of layer names, as `fnmatch` knows them; `exclude` wins. A name as printed matches itself."""

    include: Tuple[str, ...] = ("*",)
    exclude: Tuple[str, ...] = ()

    def selects(self, *names: str) -> bool:
        """True when the layer that goes by these names is to be scaled."""
        return _any_matches(self.include, names) and not _any_matches(self.exclude, names)

    def check(self, layers: Sequence[str]) -> None:
        """ValueError unless every pattern matches one of the `layers`, or is made to match everything."""
        for argument, patterns in zip(self._fields, self):
            for pattern in unmatched(patterns, layers):
                names = ", ".join(layers) if layers else "none: it has no matrix product that can be scaled"
                raise ValueError(
                    f"{argument} has the pattern {pattern!r}, which matches no layer; the network's "
                    f"layers are {names}"
                )


def unmatched(patterns: Sequence[str], layers: Sequence[str]) -> List[str]:
    """The patterns that match none of the names `layers`, but for those made to match everything."""
    return [one for one in patterns if not (matches_all(one) or _any_matches((one,), layers))]


def matches_all(pattern: str) -> bool:
    """Whether a pattern is made to match every name."""
    return bool(pattern) and not pattern.strip("*")


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern."""
    return name == pattern or fnmatchcase(name, pattern)


def _any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return "*" in patterns or any(matches(pattern, name) for pattern in patterns for name in names)
