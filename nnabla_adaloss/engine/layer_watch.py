# SPDX-License-Identifier: Apache-2.0
"""Events of the layers of a pass for monitors: their scales, and their arrays after it."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Optional, cast

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.components import LayerInput, NodeStructure
from ..core.formats import Format, get_format
from ..core.layer_record import LayerRecord, Reason
from ..kernels.arrays import is_readable, stored_dtype
from ..monitor.audience import Audience
from ..monitor.events import GradientSeen, LayerLook, LayerScaled
from .chooser import Decision
from .prepared_graph import PreparedGraph


class LayerWatch:
    """Reports the layers of one pass: as they run, or after it if no monitor reads their arrays."""

    def __init__(
        self, audience: Audience, prepared: PreparedGraph, decision: Decision, iteration: int, attempt: int
    ) -> None:
        self._audience, self.looks = audience, audience.looks(iteration)
        self._kernels, self._storage, self._graph = prepared.kernels, prepared.storage, prepared.graph
        # Gradients are stored in the format, if no storage is emulated.
        self._format = get_format(prepared.config.dtype or "float16")
        records = records_of(prepared, decision, iteration, attempt)
        self._records = {record.layer: record for record in records}

    def ran(self, node: NodeStructure) -> None:
        """Report each layer of a function that has run, once."""
        for layer_input in node.layer_inputs:
            record = self._records.pop(layer_input.layer, None)
            if record is not None:
                self._audience.tell(LayerScaled(record, self._look(node, layer_input)))

    def finish(self) -> None:
        """Report the layers of a finished pass, unless reported one by one."""
        # Monitors that look at arrays have had each layer's from `ran`, before nnabla freed them.
        for record in () if self.looks else self._records.values():
            self._audience.tell(LayerScaled(record, LayerLook()))

    def _look(self, node: NodeStructure, layer_input: LayerInput) -> LayerLook:
        """Make access to a layer's arrays, which are read only if a monitor asks."""
        positions = node.outputs[0], layer_input.input, layer_input.weight
        output, input, weight = (self._graph.variables[p] for p in positions)

        def arrays() -> Dict[str, NDArray[np.float32]]:
            named = {
                "output_gradient": output.grad,
                "input_gradient": input.grad,
                "weight": weight.data,
                "input": input.data,
            }
            stored = {
                name: x for name, x in named.items() if not x.clear_called and stored_dtype(x) is not None
            }
            return {name: np.array(cast(Any, x.data), np.float32) for name, x in stored.items()}

        # The monitor's gradient of a layer is that of its input, which alpha scales.
        gradient = partial(self._gradient, input.grad, self._graph.keys[layer_input.input])
        data = {"weight": partial(self._data, weight), "input": partial(self._data, input)}
        return LayerLook({"gradient": gradient, **data}, arrays)

    def _gradient(self, array: nn.NdArray, key: int) -> Optional[GradientSeen]:
        """Summarize a gradient, with the elements that an emulated storage lost."""
        rounded = self._storage.gradients.get(key)
        lost = () if rounded is None else (rounded.underflowed, rounded.overflowed)
        return self._seen(array, self._storage.gradient_format(key, array.size), *lost)

    def _data(self, v: nn.Variable) -> Optional[GradientSeen]:
        return self._seen(v.data, self._storage.data_format(hash(v), v.data.size))

    def _seen(self, array: nn.NdArray, format: Optional[Format], *lost: int) -> Optional[GradientSeen]:
        """Summarize an array stored in a format, where `lost` elements underflowed and overflowed; None if it
        was freed or has another dtype.
        """
        if array.clear_called or not is_readable(array):
            return None
        statistics, exponents = self._kernels.exponent_histogram(array)
        return GradientSeen(statistics, exponents, format or self._format, *lost)


def records_of(
    prepared: PreparedGraph, decision: Decision, iteration: int, attempt: int
) -> List[LayerRecord]:
    """Make a record of each layer in a pass."""
    plan, statistics = prepared.plan, prepared.statistics
    schedule, chosen = decision.schedule, decision.chosen
    records = []
    for layer, (scale, alpha) in schedule.layers.items():
        node, layer_input = plan.layer_inputs[layer]
        output = node.outputs[0]
        loss_weight = schedule.loss_weight_of(output)
        # Statistics of now did not lead to scales that were chosen before.
        g = statistics.gradient(output) if chosen else None
        records.append(
            LayerRecord(
                iteration=iteration,
                layer=layer,
                alpha=alpha,
                unbounded=schedule.unbounded.get(layer, alpha),
                previous_scale=scale,
                accumulated_scale=scale * alpha,
                fan_in=layer_input.gemm.fan_in,
                g=None if g is None else g.scaled(scale * loss_weight),
                weight=statistics.data(layer_input.weight) if chosen else None,
                reason=schedule.reasons.get(layer, Reason.BRANCHES) if chosen else Reason.HELD,
                attempt=attempt,
                loss_weight=loss_weight,
            )
        )
    return records
