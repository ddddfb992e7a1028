# SPDX-License-Identifier: Apache-2.0
"""The precision of each layer, by patterns of layer names."""

from __future__ import annotations

from functools import cached_property
from typing import Dict, Mapping, Optional, Sequence

from .layer_selection import LayerSelection
from .precision import Precision, StorageLike, get_precision

FP32 = Precision("float32")
"""The precision of layers that no pattern matches."""


class LayerPrecisions:
    """Which precision each layer has: that of the first pattern which matches its name, or else fp32."""

    def __init__(self, storage: StorageLike, argument: str = "storage") -> None:
        given = storage if isinstance(storage, Mapping) else {"*": storage}
        if not given:
            raise ValueError(f"{argument} is an empty mapping: name a pattern of layers, such as '*'")
        # The precisions by pattern, in order; one precision for all is that of "*".
        self.storage: Dict[str, Precision] = {}
        all_layers = None
        for pattern, precision in given.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{argument} has the key {pattern!r}; patterns of layer names are strings")
            if all_layers is not None:
                raise ValueError(
                    f"{argument} has the pattern {pattern!r} behind {all_layers!r}, which matches every "
                    f"layer; the first pattern that matches decides, so put {all_layers!r} last"
                )
            named = f"{argument}[{pattern!r}]" if given is storage else argument
            self.storage[pattern] = get_precision(precision, named)
            all_layers = pattern if _matches_all(pattern) else None

    @cached_property
    def only(self) -> Optional[Precision]:
        """The precision of all layers; None where they differ."""
        first, precision = next(iter(self.storage.items()))
        return precision if _matches_all(first) else None

    @cached_property
    def narrowest(self) -> Precision:
        """Of the given precisions the one in which gradients have the smallest largest number."""
        return min(self.storage.values(), key=lambda p: p.stored_gradients.max)

    @property
    def operands_only(self) -> bool:
        """Whether any layer rounds what its matrix product reads."""
        return any(p.operands_only for p in self.storage.values())

    @property
    def at_random(self) -> bool:
        """Whether any layer rounds gradients at random."""
        return any(p.stochastic_seed is not None for p in self.storage.values())

    def of(self, layer: str) -> Precision:
        """The precision of a layer."""
        return next((p for pattern, p in self.storage.items() if _matches(pattern, layer)), FP32)

    def check(self, layers: Sequence[str]) -> None:
        """Raise ValueError unless every pattern decides about a layer, or is made to match everything."""
        left = list(layers)
        for pattern in self.storage:
            decided = [layer for layer in left if _matches(pattern, layer)]
            if not decided and not _matches_all(pattern):
                taken = any(_matches(pattern, layer) for layer in layers)
                why = "only layers that an earlier pattern matches" if taken else "no layer"
                raise ValueError(
                    f"storage has the pattern {pattern!r}, which matches {why}; the network's layers "
                    f"are {', '.join(layers)}"
                )
            left = [layer for layer in left if layer not in decided]

    def __str__(self) -> str:
        if self.only is not None:
            return str(self.only)
        parts = [f"{precision} in {pattern}" for pattern, precision in self.storage.items()]
        return "; ".join(parts)


def widest(precisions: Sequence[Precision]) -> Precision:
    """The precision that stores data in the most bits, of equally wide ones that of the largest range."""
    return max(precisions, key=lambda p: (p.stored_data.bits, p.stored_data.max))


def _matches_all(pattern: str) -> bool:
    return bool(pattern) and not pattern.strip("*")


def _matches(pattern: str, layer: str) -> bool:
    return LayerSelection((pattern,)).selects(layer)
