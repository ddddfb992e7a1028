# SPDX-License-Identifier: Apache-2.0
"""Watches the passes of a network, function by function, and sums up what it saw of each."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional, Set

import nnabla as nn
import numpy as np

from ..core.statistics import ArrayStatistics
from ..graph.function_kinds import written_inputs
from ..graph.matrix_products import is_matrix_product
from ..graph.node import Node
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from .layers import attention_scores, nearest_layers
from .numbers import FunctionNumbers, ReadLeaf, Values
from .values import input_name, same_for_all_samples, values_of, zeros_of


class _Seen:
    """What was seen of one function, over all batches."""

    def __init__(self) -> None:
        self.leaves: Dict[str, ReadLeaf] = {}
        self.amax = 0.0
        self.nonfinite = self.overflowed = 0
        self.beyond = ""
        # Sums of the gradients' root mean squares, behind it and before it.
        self.arriving = self.leaving = 0.0
        self.gradient_known = self.breaks = False
        self.stops: Optional[bool] = None
        self.values: Optional[Values] = None
        self.stored_zeros = 0
        # Names of inputs, and whether they are the same for all samples; of weights, and whether they are
        # zero and stay so.
        self.constant_inputs: Dict[str, bool] = {}
        self.stuck_weights: Dict[str, bool] = {}


class GraphObserver:
    """Looks at arrays while forward and backward run.

    Args:
        plan: the graph.
        kernels: the kernels that read arrays.

    Attributes:
        amax: the largest magnitude of any gradient in fp32, but that of the loss.
        amax_of: that of the gradients behind each layer, up to the next one; by name of the layer.
    """

    def __init__(self, plan: GraphPlan, kernels: Kernels) -> None:
        self.amax = 0.0
        self.amax_of: Dict[str, float] = {}
        self._plan, self._kernels = plan, kernels
        self._layers, self._scores = nearest_layers(plan), attention_scores(plan)
        self._seen = {hash(f): _Seen() for f in plan.functions}
        self._position = {hash(f): index for index, f in enumerate(plan.functions)}
        self._readers = Counter(hash(v) for f in plan.functions for v in f.inputs)
        # Of the pass that runs: variables that are not finite, gradients by key.
        self._bad: Set[int] = set()
        self._gradients: Dict[int, ArrayStatistics] = {}

    def begin_forward(self) -> None:
        """Another forward pass begins."""
        self._bad = set()

    def after_forward_in_fp32(self, f: Any) -> None:
        """Look at what `f` has read and written; a post hook of forward."""
        seen = self._seen[hash(f)]
        for v in _read(f):
            if v.parent is None and self._nonfinite(v):
                leaf = self._leaf(v)
                seen.leaves[leaf.name] = leaf
                self._bad.add(hash(v))
            if v.parent is None and hash(v) not in self._plan.names:
                name = input_name(v)
                seen.constant_inputs[name] = seen.constant_inputs.get(name, True) and same_for_all_samples(v)
        values = values_of(f)
        seen.values = values if seen.values is None else seen.values.merged(values)
        clean = self._bad.isdisjoint(map(hash, f.inputs))
        for v in f.outputs:
            statistics = self._statistics(v.data)
            if statistics is None:
                continue
            seen.amax = max(seen.amax, statistics.abs_max)
            if statistics.nonfinite:
                self._bad.add(hash(v))
                if clean:
                    seen.nonfinite = max(seen.nonfinite, statistics.nonfinite)

    def after_forward_as_stored(self, f: Any) -> None:
        """Likewise, where activations and weights are stored; after the pass in fp32."""
        seen = self._seen[hash(f)]
        reads_bad = not self._bad.isdisjoint(map(hash, f.inputs))
        for v in _read(f):
            if v.parent is None and self._nonfinite(v):
                self._bad.add(hash(v))
                leaf = self._leaf(v)
                # Running statistics of what is not finite are not, either.
                if leaf.name not in seen.leaves and not reads_bad:
                    seen.beyond = leaf.name
        clean = self._bad.isdisjoint(map(hash, f.inputs))
        for v in f.outputs:
            count = self._nonfinite(v)
            if count:
                self._bad.add(hash(v))
                if clean:
                    seen.overflowed = max(seen.overflowed, count)
                    seen.stored_zeros = max(seen.stored_zeros, zeros_of(f))

    def begin_backward(self) -> None:
        """A backward pass in fp32 begins."""
        self._gradients = {}

    def before_backward_in_fp32(self, f: Any) -> None:
        """Look at the gradients that have arrived at `f`; a pre hook of backward."""
        for v in f.outputs:
            self._note(v)

    def end_backward(self) -> None:
        """The pass is over: gradients of leaves are complete, and functions can be judged."""
        for leaf in self._plan.leaves.values():
            self._note(leaf)
        roots = {hash(v) for v in self._plan.roots}
        for key, statistics in self._gradients.items():
            if key not in roots:
                self.amax = max(self.amax, statistics.abs_max)
        for key, node in self._plan.nodes.items():
            self._sum_up(node, self._seen[key])
            if not node.loss_section:
                layer = self._layers[key]
                found = [self._gradients[k].abs_max for k in node.output_keys if k in self._gradients]
                self.amax_of[layer] = max([self.amax_of.get(layer, 0.0), *found])

    def numbers(self) -> List[FunctionNumbers]:
        """What was seen of each function, in forward order."""
        return [self._numbers(f) for f in self._plan.functions]

    def _numbers(self, f: Any) -> FunctionNumbers:
        seen, layer, name = self._seen[hash(f)], self._layers[hash(f)], self._plan.labels[hash(f)]
        node = self._plan.nodes.get(hash(f))
        return FunctionNumbers(
            name,
            f.info.type_name,
            layer,
            layer == name,
            node is not None and node.loss_section,
            hash(f) in self._scores,
            tuple(seen.leaves.values()),
            seen.amax,
            seen.nonfinite,
            seen.overflowed,
            seen.beyond,
            seen.arriving if seen.gradient_known else None,
            seen.leaving / seen.arriving if seen.arriving and seen.leaving else None,
            bool(seen.stops),
            seen.breaks,
            tuple([self._position[hash(v.parent)] for v in f.inputs if v.parent is not None]),
            seen.values or Values(),
            seen.stored_zeros,
            tuple([name for name, constant in seen.constant_inputs.items() if constant]),
            tuple([name for name, stuck in seen.stuck_weights.items() if stuck]),
        )

    def _sum_up(self, node: Node, seen: _Seen) -> None:
        if is_matrix_product(node.type_name):
            for key, v in zip(node.leaf_keys, node.leaves):
                name, found = (
                    self._plan.names.get(key, ""),
                    (self._gradients.get(key), self._statistics(v.data)),
                )
                stuck = v.ndim > 1 and all(s is not None and not s.abs_max and s.finite for s in found)
                seen.stuck_weights[name] = stuck and seen.stuck_weights.get(name, True)
        arriving = [self._gradients[key] for key in node.output_keys if key in self._gradients]
        handed_on = [*node.input_keys, *node.leaf_keys]
        leaving = [self._gradients[key] for key in handed_on if key in self._gradients]
        if not arriving or not leaving:
            return
        if not all(s.finite for s in arriving):
            seen.stops = False
            return
        seen.gradient_known = True
        seen.breaks |= not all(s.finite for s in leaving)
        stops = any(s.abs_max for s in arriving) and not any(s.abs_max or s.nonfinite for s in leaving)
        seen.stops = stops if seen.stops is None else seen.stops and stops
        first = self._gradients.get(node.input_keys[0]) if node.input_keys else None
        # Where other functions read it as well, it is not known what this one has added.
        if first is not None and first.finite and self._readers[node.input_keys[0]] == 1:
            seen.arriving += arriving[0].mean_square ** 0.5
            seen.leaving += first.mean_square**0.5

    def _note(self, v: nn.Variable) -> None:
        statistics = self._statistics(v.grad)
        if statistics is not None:
            self._gradients[hash(v)] = statistics

    def _leaf(self, v: nn.Variable) -> ReadLeaf:
        name = self._plan.names.get(hash(v))
        values = np.asarray(v.data.data)
        nans = int(np.isnan(values).sum())
        infinities = int(np.isinf(values).sum())
        return ReadLeaf(name or input_name(v), name is not None, nans, infinities)

    def _nonfinite(self, v: nn.Variable) -> int:
        statistics = self._statistics(v.data)
        return 0 if statistics is None else statistics.nonfinite

    def _statistics(self, array: nn.NdArray) -> Optional[ArrayStatistics]:
        if array.clear_called:
            return None
        stored = stored_dtype(array)
        if stored is None:
            return ArrayStatistics.of_zeros(array.size)
        if stored in (FLOAT32, FLOAT16):
            return self._kernels.statistics(array)
        if stored.kind != "f":
            return None
        copy = nn.NdArray.from_numpy_array(np.asarray(array.data, FLOAT32))
        return self._kernels.statistics(copy)


def _read(f: Any) -> List[nn.Variable]:
    """What `f` reads: no running statistics that it writes, which are of its outputs then."""
    written = written_inputs(f.info.type_name, f.info.args)
    return [v for index, v in enumerate(f.inputs) if index not in written]
