# SPDX-License-Identifier: Apache-2.0
"""Search for numbers that storage changes first, and for gradients beyond a format."""

from __future__ import annotations

import math
from typing import Any, Iterator, List, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.formats import Format
from . import remedies
from .causes import Cause, Note, listed
from .finite import SOFTMAX
from .network import DIFFERENCES, scope_of
from .operands import CONSTANTS, GROWN, NOT_ZERO, Growth, Operands, repeated
from .watching import INDICES

_DEVIATES = 0.25  # relative error from which storage has corrupted an array
_LOST = 0.1  # share of numbers that become 0 from which it is reported
# Functions between a factor and the loss that leave it a factor of the loss, or of a part of it.
_ADDING = {"Add2", "AddN", "AddScalar", "Mean", "MulScalar", "Sub2", "Sum"}


class Deviations(Operands):
    """Search in one batch: of gradients in fp32, of other numbers as stored."""

    def exploded(self) -> Optional[Cause]:
        """Cause of a gradient that grows from function to function beyond its format."""
        network, gradient = self.network, self.gradient
        f = max(network.nodes, key=gradient)
        stored, size = network.gradient_format(f.outputs[0]), gradient(f)
        steps = self.gradient_steps(f) if size > stored.max else []
        start = min(range(len(steps)), key=lambda i: steps[i].before or math.inf, default=0)
        growth = self.growth(steps[start:], "gradients")
        times = [after / (before or math.inf) for _, before, after in steps[start:]]
        # One step alone may make most of it: that is no growth from function to function.
        if not growth.clause or max(times) ** 2 > math.prod(times):
            return None
        what = f"its gradient reaches {size:.1e}, beyond {stored.name}, which ends at {stored.max:g}"
        what, remedy = what + growth.clause, growth.remedy or remedies.SMALLER
        return Cause("exploding_gradient", network.name(f), what, remedy, parameters=growth.parameters)

    def notes(self) -> Iterator[Note]:
        """Note a scalar that only fp32 keeps finite, a recurrence that absorbs terms, and lost inputs."""
        network, functions = self.network, self.network.graph.functions
        seen = ((f, self.sight.data.get(hash(f.outputs[0]))) for f in functions if f.outputs[0].size == 1)
        beyond = [f for f, one in seen if one and one.abs_max > network.format(f.outputs[0]).max]
        for f in beyond[:1]:
            begin = f"A single number reaches {self.beyond(f.outputs[0])}, at "
            end = ": AdaptiveLossScalingUpdater computes it in fp32; without that it would be infinite"
            behind = {g.info.type_name for g in network.behind(map(hash, f.outputs))}
            is_factor = f.info.type_name == "MulScalar" and behind <= _ADDING
            remedy = remedies.NO_FACTOR if is_factor else remedies.MEAN_LOSS
            yield Note(begin, [network.name(f)], f"{end}. {remedy}.")
        # Sums of losses are left out, as one loss may be far larger than another. So are a few sums: their
        # terms may be small on purpose at the start. Of eight or more, the state of a recurrence loses terms.
        nodes = (f for f, node in network.nodes.items() if not node.loss_section)
        absorbing = (f for f in nodes if f in self.sight.absorbing and f.outputs[0].size > 1)
        sums = network.in_order(f for f in absorbing if all(v.need_grad for v in f.inputs))
        if len(sums) >= 8:
            absorbs = self._absorbs(sums[0], network.format(sums[0].outputs[0]))
            end = f" {absorbs}, as in {len(sums) - 1} sums behind it: {remedies.SMALL_TERMS}."
            yield Note("", [network.name(sums[0])], end)
        for v in network.graph.leaves.values():
            if hash(v) not in network.names and self.vanished(v) > 0.99 * v.size:
                end = f", which becomes 0 in {network.format(v).name}: {remedies.SCALE_DATA}."
                yield Note("No layer sees ", [network.called(v)], end)

    def _absorbs(self, f: Any, stored: Format) -> str:
        """Clause about a sum whose larger numbers its smaller ones do not change."""
        small, large = sorted(map(self.amax, f.inputs))
        which = f"which stay as they are in {stored.name}"
        return f"adds numbers up to {small:.2g} to others up to {large:.3g}, {which}"

    def nearly_overflowing(self) -> Iterator[Note]:
        """Note the largest numbers, if they are at most two doublings below the end of the format."""
        network = self.network
        outputs = ((f, v) for f in network.graph.functions for v in f.outputs)
        large = [(f, v) for f, v in outputs if v.need_grad and v.size > 1 and network.format(v).bits > 8]
        for f, v in sorted(large, key=lambda one: self.amax(one[1]))[-1:]:
            stored, size, growth = network.format(v), self.amax(v), self.grown(f)
            # Raw data, and masks such as -1e4, are as large but do not grow in training.
            sums = (g for g, _, _ in self.steps(f) if remedies.is_a(g, "Add2", "Sub2", "Where"))
            is_masked = not all(max(g.inputs, key=self.amax).need_grad for g in sums)
            grows = growth.remedy != remedies.NORMALISE_DATA and not is_masked
            if grows and 0.25 * stored.max < size <= stored.max:
                begin = f"Numbers reach {size:.3g}, where {stored.name} ends at {stored.max:g}, in "
                yield Note(begin, [network.name(f)], f"{growth.clause}: {remedies.ROOM}.")

    def wrong_rows(self) -> Iterator[Cause]:
        """Functions that read computed indices that storage has rounded."""
        for f, count in self.sight.wrong_indices.items():
            v = f.inputs[INDICES[f.info.type_name]]
            stored, largest = self.network.format(v), self.amax(v)
            # Smaller whole numbers are exact: if such an index differs, it was chosen by inexact numbers.
            last = math.ldexp(2.0, stored.mantissa_bits)
            if count and largest > last:
                what = f"it takes {self.network.called(v)} for indices up to {largest:g}, of which {count} "
                what += f"change in {stored.name}, which holds all whole numbers up to {last:g} only"
                yield Cause("rounded_index", self.network.name(f), what, remedies.FEED_INDICES)

    def lone_constants(self) -> Iterator[Cause]:
        """Constants, as in log(1 - p + 1e-7), that alone keep numbers off 0, so that derivatives overflow."""
        network, gradients = self.network, self.sight.gradients
        for f, node in network.nodes.items():
            v = f.inputs[NOT_ZERO[node.type_name]] if node.type_name in NOT_ZERO else None
            g = None if v is None else v.parent
            if g is None or g.info.type_name not in CONSTANTS or not 0.0 < g.info.args["val"] < 2.0**-10:
                continue
            constant, stored = g.info.args["val"], network.gradient_format(v)
            read = self.sight.data.get(hash(v))
            arriving, size = (gradients.get(hash(w)) for w in (f.outputs[0], v))
            is_alone = read is not None and read.abs_min <= 2.0 * constant
            if is_alone and arriving and size and arriving.abs_max <= stored.max < size.abs_max:
                what = f"it reads numbers that only the constant {constant:g} of {network.name(g)} keeps "
                what += f"from 0: its gradient reaches {size.abs_max:.1e}, beyond {stored.name}, "
                what += f"which ends at {stored.max:g}"
                yield Cause("lone_constant", node.label, what, remedies.held(f))

    def changed(self, damaged: Sequence[str]) -> Optional[Cause]:
        """Cause of the first difference from fp32 that reaches a loss or a damaged layer in forward."""
        error_of, network = self.sight.error, self.network
        leads: Set[int] = set()  # keys of corrupted variables on the way to these
        origins: List[Tuple[Any, nn.Variable]] = []
        layers = [f for f in network.graph.functions if network.name(f) in damaged]
        behind = set(network.behind(hash(v) for f in layers for v in f.outputs))
        for f in reversed(network.graph.functions):
            leads.update(hash(v) for v in f.outputs if v.size == 1 and error_of(v) > 0.02)
            changed = not leads.isdisjoint(map(hash, f.outputs))
            # A factor that becomes 0 makes the other one's gradient 0.
            factors = f.inputs if f.info.type_name == "Mul2" and f in behind else ()
            vanishes = any(self.sight.lost(v)[0] == 1.0 for v in factors)
            if not (changed or vanishes or f in layers):
                continue
            before = [v for v in f.inputs if error_of(v) >= _DEVIATES]
            leads.update(map(hash, before))
            origins += [(f, v) for v in before if v.parent is None]
            error = max(map(error_of, f.outputs))
            # An error that accumulates over functions has no single origin.
            jumps = all(2.0 * error_of(v) < error for v in f.inputs)
            if changed and jumps and not (before or error < _DEVIATES):
                origins.append((f, f.outputs[0]))
        if not origins:
            # No error is large enough to be followed back: take the first function that multiplies one.
            for f in network.in_order(network.walk(behind)):
                error = max(map(error_of, f.outputs))
                if error > 0.1 and all(8.0 * error_of(v) < error for v in f.inputs):
                    return self._cause_of(f, f.outputs[0])
            return None
        origins.sort(key=lambda one: network.number(one[0]))
        cause = self._cause_of(*origins[0])
        if cause.remedy != remedies.LARGER:
            return cause
        alike = network.parameters(v for _, v in origins if self.sight.lost(v)[0] > _LOST)
        others = f" (like {listed(alike[1:])})" * bool(alike[1:])
        return cause._replace(what=cause.what + others, parameters=alike)

    def _cause_of(self, f: Any, v: nn.Variable) -> Cause:
        """Cause of a difference that begins in `v`, which `f` computes, or reads from a leaf."""
        network, name = self.network, self.network.name(f)
        source = repeated(v)  # a leaf that is only cut or reshaped is still read, not computed
        computed, error, stored = source.parent is not None, self.sight.error(v), network.format(v)
        lost, typical_lost = self.sight.lost(v)
        subject = "it computes numbers" if computed else f"it reads {network.called(source)}"
        if self.amax(v) > stored.max:
            return self.overflow(f, v, subject, self.grown(f) if computed else Growth())
        # Numbers that depend on data alone can be computed before they are stored.
        feeder = remedies.IN_FEEDER if computed and not v.need_grad else ""
        largest = max(map(self.amax, f.inputs), default=0.0)
        # Rounding errors of the inputs are a tenth as large as the outputs, or larger.
        size = math.sqrt(self.in_fp32.data[hash(v)].mean_square)
        cancels = math.ldexp(largest, -stored.mantissa_bits) > _LOST * size
        # The format could hold the lost numbers: the rounding of inputs has lost them, as 1 + 1e-5 becomes 1.
        lost_before = typical_lost > stored.smallest_subnormal
        sums = network.in_order(g for g in network.walk([f]) if g in self.sight.absorbing)
        if sums and (cancels or lost_before):
            others = f" (as in {len(sums) - 1} sums behind it)" * bool(sums[1:])
            what = f"it {self._absorbs(sums[0], stored)}{others}"
            return Cause("absorbed", network.name(sums[0]), what, feeder or remedies.SMALL_TERMS)
        if computed and cancels and f.info.type_name in ("Add2", "Sub2", "AddScalar", "RSubScalar"):
            what = f"it computes the difference of numbers up to {largest:.3g}, which is so small "
            what += f"beside them that {stored.name} holds it with an error of {error:.0%}"
            if self._is_finite_difference(f):
                return Cause("precision", name, what, remedies.LARGER_STEP)
            remedy = remedies.of_difference(f)
            remedy = (feeder or remedy) if remedy == remedies.DIFFERENCE else remedy
            return Cause("precision", name, what, remedy)
        difference = remedies.origin(f.inputs[0]) if computed and f.info.type_name == "Log" else None
        if remedies.is_a(difference, "Sub2", "RSubScalar"):
            what = f"{subject} with an error of {error:.0%} in {stored.name}, as {network.name(difference)} "
            what += "subtracts numbers whose last bit changes the difference"
            return Cause("precision", name, what, feeder or remedies.LOG_OF_DIFFERENCE)
        before: Any = f.inputs[0].parent if f.inputs else None
        if remedies.is_a(before, "Add2", "AddScalar"):
            # An operand of this sum has become 0 earlier, which the other one hides.
            gone = [self.first_zeros(w) for w in before.inputs if self.sight.lost(w)[0] > _LOST]
            if gone and gone[0].parent is not None:
                return self._cause_of(gone[0].parent, gone[0])
        if computed and lost_before and before is not None:
            what = f"it computes numbers, of which {lost:.0%} become 0 in {stored.name}, which holds too few "
            what += f"bits of the numbers up to {largest:.3g} that it reads from {network.name(before)}"
            return Cause("precision", name, what, feeder or remedies.SMALL_TERMS)
        first = self.first_zeros(v)  # computed earlier, if zeros are handed on
        if first != v and first.parent is not None and min(lost, self.sight.lost(first)[0]) > _LOST:
            return self._cause_of(first.parent, first)
        if lost > _LOST:
            what = f"{subject}, {'of which' if computed else 'of whose numbers'} {lost:.0%} become 0 in "
            what += f"{stored.name}, whose smallest is {stored.smallest_subnormal:.1g}"
            return self._underflow(f, v, what, computed)
        what = f"{subject} that come out with an error of {error:.0%} in {stored.name}"
        if not computed:
            return Cause("precision", name, what, remedies.MORE_BITS)
        return self._inexact(f, what, feeder)

    def _is_finite_difference(self, f: Any) -> bool:
        """True for a difference of two results of the same parameters, each with products of its own."""
        network, sides = self.network, [{*self.network.walk([w.parent])} for w in f.inputs]
        parameters = [{*network.parameters(v for g in side for v in g.inputs)} for side in sides]
        weighted = [side.intersection(network.weighted) for side in sides]
        is_same = len(sides) == 2 and bool(parameters[0]) and parameters[0] == parameters[1]
        return is_same and weighted[0].isdisjoint(weighted[1])

    def _underflow(self, f: Any, v: nn.Variable, what: str, computed: bool) -> Cause:
        """Cause of numbers of `v` that become 0 in storage; `computed` is true if no leaf holds them."""
        network, kind = self.network, f.info.type_name
        if hash(v) in network.names:
            return Cause("underflow", scope_of(network.names[hash(v)]), what, remedies.LARGER)
        growth = self.shrunk(f if computed else None)
        remedy = growth.remedy or remedies.TOO_SMALL
        gammas = [w for w in f.inputs if network.names.get(hash(w), "").endswith("gamma")]
        if kind == "Prod":
            remedy = remedies.LOGARITHMS
        elif computed and remedies.is_square(f) and not growth.remedy:
            remedy = remedies.MULTIPLY_FIRST.format("it")
        elif kind == "Exp":
            growth = self.grown(f)
            remedy = growth.remedy or remedies.EXP_OF_LESS
            what += self.reads(f)
        elif computed and gammas and self.amax(gammas[0]) * GROWN < 1.0:
            what += f", as {network.called(gammas[0])} is at most {self.amax(gammas[0]):.1g}"
            remedy, growth = remedies.GAMMA, Growth("", network.parameters(gammas))
        elif not computed and kind != "Mul2":
            remedy = remedies.SCALE_DATA
            # A target has the units of the prediction: large or small factors of both change units.
            both = (*network.walk([f]), *network.behind(map(hash, f.outputs)))
            factors = (g for g in both if remedies.is_a(g, "MulScalar"))
            units = network.listed(g for g in factors if not 2.0**-10 < abs(g.info.args["val"]) < 2.0**10)
            if units and kind in DIFFERENCES:
                remedy = remedies.NO_UNITS.format(units)
        return Cause("underflow", network.name(f), what + growth.clause, remedy, parameters=growth.parameters)

    def _inexact(self, f: Any, what: str, feeder: str) -> Cause:
        """Cause of large errors in numbers that `f` computes; `feeder`: the remedy if only data matter."""
        network, is_softmax = self.network, f.info.type_name in SOFTMAX
        before: Any = f.inputs[0].parent if is_softmax else None
        if remedies.is_a(before, "Add2", "Sub2"):
            small, large = sorted(map(self.amax, before.inputs))
            if 64.0 * small < large:
                what += f", as {network.name(before)} adds {large:.3g} to scores up to {small:.3g}"
                return Cause("precision", network.name(f), what, remedies.CHECK_MASK)
        if not is_softmax:
            what += self.reads(f)
        remedy = remedies.of_errors(f, feeder)
        if remedy == remedies.MORE_BITS:
            # Scores that a mask has made large and negative cause no errors: only trained ones are followed.
            growth = self.grown(before or f, trained=is_softmax)
            if growth.remedy == remedies.NORMALISE_DATA or (is_softmax and growth.remedy):
                what, remedy = what + growth.clause, growth.remedy
        return Cause("precision", network.name(f), what, remedy)
