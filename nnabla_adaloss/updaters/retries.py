# SPDX-License-Identifier: Apache-2.0
"""Result of an update, and counts of used, repeated and lost batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, Mapping, NamedTuple, Tuple

from ..core.scale_policy import ScaleState
from ..core.validation import nonnegative_integer
from ..engine import Outcome


class UpdateResult(NamedTuple):
    """The result of one `update()`; a learning-rate schedule advances when `updated` is true.

    Attributes:
        updated: True if the solver changed the parameters.
        scale: the global loss scale S0 of the next call; if measured, of the last batch.
        retries: number of unused gradient computations in this call: a batch was repeated, or a batch (or
            window of `accum_grad` batches) thrown away.
        reason: `"updated"`; `"zero_gradients"` (updated, but every gradient was exactly zero);
            `"overflow"` (gradients were not finite to the last retry); `"nonfinite_loss"`;
            `"nonfinite_forward"` (the loss was finite, something in forward was not).
        overflow_layers: names of the layers whose gradient was not finite when a batch was last repeated or
            thrown away for that, the first in backward order first; empty when none was.
        nonfinite_layers: names of the layers whose gradient was not finite in the last batch, also if that
            did no harm: behind a mask, or in parameters that the solver does not update.
        cause: in words, the function of forward that was not finite; empty when all were.
        component: the part of the network where the gradients of `overflow_layers` were first not finite,
            named after the function whose output gradient is its first; empty if it was on another rank, or
            only the loss was NaN.

    Example:
        >>> from nnabla_adaloss import UpdateResult
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
    component: str = ""


@dataclass
class Counters:
    """Counts of a training's batches, which an updater saves.

    Every batch is part of an update, or lost: `batches == updates * accum_grad + sum(lost.values())`.

    Attributes:
        updates: number of updates of the parameters.
        batches: number of batches used or lost. A repeated one counts once.
        repeats: number of repeats of batches.
        fed: number of batches that the data feeder has filled in. While it runs, this is the number of its
            batch, from 0: derive randomness from it, so that a resumed training is the same.
        lost: batches that were thrown away, by cause: `"overflow"`, `"hopeless"` (gradients overflow at any
            scale), `"retries"` (repeated as often as allowed), `"nonfinite_loss"`, `"nonfinite_forward"`.

    Example:
        >>> from nnabla_adaloss import Counters
        >>> counters = Counters()
        >>> counters.count_lost("nonfinite_loss", 1)
        >>> counters.batches, counters.lost
        (1, {'nonfinite_loss': 1})
    """

    undone: ClassVar = ("updates", "batches", "repeats", "lost", "fed")
    updates: int = 0
    batches: int = 0
    repeats: int = 0
    lost: Dict[str, int] = field(default_factory=dict)
    fed: int = 0

    def count_update(self, batches: int) -> None:
        """Count an update of this many batches."""
        self.updates += 1
        self.batches += batches

    def count_lost(self, cause: str, batches: int) -> None:
        """Count batches that were thrown away for `cause`."""
        self.batches += batches
        self.lost = {**self.lost, cause: self.lost.get(cause, 0) + batches}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Counters:
        """Load saved fields; KeyError, TypeError, AttributeError or ValueError if they are invalid."""
        names = ("updates", "batches", "repeats", "fed")
        lost = {str(cause): nonnegative_integer("lost", number) for cause, number in saved["lost"].items()}
        return cls(lost=lost, **{name: nonnegative_integer(name, saved[name]) for name in names})


@dataclass
class RetryState:
    """Retries of one iteration, and the scales to restore if none of them helps."""

    scale_state: ScaleState  # the global scale before it
    fed: int = 0  # number of batches fed before its last attempt
    repeats: int = 0  # number of repeats
    discarded: int = 0  # lost batches, or windows of `accum_grad`
    hopeless: int = 0  # number of those that overflowed at any scale
    last: Outcome = field(default_factory=Outcome)  # of the last repeated or lost batch

    @property
    def retries(self) -> int:
        """Number of backward passes whose gradients were not used."""
        return self.repeats + self.discarded
