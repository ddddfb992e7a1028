# SPDX-License-Identifier: Apache-2.0
"""Functions at which the gradient ends although the loss is not zero."""

from __future__ import annotations

from functools import partial
from typing import AbstractSet, Any, Dict, Iterator, List, Sequence, Set, Tuple

import nnabla as nn
import numpy as np

from ..core.formats import FLOAT32
from . import remedies
from .causes import Cause, Note, listed
from .finite import SOFTMAX_OR_LOSS, Finiteness
from .network import DIFFERENCES, NORMALIZATIONS, Network, read_by
from .operands import Batches, Growth
from .watching import INDICES, Sight

_MOST = 0.5  # an activation is saturated if more than this share of its outputs has next to no derivative

_RECTIFIERS = {"CReLU", "GELU", "Mish", "ReLU", "ReLU6", "SoftPlus", "Swish"}
_BOUNDS = {"Maximum2", "MaximumScalar", "Minimum2", "MinimumScalar"}
_BOUNDS |= {"FixedPointQuantize", "HardSigmoid", "HardTanh", "ReLU6"}
_SATURATES = {*_BOUNDS, "Exp", "Sigmoid", "Softmax", "SoftPlus", "Tanh"}
# Linear functions hand on a gradient, whatever they read.
_HANDS_ON = {"Add2", "AddScalar", "Broadcast", "Mean", "MulScalar", "Reshape", "Sub2", "Sum", "Transpose"}
# Functions between the choice of an expert and the factor of its output.
_PARTS = {"Broadcast", "Div2", "Mul2", "Reshape", "Slice", "Split", "Transpose"}
_METRICS = {"BinaryError", "TopNError"}  # functions that count errors


