# SPDX-License-Identifier: Apache-2.0
"""Events of a training, and the methods of a monitor that receive them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Callable, Dict, NamedTuple, Optional, Protocol, Tuple, Type, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.layer_record import LayerRecord
from ..core.statistics import ArrayStatistics


class Event(Protocol):
    """Protocol of an event, or of its row in a recording: a tuple with the iteration number."""

    @property
    def iteration(self) -> int:
        """Number of the iteration."""

    def _asdict(self) -> Dict[str, Any]: ...


class GradientSeen(NamedTuple):
    """Statistics of a gradient as stored, accumulated scale included; or of a weight or an activation."""

    statistics: ArrayStatistics
    # Number of elements with each binary exponent, shape (256,): bin e counts magnitudes from 2^(e - 127) on,
    # bin 0 those below 2^-126, zeros included, bin 255 infinities and NaN.
    exponents: NDArray[np.int64]
    format: Format  # storage format
    # Numbers of elements that became zero, and infinite, when stored; counted by emulated storage only.
    underflowed: Optional[int] = None
    overflowed: Optional[int] = None

    @property
    def subnormals(self) -> int:
        """Number of nonzero elements below the format's normal range, which have lost precision."""
        first_normal = math.frexp(self.format.smallest_normal)[1] - 1 + 127
        return int(self.exponents[:first_normal].sum()) - self.statistics.zeros

    @property
    def headroom(self) -> float:
        """Bits from the largest magnitude to the format's maximum: 0 if not finite, infinity if all are 0."""
        if self.statistics.nonfinite:
            return 0.0
        abs_max = self.statistics.abs_max
        return math.log2(self.format.max / abs_max) if abs_max else math.inf


class LayerLook:
    """Access to a layer's arrays during the monitor's call, right after the layer's backward. Each is read at
    its first use, which synchronizes a GPU. Empty for a layer scaled by hand.
    """

    def __init__(
        self,
        read: Callable[[str], Optional[GradientSeen]] = lambda name: None,
        arrays: Callable[[], Dict[str, NDArray[np.float32]]] = dict,
    ) -> None:
        self._read, self._arrays = read, arrays

    @cached_property
    def gradient(self) -> Optional[GradientSeen]:
        """The input gradient as stored, accumulated scale included; None if none was written."""
        return self._read("input_gradient")

    @cached_property
    def weight(self) -> Optional[GradientSeen]:
        """The weight, without the layer's scale; None where nothing is stored."""
        return self._read("weight")

    @cached_property
    def input(self) -> Optional[GradientSeen]:
        """The array that the weight is multiplied by; None where it is no longer stored."""
        return self._read("input")

    def arrays(self) -> Dict[str, NDArray[np.float32]]:
        """Copies of the arrays that are still stored: `"output_gradient"` and `"input_gradient"`, accumulated
        scale included, `"weight"`, without the layer's scale, and `"input"`, its other operand.
        """
        return self._arrays()


class TrainingBegan(NamedTuple):
    """An updater is about to train for the first time in this process.

    Attributes:
        iteration: number of its first iteration.
        date: start in ISO 8601, with the offset of the time zone.
        version: version of nnabla_adaloss.
        settings: the updater's arguments, the solver and its learning rate included, as text.
    """

    iteration: int
    date: str
    version: str
    settings: Dict[str, str]


class LayerScaled(NamedTuple):
    """A layer's backward ran with a scale of its own.

    Attributes:
        record: the scale, its reason, and the measurements that it was chosen from.
        look: access to the layer's arrays.
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
        component: the part of the network where it began, named after the function that its first gradient
            belongs to; empty if unknown.
        scale: the global scale S0 of the pass.
        detail: the values in forward that were not finite, as text; empty if there were none.
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
        cause: `"overflow"`, or `"first measurement"`: the pass measured a part of the network for the first
            time, with a scale that was far too low.
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
        cause: `"overflow"`; `"hopeless"` (gradients overflow at any scale); `"retries"` (the limit of repeats
            is reached); `"nonfinite_loss"`; `"nonfinite_forward"`.
        layers: functions whose gradients were not finite, the first in backward order first.
        batches: how many batches were lost.
        detail: the values in forward that were not finite, as text; empty if there were none.
    """

    iteration: int
    cause: str
    layers: Tuple[str, ...]
    batches: int
    detail: str = ""


class ScaleChanged(NamedTuple):
    """An update changed the global loss scale S0.

    Attributes:
        iteration: number of the iteration.
        before: S0 before.
        after: S0 now.
    """

    iteration: int
    before: float
    after: float


class UpdateEnded(NamedTuple):
    """A call of `update()` ended.

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
    """Base class whose methods do nothing: override those of the events that you want.

    Any object with some of these methods is a monitor, also without this base class. An exception in a
    monitor is reported once, and training goes on.

    Attributes:
        every: `on_layer_scaled` and `on_update_ended` are called only in iterations whose number is a
            multiple of this, and cost nothing in others. Default 1. Other methods are called at every event.
        looks: whether `on_layer_scaled` uses `event.look`, which takes hooks around the network's functions.
            Default True; with False the pass runs without hooks and its layers are reported afterwards.

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
        """Receive every event for which the monitor lacks a method of its own, of those below."""

    def on_training_began(self, event: TrainingBegan) -> None:
        """Called before the first update."""

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Called after a layer's backward with a scale of its own, in every pass of a repeated batch."""

    def on_overflowed(self, event: Overflowed) -> None:
        """Called after a pass with gradients that were not finite."""

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """Called before a batch is repeated."""

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """Called after a batch, or a window of them, was lost."""

    def on_scale_changed(self, event: ScaleChanged) -> None:
        """Called after an update that changed the global loss scale."""

    def on_update_ended(self, event: UpdateEnded) -> None:
        """Called after each update."""


METHODS: Dict[Type[Any], str] = {
    get_type_hints(method)["event"]: name for name, method in vars(Monitor).items() if name.startswith("on_")
}
"""The method for each kind of event; that of `Event` receives the kinds without one."""
