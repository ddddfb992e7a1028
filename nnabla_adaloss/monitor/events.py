# SPDX-License-Identifier: Apache-2.0
"""Events of a training, and the methods of a monitor that receive them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Protocol, Tuple, Type, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.layer_record import LayerRecord
from ..core.statistics import ArrayStatistics

_BIAS = 127  # bin e of an exponent histogram counts magnitudes from 2**(e - 127) on


class Event(Protocol):
    """An event, or the row of one in a recording: a tuple with the iteration in which it happened."""

    @property
    def iteration(self) -> int:
        """Number of the iteration."""

    def _asdict(self) -> Dict[str, Any]: ...


class GradientSeen(NamedTuple):
    """A gradient as stored, accumulated scale included; or a weight or an activation."""

    statistics: ArrayStatistics
    # How many elements have each binary exponent, shape (256,): bin 0 holds zeros and what is smaller than
    # 2^-126, bin 255 infinities and NaN.
    exponents: NDArray[np.int64]
    format: Format  # in which it is stored
    # How many elements became zero, and infinite, when stored. None: only emulated storage counts them.
    underflowed: Optional[int] = None
    overflowed: Optional[int] = None

    @property
    def subnormals(self) -> int:
        """How many elements are not zero and below the format's normal range: they have lost precision."""
        first_normal = math.frexp(self.format.smallest_normal)[1] - 1 + _BIAS
        return int(self.exponents[:first_normal].sum()) - self.statistics.zeros

    @property
    def headroom(self) -> float:
        """Bits between the largest magnitude and the end of the format: 0 where one is not finite, else
        infinity where all are zero.
        """
        if self.statistics.nonfinite:
            return 0.0
        abs_max = self.statistics.abs_max
        return math.log2(self.format.max / abs_max) if abs_max else math.inf


class LayerLook:
    """A look at a layer's arrays while the monitor is called, right after its backward ran. Each is read when
    it is first asked for, which on a GPU waits for the device. Of a layer scaled by hand it shows none.
    """

    def __init__(
        self,
        read: Optional[Mapping[str, Callable[[], Optional[GradientSeen]]]] = None,
        arrays: Callable[[], Dict[str, NDArray[np.float32]]] = dict,
    ) -> None:
        self._read, self._arrays = read or {}, arrays

    def _seen(self, name: str) -> Optional[GradientSeen]:
        return self._read[name]() if name in self._read else None

    @cached_property
    def gradient(self) -> Optional[GradientSeen]:
        """The input gradient as stored, accumulated scale included; None if none was written."""
        return self._seen("gradient")

    @cached_property
    def weight(self) -> Optional[GradientSeen]:
        """The weight, without the layer's scale; None where nothing is stored."""
        return self._seen("weight")

    @cached_property
    def input(self) -> Optional[GradientSeen]:
        """The factor of the weight; None where nothing is stored any more."""
        return self._seen("input")

    def arrays(self) -> Dict[str, NDArray[np.float32]]:
        """Copies of the arrays that are still stored: `"output_gradient"` and `"input_gradient"`, accumulated
        scale included, `"weight"`, without the layer's scale, and `"input"`, the weight's factor.
        """
        return self._arrays()


class TrainingBegan(NamedTuple):
    """An updater is about to train for the first time, in this process.

    Attributes:
        iteration: number of its first iteration.
        date: when, in ISO 8601, with the offset of the time zone.
        version: version of nnabla_adaloss.
        settings: what the updater was made with, the solver and its learning rate included, in words.
    """

    iteration: int
    date: str
    version: str
    settings: Dict[str, str]


class LayerScaled(NamedTuple):
    """A layer's backward ran with a scale of its own.

    Attributes:
        record: the scale, what held it there, and what was known when it was chosen.
        look: what the layer's arrays hold now.
    """

    record: LayerRecord
    look: LayerLook

    @property
    def iteration(self) -> int:
        """Number of the iteration."""
        return self.record.iteration


