# SPDX-License-Identifier: Apache-2.0
"""Counts of batches that were used, repeated or lost, in one iteration and in the whole training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Dict, Mapping, Tuple

from ..core.layer_limits import LayerLimit
from ..core.scale_policy import ScaleState
from ..core.validation import integer

# This many batches in a row that overflow at any scale are not the fault of single batches. nnabla's updater
# would have halved its scale as often, until no gradient is left.
_HOPELESS = 25


@dataclass
class Counters:
    """The batches of a training, as an updater counts and saves them.

    Every batch is part of an update, or lost: `batches == updates * accum_grad + sum(lost.values())`.

    Attributes:
        updates: how often the solver updated the parameters.
        batches: batches that were used or lost. One that is repeated counts once.
        repeats: how often a batch was run again.
        lost: batches that were thrown away, by cause: `"overflow"`, `"hopeless"` (gradients overflow at any
            scale), `"retries"` (repeated as often as allowed), `"nonfinite_loss"`, `"nonfinite_forward"`.

    Example:
        >>> counters = Counters()
        >>> counters.count_lost("nonfinite_loss", 1)
        >>> counters.batches, counters.lost
        (1, {'nonfinite_loss': 1})
    """

    undone: ClassVar = ("updates", "batches", "repeats", "lost")
    updates: int = 0
    batches: int = 0
    repeats: int = 0
    lost: Dict[str, int] = field(default_factory=dict)

    def count_update(self, batches: int) -> None:
        """Count an update of this many batches."""
        self.updates += 1
        self.batches += int(batches)  # not one of NumPy's integers, which JSON does not know

    def count_repeat(self) -> None:
        """Count a batch that is run again."""
        self.repeats += 1

    def count_lost(self, cause: str, batches: int) -> None:
        """Count batches that were thrown away for `cause`."""
        self.batches += int(batches)
        self.lost = {**self.lost, cause: self.lost.get(cause, 0) + int(batches)}

    def as_dict(self) -> Dict[str, Any]:
        """The counts, for saving."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Counters:
        """The counters that `as_dict` saved.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: `saved` does not come from `as_dict`.
        """
        found = cls(
            integer("updates", saved["updates"]),
            integer("batches", saved["batches"]),
            integer("repeats", saved["repeats"]),
            {str(cause): integer("lost", number) for cause, number in saved["lost"].items()},
        )
        if min(found.updates, found.batches, found.repeats, *found.lost.values()) < 0:
            raise ValueError(f"counters={dict(saved)!r} must not be negative")
        return found


@dataclass
class RetryState:
    """The retries of one iteration, and the scales to return to if none of them helps.

    Attributes:
        iteration: number of the iteration.
        scale_state: the global scale before it.
        limits: the limits of layers before it.
        repeats: how often a batch was run again.
        discarded: batches (or windows of `accum_grad`) that were thrown away.
        hopeless: how many of these overflowed at any scale.
        layers: names of the layers whose gradients were not finite in the last batch that was thrown away.
    """

    iteration: int
    scale_state: ScaleState
    limits: Mapping[str, LayerLimit]
    repeats: int = 0
    discarded: int = 0
    hopeless: int = 0
    layers: Tuple[str, ...] = ()

    @property
    def retries(self) -> int:
        """The number of backward passes whose gradients were not used."""
        return self.repeats + self.discarded

    def count_repeat(self) -> None:
        """Count a batch that is run again."""
        self.repeats += 1

    def is_last(self, max_retries: int) -> bool:
        """True when too many batches were hopeless to throw another one away."""
        return self.hopeless == _HOPELESS or self.discarded == max_retries
