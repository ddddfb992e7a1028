# SPDX-License-Identifier: Apache-2.0
"""Which parameters learn from a loss, which of them a solver has, and what it is about to do to them."""

from __future__ import annotations

import gc
import math
from typing import AbstractSet, Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Set

import nnabla as nn
import numpy as np

from .numbers import Training, Untrained, WeightStep
from .passes import Layer
from .target import Examined

# Solvers whose step is the learning rate times the gradient.
_BY_GRADIENT: FrozenSet[str] = frozenset({"Sgd", "SgdW", "Momentum", "Nesterov"})
# Theirs is about the learning rate, however large the gradient.
_BY_SIGN: FrozenSet[str] = frozenset(
    {"Adam", "AdamW", "Adamax", "AMSGRAD", "AMSBound", "AdaBound", "AdaBelief", "Lion", "RMSprop"}
)


def training_of(
    network: Examined,
    layers: Sequence[Layer],
    gradients: Mapping[int, float],
    before_hook: Mapping[int, float],
) -> Optional[Training]:
    """What the solver is about to do, with gradients of such a size by key; None without a solver."""
    solver = network.solver
    if solver is None or not hasattr(solver, "learning_rate"):
        return None
    rate = float(solver.learning_rate())
    states = solver.get_states().values() if hasattr(solver, "get_states") else ()
    held = set(map(hash, solver.get_parameters().values()))
    steps: List[WeightStep] = []
    for layer in layers:
        for key, v in layer.weights.items():
            fan_in = _fan_in(layer.type_name, v.shape)
            if fan_in and key in held:
                weight = float(np.sqrt(np.mean(np.asarray(v.data.data, np.float64) ** 2)))
                update, before = (_step(solver, rate, g.get(key, 0.0)) for g in (gradients, before_hook))
                steps.append(WeightStep(layer.name, weight, 1.0 / math.sqrt(fan_in), update, before))
    decay = rate * network.weight_decay if solver.name in _BY_GRADIENT else 0.0
    return Training(rate, max((int(state.t) for state in states), default=0), steps, decay)


def _step(solver: Any, rate: float, gradient: float) -> float:
    if solver.name in _BY_GRADIENT:
        # Momentum adds up to this.
        return rate * gradient / (1.0 - min(float(solver.info.get("momentum", 0.0)), 0.999))
    return rate if solver.name in _BY_SIGN and gradient else 0.0


