# SPDX-License-Identifier: Apache-2.0
"""Functions and layers that change the size of gradients: a scale may do, but there is more to mend."""

from __future__ import annotations

from typing import List, Optional, Sequence

from ..numbers import FunctionNumbers, LayerNumbers, NetworkNumbers
from .cause import Cause, Kind, place, subject

# By how much a single function may change the size of gradients before it is spoken of.
_EXPLODES = 2.0**7
_SHRINKS = 2.0**-10
# By how much gradients may differ from layer to layer before it is spoken of, where no function stands out.
_SPREAD = 2.0**20


def sizes(network: NetworkNumbers, *, among: bool) -> List[Cause]:
    """What changes the size of gradients by itself; where nothing does, what layers do together.

    Args:
        network: what was measured.
        among: whether other causes were found, from which the latter may follow.
    """
    changes = [c for c in map(_change, network.functions) if c is not None]
    return changes if changes or among else _spread(network.layers)


def _change(f: FunctionNumbers) -> Optional[Cause]:
    """A function that changes the size of gradients by itself."""
    if f.growth is None:
        return None
    if f.loss_section:
        if f.type_name in ("MulScalar", "Mul2") and f.growth <= _SHRINKS:
            what = f"the loss behind it is multiplied by {f.growth:.1e}"
            remedy = "adapt the learning rate instead, or let the scale be measured"
            return Cause(Kind.SMALL_LOSS, place(f), what, remedy, False)
        return None
    if f.growth >= _EXPLODES:
        what = f"{subject(f)} makes gradients {f.growth:.1e} times larger"
        remedy = "start from smaller weights, normalise, or clip gradients"
        return Cause(Kind.EXPLODING, place(f), what, remedy, False)
    if f.growth <= _SHRINKS:
        what = f"{subject(f)} makes gradients {1.0 / f.growth:.1e} times smaller"
        remedy = "start from larger weights, normalise, or take the factor out"
        return Cause(Kind.SHRINKING, place(f), what, remedy, False)
    return None


def _spread(layers: Sequence[LayerNumbers]) -> List[Cause]:
    """Layers that together change the size of gradients."""
    known = [layer for layer in layers if layer.amax]
    if len(known) < 2:
        return []
    largest, smallest = max(known, key=_amax), min(known, key=_amax)
    ratio = largest.amax / smallest.amax
    if ratio < _SPREAD:
        return []
    vanish = known.index(smallest) < known.index(largest)
    verb = "vanish" if vanish else "explode"
    what = (
        f"gradients {verb} on their way to the input: they differ {ratio:.1e} times between {smallest.name} "
        f"and {largest.name}"
    )
    remedy = "normalise, add residual connections, or choose another activation or initialisation"
    return [Cause(Kind.SPREAD, smallest.name if vanish else largest.name, what, remedy, False)]


def _amax(layer: LayerNumbers) -> float:
    return layer.amax
