# SPDX-License-Identifier: Apache-2.0
"""Functions at which the gradient ends although the loss is not zero."""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, Iterator, List, Sequence, Set, Tuple

import nnabla as nn
import numpy as np

from ..core.formats import FLOAT32
from . import remedies
from .causes import Cause, Note, listed
from .finite import SOFTMAX_OR_LOSS, Finiteness
from .network import DIFFERENCES, NORMALIZATIONS, Network, read_by
from .operands import Batches
from .watching import INDICES, Sight

_MOST = 0.5  # share of outputs in the flat part, in every batch, from which an activation is saturated

_RECTIFIERS = {"CReLU", "GELU", "Mish", "ReLU", "ReLU6", "SoftPlus", "Swish"}
_BOUNDS = {"Maximum2", "MaximumScalar", "Minimum2", "MinimumScalar"}
_BOUNDS |= {"FixedPointQuantize", "HardSigmoid", "HardTanh", "ReLU6"}
_SATURATES = {*_BOUNDS, "Exp", "Sigmoid", "Softmax", "SoftPlus", "Tanh"}
# Functions that end no gradient by themselves.
_HANDS_ON = {"Add2", "AddScalar", "Broadcast", "Mean", "MulScalar", "Reshape", "Sub2", "Sum", "Transpose"}
# Functions that cut, hand on or weigh parts of a choice.
_PARTS = {"Broadcast", "Div2", "Mul2", "Reshape", "Slice", "Split", "Transpose"}
_METRICS = {"BinaryError", "TopNError"}  # functions that count errors


