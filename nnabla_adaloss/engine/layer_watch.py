# SPDX-License-Identifier: Apache-2.0
"""Reports the layers of a pass to monitors: their scales, and their arrays after it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Iterable, List, Optional, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.components import LayerSlot, NodeStructure
from ..core.formats import Format, get_format
from ..core.layer_record import LayerRecord, Reason
from ..core.schedule import ScaleSchedule
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from ..monitor import Audience, GradientSeen, LayerArrays, LayerLook, LayerScaled
from .chooser import Decided
from .prepared_graph import PreparedGraph
from .statistics import Statistics


class LayerWatch:
    """Reports layers of one pass as they run."""

    def __init__(
        self, audience: Audience, prepared: PreparedGraph, format: Format, records: Iterable[LayerRecord]
    ) -> None:
        self._audience = audience
        # Gradients are stored in the format, if no storage is emulated.
        self.kernels, self.storage, self.format = prepared.kernels, prepared.storage, format
        self._graph = prepared.graph
        self._records = {record.layer: record for record in records}

    def ran(self, node: NodeStructure) -> None:
        """Report the layers of a function that has run, once each."""
        for slot in node.slots:
            record = self._records.pop(slot.layer, None)
            if record is not None:
                self._audience.tell(LayerScaled(record, _Look(self, self._graph, node, slot)))


def watch_layers(
    audience: Audience, prepared: PreparedGraph, decided: Decided, iteration: int, attempt: int
) -> Optional[LayerWatch]:
    """Return the watch of the layers of a pass; None in an iteration in which no monitor wants them."""
    if not audience.wants(LayerScaled, iteration):
        return None
    schedule = decided.schedule
    which, chosen = (iteration, attempt), decided.chosen
    records = records_of(prepared.plan, prepared.statistics, schedule, which, chosen=chosen)
    return LayerWatch(audience, prepared, get_format(prepared.config.dtype or "float16"), records)


def records_of(
    plan: GraphPlan,
    statistics: Statistics,
    schedule: ScaleSchedule,
    which: Tuple[int, int],
    *,
    chosen: bool,
) -> List[LayerRecord]:
    """A record of each layer in a pass, by iteration and attempt; `chosen`: scales were chosen for it."""
    found = []
    for layer, (scale, alpha) in schedule.layers.items():
        node, slot = plan.layer_slots[layer]
        output = node.outputs[0]
        g = statistics.gradient(output) if chosen else None
        found.append(
            LayerRecord(
                iteration=which[0],
                layer=layer,
                alpha=alpha,
                unbounded=schedule.unbounded.get(layer, alpha),
                previous_scale=scale,
                accumulated_scale=scale * alpha,
                fan_in=slot.gemm.fan_in,
                g=None if g is None else g.scaled(scale * schedule.loss_weight_of(output)),
                weight=statistics.data(slot.factor) if chosen else None,
                reason=schedule.reasons.get(layer, Reason.BRANCHES) if chosen else Reason.HELD,
                attempt=which[1],
            )
        )
    return found


class _Look(LayerLook):
    def __init__(self, stored: LayerWatch, graph: Graph, node: NodeStructure, slot: LayerSlot) -> None:
        self._stored, self._key = stored, graph.keys[slot.target]
        self._output, self._target, self._factor = (
            graph.variables[p] for p in (node.outputs[0], slot.target, slot.factor)
        )

    @cached_property
    def gradient(self) -> Optional[GradientSeen]:
        """The input gradient as it is stored."""
        array, key, storage = self._target.grad, self._key, self._stored.storage
        rounded = storage.gradients.get(key)
        lost = () if rounded is None else (rounded.underflowed, rounded.overflowed)
        return self._seen(array, storage.gradient_format(key, array.size), *lost)

    @cached_property
    def weight(self) -> Optional[GradientSeen]:
        return self._data(self._factor)

    @cached_property
    def input(self) -> Optional[GradientSeen]:
        """What the weight is multiplied by."""
        return self._data(self._target)

    def _data(self, v: nn.Variable) -> Optional[GradientSeen]:
        return self._seen(v.data, self._stored.storage.data_format(hash(v), v.data.size))

    def _seen(self, array: nn.NdArray, format: Optional[Format], *lost: int) -> Optional[GradientSeen]:
        if array.clear_called or stored_dtype(array) not in (FLOAT32, FLOAT16):
            return None
        statistics, exponents = self._stored.kernels.exponent_histogram(array)
        return GradientSeen(statistics, exponents, format or self._stored.format, *lost)

    def arrays(self) -> LayerArrays:
        return LayerArrays(
            _copy(self._output.grad),
            _copy(self._target.grad),
            _copy(self._factor.data),
            _copy(self._target.data),
        )


def _copy(array: nn.NdArray) -> Optional[NDArray[np.float32]]:
    if array.clear_called or stored_dtype(array) is None:
        return None
    values: Any = array.data
    return np.array(values, np.float32)