class Overflowed(NamedTuple):
    """Gradients that the solver needs were not finite after a pass.

    Attributes:
        iteration: number of the iteration.
        attempt: number of the pass within it.
        cause: `"overflow"` (a lower scale may help), `"nonfinite_loss"`, `"nonfinite_forward"`.
        layers: functions whose gradients were not finite, the first in backward order first.
        component: the part of the network where it began, by the name of the function that its first
            gradient belongs to; empty where that is not known.
        scale: the global scale S0 of the pass.
        detail: what in forward was not finite, in words; empty when nothing was.
    """

    iteration: int
    attempt: int
    cause: str
    layers: Tuple[str, ...]
    component: str
    scale: float
    detail: str = ""


class BatchRepeated(NamedTuple):
    """A batch is about to be repeated.

    Attributes:
        iteration: number of the iteration.
        attempt: number of the pass that failed.
        cause: `"overflow"`, or `"first measurement"`: the pass has measured a part of the network for the
            first time, and its scale was far too low for it.
        layers: functions whose gradients were not finite, the first in backward order first.
    """

    iteration: int
    attempt: int
    cause: str
    layers: Tuple[str, ...]


class BatchThrownAway(NamedTuple):
    """A batch, or a window of `accum_grad` batches, was lost: it changed nothing.

    Attributes:
        iteration: number of the iteration.
        cause: `"overflow"`; `"hopeless"` (gradients overflow at any scale); `"retries"` (repeated as often as
            may be); `"nonfinite_loss"`; `"nonfinite_forward"`.
        layers: functions whose gradients were not finite, the first in backward order first.
        batches: how many batches were lost.
        detail: what in forward was not finite, in words; empty when nothing was.
    """

    iteration: int
    cause: str
    layers: Tuple[str, ...]
    batches: int
    detail: str = ""


class ScaleChanged(NamedTuple):
    """The global loss scale S0 is another one than before the update.

    Attributes:
        iteration: number of the iteration.
        before: S0 before.
        after: S0 now.
    """

    iteration: int
    before: float
    after: float


class UpdateEnded(NamedTuple):
    """A call of `update()` is over.

    Attributes:
        iteration: number of the iteration.
        updated: whether the solver changed the parameters.
        reason: as `UpdateResult.reason`.
        scale: the global loss scale S0 afterwards.
        retries: how many passes failed.
        loss: the loss of the last batch, as stored.
    """

    iteration: int
    updated: bool
    reason: str
    scale: float
    retries: int
    loss: float


class Monitor:
    """Methods that do nothing: override those whose events you want.

    Any object with some of these methods is a monitor, of this class or not. An exception in a monitor is
    reported once, and training goes on.

    Attributes:
        every: `on_layer_scaled` and `on_update_ended` are called in iterations whose number is a multiple of
            this. In the others they cost nothing. 1. Other methods are called at every event.
        looks: whether `on_layer_scaled` uses `event.look`, which takes hooks around the network's functions.
            True; with False the pass runs as ever, and its layers are reported when it has run.

    Example:
        >>> from nnabla_adaloss import Monitor
        >>> class Losses(Monitor):
        ...     every = 10
        ...     def __init__(self):
        ...         self.seen = []
        ...     def on_update_ended(self, event):
        ...         self.seen.append(event.loss)
    """

    every: int = 1
    looks: bool = True

    def on_event(self, event: Event) -> None:
        """An event whose own method, below, the monitor does not have."""

    def on_training_began(self, event: TrainingBegan) -> None:
        """The first update is about to begin."""

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """A layer's backward ran with a scale of its own; several times per iteration if batches repeat."""

    def on_overflowed(self, event: Overflowed) -> None:
        """Gradients were not finite after a pass."""

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """A batch is going to be run again."""

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """A batch, or a window of them, was lost."""

    def on_scale_changed(self, event: ScaleChanged) -> None:
        """The global loss scale is another one than before the update."""

    def on_update_ended(self, event: UpdateEnded) -> None:
        """An update is over."""


METHODS: Dict[Type[Any], str] = {
    get_type_hints(method)["event"]: name for name, method in vars(Monitor).items() if name.startswith("on_")
}
"""The method for each kind of event; that of `Event` is for all that have no other."""

RECORDED: Tuple[Type[Any], ...] = tuple(kind for kind in METHODS if kind not in (Event, LayerScaled))
"""Kinds of events that are recorded as they are; a `LayerScaled` becomes a `LayerRow`."""
