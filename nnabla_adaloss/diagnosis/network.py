# SPDX-License-Identifier: Apache-2.0
"""Functions of the examined network: their names, readers, storage formats, and walks between them."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, Callable, Dict, Iterable, Iterator, List, Set, Tuple

import nnabla as nn

from ..core.components import NodeStructure
from ..core.formats import Format
from ..emulation.rounded_storage import RoundedStorage
from ..graph.functions import is_matrix_product
from . import remedies
from .causes import listed
from .target import Subject, input_name

DIFFERENCES = {"Sub2", "SquaredError", "AbsoluteError", "HuberLoss"}
# Ends of the names of functions that compare predictions with targets.
COMPARING = ("Error", "Loss", "CrossEntropy", "KLMultinomial")
_NORMALIZED = ("Batch", "FusedBatch", "SyncBatch", "Layer", "Instance", "Group")
NORMALIZATIONS = {f"{kind}Normalization" for kind in _NORMALIZED}
RECURRENT = {"RNN", "LSTM", "GRU"}


class Network:
    """Functions of a graph, with their names and storage formats."""

    def __init__(self, examined: Subject, storage: RoundedStorage) -> None:
        self.examined, self.graph, self.plan = examined, examined.graph, examined.plan
        graph, plan = self.graph, self.plan
        self._storage, self.never_filled = storage, examined.never_filled
        self.inputs = {hash(v): v for v in graph.leaves.values()}
        self.roots = [graph.variables[p] for p in plan.roots]  # variables that backward starts from
        self.last = [v.parent for v in self.roots]
        self.positions = {name: number for number, name in enumerate(plan.labels)}
        # Functions that backward visits, in its order; their inputs and leaves are keys.
        self.nodes: Dict[Any, NodeStructure] = {}
        key = graph.keys.__getitem__
        for node in plan.nodes:
            inputs, leaves = tuple(map(key, node.inputs)), tuple(map(key, node.leaves))
            self.nodes[graph.functions[node.number]] = node._replace(inputs=inputs, leaves=leaves)
        self.leaves = graph.by_key(plan.leaves)  # those with a gradient, by key
        self.trained = {f for f, node in self.nodes.items() if node.leaves}  # functions that read these
        self.names = plan.names  # names of parameters, by key
        self.products = {f for f in graph.functions if is_matrix_product(f.info.type_name)}
        # Products with a parameter, in forward order.
        self.weighted = [f for f in self.in_order(self.products) if hash(f.inputs[1]) in self.names]
        self.readers: Dict[int, List[Any]] = {}  # functions that read a variable, by its key
        for f in graph.functions:
            for v in f.inputs:
                self.readers.setdefault(hash(v), []).append(f)
        # Functions, and keys of leaves, that the loss depends on with a gradient.
        walked = self.walk([graph.functions[-1]], _differentiated)
        self.reached = {f for f in walked if f.info.type_name != "Unlink"}
        self.reached_leaves = {hash(v) for f in self.reached for v in _differentiated(f) if v.parent is None}

    def number(self, f: Any) -> int:
        """Number of a function in forward order."""
        return self.graph.numbers[hash(f)]

    def name(self, f: Any) -> str:
        """Name of a function."""
        return self.plan.labels[self.number(f)]

    def called(self, v: nn.Variable) -> str:
        """Name of a variable, as a phrase such as "the parameter fc/W"."""
        if v.parent is not None:
            return f"the output of {self.name(v.parent)}"
        name = self.names.get(hash(v))
        return input_name(v) if name is None else f"the parameter {name}"

    def sources(self, v: nn.Variable) -> str:
        """List the leaves that a variable is computed of."""
        leaves = [w for f in self.in_order(self.walk([v.parent])) for w in f.inputs if w.parent is None]
        return listed([*dict.fromkeys(map(self.called, leaves or [v]))])

    def format(self, v: nn.Variable) -> Format:
        """Format that a variable is stored in."""
        return self._storage.data_format(hash(v), v.size)

    def gradient_format(self, v: nn.Variable) -> Format:
        """Format that the gradient of a variable is stored in."""
        return self._storage.gradient_format(hash(v), v.size)

    def is_input(self, v: nn.Variable) -> bool:
        """True for a leaf that is no parameter."""
        return v.parent is None and hash(v) not in self.names

    def is_copy(self, f: Any) -> bool:
        """True for a difference of networks with other parameters, such as a student and its teacher."""
        if f.info.type_name not in DIFFERENCES and f.inputs and f.inputs[0].parent is not None:
            f = f.inputs[0].parent  # the difference that is squared, for example
        if f.info.type_name not in DIFFERENCES:
            return False
        sides = [read_by(self.walk([v.parent])) for v in f.inputs]
        first, second = (keys & self.names.keys() for keys in sides)
        return all(sides) and first != second  # a side without variables is a constant

    def is_loss_weight(self, f: Any) -> bool:
        """True if a function multiplies a scalar by a number."""
        return bool(f.info.type_name == "MulScalar" and f.outputs[0].size == 1)

    def parameters(self, variables: Iterable[nn.Variable]) -> Tuple[str, ...]:
        """Names of the parameters among variables."""
        return tuple(dict.fromkeys(self.names[hash(v)] for v in variables if hash(v) in self.names))

    def emptiness(self, v: nn.Variable) -> Tuple[str, str]:
        """Clause about why an input is 0, and the remedy."""
        if hash(v) in self.never_filled:
            return "nobody has filled", remedies.FILL
        return "is all 0 in every batch", remedies.ZEROS

    def normalized_together(self, f: Any) -> float:
        """How many numbers a function normalizes together; infinite if it does not normalize."""
        kind, args = f.info.type_name, f.info.args
        if kind not in NORMALIZATIONS or not args.get("batch_stat", True):
            return math.inf
        # Each index of these axes has a mean of its own: channels, or (of other kinds) samples.
        axes = [*args.get("batch_axis", args.get("axes", []))]
        if kind == "InstanceNormalization":
            axes.append(args["channel_axis"])
        groups = math.prod(f.inputs[0].shape[axis] for axis in axes) * args.get("num_groups", 1)
        return float(f.inputs[0].size / groups)

    def behind(
        self, variables: Iterable[int], is_passed: Callable[[Any], bool] = lambda f: True
    ) -> Iterator[Any]:
        """Functions that compute variables or depend on them, through `is_passed` ones, in forward order."""
        found = set(variables)
        for f in self.graph.functions:
            if not found.isdisjoint(map(hash, (*f.inputs, *f.outputs))):
                found.update(map(hash, f.outputs if is_passed(f) else ()))
                yield f

    def walk(
        self, last: Iterable[Any], onward: Callable[[Any], Iterable[nn.Variable]] = attrgetter("inputs")
    ) -> Iterator[Any]:
        """Walk towards the inputs: `last` functions, and those that compute the `onward` inputs of others."""
        waiting, seen = list(last), set()
        while waiting:
            f = waiting.pop()
            if f is not None and f not in seen:
                seen.add(f)
                yield f
                waiting += [v.parent for v in onward(f)]

    def listed(self, functions: Iterable[Any]) -> str:
        """List the names of functions in forward order, each once; "the loss weight" precedes that of one."""
        weight = "the loss weight "
        return listed([weight * self.is_loss_weight(f) + self.name(f) for f in self.in_order({*functions})])

    def in_order(self, functions: Iterable[Any]) -> List[Any]:
        """Sort functions in forward order."""
        return sorted(functions, key=self.number)


def _differentiated(f: Any) -> List[nn.Variable]:
    """Inputs of a function that get a gradient from it."""
    return [] if f.info.type_name == "Unlink" else [v for v in f.inputs if v.need_grad]


def read_by(functions: Iterable[Any]) -> Set[int]:
    """Keys of the variables that functions read."""
    return {hash(v) for f in functions for v in f.inputs}


def scope_of(parameter: str) -> str:
    """Scope of a parameter's name, or the name if it has none."""
    return parameter.rpartition("/")[0] or parameter
