# SPDX-License-Identifier: Apache-2.0
"""Functions of nnabla that behave differently from the others in backward."""

from __future__ import annotations

from typing import FrozenSet

import nnabla as nn

# Their gradient is not proportional to the output gradient: they clip it or ignore it.
NON_HOMOGENEOUS: FrozenSet[str] = frozenset({"ClipGradByNorm", "ClipGradByValue", "Sink"})

# They keep references of their own to the arrays of their parameters, so that swapping has no effect.
OWN_REFERENCES: FrozenSet[str] = frozenset({"LSTM", "GRU", "RNN", "SpectralNorm"})


def computes_in_half(context: nn.Context) -> bool:
    """Whether nnabla computes in a native half-precision type under `context`."""
    first = context.backend[0] if context.backend else ""
    return bool(first.endswith((":half", ":mixed_half")))
