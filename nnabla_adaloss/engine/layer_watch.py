# SPDX-License-Identifier: Apache-2.0
"""Tells monitors of the layers of one pass: what was decided, and what their gradients hold afterwards."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format, get_format
from ..core.layer_record import LayerRecord, Reason
from ..emulation.rounded_storage import RoundedStorage
from ..graph.node import Node, Scaling
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from ..kernels.interface import Kernels
from ..monitor import Audience, GradientSeen, LayerArrays, LayerScaled


class Stored(NamedTuple):
    """How gradients are stored, and read.

    Attributes:
        kernels: the kernels that read arrays.
        storage: an emulated storage, or None.
        format: the format of gradients where there is none.
    """

    kernels: Kernels
    storage: Optional[RoundedStorage]
    format: Format


class LayerWatch:
    """Made for a pass that somebody watches.

    Args:
        audience: the monitors.
        stored: how gradients are stored.
        iteration: number of the iteration.
        attempt: number of the pass within it.
    """

    def __init__(self, audience: Audience, stored: Stored, iteration: int, attempt: int) -> None:
        self._audience = audience
        self._pass = iteration, attempt
        self._stored = stored
        self._decided: Dict[str, LayerRecord] = {}

    def decided(self, record: LayerRecord) -> None:
        """Take note of what was decided about a layer that is going to run."""
        self._decided[record.layer] = record

    def scheduled(self, scaling: Scaling, scale: float, alpha: float) -> None:
        """Take note of a layer that is going to run with a scale from the schedule, unless that was decided
        for this pass.

        Args:
            scaling: the layer.
            scale: what its output gradient carries.
            alpha: its own scale.
        """
        if scaling.layer in self._decided:
            return
        iteration, attempt = self._pass
        self._decided[scaling.layer] = LayerRecord(
            iteration=iteration,
            layer=scaling.layer,
            alpha=alpha,
            unbounded=alpha,
            previous_scale=scale,
            accumulated_scale=scale * alpha,
            fan_in=scaling.slot.fan_in,
            g=None,
            weight=None,
            reason=Reason.HELD,
            attempt=attempt,
        )

    def ran(self, node: Node) -> None:
        """Tell of the layers of a function whose backward just ran."""
        for scaling in node.scalings:
            record = self._decided.pop(scaling.layer, None)
            if record is not None:
                self._audience.tell(LayerScaled(record, _Look(self._stored, node, scaling)))


def watch_for(
    audience: Audience,
    stored: Tuple[Kernels, Optional[RoundedStorage], Union[str, Format, None]],
    iteration: int,
    attempt: int,
) -> Optional[LayerWatch]:
    """Who is told of the layers of a pass; None, as nearly always: nobody.

    Args:
        audience: the monitors.
        stored: what reads gradients, an emulated storage or None, and the format of gradients.
        iteration: number of the iteration.
        attempt: number of the pass within it.
    """
    if not audience.wants(LayerScaled, iteration):
        return None
    kernels, storage, dtype = stored
    return LayerWatch(audience, Stored(kernels, storage, get_format(dtype or "float16")), iteration, attempt)


class _Look:
    """A look at one layer."""

    def __init__(self, stored: Stored, node: Node, scaling: Scaling) -> None:
        self._stored = stored
        self._node = node
        self._scaling = scaling

    @cached_property
    def gradient(self) -> Optional[GradientSeen]:
        """The input gradient as it is stored."""
        array, key, storage = self._scaling.target.grad, self._scaling.target_key, self._stored.storage
        if stored_dtype(array) not in (FLOAT32, FLOAT16):
            return None
        statistics, exponents = self._stored.kernels.exponent_histogram(array)
        if storage is None:
            return GradientSeen(statistics, exponents, self._stored.format)
        format = storage.gradient_format(key, array.size)
        rounded = storage.gradient_rounding(key)
        if rounded is None:
            return GradientSeen(statistics, exponents, format)
        return GradientSeen(statistics, exponents, format, rounded.underflowed, rounded.overflowed)

    @cached_property
    def weight(self) -> Optional[GradientSeen]:
        """The weight, without the layer's scale."""
        return self._data(self._scaling.factor)

    @cached_property
    def input(self) -> Optional[GradientSeen]:
        """What the weight is multiplied by."""
        return self._data(self._scaling.target)

    def _data(self, v: nn.Variable) -> Optional[GradientSeen]:
        storage = self._stored.storage
        if v.data.clear_called or stored_dtype(v.data) not in (FLOAT32, FLOAT16):
            return None
        statistics, exponents = self._stored.kernels.exponent_histogram(v.data)
        format = self._stored.format if storage is None else storage.data_format(hash(v), v.data.size)
        return GradientSeen(statistics, exponents, format)

    def arrays(self) -> LayerArrays:
        """Copies of the layer's arrays."""
        scaling = self._scaling
        return LayerArrays(
            _copy(self._node.outputs[0].grad),
            _copy(scaling.target.grad),
            _copy(scaling.factor.data),
            _copy(scaling.target.data),
        )


def _copy(array: nn.NdArray) -> Optional[NDArray[np.float32]]:
    if array.clear_called or stored_dtype(array) is None:
        return None
    values: Any = array.data
    return np.array(values, np.float32)
