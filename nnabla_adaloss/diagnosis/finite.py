# SPDX-License-Identifier: Apache-2.0
"""Search for the first place of a pass that is not finite."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np

from ..graph.description import type_name_of
from . import remedies
from .causes import Cause, distinct, listed
from .network import Network
from .operands import CONSTANTS, DIVISIONS, FLOOR, GROWN, NOT_ZERO, Growth, Operands, is_product, repeated
from .watching import INDICES, PROBABILITIES, Sight

SOFTMAX = {"Softmax", "LogSoftmax"}
SOFTMAX_OR_LOSS = {*SOFTMAX, "SoftmaxCrossEntropy"}


def not_finite(network: Network, sights: Sequence[Sight]) -> List[Cause]:
    """Causes of nonfinite numbers in any batch, in forward order, one of each kind and function."""
    of_batches = [distinct(Finiteness(network, sight).causes()) for sight in sights]
    found = []
    for key, cause in distinct([one for causes in of_batches for one in causes.values()]).items():
        batches = [str(number) for number, causes in enumerate(of_batches, 1) if key in causes]
        where = f", in batch{'es' * (len(batches) > 1)} {listed(batches)} of {len(sights)}"
        found.append(cause._replace(what=cause.what + where * (len(batches) < len(sights))))
    return sorted(found, key=lambda cause: network.positions.get(cause.function, -1))


class Finiteness(Operands):
    """Search for the origin of NaNs and infinities in one batch, in fp32 or as stored."""

    def causes(self) -> List[Cause]:
        """Functions that cause a nonfinite loss or gradient, in forward order."""
        roots, positions = self.bad(self.network.roots), self.network.positions
        found, wrong = self._origins(roots) if roots else self._in_backward(), self._wrong_input()
        if not (found and wrong):
            return found or wrong
        # A class that does not exist explains its probability of 0, and what follows.
        is_earlier = positions[wrong[0].function] <= min(positions.get(one.function, 0) for one in found)
        if wrong[0].kind not in ("index_beyond", "no_probability") or not is_earlier:
            return found
        return [wrong[0]._replace(fatal=True), *(one for one in found if one.function != wrong[0].function)]

    def _wrong_input(self) -> List[Cause]:
        """Cause, if any, of a wrong label, index or probability, which need not make the loss nonfinite."""
        network, sight = self.network, self.sight
        for v in self.bad(network.graph.leaves.values()):
            if hash(v) in network.leaves and hash(v) in self.in_fp32.nans:
                return [self._leaf(network.readers[hash(v)][0], v)._replace(fatal=False)]
            for f in network.readers[hash(v)] if sight.nans[hash(v)] else ():
                if type_name_of(f.info.type_name).endswith(("CrossEntropy", "Embed", "OneHot")):
                    what = f"it reads numbers of classes from {network.called(v)}, which holds "
                    what += sight.not_finite(v)
                    return [Cause("data_not_finite", network.name(f), what, remedies.CLEAN, False)]
        for f in network.graph.functions:
            kind, args, name = f.info.type_name, f.info.args, network.name(f)
            for v in f.inputs[: PROBABILITIES.get(kind, 0)]:
                if count := sight.improbable.get(hash(v)):
                    what = f"it takes {network.called(v)} for probabilities, of which "
                    what += f"{count} of {v.size} are below 0 or above 1"
                    return [Cause("no_probability", name, what, remedies.of_errors(f))]
            if kind not in INDICES:
                continue
            v, table = f.inputs[INDICES[kind]], f.inputs[INDICES[kind] - 1]
            last = (args["shape"] if kind == "OneHot" else table.shape)[args.get("axis", 0)] - 1
            what, largest = f"it takes {network.called(v)} for indices", sight.largest_index.get(f, 0.0)
            if sight.undefined.get(f):
                what += f", of which {sight.undefined[f]} are not whole numbers"
                return [Cause("fractional_index", name, what, remedies.WHOLE_NUMBERS, False)]
            if largest > last:
                what += f" up to {largest:g}, but the last one is {last}: nnabla reads other memory"
                return [Cause("index_beyond", name, what, remedies.COUNT_FROM_0, False)]
        return []

    def _in_backward(self) -> List[Cause]:
        gradients, network, f = self.sight.gradients, self.network, self.sight.breaks
        if f is None or all(gradients[key].finite for key in network.leaves if key in gradients):
            return []
        if bad := self.bad((*f.inputs, *f.outputs)):
            return self._origins(bad)
        broken = [v for v in f.inputs if hash(v) in gradients and not gradients[hash(v)].finite]
        parameters = network.parameters(map(repeated, broken))
        parameters = parameters if len(parameters) == len(broken) else ()
        of = f" of {listed(parameters)}" * bool(parameters)
        # The derivatives of these are infinite at some numbers; those of others are finite everywhere.
        has_pole = f.info.type_name in {*NOT_ZERO, "ACos", "ACosh", "ASin", "ATanh"}
        what = f"its gradient{of} is not finite{self.reads(f) if has_pole else ''}{self.also}"
        own = Cause("backward_not_finite", network.name(f), what, self._remedy(f), parameters=parameters)
        return [(self.before(f) or own)._replace(as_stored=self.is_stored)]

    def _origins(self, variables: List[nn.Variable]) -> List[Cause]:
        """Follow nonfinite variables back to functions of finite inputs."""
        network = self.network
        outputs = (v for f in network.walk(v.parent for v in variables) for v in f.outputs)
        # A ReLU makes 0 of NaN, which hides it. Outputs that nothing reads have no parent.
        hidden = (v for v in outputs if v.parent is not None and self.sight.nans.get(hash(v)))
        waiting, seen = [*variables, *hidden], set()
        found: List[Tuple[Any, nn.Variable]] = []
        while waiting:
            v = waiting.pop()
            if hash(v) not in seen:
                seen.add(hash(v))
                before = self._to_blame(v)
                waiting += before
                if not before:
                    found.append((network.readers[hash(v)][0] if v.parent is None else v.parent, v))
        found.sort(key=lambda one: network.number(one[0]))
        leaves = [v for _, v in found if v.parent is None]
        others = f" ({len(leaves) - 1} other inputs or parameters are not finite either)" * bool(leaves[1:])
        causes: Dict[Tuple[str, str], Cause] = {}
        for f, v in found:
            if v in leaves[1:]:
                continue
            is_leaf = v.parent is None or self._is_mask(v)
            cause = self._leaf(f, v, others) if is_leaf else self._computed(f, v)
            parameters = cause.parameters or network.parameters([v])
            cause = cause._replace(parameters=parameters, as_stored=self.is_stored)
            causes.setdefault((cause.kind, f.info.type_name), cause)
        return list(causes.values())

    def _is_mask(self, v: nn.Variable) -> bool:
        """True if a user has filled a variable with minus infinities, as a mask of scores has them."""
        if self.sight.nans[hash(v)] or self.sight.infinities[hash(v)]:
            return False
        return v.parent is None or -math.inf in v.parent.info.args.values()

    def _to_blame(self, v: nn.Variable) -> List[nn.Variable]:
        """Inputs that explain the NaNs and infinities of a variable computed from them."""
        if v.parent is None:
            return []
        bad = self.bad(v.parent.inputs)
        nans = [w for w in bad if self.sight.nans[hash(w)]]
        if not self.sight.nans[hash(v)]:
            return [w for w in bad if w not in nans] or bad
        if nans or v.parent.info.type_name not in SOFTMAX:
            return nans or bad
        # A softmax makes 0 of minus infinities, such as of a mask, unless a row has no other numbers.
        return [w for w in bad if self.sight.infinities[hash(w)]]

    def _leaf(self, f: Any, v: nn.Variable, others: str = "") -> Cause:
        network, name, called = self.network, self.network.name(f), self.network.called(v)
        if v.parent is None and hash(v) not in self.in_fp32.nans:
            what = f"it reads {called}, which reaches {self.beyond(v)}"
            return Cause("beyond_format", name, what, remedies.INTO_RANGE)
        if self._is_mask(v):
            # The fault is not the mask, but the function that makes NaN of it.
            for g in network.graph.functions:
                if any(self.sight.nans.get(hash(w)) for w in g.outputs):
                    what = f"it makes NaN of the minus infinities that {called} holds"
                    what += ": 0 times infinity is NaN" * (g.info.type_name == "Mul2")
                    return Cause("not_finite", network.name(g), what, remedies.MASK)
        what = f"it reads {called}, which holds {self.sight.not_finite(v)}{others}"
        if hash(v) in network.names:
            is_trained = hash(v) in network.leaves
            return Cause("weight_not_finite", name, what, remedies.RESTORE if is_trained else remedies.REPAIR)
        return Cause("data_not_finite", name, what, remedies.CLEAN)

    def _computed(self, f: Any, v: nn.Variable) -> Cause:
        network, name, bad = self.network, self.network.name(f), self.bad(f.inputs)
        if bad and f.info.type_name in SOFTMAX:
            what = f"it reads rows of minus infinity alone from {network.called(bad[0])}{self.also}"
            read = (w for g in network.in_order(network.walk([f])) for w in (*g.inputs, *g.outputs))
            finite = (w for w in read if self.is_stored and hash(w) not in self.in_fp32.nans)
            if (mask := next((w for w in finite if self.amax(w) > network.format(w).max), None)) is not None:
                what += f", as {network.called(mask)} reaches {self.beyond(mask)}"
            return Cause("closed_row", name, what, remedies.OPEN_ROWS)
        for w in f.inputs if self.is_stored else ():
            # Numbers kept in fp32 are rounded for their readers: the function that computes them is at fault.
            if w.parent is not None and self.amax(w) > network.format(w).max:
                return self._computed(w.parent, w)
        if (before := self.before(f)) is not None:
            return before
        if self.is_stored and self.amax(v) > network.format(v).max:
            return self.overflow(f, v, "it computes numbers", self.grown(f), self.reads(f))
        what = f"it computes {self.sight.not_finite(v)} from finite numbers{self.reads(f)}{self.also}"
        growth = self._of_zeros(f) if f.info.type_name in NOT_ZERO else self.grown(f)
        what += growth.clause
        if growth.clause and (growth.remedy == remedies.NORMALISE_DATA or f.info.type_name in NOT_ZERO):
            remedy = growth.remedy + f", or {remedies.BOUND_EXP}" * remedies.is_a(f, "Exp")
            return Cause("not_finite", name, what, remedy)
        return Cause("not_finite", name, what, self._remedy(f, growth.remedy), parameters=growth.parameters)

    def _remedy(self, f: Any, known: str = "") -> str:
        """Remedy for an output or a gradient that is not finite; `known`: that of an operand."""
        if any(isinstance(one, float) and math.isinf(one) for one in f.info.args.values()):
            return remedies.MASK
        g = remedies.origin(f.inputs[0]) if self.is_stored and f.inputs else None
        is_difference = remedies.is_a(g, "Sub2")
        if self.negatives(f) and not is_difference:
            return remedies.ABSOLUTE if remedies.is_a(f.inputs[0].parent, "BatchDet") else remedies.ABOVE
        return self._scaled_before(f, remedies.of(g if is_difference else f, known))

    def _of_zeros(self, f: Any) -> Growth:
        """Operand that saturates a sigmoid or the like, so that `f` reads zeros, as in log(1 - p)."""
        v = f.inputs[NOT_ZERO[f.info.type_name]]
        passing = "RSubScalar", "AddScalar", "MulScalar", "Reshape", "Slice", "Broadcast", "Mean", "Sum"
        g = remedies.source(v, *passing).parent if self.zeros(v) else None
        growth = self.grown(g) if remedies.is_a(g, "Sigmoid", "Softmax", "SoftPlus", "Tanh") else Growth()
        return growth if growth.remedy in remedies.SHIFTS else Growth()

    def before(self, f: Any) -> Optional[Cause]:
        """Cause of a function's zeros or large numbers: a constant that storage changes, a variance of 0."""
        network = self.network
        for g in network.walk([w.parent for w in self.vanishing(f)], self.vanishing):
            constant = g.info.args.get("val") if g.info.type_name in CONSTANTS else None
            stored = network.format(g.outputs[0])
            if constant and not stored.nearest(constant):
                what = f"its constant {constant:g} is 0 in {stored.name}{self.reads(f, network.name(f))}"
                return Cause("lost_constant", network.name(g), what, self._scaled_before(f, remedies.held(f)))
        for g in [g for g in network.in_order(network.walk([f])) if g.inputs]:
            if (cause := self._enlarging(g)) and not self.amax(g.outputs[0]) < GROWN * self.amax(g.inputs[0]):
                return cause
        return None

    def _enlarging(self, f: Any) -> Optional[Cause]:
        """Cause of a running variance that is 0 or negative, or of a constant beyond the format."""
        network, kind, args, name = self.network, f.info.type_name, f.info.args, self.network.name(f)
        constant, stored = args.get("val", 0.0), network.format(f.outputs[0])
        if kind in CONSTANTS and self.is_stored and abs(constant) > stored.max:
            what = f"its constant {constant:g} is beyond {stored.name}, which ends at {stored.max:g}"
            return Cause("overflow", name, what, remedies.CONSTANT)
        if not kind.endswith("BatchNormalization") or args.get("batch_stat", True):
            return None
        v = f.inputs[4]
        count = int(np.count_nonzero(v.d <= 0.0))
        what = f"it divides by {network.called(v)}, which is 0 or less in {count} of {v.size} channels"
        cause = Cause("zero_variance", name, what, remedies.STATISTICS, parameters=network.parameters([v]))
        return cause if count else None

    def _scaled_before(self, f: Any, remedy: str) -> str:
        """Remedy for a function that reads zeros, if the origin of these needs another one than `remedy`."""
        kind = f.info.type_name
        v = f.inputs[NOT_ZERO[kind]] if kind in NOT_ZERO else None
        if v is None or not self.zeros(v):
            return remedy
        first = self.first_zeros(v)
        g = first.parent
        if not self.is_stored:
            if hash(first) in self.network.names:
                is_all = kind in DIVISIONS and self.zeros(first) == first.size
                return remedies.INITIALISE if is_all else remedy
            if g is None:
                return remedies.ZERO_DATA if remedy in (remedies.AWAY, remedies.LOG) else remedy
            return remedies.CHAIN if is_product(g) else remedy
        # Few zeros among larger numbers may be kept from 0 and lost.
        if 2 * self.vanished(v) <= v.size and self.amax(v) >= FLOOR:
            return remedy
        if g is None:
            return f"{remedies.SCALE_DATA}, and {remedy}"
        if remedies.is_square(g):
            return f"{remedies.MULTIPLY_FIRST.format(self.network.name(g))}, and {remedy}"
        if g.info.type_name == "MulScalar":
            return f"{remedies.UNITS}: {g.info.args['val']:g} in {self.network.name(g)}"
        if is_product(g):
            return remedies.CHAIN
        # Where all numbers are small, the one that such a remedy adds would make them all equal.
        adds = remedy in (remedies.AWAY, remedies.LOG, remedies.HELD, remedies.HELD_IN_LOG)
        if not adds or self.amax(v) >= FLOOR or g.info.type_name in CONSTANTS:
            return remedy
        is_exponential = g.info.type_name == "Exp"
        return remedies.EXP_OF_LESS if is_exponential else remedies.LARGER_UNITS.format(self.network.name(g))
