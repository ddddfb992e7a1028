# SPDX-License-Identifier: Apache-2.0
"""The result of one update."""

from __future__ import annotations

from typing import NamedTuple, Tuple


class UpdateResult(NamedTuple):
    """The result of one `update()`; a learning-rate schedule advances when `updated` is true.

    Attributes:
        updated: whether the solver changed the parameters.
        scale: the global loss scale S0 of the next call; where it is measured, of the last batch.
        retries: how often gradients were computed in vain in this call: a batch was repeated, or a batch (or
            window of `accum_grad` batches) thrown away.
        reason: `"updated"`; `"zero_gradients"` (updated, but every gradient was exactly zero);
            `"overflow"` (gradients were not finite to the last retry); `"nonfinite_loss"`;
            `"nonfinite_forward"` (the loss was finite, something in forward was not).
        overflow_layers: names of the layers whose gradient was not finite when a batch was last repeated or
            thrown away for that, the first in backward order first; empty when none was.
        nonfinite_layers: names of the layers whose gradient was not finite in the last batch, also where that
            did no harm: behind a mask, or in parameters that the solver does not update.
        cause: in words, the function of forward that was not finite; empty when all were.

    Example:
        >>> result = UpdateResult(True, 8.0)
        >>> result.updated, result.reason
        (True, 'updated')
    """

    updated: bool
    scale: float
    retries: int = 0
    reason: str = "updated"
    overflow_layers: Tuple[str, ...] = ()
    nonfinite_layers: Tuple[str, ...] = ()
    cause: str = ""
