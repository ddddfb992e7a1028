# SPDX-License-Identifier: Apache-2.0
"""A loss that is multiplied from one batch to the next, and when the scale is right again."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Optional

import nnabla as nn

from .methods import Job
from .training import LoopMaker

# The batch that is first multiplied.
AT = 100
# What the loss is multiplied by in batch `AT`, and in those that follow.
JUMPS = {
    "none": (1.0, 1.0),
    "2^10, one batch": (2.0**10, 1.0),
    "2^-10, one batch": (2.0**-10, 1.0),
    "2^10, for good": (2.0**10, 2.0**10),
    "2^-10, for good": (2.0**-10, 2.0**-10),
}
# A scale is right that differs by no more than this, for so many batches, from that of a training without.
NEAR = 4.0
STAYS = 20


def jumping(jump: str, make: LoopMaker) -> LoopMaker:
    """What makes the loop of `make` with a loss that jumps.

    Args:
        jump: key of `JUMPS`.
        make: makes the loop.
    """

    def made(job: Job) -> Any:
        factor = nn.Variable(job.loss.shape)
        return make(job._replace(loss=job.loss * factor, feed=_Jumping(job, factor, jump)))

    return made


class _Jumping:
    """Feeds, multiplies the loss, and divides the learning rate likewise: steps stay what they are."""

    def __init__(self, job: Job, factor: nn.Variable, jump: str) -> None:
        self._feed: Callable[[], Any] = job.feed
        self._solver, self._factor = job.solver, factor
        self._at_once, self._later = JUMPS[jump]
        self._count = 0
        self._set: Optional[float] = None
        self._rate = 0.0

    def __call__(self) -> None:
        rate = self._solver.learning_rate()
        if rate != self._set:
            # Somebody else has set it since.
            self._rate = rate
        factor = 1.0 if self._count < AT else self._at_once if self._count == AT else self._later
        self._solver.set_learning_rate(self._rate / factor)
        self._set = self._solver.learning_rate()
        self._factor.d = factor
        self._count += 1
        self._feed()


def until_right(record: Dict[str, Any], calm: Dict[str, Any]) -> Optional[int]:
    """After how many batches from the jump on the scale is right for `STAYS` batches; None: never.

    Args:
        record: `"jump"`, and for each update `"fed"`, how many batches there were by then, and `"exponents"`,
            the binary logarithm of the scale.
        calm: that of the training without a jump.
    """
    at_once, later = (math.log2(factor) for factor in JUMPS[record["jump"]])
    wanted = dict(zip(calm["fed"], calm["exponents"]))
    until, right = 0, 0
    for fed, exponent in zip(record["fed"], record["exponents"]):
        if fed <= AT or fed not in wanted:
            continue
        jump = at_once if fed == AT + 1 else later
        if abs(exponent - (wanted[fed] - jump)) > math.log2(NEAR):
            until, right = fed - AT, 0
            continue
        right += 1
        if right == STAYS:
            return until
    return None
