# SPDX-License-Identifier: Apache-2.0
"""Events of the layers of a pass for monitors: their scales, and their arrays after each layer's backward."""

from __future__ import annotations

from typing import Any, Dict, Optional, cast

import numpy as np
from numpy.typing import NDArray

from ..core.components import LayerInput, NodeStructure
from ..core.formats import get_format
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
        self._audience, self.reads_arrays = audience, audience.looks(iteration)
        self._kernels, self._storage, self._graph = prepared.kernels, prepared.storage, prepared.graph
        # Format of arrays that no storage rounds.
        self._format = get_format(prepared.config.dtype or "float16")
        plan, statistics, schedule = prepared.plan, prepared.statistics, decision.schedule
        # Records of the layers, by name, until they are reported.
        self._records: Dict[str, LayerRecord] = {}
        for layer, (scale, alpha) in schedule.layers.items():
            node, layer_input = plan.layer_inputs[layer]
            output, is_new = node.outputs[0], decision.is_new
            loss_weight = schedule.loss_weight_of(output)
            # Scales that were chosen earlier do not follow from the present statistics. A layer within merged
            # components has no reason of its own.
            g = statistics.gradient(output) if is_new else None
            self._records[layer] = LayerRecord(
                iteration=iteration,
                layer=layer,
                alpha=alpha,
                unbounded=schedule.unbounded_alphas.get(layer, alpha),
                previous_scale=scale,
                accumulated_scale=scale * alpha,
                fan_in=layer_input.scaled.fan_in,
                g=None if g is None else g.scaled(scale * loss_weight),  # as stored
                weight=statistics.data(layer_input.weight) if is_new else None,
                reason=schedule.reasons.get(layer, Reason.BRANCHES) if is_new else Reason.HELD,
                attempt=attempt,
                loss_weight=loss_weight,
            )

    def report(self, node: NodeStructure) -> None:
        """Report each layer of a function that has run, before nnabla frees its arrays."""
        for layer_input in node.layer_inputs:
            record = self._records.pop(layer_input.layer)
            self._audience.tell(LayerScaled(record, self._look(node, layer_input)))

    def finish(self) -> None:
        """Report the other layers of a finished pass."""
        for record in self._records.values():
            self._audience.tell(LayerScaled(record, LayerLook()))

    def _look(self, node: NodeStructure, layer_input: LayerInput) -> LayerLook:
        """Make access to a layer's arrays, which are read only if a monitor asks."""
        keys, variables, storage = self._graph.keys, self._graph.variables, self._storage
        layer_in, weight = variables[layer_input.input], variables[layer_input.weight]
        named = {
            "output_gradient": variables[node.outputs[0]].grad,
            "input_gradient": layer_in.grad,
            "weight": weight.data,
            "input": layer_in.data,
        }

        def read(name: str) -> Optional[GradientSeen]:
            """Statistics of an input gradient, a weight or an input; None if they cannot be read."""
            array = named[name]
            if array.clear_called or not is_readable(array):
                return None  # freed, never written, or integers as in the input of an embedding
            seen = self._kernels.exponent_histogram(array)
            key = keys[layer_input.weight if name == "weight" else layer_input.input]
            if name != "input_gradient":
                return GradientSeen(*seen, storage.data_format(key, array.size) or self._format)
            stored, rounded = storage.gradient_format(key, array.size), storage.gradients.get(key)
            # Numbers of elements that rounding has made 0, and infinite.
            lost = () if rounded is None else (rounded.underflowed, rounded.overflowed)
            return GradientSeen(*seen, stored or self._format, *lost)

        def arrays() -> Dict[str, NDArray[np.float32]]:
            written = {n: x for n, x in named.items() if not x.clear_called and stored_dtype(x) is not None}
            return {name: np.array(cast(Any, x.data), np.float32) for name, x in written.items()}

        return LayerLook(read, arrays)
