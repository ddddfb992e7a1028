# SPDX-License-Identifier: Apache-2.0
"""How many batches a training has seen, and what became of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Mapping

from ..core.validation import integer


@dataclass
class Counters:
    """What an updater counts; a part of its saved state.

    Every batch is part of an update, or lost: `batches == updates * accum_grad + sum(lost.values())`.

    Attributes:
        updates: how often the solver updated the parameters.
        batches: batches that were used or lost. One that is repeated counts once.
        repeats: how often a batch was run again.
        lost: batches that were thrown away, by cause: `"overflow"`, `"hopeless"` (gradients overflow at any
            scale), `"retries"` (repeated as often as may be), `"nonfinite_loss"`, `"nonfinite_forward"`.

    Example:
        >>> counters = Counters()
        >>> counters.count_lost("nonfinite_loss", 1)
        >>> counters.batches, counters.lost
        (1, {'nonfinite_loss': 1})
    """

    updates: int = 0
    batches: int = 0
    repeats: int = 0
    lost: Dict[str, int] = field(default_factory=dict)

    def count_update(self, batches: int) -> None:
        """Count an update that took so many batches."""
        self.updates += 1
        self.batches += int(batches)  # not one of NumPy's integers, which JSON does not know

    def count_lost(self, cause: str, batches: int) -> None:
        """Count batches that were thrown away for `cause`."""
        self.batches += int(batches)
        self.lost[cause] = self.lost.get(cause, 0) + int(batches)

    def as_dict(self) -> Dict[str, Any]:
        """The numbers, for saving."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Counters:
        """The counters that `as_dict` returned.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: `saved` is none that it returned.
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