class Ends(Batches):
    """Search for ends of the gradient in the backward passes of all batches."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        super().__init__(network, sights)
        # Keys of the leaves without gradient in all batches.
        self._starved = {key for key in network.leaves if not self.gradient([key])}

    def functions(self) -> Dict[Any, Cause]:
        """Causes by function: where the gradient ends, or of the zeros that end it further on."""
        network, found = self._network, {}
        ended: Set[Any] = set()
        has_loss = any(map(self.largest, network.roots))
        for f, node in reversed(network.nodes.items()):
            arriving = [s for s in self._sights if Batches(network, [s]).arriving(f)]
            compared = f.inputs if has_loss and node.type_name in DIFFERENCES else ()
            is_equal = any(map(self.largest, compared)) and not any(map(self.largest, f.outputs))
            # A student is equal to its teacher only at the start, if it begins as a copy.
            is_on_purpose = node.type_name in ("Unlink", "Sink") or (is_equal and network.is_copy(f))
            if is_on_purpose or not arriving:
                continue
            # A normalization makes 0 of a single number, and 1 and -1 of any two.
            hands_on_none = network.normalized_together(f) <= 2.0 or node.args.get("only_index")
            if hands_on_none and (cut_off := self._leaves_before(f.inputs[0].parent) - self._without({f})):
                found[f] = self._cause_of(f)._replace(spoils=self._layers_of(cut_off))
                ended.add(f)
            # The last layer of a residual branch may start from 0: its weights get a gradient and move.
            weights = [key for key in node.leaves if network.leaves[key].ndim > 1]
            handed_on = [*(node.inputs or node.leaves), *weights]
            is_end = handed_on and not Batches(network, arriving).gradient(handed_on)
            # An end is harmless if other paths bring a gradient to all leaves before it.
            if not (is_equal or is_end) or self._leaves_before(f).isdisjoint(self._starved):
                continue
            if is_equal:
                what = f"it compares equal numbers in every batch{self._sources(f)}"
                at_fault = {f: self._cause(f, "equal_operands", what, remedies.DIFFERENT)}
            elif self._may_open(f):
                continue
            else:
                at_fault = self._at_fault(f)
                kind = next(iter(at_fault.values())).kind
                if kind not in ("zero_factor", "constant_softmax") and self._nothing_to_learn(f):
                    continue
            found.update(at_fault)
            ended.add(f)
        # Where other ends explain the same parameters, one is left: a gate beside a state that starts from 0.
        # A comparison of equal numbers is the last to go, as it ends all gradients before it.
        kinds = {f: found[f].kind for f in ended & found.keys()}
        for f in sorted(kinds, key=lambda f: (kinds[f] == "equal_operands", -network.number(f))):
            starved = self._leaves_before(f) & self._starved
            others = ended - {f}
            if starved and others and self._without(others).isdisjoint(starved):
                ended = others
                del found[f]
        # An LSTM's cell starts from a constant 0: saturated gates are the fault, if they are ends, too.
        for f in [f for f in ended & found.keys() if found[f].kind == "zero_factor"]:
            elsewhere = map(self._leaves_before, ended - {f})
            is_start = any(not v.parent.inputs for v in self._zeros(f)[:1])
            if is_start and self._leaves_before(f) & self._starved <= set().union(*elsewhere):
                ended = ended - {f}
                del found[f]
        # A difference in which a prediction cancels is 0 for any numbers: "cancels" says more than "equal".
        cancelling = {("equal_operands", one.function) for one in found.values() if one.kind == "cancels"}
        causes = [f for f in network.in_order(found) if (found[f].kind, found[f].function) not in cancelling]
        fatal = not self._learns(ended)
        return {f: found[f]._replace(fatal=found[f].fatal and fatal) for f in causes}

    def dead(self) -> List[Cause]:
        """Causes of rectifiers that output only zeros, in a network that is not finite elsewhere."""
        layers = [f for f, node in self._network.nodes.items() if not node.loss_section and self._is_dead(f)]
        dead = [f for f in self._network.in_order(layers) if any(map(self.largest, f.inputs))]
        return [self._cause_of(f)._replace(fatal=False) for f in dead]

    def zero_loss(self) -> List[Cause]:
        """Cause of a loss that is 0 in every batch: the first function before it that computes only zeros."""
        if any(map(self.largest, self._network.roots)):
            return []
        f = self._first_zeros(self._network.last)
        if f.info.type_name in _RECTIFIERS | _BOUNDS:
            why, remedy = f", as it reads {self._around(f)}", remedies.MARGIN
        else:
            why, remedy = self._why_zeros(f)
            if not why:  # such as the cross entropy of scores so large that the right class has probability 1
                why, remedy = self._first.grown(f).clause, remedies.SATURATED
        what = f"it computes only zeros, so that the loss is 0 and no layer gets a gradient{why}"
        return [Cause("zero_loss", self._network.name(f), what, remedy)]

    def _why_zeros(self, f: Any) -> Tuple[str, str]:
        """Clause that tells why a function computes only zeros, empty if unknown, and a remedy."""
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
        """Clause that names the leaves which the two operands of a function are computed of."""
        first, second = map(self._network.sources, f.inputs)
        return f", both computed of {first}" if first == second else f", computed of {first}, and of {second}"

    def _around(self, f: Any) -> str:
        """Describe the numbers that a function reads by their mean, and its constant."""
        read, args = self._sights[0].data.get(hash(f.inputs[0])), f.info.args
        constant = f", with the constant {args['val']:g}" if "val" in args else ""
        # An array that nnabla has freed, or an empty one, has no mean.
        mean = f" around {read.sum / read.count:.3g}" if read and read.count else ""
        return f"numbers{mean}{constant}"

    def _zeros(self, f: Any) -> List[nn.Variable]:
        """Computed inputs that are all 0."""
        return [v for v in f.inputs if v.parent is not None and not self.largest(v)]

    def _first_zeros(self, last: List[Any]) -> Any:
        """First function that makes the zeros which some functions read; or the first of these functions."""
        return self._network.in_order(self._network.walk(last, self._zeros))[0]

    def _at_fault(self, f: Any) -> Dict[Any, Cause]:
        """Functions whose zeros make the gradient end at `f`, with the causes of these zeros; or `f`."""
        network = self._network
        dead = filter(self._is_dead, network.walk([f]))
        origins = {g for g in (*network.walk([f], self._zeros), *dead) if not self._zeros(g)}
        found = {g: self._cause_of(g) for g in network.in_order({*origins, f}) if g in network.nodes}
        known = {g: cause for g, cause in found.items() if cause.kind != "no_gradient"}
        if len(known) > 1 and f in known and self._zeros(f):
            own = known.pop(f)
            # Two weights of zeros, one after the other, give each other no gradient: both are named.
            if own.kind == "zero_weights":
                g, cause = known.popitem()
                both = cause.parameters + own.parameters
                what = f"{cause.what}, and what it computes is multiplied by zeros again, in "
                weights = [v for key, v in network.leaves.items() if v.ndim > 1 and key in network.names]
                is_pair = {network.names[hash(v)] for v in weights if not self.largest(v)} <= {*both}
                remedy = remedies.ONE_FACTOR if is_pair else remedies.INITIALISE
                what += listed(own.parameters)
                known[g] = cause._replace(what=what, remedy=remedy, parameters=both)
        return known or {f: found[f]}

    def _is_dead(self, f: Any) -> bool:
        return f.info.type_name in _RECTIFIERS and not any(map(self.largest, f.outputs))

    def _learns(self, ended: AbstractSet[Any]) -> bool:
        """True if parameters still learn from data; only a bias may get a gradient behind a dead ReLU."""
        data: Set[int] = set()  # variables that depend on data by a way without an end
        weights, reached = set(self._network.names), self._without(ended)
        for f in self._network.graph.functions:
            keys = set(map(hash, f.inputs))
            # A variable that is computed of weights alone is a weight, too, such as a normalized one.
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
        """Causes of saturated activations that every gradient of some parameter comes through."""
        shares = {f: min(one.flat.get(f, 0.0) for one in self._sights) for f in self._sights[0].flat}
        flat = {f: share for f, share in shares.items() if share > _MOST}
        others = self._without(flat.keys())
        for f, node in reversed(self._network.nodes.items()):
            # In a loss, saturated outputs are predictions that are sure.
            if f not in flat or node.loss_section:
                continue
            before = self._leaves_before(f)
            if not before <= others and self.arriving(f):
                what = "outputs are where its derivative is next to 0"
                if node.type_name == "Softmax":
                    what = "rows are 1 in one place and 0 elsewhere"
                what = f"it is saturated: {flat[f]:.0%} of its {what}"
                spoils = self._layers_of(before - others - self._starved)
                fatal = before <= self._starved and not self._learns({f})
                yield self._saturated(f, what, remedies.SATURATED)._replace(fatal=fatal, spoils=spoils)

    def saturated_gates(self) -> Iterator[Note]:
        """Note the first of many saturated gates, such as an LSTM's, beside which its layers still learn."""
        nodes = self._network.nodes.items()
        gates = [f for f, node in nodes if not node.loss_section and remedies.is_a(f, "Sigmoid", "Tanh")]
        most = [f for f in gates if np.mean([s.flat.get(f, 0.0) for s in self._sights]) > _MOST]
        if len(most) >= 4 and len(most) > _MOST * len(gates):
            f = self._network.in_order(most)[0]
            cause = self._saturated(f, "", remedies.SATURATED)
            begin = f"Most outputs of {len(most)} activations are where the derivative is next to 0, from "
            yield Note(begin, [self._network.name(f)], f" on{cause.what}: {cause.remedy}.")

    def _saturated(self, f: Any, what: str, remedy: str) -> Cause:
        """Cause of saturation: the operand that makes the inputs of `f` large, or `f` if there is none."""
        # The large numbers of a mask, which has no gradient, saturate no softmax.
        growth = self._first.grown(f, trained=f.info.type_name == "Softmax")
        if growth.remedy:
            remedy = growth.remedy + f", or {remedy}" * (remedy == remedies.BOUND)
        name, what = self._network.name(f), what + growth.clause
        own = Cause("saturated", name, what, remedy, parameters=growth.parameters)
        return Finiteness(self._network, self._sights[0]).before(f) or own

    def _cancelling(self, f: Any) -> Any:
        """First function, if any, that joins the output of `f` with another use of its input."""
        uses = {hash(v) for v in f.inputs if v.need_grad}
        for g in self._network.behind(uses):
            if len(uses.intersection(map(hash, g.inputs))) > 1:
                return g
            uses.update(map(hash, g.outputs))
        return None

    def _layers_of(self, leaves: AbstractSet[int]) -> Tuple[str, ...]:
        nodes = reversed(self._network.nodes.values())
        return tuple(node.label for node in nodes if not leaves.isdisjoint(node.leaves))

    def _may_open(self, f: Any) -> bool:
        """True if a feeder may change a scalar of 0 that `f` reads, or choose another expert or part."""
        zeros = [self.zero_origin(v) for v in f.inputs if not self.largest(v)]
        if any(v.size == 1 and self._network.is_input(v) for v in zeros):
            return True
        parts = self._network.walk(
            [v.parent for v in zeros], lambda g: g.inputs if remedies.is_a(g, *_PARTS) else []
        )
        return any(self.largest(g.outputs[0]) for g in parts if remedies.is_a(g, "OneHot", "TopKData"))

    def _nothing_to_learn(self, f: Any) -> bool:
        """True if the part of the loss behind a function is 0, such as of margins that all samples keep."""
        # A ReLU of a gate that starts from 0 keeps its part of the loss 0 for ever: that is a fault.
        if f.inputs and all(hash(v) in self._network.names for v in f.inputs):
            return False
        behind = self._network.behind(map(hash, f.outputs))
        part = next((v for g in behind for v in g.outputs if v.size == 1), None)
        return part is not None and not self.largest(part)

    def _leaves_before(self, f: Any) -> Set[int]:
        """Keys of the leaves that need a gradient and that `f` depends on."""
        return read_by(self._network.walk([f])) & self._network.leaves.keys()

    def _without(self, functions: AbstractSet[Any]) -> Set[int]:
        """Keys of the variables that a gradient reaches without passing any of these functions."""

        def onward(f: Any) -> List[nn.Variable]:
            return [] if f in functions else [v for v in f.inputs if v.need_grad]

        return read_by(f for f in self._network.walk(self._network.last, onward) if f not in functions)

    def _cause(self, f: Any, kind: str, what: str, remedy: str, *at_fault: nn.Variable) -> Cause:
        return Cause(kind, self._network.name(f), what, remedy, parameters=self._network.parameters(at_fault))

    def _dead(self, f: Any) -> Cause:
        """Cause of a rectifier that outputs only zeros."""
        network, names = self._network, self._network.names
        what = "it is dead: every output is 0 in every batch"
        if own := [v for v in f.inputs if hash(v) in names and not self.largest(v)]:
            what += f", as {network.called(own[0])} is"
            return self._cause(f, "dead_relu", what, remedies.ABOVE_ZERO, *own)
        first = self._first_zeros([f])
        growth = self._first.grown(first)
        if first is f and growth.remedy not in remedies.SHIFTS:
            growth = self._first.shifted(f.inputs[0])
        if growth.remedy not in remedies.SHIFTS:
            growth = Growth()
        if first is f:
            clause = growth.clause if growth.remedy else f", as it reads {self._around(f)}"
            remedy = f"{growth.remedy}, or use F.leaky_relu" if growth.remedy else remedies.DEAD
            return self._cause(f, "dead_relu", what + clause, remedy)
        what += f", as it reads only zeros, from {network.name(first)} on"
        read = self.factors(first) or first.inputs
        weights = [v for v in read if hash(v) in names and v.ndim > 1 and not self.largest(v)]
        what += f", as {network.called(weights[0])} is" if weights else ""
        remedy = remedies.INITIALISE if weights else growth.remedy or remedies.WHY_ZERO
        return self._cause(f, "dead_relu", what + growth.clause, remedy, *weights)

    def _cause_of(self, f: Any) -> Cause:
        """Cause of a gradient's end at a function, or of its zeros, by the first rule that fits."""
        network, node, called = self._network, self._network.nodes[f], self._network.called
        kind, args, names, cause = node.type_name, node.args, network.names, partial(self._cause, f)
        zeros = self.zero_factors(f)
        if args.get("only_index"):
            what = "it computes indices, which have no derivative, and hands on the gradient that it gets"
            return cause("no_backward", what, remedies.NO_DERIVATIVE)
        if self._is_dead(f):
            return self._dead(f)
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
                what = "it passes no gradient: the numbers that it normalises together are equal"
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
        # A linear function ends no gradient: parts of it cancel where the output meets the input again.
        if kind in _HANDS_ON and arriving and (cancelling := self._cancelling(f)) is not None:
            v = next(v for v in f.inputs if v.need_grad)
            what = f"it computes the same whatever {called(v)} is: the gradients to it cancel"
            node = network.nodes[cancelling]
            compares = node.loss_section and node.type_name in DIFFERENCES
            remedy = remedies.UNLINK_TARGET if compares else remedies.NOT_CONSTANT
            return self._cause(cancelling, "cancels", what, remedy)
        is_activation = len(f.inputs) == 1 and f.inputs[0].size == f.outputs[0].size
        is_other = kind in _METRICS | _RECTIFIERS | _HANDS_ON or remedies.is_square(f)
        if kind in _SATURATES or (is_activation and not is_other):
            what = "it is saturated: all of its outputs are where its derivative is 0"
            if "val" in args:
                what += f", as it reads {self._around(f)}"
            return self._saturated(f, what, remedies.BOUND if kind in _BOUNDS else remedies.SATURATED)
        if remedies.is_square(f) and hash(v := self.zero_origin(f.inputs[0])) in names:
            return cause("zero_weights", f"it squares {called(v)}, which is all 0", remedies.INITIALISE, v)
        what, remedy = "it passes no gradient on", remedies.NO_GRADIENT
        chooses = "Max", "MaxPooling", "Maximum2", "Min", "Minimum2", "TopKData"
        choosing = next((g for g in network.behind(map(hash, f.outputs)) if remedies.is_a(g, *chooses)), None)
        if kind in _METRICS:
            remedy = remedies.CROSS_ENTROPY
        elif kind.startswith("ClipGrad"):
            what, remedy = "it makes all gradients 0", remedies.CLIP_NORM
        elif remedies.is_square(f):
            what, remedy = f"{what}, as all numbers at which one arrives are 0", remedies.SELF
        elif choosing is not None:
            what += f", as {network.name(choosing)} never chooses its numbers"
            remedy = remedies.PADDING
        return cause("no_gradient", what, remedy)
