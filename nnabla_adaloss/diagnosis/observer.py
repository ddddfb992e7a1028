# SPDX-License-Identifier: Apache-2.0
"""Watches the passes of a network, function by function, and sums up what it saw of each."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Dict, FrozenSet, Optional, Set, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..emulation import FormatEmulation
from ..graph.functions import is_matrix_product, written_inputs
from ..graph.node import Node
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from .numbers import FunctionNumbers, ReadLeaf, Targets, Values, merged
from .passes import nearest_layers
from .target import input_name

# A derivative below this share of the largest one is next to nothing.
_FLAT = 2.0**-10
# Numbers that differ by less than this share of the largest are taken for equal: sums are rounded.
_EQUAL = 1e-5

_SOFTMAX: FrozenSet[str] = frozenset({"Softmax", "LogSoftmax"})
_PRODUCT: FrozenSet[str] = frozenset({"BatchMatmul", "Einsum"})
# What may stand between the scores of an attention and their softmax.
_BETWEEN: FrozenSet[str] = frozenset(
    {"Add2", "AddScalar", "MulScalar", "Mul2", "Div2", "Sub2", "Reshape", "Transpose", "Where", "MaskedFill"}
)


class Observer:
    """Looks at arrays while forward and backward run."""

    def __init__(self, plan: GraphPlan, kernels: Kernels, emulation: FormatEmulation) -> None:
        # Of the last backward pass, by key of the variable.
        self.gradients: Dict[int, ArrayStatistics] = {}
        # The largest magnitude of any gradient in fp32, but that of the loss; and of those behind each layer,
        # up to the next one.
        self.amax = 0.0
        self.amax_of: Dict[str, float] = {}
        self._plan, self._kernels = plan, kernels
        layers, scores = nearest_layers(plan), _attention_scores(plan)
        position = {hash(f): index for index, f in enumerate(plan.functions)}
        # By key, in forward order.
        self.functions: Dict[int, FunctionNumbers] = {}
        for f in plan.functions:
            key, node, y = hash(f), plan.nodes.get(hash(f)), f.outputs[0]
            self.functions[key] = FunctionNumbers(
                plan.labels[key],
                f.info.type_name,
                layers[key],
                emulation.emulated_storage.data_format(hash(y), y.size),
                node is not None and node.loss_section,
                key in scores,
                tuple([position[hash(v.parent)] for v in f.inputs if v.parent is not None]),
            )
        self._readers = Counter(hash(v) for f in plan.functions for v in f.inputs)
        # Variables that are not finite in the pass that runs, and functions that were looked at before.
        self._bad: Set[int] = set()
        self._looked_at: Set[int] = set()

    def begin(self) -> None:
        """Forward and backward begin."""
        self._bad, self.gradients = set(), {}

    def after_forward_in_fp32(self, f: Any) -> None:
        """Look at what `f` has read and written; a post hook of forward."""
        seen = self.functions[hash(f)]
        for v in _read_leaves(f):
            x, name = _read(v), self._name(v)
            if x is None:
                continue
            if self._nonfinite(v):
                nans, infinities = int(np.isnan(x).sum()), int(np.isinf(x).sum())
                seen.leaves[name] = ReadLeaf(name, hash(v) in self._plan.names, nans, infinities)
                self._bad.add(hash(v))
            if hash(v) not in self._plan.names:
                several = v.ndim > 0 and v.shape[0] > 1
                same = several and v.ndim > 1 and bool((x == x[:1]).all())
                seen.same_inputs[name] = seen.same_inputs.get(name, True) and same
                seen.reads_blank |= not x.any()
                seen.reads_data |= several and not same
        look = _LOOKS.get(f.info.type_name)
        if look is not None:
            values = look(f)
            seen.values = merged(values, seen.values) if hash(f) in self._looked_at else values
            self._looked_at.add(hash(f))
        clean = self._bad.isdisjoint(map(hash, f.inputs))
        for v in f.outputs:
            statistics = self.statistics(v.data)
            if statistics is None:
                continue
            seen.amax = max(seen.amax, statistics.abs_max)
            if statistics.nonfinite:
                self._bad.add(hash(v))
                seen.nonfinite = max(seen.nonfinite, statistics.nonfinite * clean)

    def after_forward_as_stored(self, f: Any) -> None:
        """Likewise, where activations and weights are stored; after the pass in fp32."""
        seen = self.functions[hash(f)]
        reads_bad = not self._bad.isdisjoint(map(hash, f.inputs))
        for v in _read_leaves(f):
            if self._nonfinite(v):
                self._bad.add(hash(v))
                # Running statistics of what is not finite are not, either.
                if self._name(v) not in seen.leaves and not reads_bad:
                    seen.beyond = self._name(v)
        clean = self._bad.isdisjoint(map(hash, f.inputs))
        for v in f.outputs:
            count = self._nonfinite(v)
            if count:
                self._bad.add(hash(v))
                if clean:
                    seen.overflowed = max(seen.overflowed, count)
                    look = _LOOKS.get(f.info.type_name)
                    seen.stored_zeros = max(seen.stored_zeros, look(f).zeros if look else 0)

    def before_backward(self, f: Any) -> None:
        """Look at the gradients that have arrived at `f` in fp32; a pre hook of backward."""
        for v in f.outputs:
            self._note(v)

    def end_backward(self) -> None:
        """The pass is over: gradients of leaves are complete, and functions can be judged."""
        for leaf in self._plan.leaves.values():
            self._note(leaf)
        roots = set(map(hash, self._plan.roots))
        others = [statistics.abs_max for key, statistics in self.gradients.items() if key not in roots]
        self.amax = max([self.amax, *others])
        for key, node in self._plan.nodes.items():
            seen = self.functions[key]
            for leaf_key, v in zip(node.leaf_keys, node.leaves) if is_matrix_product(node.type_name) else ():
                known = self.gradients.get(leaf_key), self.statistics(v.data)
                stuck = v.ndim > 1 and all(s is not None and not s.abs_max and s.finite for s in known)
                name = self._plan.names.get(leaf_key, "")
                seen.stuck_weights[name] = stuck and seen.stuck_weights.get(name, True)
            self._sum_up(node, seen)
            if not node.loss_section:
                found = [self.gradients[k].abs_max for k in node.output_keys if k in self.gradients]
                self.amax_of[seen.layer] = max([self.amax_of.get(seen.layer, 0.0), *found])

    def _sum_up(self, node: Node, seen: FunctionNumbers) -> None:
        arriving = [self.gradients[key] for key in node.output_keys if key in self.gradients]
        handed_on = [*node.input_keys, *node.leaf_keys]
        leaving = [self.gradients[key] for key in handed_on if key in self.gradients]
        if not arriving or not leaving:
            return
        if not all(s.finite for s in arriving):
            seen.stops_gradient = False
            return
        seen.gets_gradient = True
        broken = [key for key in handed_on if key in self.gradients and not self.gradients[key].finite]
        seen.breaks_gradient |= bool(broken)
        seen.breaks_own_gradient |= any(self._readers[key] == 1 for key in broken)
        stops = any(s.abs_max for s in arriving) and not any(s.abs_max or s.nonfinite for s in leaving)
        seen.stops_gradient = stops and seen.stops_gradient is not False
        first = self.gradients.get(node.input_keys[0]) if node.input_keys else None
        # Where other functions read it as well, it is not known what this one has added.
        if first is not None and first.finite and self._readers[node.input_keys[0]] == 1:
            seen.arriving += arriving[0].mean_square ** 0.5
            seen.leaving += first.mean_square**0.5

    def _note(self, v: nn.Variable) -> None:
        statistics = self.statistics(v.grad)
        if statistics is not None:
            self.gradients[hash(v)] = statistics

    def _name(self, v: nn.Variable) -> str:
        return self._plan.names.get(hash(v)) or input_name(v)

    def _nonfinite(self, v: nn.Variable) -> int:
        statistics = self.statistics(v.data)
        return 0 if statistics is None else statistics.nonfinite

    def statistics(self, array: nn.NdArray) -> Optional[ArrayStatistics]:
        """Of an array; None where there is nothing to look at."""
        if array.clear_called:
            return None
        stored = stored_dtype(array)
        if stored is None:
            return ArrayStatistics.of_zeros(array.size)
        if stored not in (FLOAT32, FLOAT16):
            if stored.kind != "f":
                return None
            array = nn.NdArray.from_numpy_array(np.asarray(array.data, FLOAT32))
        return self._kernels.statistics(array)


def _attention_scores(plan: GraphPlan) -> Set[int]:
    """Keys of the products that go into a softmax, by way of what may be done to scores."""
    leads: Set[int] = set()
    found: Set[int] = set()
    for f in reversed(plan.functions):
        type_name, key = f.info.type_name, hash(f)
        if type_name in _PRODUCT and not leads.isdisjoint(map(hash, f.outputs)):
            found.add(key)
        to_scores = type_name in _BETWEEN and not leads.isdisjoint(map(hash, f.outputs))
        if type_name in _SOFTMAX or to_scores:
            leads.update(map(hash, f.inputs))
    return found


def _read_leaves(f: Any) -> Tuple[nn.Variable, ...]:
    """The leaves that `f` reads: no running statistics that it writes, which are of its outputs then."""
    written = written_inputs(f.info.type_name, f.info.args)
    return tuple(v for index, v in enumerate(f.inputs) if v.parent is None and index not in written)


def _read(v: nn.Variable) -> Optional[NDArray[Any]]:
    return None if v.data.clear_called else np.asarray(v.data.data)


def _activation(f: Any) -> Values:
    y = _read(f.outputs[0])
    if y is None or not y.size:
        return Values()
    return Values(saturated=float(np.mean(_IS_FLAT[f.info.type_name](y, f.info.args))))


# Which outputs of an activation are where its derivative is next to nothing; one of a softmax has it all.
_IS_FLAT: Dict[str, Callable[[NDArray[Any], Any], Any]] = {
    "Tanh": lambda y, _: 1.0 - y * y <= _FLAT,
    "Sigmoid": lambda y, _: 4.0 * y * (1.0 - y) <= _FLAT,
    "HardTanh": lambda y, _: np.abs(y) >= 1.0,
    "HardSigmoid": lambda y, _: (y <= 0.0) | (y >= 1.0),
    "Softmax": lambda y, args: np.max(y, axis=args["axis"]) >= 1.0 - _FLAT / 2.0,
}


def _softmax(f: Any) -> Values:
    x, axis = _read(f.inputs[0]), f.info.args["axis"]
    values = _activation(f) if f.info.type_name == "Softmax" else Values()
    if x is None:
        return values
    return values._replace(together=x.shape[axis], closed=int(np.isneginf(x).all(axis=axis).sum()))


def _normalization(f: Any) -> Values:
    type_name, args, x = f.info.type_name, f.info.args, _read(f.inputs[0])
    if x is None or not args.get("batch_stat", True):
        return Values()
    if type_name == "GroupNormalization":
        x = x.reshape(x.shape[0], args["num_groups"], -1) if args["channel_axis"] == 1 else x
        kept = {0, 1}
    elif "axes" in args:
        kept = set(args["axes"])
    else:
        kept = {*args["batch_axis"], *([args["channel_axis"]] if "channel_axis" in args else [])}
    axes = tuple(axis for axis in range(x.ndim) if axis not in {k % x.ndim for k in kept})
    together = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    if not x.size or not np.isfinite(x).all():
        return Values(together=together)
    spread = np.max(x, axis=axes) - np.min(x, axis=axes)
    constant = bool((spread <= _EQUAL * np.max(np.abs(x), axis=axes)).all())
    return Values(constant=constant, together=together)


def _reads_zeros(index: int, *, below: bool) -> Callable[[Any], Values]:
    def look(f: Any) -> Values:
        x = _read(f.inputs[index])
        power = f.info.args.get("val", 0.0) if f.info.type_name == "PowScalar" else 0.0
        if x is None or power >= 1.0:
            return Values()
        return Values(zeros=int(np.count_nonzero(x == 0)), negatives=int(np.count_nonzero(x < 0)) * below)

    return look


def _labels(f: Any) -> Values:
    limit = {"SigmoidCrossEntropy": 2, "BinaryCrossEntropy": 0}.get(f.info.type_name)
    if limit is None:
        limit = f.inputs[0].shape[f.info.args["axis"]]
    return Values(targets=_targets(f.inputs[1], "labels", limit))


def _one_hot(f: Any) -> Values:
    shape: Tuple[int, ...] = tuple(f.info.args["shape"])
    return Values(targets=_targets(f.inputs[0], "indices", shape[0])) if len(shape) == 1 else Values()


def _targets(v: nn.Variable, what: str, limit: int) -> Optional[Targets]:
    values = _read(v)
    if values is None or not values.size:
        return None
    while v.parent is not None and v.parent.inputs:
        v = v.parent.inputs[0]
    nans = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    known = values[~nans]
    least, largest = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    whole = bool((known == np.floor(known)).all())
    return Targets(input_name(v, what), limit, least, largest, int(nans.sum()), whole)


_NORMALIZATIONS = tuple(
    f"{kind}Normalization" for kind in ("Batch", "FusedBatch", "SyncBatch", "Layer", "Instance", "Group")
)
_LOSSES = tuple(f"{kind}CrossEntropy" for kind in ("Softmax", "Categorical", "Sigmoid", "Binary"))
_LOOKS: Dict[str, Callable[[Any], Values]] = {
    **dict.fromkeys(_IS_FLAT, _activation),
    **dict.fromkeys(_SOFTMAX, _softmax),
    **dict.fromkeys(_NORMALIZATIONS, _normalization),
    **dict.fromkeys(_LOSSES, _labels),
    "Log": _reads_zeros(0, below=True),
    "PowScalar": _reads_zeros(0, below=True),
    "Div2": _reads_zeros(1, below=False),
    "RDivScalar": _reads_zeros(0, below=False),
    "Dropout": lambda f: Values(dropped=float(f.info.args["p"])),
    "Embed": lambda f: Values(targets=_targets(f.inputs[0], "indices", f.inputs[1].shape[0])),
    "OneHot": _one_hot,
}