class Ends(Batches):
    """Search for ends of the gradient in the backward passes of all batches."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        super().__init__(network, sights)
        # Keys of the leaves without gradient in all batches.
        self._starved = {key for key in network.leaves if not self.gradient([key])}

    def functions(self) -> Dict[Any, Cause]:
        """Causes of functions at which the gradient ends, or with outputs of 0 for nonzero inputs."""
        ended, found, network = set(), {}, self._network
        has_loss = any(map(self.largest, network.roots))
        for f, node in reversed(network.nodes.items()):
            arriving = [s for s in self._sights if Batches(network, [s]).arriving(f)]
            # A difference of other numbers that is always 0.
            compared = f.inputs if has_loss and node.type_name in DIFFERENCES else ()
            is_equal = any(map(self.largest, compared)) and not any(map(self.largest, f.outputs))
            # A stop on purpose, or a difference of networks that are equal at the start only.
            is_stop = node.type_name in ("Unlink", "Sink") or (is_equal and network.is_copy(f))
            if is_stop or not arriving:
                continue
            # One number becomes 0, and two become 1 and -1.
            if network.normalized_together(f) <= 2.0 or node.args.get("only_index"):
                alone = self._leaves_before(f.inputs[0].parent) - self._without({f})
                if alone:
                    found[f] = self._told(f)._replace(spoils=self._labels(alone))
                    ended.add(f)
            # A layer that starts from 0 and learns is no end, either.
            weights = [key for key in node.leaves if network.leaves[key].ndim > 1]
            handed_on = [*(node.inputs or node.leaves), *weights]
            is_end = handed_on and not Batches(network, arriving).gradient(handed_on)
            # Harmless if other paths bring a gradient to all its leaves.
            if not (is_equal or is_end) or self._leaves_before(f).isdisjoint(self._starved):
                continue
            if is_equal:
                what = f"it compares equal numbers in every batch{self._sources(f)}"
                found[f] = Cause("equal_operands", node.label, what, remedies.DIFFERENT)
                ended.add(f)
                continue
            # A loss weight that a feeder may raise later.
            zeros = [self.zero_origin(v) for v in f.inputs if not self.largest(v)]
            if any(v.size == 1 and network.is_input(v) for v in zeros) or any(map(self._not_chosen, zeros)):
                continue
            at_fault = self._at_fault(f)
            kind = next(iter(at_fault.values())).kind
            if kind in ("zero_factor", "constant_softmax") or not self._nothing_to_learn(f):
                found.update(at_fault)
                ended.add(f)
        # What compares equal numbers explains ends before it.
        kinds = {f: cause.kind for f, cause in found.items() if f in ended}
        for f in sorted(kinds, key=lambda f: (kinds[f] == "equal_operands", -network.number(f))):
            # Another end explains the same parameters, such as a gate beside a state that starts from 0.
            starved = self._leaves_before(f) & self._starved
            others = ended - {f}
            if starved and others and self._without(others).isdisjoint(starved):
                ended = others
                del found[f]
        # A state that starts from 0 is no fault if what is before it ends elsewhere, too.
        for f in [f for f in ended & found.keys() if found[f].kind == "zero_factor"]:
            elsewhere = map(self._leaves_before, ended - {f})
            starts = [v for v in self._zeros(f)[:1] if not v.parent.inputs]
            if starts and self._leaves_before(f) & self._starved <= set().union(*elsewhere):
                ended = ended - {f}
                del found[f]
        # What always cancels is not also equal by chance.
        twice = {("equal_operands", cause.function) for cause in found.values() if cause.kind == "cancels"}
        fatal = not self._learns(ended)
        causes = ((f, found[f]) for f in network.in_order(found))
        told = ((f, cause) for f, cause in causes if (cause.kind, cause.function) not in twice)
        return {f: cause if fatal else cause._replace(fatal=False) for f, cause in told}

    def dead(self) -> List[Cause]:
        """Rectifiers that output only zeros, in a network that is not finite elsewhere."""
        network = self._network
        own = (f for f, node in network.nodes.items() if not node.loss_section)
        dead = (f for f in network.in_order(own) if self._is_dead(f) and any(map(self.largest, f.inputs)))
        return [self._told(f)._replace(fatal=False) for f in dead]

    def zero_loss(self) -> List[Cause]:
        """Cause of a loss that is 0 in every batch: the first function before it that computes only zeros."""
        if any(map(self.largest, self._network.roots)):
            return []
        f = self._first_zeros(self._network.last)
        why, remedy = self._why_zeros(f)
        if f.info.type_name in _RECTIFIERS | _BOUNDS:
            why, remedy = f", as it reads {self._around(f)}", remedies.MARGIN
        elif not why:
            why, remedy = self._first.grown(f).clause, remedies.SATURATED
        what = f"it computes only zeros, so that the loss is 0 and no layer gets a gradient{why}"
        return [Cause("zero_loss", self._network.name(f), what, remedy)]

    def _why_zeros(self, f: Any) -> Tuple[str, str]:
        """Clause about the reason why a function computes only zeros, empty for none, and a remedy."""
        kind = f.info.type_name
        if kind in DIFFERENCES:
            return f", as it compares equal numbers{self._sources(f)}", remedies.DIFFERENT
        if kind == "EpsilonInsensitiveLoss":
            return f", as no error exceeds its epsilon of {f.info.args['epsilon']:g}", remedies.SMALLER_MARGIN
        if kind.endswith("CrossEntropy") and kind in INDICES and (f.inputs[1].d < 0.0).all():
            labels = self._network.called(f.inputs[1])
            return f", as {labels} holds only numbers below 0, which it leaves out", remedies.LABELS
        return "", remedies.WHY_ZERO

    def _sources(self, f: Any) -> str:
        """Clause about the leaves that the equal operands of a function are computed of."""
        first, second = map(self._network.sources, f.inputs)
        return f", both computed of {first}" if first == second else f", computed of {first}, and of {second}"

    def _around(self, f: Any) -> str:
        """Mean of the numbers that a function reads, and its constant."""
        read, args = self._sights[0].data.get(hash(f.inputs[0])), f.info.args
        constant = f", with the constant {args['val']:g}" if "val" in args else ""
        # Not of an array that nnabla has freed, or that is empty.
        mean = f" around {read.sum / read.count:.3g}" if read and read.count else ""
        return f"numbers{mean}{constant}"

    def _zeros(self, f: Any) -> List[nn.Variable]:
        """Computed inputs that are all 0."""
        return [v for v in f.inputs if v.parent is not None and not self.largest(v)]

    def _first_zeros(self, last: List[Any]) -> Any:
        """First function that computes the zeros which some functions read; or the first of these."""
        return self._network.in_order(self._network.walk(last, self._zeros))[0]

    def _at_fault(self, f: Any) -> Dict[Any, Cause]:
        """Functions that turn other numbers into zeros, so that the gradient ends at `f`; or `f`."""
        network = self._network
        dead = filter(self._is_dead, network.walk([f]))
        origins = {g for g in (*network.walk([f], self._zeros), *dead) if not self._zeros(g)}
        found = {g: self._told(g) for g in network.in_order({*origins, f}) if g in network.nodes}
        known = {g: cause for g, cause in found.items() if cause.kind != "no_gradient"}
        if len(known) > 1 and f in known and self._zeros(f):
            own = known.pop(f)
            if own.kind == "zero_weights":
                g, cause = known.popitem()
                both = cause.parameters + own.parameters
                what = f"{cause.what}, and its outputs meet only zeros again in {listed(own.parameters)}"
                weights = [v for key, v in network.leaves.items() if v.ndim > 1 and key in network.names]
                others = {network.names[hash(v)] for v in weights if not self.largest(v)}
                remedy = remedies.INITIALISE if others - {*both} else remedies.ONE_FACTOR
                known[g] = cause._replace(what=what, remedy=remedy, parameters=both)
        return known or {f: found[f]}

    def _is_dead(self, f: Any) -> bool:
        return f.info.type_name in _RECTIFIERS and not any(map(self.largest, f.outputs))

    def _learns(self, ended: AbstractSet[Any]) -> bool:
        """True if a gradient bypasses these functions and reaches parameters that are applied to data."""
        data: Set[int] = set()
        weights, reached = set(self._network.names), self._without(ended)
        for f in self._network.graph.functions:
            keys = set(map(hash, f.inputs))
            if keys and keys <= weights:
                weights.update(map(hash, f.outputs))
                continue
            fed = [v for v in f.inputs if v.parent is None and hash(v) not in weights]
            if f not in ended and (fed or not keys or not keys.isdisjoint(data)):
                data.update(map(hash, f.outputs))
                if self.gradient(keys & weights & reached):
                    return True
        return False

    def saturated(self) -> Iterator[Cause]:
        """Activations with a gradient and most of their outputs in their flat part."""
        shares = {f: min(one.flat.get(f, 0.0) for one in self._sights) for f in self._sights[0].flat}
        flat = {f: share for f, share in shares.items() if share > _MOST}
        others, nodes = self._without(flat.keys()), self._network.nodes
        for f, node in reversed(nodes.items()):
            # Saturated outputs are fine in a loss, and leaves with a gradient by another path do learn.
            if f not in flat or node.loss_section:
                continue
            before = self._leaves_before(f)
            if not before <= others and self.arriving(f):
                what = "outputs are where its derivative is next to 0"
                if node.type_name == "Softmax":
                    what = "rows are 1 in one place and 0 elsewhere"
                what = f"it is saturated: {flat[f]:.0%} of its {what}"
                cause = self._saturated(f, what, remedies.SATURATED)
                spoils = self._labels(before - others - self._starved)
                fatal = before <= self._starved and not self._learns({f})
                yield cause._replace(fatal=fatal, spoils=spoils)

    def saturated_gates(self) -> Iterator[Note]:
        """Note saturated activations whose layers get a gradient by others, such as gates of an LSTM."""
        nodes, flat = self._network.nodes, self._sights[0].flat
        flat_nodes = (f for f, node in nodes.items() if f in flat and not node.loss_section)
        own = [f for f in flat_nodes if remedies.is_a(f, "Sigmoid", "Tanh")]
        most = [f for f in own if np.mean([s.flat.get(f, 0.0) for s in self._sights]) > _MOST]
        if len(most) >= 4 and len(most) > _MOST * len(own):
            f = self._network.in_order(most)[0]
            cause = self._saturated(f, "", remedies.SATURATED)
            begin = f"Most outputs of {len(most)} activations are where the derivative is next to 0, from "
            yield Note(begin, [self._network.name(f)], f" on{cause.what}: {cause.remedy}.")

    def _saturated(self, f: Any, what: str, remedy: str) -> Cause:
        """Cause of saturation: what makes its inputs large, or the function."""
        # What a softmax reads of a mask is no fault.
        masked = f.info.type_name == "Softmax"
        growth = self._first.grown(f, trained=masked)
        if growth.remedy:
            remedy = growth.remedy + f", or {remedy}" * (remedy == remedies.BOUND)
        what, parameters = what + growth.clause, growth.parameters
        own = Cause("saturated", self._network.name(f), what, remedy, parameters=parameters)
        return Finiteness(self._network, self._sights[0]).before(f) or own

    def _cancelling(self, f: Any) -> Any:
        """First function that joins the output of `f` with another use of its input; None for none."""
        uses = {hash(v) for v in f.inputs if v.need_grad}
        for g in self._network.behind(uses):
            if len(uses.intersection(map(hash, g.inputs))) > 1:
                return g
            uses.update(map(hash, g.outputs))
        return None

    def _labels(self, leaves: AbstractSet[int]) -> Tuple[str, ...]:
        """Names of the layers that leaves belong to."""
        nodes = reversed(self._network.nodes.values())
        return tuple(node.label for node in nodes if not leaves.isdisjoint(node.leaves))

    def _not_chosen(self, v: nn.Variable) -> bool:
        """True for the zeros of a part that no sample of these batches has chosen, such as a rare expert."""
        walked = self._network.walk([v.parent], lambda f: f.inputs if remedies.is_a(f, *_PARTS) else [])
        chosen = (g for g in walked if remedies.is_a(g, "OneHot", "TopKData"))
        return any(self.largest(g.outputs[0]) for g in chosen)

    def _nothing_to_learn(self, f: Any) -> bool:
        """True if a function contributes 0 to the loss: a margin is kept, or no label counts."""
        if f.inputs and all(hash(v) in self._network.names for v in f.inputs):
            return False
        behind = (v for g in self._network.behind(map(hash, f.outputs)) for v in g.outputs if v.size == 1)
        first = next(behind, None)
        return first is not None and not self.largest(first)

    def _leaves_before(self, f: Any) -> Set[int]:
        """Keys of the leaves that need a gradient and that `f` depends on."""
        return read_by(self._network.walk([f])) & self._network.leaves.keys()

    def _without(self, functions: AbstractSet[Any]) -> Set[int]:
        """Keys of the variables that a gradient reaches without passing any of these functions."""

        def onward(f: Any) -> List[nn.Variable]:
            return [] if f in functions else [v for v in f.inputs if v.need_grad]

        walked = self._network.walk(self._network.last, onward)
        return read_by(f for f in walked if f not in functions)

    def _told(self, f: Any) -> Cause:
        """Cause of a gradient's end at a function, or of its zeros."""
        network, node, called = self._network, self._network.nodes[f], self._network.called
        kind, args, names = node.type_name, node.args, network.names

        def cause(kind: str, what: str, remedy: str, *of: nn.Variable) -> Cause:
            return Cause(kind, node.label, what, remedy, parameters=network.parameters(of))

        zeros = self.zero_factors(f)
        if args.get("only_index"):
            what = "it computes numbers of places, which have no derivative, and hands on their gradient"
            return cause("no_backward", what, remedies.NO_DERIVATIVE)
        if self._is_dead(f):
            what = "it is dead: every output is 0 in every batch"
            of = [v for v in f.inputs if hash(v) in names and not self.largest(v)]
            if of:
                return cause("dead_relu", f"{what}, as {called(of[0])} is", remedies.ABOVE_ZERO, *of)
            first = self._first_zeros([f])
            growth = self._first.grown(first)
            is_shifted = growth.remedy in remedies.SHIFTS
            if first is f:
                if not is_shifted:
                    growth = self._first.shifted(f.inputs[0])
                    is_shifted = bool(growth.clause)
                clause = growth.clause if is_shifted else f", as it reads {self._around(f)}"
                remedy = f"{growth.remedy}, or use F.leaky_relu" if is_shifted else remedies.DEAD
                return cause("dead_relu", what + clause, remedy)
            what += f", as it reads only zeros, from {network.name(first)} on"
            read = self.factors(first) or first.inputs
            of = [v for v in read if hash(v) in names and v.ndim > 1 and not self.largest(v)]
            what += f", as {called(of[0])} is" if of else ""
            known = growth.remedy if is_shifted else remedies.WHY_ZERO
            remedy = remedies.INITIALISE if of else known
            return cause("dead_relu", what + growth.clause * is_shifted, remedy, *of)
        if kind == "Dropout":
            return cause("zero_factor", f"it drops everything (p={args['p']:g})", remedies.DROPOUT)
        if kind == "MulScalar" and not args["val"]:
            what = "it is a loss weight of 0" if network.is_loss_weight(f) else "it multiplies by 0"
            return cause("zero_factor", what, remedies.ZERO_FACTOR)
        arriving = self.arriving(f)
        if kind == "MulScalar" and arriving * abs(args["val"]) < FLOAT32.smallest_subnormal:
            what = f"it multiplies the gradient, which is {arriving:.1g}, by {args['val']:g}, which gives 0"
            return cause("small_factors", what, remedies.SMALL_FACTORS)
        weights = [v for v in zeros if hash(v) in names and v.ndim > 1]
        if f in network.products and node.leaves and weights:
            what = f"its weights are all 0 and get no gradient ({called(weights[0])})"
            return cause("zero_weights", what, remedies.INITIALISE, *weights)
        if zeros:
            v = self.zero_origin(zeros[0])
            own = remedies.GAMMA if kind in NORMALIZATIONS else remedies.TRAIN
            why, remedy = "is all 0", own if hash(v) in names else remedies.WHY_ZERO
            if network.is_input(v):
                why, remedy = network.emptiness(v)
            elif v.parent is not None and v.parent.inputs:
                clause, remedy = self._why_zeros(v.parent)
                why += clause or f", computed of {self._around(v.parent)}"
            return cause("zero_factor", f"it multiplies by {called(v)}, which {why}", remedy, v)
        if kind == "Prod":
            return cause("zero_factor", "it multiplies several zeros", remedies.FACTORS)
        if kind in SOFTMAX_OR_LOSS and f.inputs[0].shape[args["axis"]] == 1:
            what = "it runs over an axis of size 1, so that all its outputs are the same"
            return cause("constant_softmax", what, remedies.SOFTMAX_AXIS)
        if kind in NORMALIZATIONS:
            together = network.normalized_together(f)
            if together > 2.0:
                what = "it passes no gradient: what it normalises together is constant"
                return cause("constant_input", what, remedies.CONSTANT_INPUT)
            what = "it passes no gradient: it normalises one number at a time"
            if together > 1.0:
                what = "it normalises two numbers at a time, which makes 1 and -1 of any"
            return cause("constant_input", what, remedies.SINGLE_NUMBERS)
        is_closed = kind == "Softmax" and not any(sight.flat.get(f, 1.0) for sight in self._sights)
        if is_closed and not self._first.grown(f, trained=True).remedy:
            what = "a mask leaves it a single place in each row, so that all its outputs are the same"
            return cause("constant_softmax", what, remedies.CHECK_MASK)
        rounds = "Floor", "FixedPointQuantize", "MinMaxQuantize", "Pow2Quantize", "Round"
        if kind in rounds and not any(map(self.largest, f.outputs)):
            what = f"it rounds all numbers to 0, which reach {self.largest(f.inputs[0]):.2g}"
            return cause("rounded", what, remedies.STEP)
        # A function that hands on all that it gets.
        cancelling = self._cancelling(f) if kind in _HANDS_ON else None
        if cancelling is not None and arriving:
            v = next(v for v in f.inputs if v.need_grad)
            what = f"it computes the same whatever {called(v)} is: the gradients to it cancel"
            node = network.nodes[cancelling]
            compares = node.loss_section and node.type_name in DIFFERENCES
            remedy = remedies.UNLINK_TARGET if compares else remedies.NOT_CONSTANT
            return Cause("cancels", self._network.name(cancelling), what, remedy)
        # A rectifier that is not dead is not saturated.
        is_activation = len(f.inputs) == 1 and f.inputs[0].size == f.outputs[0].size
        is_other = kind in _METRICS | _RECTIFIERS | _HANDS_ON or remedies.is_square(f)
        if kind in _SATURATES or (is_activation and not is_other):
            what = "it is saturated: all of its outputs are where its derivative is 0"
            if "val" in args:
                what += f", as it reads {self._around(f)}"
            return self._saturated(f, what, remedies.BOUND if kind in _BOUNDS else remedies.SATURATED)
        if remedies.is_square(f):
            v = self.zero_origin(f.inputs[0])
            if hash(v) in names:
                what = f"it squares {called(v)}, which is all 0"
                return cause("zero_weights", what, remedies.INITIALISE, v)
        what, remedy = "it passes no gradient on", remedies.NO_GRADIENT
        behind = network.behind(map(hash, f.outputs))
        chooses = "Max", "MaxPooling", "Maximum2", "Min", "Minimum2", "TopKData"
        choosing = next((g for g in behind if remedies.is_a(g, *chooses)), None)
        if kind in _METRICS:
            remedy = remedies.CROSS_ENTROPY
        elif kind.startswith("ClipGrad"):
            what, remedy = "it makes all gradients 0", remedies.CLIP_NORM
        elif remedies.is_square(f):
            what, remedy = f"{what}, as it reads 0 wherever one arrives", remedies.SELF
        elif choosing is not None:
            what += f", as {network.name(choosing)} chooses only others of its numbers"
            remedy = remedies.PADDING
        return cause("no_gradient", what, remedy)
