# SPDX-License-Identifier: Apache-2.0
"""The precision of each layer, by patterns of layer names."""

from __future__ import annotations

from functools import cached_property
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .layer_selection import LayerSelection
from .precision import Precision, StorageLike, get_precision

FP32 = Precision("float32")
"""The precision of layers that no pattern matches."""


class PatternPrecision(NamedTuple):
    """A pattern of layer names, and the precision of the layers that it matches."""

    pattern: str
    precision: Precision

    def matches(self, layer: str) -> bool:
        """Whether the pattern matches the name of a layer, as `include` of `AdaLossConfig` does."""
        return LayerSelection((self.pattern,)).selects(layer)


class LayerPrecisions:
    """Which precision each layer has: that of the first pattern which matches its name, or else fp32.

    Args:
        storage: what `storage=` takes: one precision for all layers, or a mapping from patterns of layer
            names to precisions.
        argument: what the caller's own argument is called, for error messages.

    Attributes:
        patterns: the patterns in order, with their precisions; one precision for all is that of `"*"`.

    Raises:
        TypeError: a key of the mapping is no string.
        ValueError: a format is unknown, the mapping is empty, or a pattern stands behind `"*"`.

    Example:
        >>> precisions = LayerPrecisions({"head/*": "float16", "body/*": "fp8_hybrid"})
        >>> precisions.of("head/affine").forward.name, precisions.of("body/conv").forward.name
        ('float16', 'float8_e4m3')
        >>> precisions.of("stem/conv").forward.name
        'float32'
    """

    def __init__(self, storage: StorageLike, argument: str = "storage") -> None:
        given = storage if isinstance(storage, Mapping) else {"*": storage}
        if not given:
            raise ValueError(f"{argument} is an empty mapping: name a pattern of layers, such as '*'")
        found: List[PatternPrecision] = []
        for pattern, precision in given.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{argument} has the key {pattern!r}; patterns of layer names are strings")
            if found and _matches_all(found[-1].pattern):
                all_layers = found[-1].pattern
                raise ValueError(
                    f"{argument} has the pattern {pattern!r} behind {all_layers!r}, which matches every "
                    f"layer; the first pattern that matches decides, so put {all_layers!r} last"
                )
            named = f"{argument}[{pattern!r}]" if given is storage else argument
            found.append(PatternPrecision(pattern, get_precision(precision, named)))
        self.patterns: Tuple[PatternPrecision, ...] = tuple(found)

    @property
    def storage(self) -> Dict[str, Precision]:
        """These precisions as `storage=` takes them."""
        return {entry.pattern: entry.precision for entry in self.patterns}

    @cached_property
    def only(self) -> Optional[Precision]:
        """The precision of all layers; None where they differ."""
        first = self.patterns[0]
        return first.precision if _matches_all(first.pattern) else None

    @cached_property
    def narrowest(self) -> Precision:
        """Of the given precisions the one in which gradients have the smallest largest number."""
        return min((p.precision for p in self.patterns), key=lambda p: p.stored_gradients.max)

    @property
    def operands_only(self) -> bool:
        """Whether any layer rounds what its matrix product reads."""
        return any(p.precision.operands_only for p in self.patterns)

    @property
    def at_random(self) -> bool:
        """Whether any layer rounds gradients at random."""
        return any(p.precision.stochastic_seed is not None for p in self.patterns)

    def of(self, layer: str) -> Precision:
        """The precision of a layer."""
        return next((p.precision for p in self.patterns if p.matches(layer)), FP32)

    def check(self, layers: Sequence[str]) -> None:
        """Raise unless every pattern decides about one of the `layers`, or is made to match everything.

        Raises:
            ValueError: one does not; the message lists the layers.
        """
        left = list(layers)
        for entry in self.patterns:
            decided = [layer for layer in left if entry.matches(layer)]
            if not decided and not _matches_all(entry.pattern):
                taken = any(map(entry.matches, layers))
                why = "only layers that an earlier pattern matches" if taken else "no layer"
                raise ValueError(
                    f"storage has the pattern {entry.pattern!r}, which matches {why}; the network's layers "
                    f"are {', '.join(layers)}"
                )
            left = [layer for layer in left if layer not in decided]

    def __str__(self) -> str:
        if self.only is not None:
            return str(self.only)
        parts = [f"{precision} in {pattern}" for pattern, precision in self.patterns]
        return "; ".join(parts)


def widest(precisions: Sequence[Precision]) -> Precision:
    """The precision that stores data in the most bits; of equally wide ones that of the largest range, and of
    equal ones the first.
    """
    return max(precisions, key=lambda p: (p.stored_data.bits, p.stored_data.max))


def _matches_all(pattern: str) -> bool:
    return bool(pattern) and not pattern.strip("*")
