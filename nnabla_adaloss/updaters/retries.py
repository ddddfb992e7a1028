# SPDX-License-Identifier: Apache-2.0
"""Result of an update, and counts of the batches that a training has used, repeated or lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, Mapping, NamedTuple, Tuple

from ..core.scale_policy import ScaleState
from ..core.validation import integer
from ..engine import Outcome


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
        component: where the last overflow began: the part of the network that carries one scale, by the name
            of the function that its first gradient belongs to; empty when none was, or on another rank.

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
    """The batches of a training, as an updater counts and saves them.

    Every batch is part of an update, or lost: `batches == updates * accum_grad + sum(lost.values())`.

    Attributes:
        updates: how often the solver updated the parameters.
        batches: batches that were used or lost. One that is repeated counts once.
        repeats: how often a batch was run again.
        fed: how many batches the data feeder has filled in. While it runs, this is the number of the batch
            that it is asked for, from 0: derive from it what is random, and a resumed training is the same.
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
        self.batches += int(batches)  # not one of NumPy's integers, which JSON does not know

    def count_lost(self, cause: str, batches: int) -> None:
        """Count batches that were thrown away for `cause`."""
        self.batches += int(batches)
        self.lost = {**self.lost, cause: self.lost.get(cause, 0) + int(batches)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Counters:
        """Counters from saved fields; KeyError, TypeError, AttributeError or ValueError if they are not."""
        # Earlier states do not have `fed`.
        counts = {"fed": saved["batches"], **saved}
        names = ("updates", "batches", "repeats", "fed")
        lost = {str(cause): integer("lost", number) for cause, number in saved["lost"].items()}
        found = cls(lost=lost, **{name: integer(name, counts[name]) for name in names})
        if min(found.updates, found.batches, found.repeats, found.fed, *found.lost.values()) < 0:
            raise ValueError(f"counters={dict(saved)!r} must not be negative")
        return found


@dataclass
class RetryState:
    """The retries of one iteration, and the scales to return to if none of them helps."""

    scale_state: ScaleState  # the global scale before it
    fed: int = 0  # how many batches had been fed when its last try began
    repeats: int = 0  # how often a batch was run again
    discarded: int = 0  # batches (or windows of `accum_grad`) that were thrown away
    hopeless: int = 0  # how many of these overflowed at any scale
    last: Outcome = field(default_factory=Outcome)  # of the last that was repeated or thrown away

    @property
    def retries(self) -> int:
        """The number of backward passes whose gradients were not used."""
        return self.repeats + self.discarded