def _fan_in(type_name: str, shape: Sequence[int]) -> int:
    """Of a weight; 0 for biases and where it is not known."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    if type_name == "Affine":
        return shape[0]
    return math.prod(shape[1:]) if type_name == "Convolution" else 0


class Reach:
    """Where the gradient of a loss comes to, and which parameters it therefore trains."""

    def __init__(self, network: Examined) -> None:
        self._network, self._plan = network, network.plan
        # Keys of the functions and of the leaves.
        self._functions: Set[int] = set()
        self._leaves: Set[int] = set()
        waiting: List[Any] = [self._plan.functions[-1]]
        while waiting:
            f = waiting.pop()
            if hash(f) not in self._functions and f.info.type_name != "Unlink":
                self._functions.add(hash(f))
                self._leaves.update(hash(v) for v in f.inputs if v.need_grad and v.parent is None)
                waiting += [v.parent for v in f.inputs if v.need_grad and v.parent is not None]

    def untrained(self) -> Optional[Untrained]:
        """The parameters that need a gradient and get none from this loss.

        What a solver has is to be trained. Of a loss alone it is not known what is: a discriminator's loss
        reaches no generator, and a frozen part has no gradient on purpose. Then registered parameters count
        when one beside them is trained, when they stand between layers that are, or when no data comes to
        any trained layer but by way of something that is cut off.
        """
        solver, registered = self._network.solver, nn.get_parameters(grad_only=False)
        leaves = [v for f in self._plan.functions for v in f.inputs if v.parent is None]
        # With `fix_parameters=True` the leaf of the graph needs no gradient, and no solver knows.
        frozen = {hash(v) for v in (*leaves, *registered.values()) if not v.need_grad}
        wanted = registered if solver is None else self._network.parameters
        missed = {name: hash(v) for name, v in wanted.items() if hash(v) not in self._leaves | frozen}
        if solver is None and not self._cut_from_data():
            scopes = {_scope(name) for name, v in registered.items() if hash(v) in self._leaves}
            between = self._between()
            missed = {n: key for n, key in missed.items() if _scope(n) in scopes or key in between}
        return Untrained([*missed], solver is not None, self._cut({*missed.values()})) if missed else None

    def forgotten(self) -> List[str]:
        """The parameters that get a gradient and that no solver has, behind layers that are trained.

        Layers before those are frozen, and a network of its own, such as the discriminator that a generator
        learns from, has a solver that may not exist yet.
        """
        if self._network.solver is None:
            return []
        held = {hash(v) for v in self._network.parameters.values()}
        solvers = [made for made in gc.get_objects() if isinstance(made, nn.solver.Solver)]
        updated = held.union(*({hash(v) for v in made.get_parameters().values()} for made in solvers))
        names = self._plan.names
        known = {_scope(names[key]) for key in held if key in names}
        layers = {name.rpartition("/")[0]: _scope(name) for name in names.values()}
        found: Dict[str, None] = {}
        behind: Set[int] = set()
        for f in self._plan.functions:
            reads = {hash(v.parent) for v in f.inputs if v.parent is not None}
            own = {hash(v) for v in f.inputs if v.parent is None}
            if not behind.isdisjoint(reads) or not held.isdisjoint(own):
                behind.add(hash(f))
            if not behind.isdisjoint(reads) and held.isdisjoint(own):
                for name in (names[key] for key in own & self._leaves - updated if key in names):
                    if _scope(name) in known or [*layers.values()].count(_scope(name)) == 1:
                        found[name] = None
        return list(found)

    def _cut_from_data(self) -> bool:
        """Whether trained layers read no data but what comes from parts without a gradient."""
        carries: Set[int] = set(self._network.fed)
        for f in self._plan.functions:
            if carries.isdisjoint(map(hash, f.inputs)):
                continue
            node = self._plan.nodes.get(hash(f))
            if hash(f) in self._functions:
                if node is not None and node.leaves:
                    return False
                carries.update(map(hash, f.outputs))
            elif not any(v.need_grad for v in f.inputs) and f.info.type_name != "Unlink":
                # Nothing to train yet: it only prepares the data.
                carries.update(map(hash, f.outputs))
        return bool(self._network.fed)

    def _between(self) -> Set[int]:
        """Keys of the leaves that are read without a gradient, together with what trained layers compute."""
        behind = set(self._functions)
        found: Set[int] = set()
        for f in self._plan.functions:
            if hash(f) not in behind and any(hash(v.parent) in behind for v in f.inputs):
                behind.add(hash(f))
                found.update(hash(v) for v in f.inputs if v.parent is None)
        return found

    def _cut(self, missed: AbstractSet[int]) -> str:
        """Where the gradient stops on its way to these leaves; empty if that is not in the graph."""
        for f in self._plan.functions:
            if hash(f) in self._functions:
                for v in f.inputs:
                    if v.parent is None or hash(v.parent) in self._functions:
                        continue
                    before = list(_before(v.parent))
                    if any(hash(leaf) in missed for g in before for leaf in g.inputs):
                        g = next(g for g in before if g.info.type_name != "Unlink")
                        how = "has need_grad=False" if g is before[0] else "is unlinked"
                        return f"the output of {self._plan.labels[hash(g)]}, which {how}"
        for f in self._plan.functions:
            stray = [v for v in f.inputs if v.parent is None and v.need_grad and hash(v) in self._leaves]
            if any(hash(v) not in self._plan.names for v in stray):
                return f"an input of {self._plan.labels[hash(f)]} that nothing computes: it is unlinked"
        return ""


def _scope(name: str) -> str:
    """The scope that the layer of a parameter stands in: `net` for `net/fc/affine/W`."""
    return name.rsplit("/", 3)[0]


def _before(f: Any) -> Iterator[Any]:
    """A function and all before it."""
    waiting, seen = [f], set()
    while waiting:
        f = waiting.pop()
        if hash(f) not in seen:
            seen.add(hash(f))
            yield f
            waiting += [v.parent for v in f.inputs if v.parent is not None]
