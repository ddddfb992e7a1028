# SPDX-License-Identifier: Apache-2.0
"""Search for the first place of a pass that is not finite, beyond a format, or unlike fp32."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.formats import FLOAT32
from ..graph.description import type_name_of
from ..graph.functions import is_matrix_product
from . import remedies
from .target import NORMALIZATIONS, Network, Note, listed, scope_of
from .watching import Sight

# Relative change of an array, or of the loss, from which storage has corrupted it.
_DEVIATES = 0.25
_LOSS_DEVIATES = 0.02
# Factor of growth by weights from which it is reported.
_GROWN = 8.0
# Share of numbers that become 0 from which it is reported, and from which most do.
_LOST, _MOST = 0.1, 0.5

SOFTMAX = {"Softmax", "LogSoftmax"}
# Input that must not be 0.
_NOT_ZERO = {"Log": 0, "PowScalar": 0, "Pow2": 0, "Div2": 1, "RDivScalar": 0}
_DIVISIONS = {"Div2", "RDivScalar"}
# Constants below this one are against 0.
_SMALL = 2.0**-10
# Functions with a constant that may keep numbers away from 0.
_CONSTANTS = {"AddScalar", "MaximumScalar", "Constant"}


class Cause(NamedTuple):
    """Fault that no loss scale can fix, and its remedy."""

    kind: str  # such as "dead_relu"
    function: str  # its name in the updater
    what: str
    remedy: str
    fatal: bool = True  # True if nothing is learned before it is fixed
    spoils: Tuple[str, ...] = ()  # layers whose gradients no scale keeps because of it
    parameters: Tuple[str, ...] = ()  # those at fault, or without a gradient
    as_stored: bool = False  # True if fp32 does not have it

    def __str__(self) -> str:
        return f"{self.function}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}."


class _Step(NamedTuple):
    """Function, with the largest magnitude that it reads, and that it computes."""

    function: Any
    before: float
    after: float


class Finiteness:
    """Search for the origin of NaNs and infinities in one batch, in fp32 or as stored."""

    def __init__(self, network: Network, sight: Sight) -> None:
        self._network, self._sight = network, sight
        self._in_fp32 = sight.in_fp32 or sight
        self._is_stored = sight.in_fp32 is not None
        self._also = "" if self._is_stored else ", in fp32 too"

    def causes(self) -> List[Cause]:
        """Functions that cause a nonfinite loss or gradient, in forward order."""
        roots = self._bad(self._network.roots)
        return self._origins(roots) if roots else self._in_backward() or self._labels()

    def _bad(self, variables: Iterable[nn.Variable]) -> List[nn.Variable]:
        return [v for v in variables if hash(v) in self._sight.nans]

    def _labels(self) -> List[Cause]:
        """NaNs that a function reads as labels or indices, without a visible effect."""
        for v in self._bad(self._network.graph.leaves.values()):
            for f in self._network.readers[hash(v)] if self._sight.nans[hash(v)] else ():
                if type_name_of(f.info.type_name).endswith(("CrossEntropy", "Embed", "OneHot")):
                    what = f"it takes {self._network.called(v)} for numbers of classes, which holds "
                    what += self._sight.not_finite(v)
                    return [Cause("data_not_finite", self._network.name(f), what, remedies.CLEAN, False)]
        return []

    def _in_backward(self) -> List[Cause]:
        gradients, network = self._sight.gradients, self._network
        found: List[Tuple[bool, bool, Any]] = []
        for key, node in network.nodes.items():
            arriving = [gradients[k] for k in network.keys(node.outputs) if k in gradients]
            handed_on = network.keys((*node.inputs, *node.leaves))
            broken = [k for k in handed_on if k in gradients and not gradients[k].finite]
            if broken and arriving and all(s.finite for s in arriving):
                f = network.function(key)
                # If others read it as well, the gradient may be theirs.
                shared = all(len(network.readers[k]) > 1 for k in broken)
                found.append((shared, not (self._bad(f.inputs) or self._reads(f)), f))
        if not found:
            return []
        f = min(found, key=lambda one: one[:2])[2]
        bad = self._bad((*f.inputs, *f.outputs))
        if bad:
            return self._origins(bad)
        broken = [v for v in f.inputs if hash(v) in gradients and not gradients[hash(v)].finite]
        parameters = network.parameters(map(_repeated, broken))
        parameters = parameters if len(parameters) == len(broken) else ()
        of = f" of {listed(parameters)}" * bool(parameters)
        what = f"its gradient{of} is not finite{self._reads(f)}{self._also}"
        own = Cause("backward_not_finite", network.name(f), what, remedies.of(f), parameters=parameters)
        return [(self.before(f) or own)._replace(as_stored=self._is_stored)]

    def _origins(self, variables: List[nn.Variable]) -> List[Cause]:
        """Follow nonfinite variables back to functions of finite inputs."""
        network, waiting, seen = self._network, list(variables), set()
        found: List[Tuple[Any, nn.Variable]] = []
        while waiting:
            v = waiting.pop()
            before = [] if hash(v) in seen else self._to_blame(v)
            waiting += before
            if not before and hash(v) not in seen:
                found.append((network.readers[hash(v)][0] if v.parent is None else v.parent, v))
            seen.add(hash(v))
        found.sort(key=lambda one: network.graph.numbers[hash(one[0])])
        leaves = [(f, v) for f, v in found if v.parent is None]
        others = f" ({len(leaves) - 1} other inputs or parameters are not finite either)" * bool(leaves[1:])
        causes: Dict[Tuple[str, str], Cause] = {}
        for f, v in [one for one in found if one[1].parent is not None or one in leaves[:1]]:
            computed = v.parent is not None and not self._is_mask(v)
            cause = self._computed(f, v) if computed else self._leaf(f, v, others)
            parameters = cause.parameters or network.parameters([v])
            cause = cause._replace(parameters=parameters, as_stored=self._is_stored)
            causes.setdefault((cause.kind, f.info.type_name), cause)
        return list(causes.values())

    def _is_mask(self, v: nn.Variable) -> bool:
        """True if a variable has minus infinities from a user."""
        if self._sight.nans[hash(v)] or self._sight.infinities[hash(v)]:
            return False
        return v.parent is None or -math.inf in v.parent.info.args.values()

    def _to_blame(self, v: nn.Variable) -> List[nn.Variable]:
        """Inputs that explain the NaNs and infinities of a variable computed from them."""
        if v.parent is None:
            return []
        bad = self._bad(v.parent.inputs)
        nans = [w for w in bad if self._sight.nans[hash(w)]]
        if not self._sight.nans[hash(v)]:
            return [w for w in bad if w not in nans] or bad
        # A softmax of minus infinities is fine, unless a row has only these.
        if nans or v.parent.info.type_name not in SOFTMAX:
            return nans or bad
        return [w for w in bad if self._sight.infinities[hash(w)]]

    def _leaf(self, f: Any, v: nn.Variable, others: str) -> Cause:
        network, name = self._network, self._network.name(f)
        called, sight = network.called(v), self._sight
        if self._is_stored and v.parent is None:
            what = f"it reads {called}, which reaches {self._beyond(v)}"
            return Cause("beyond_format", name, what, remedies.INTO_RANGE)
        if self._is_mask(v):
            # A mask: the cause is the function that turns it into NaN.
            for g in network.graph.functions:
                if any(sight.nans.get(hash(w)) for w in g.outputs):
                    what = f"it makes NaN of the minus infinities that {called} holds"
                    what += ": 0 times infinity is NaN" * (g.info.type_name == "Mul2")
                    return Cause("not_finite", network.name(g), what, remedies.MASK)
        what = f"it reads {called}, which holds {sight.not_finite(v)}{others}"
        if hash(v) in network.names:
            return Cause("weight_not_finite", name, what, remedies.RESTORE)
        return Cause("data_not_finite", name, what, remedies.CLEAN)

    def _computed(self, f: Any, v: nn.Variable) -> Cause:
        network, name, bad = self._network, self._network.name(f), self._bad(f.inputs)
        if bad:
            what = f"it reads rows of minus infinity alone from {network.called(bad[0])}{self._also}"
            leaves = [w for g in network.walk([f]) for w in g.inputs if w.parent is None and self._is_stored]
            for mask in [w for w in leaves if self._amax(w) > network.format(w).max][:1]:
                what += f", as {network.called(mask)} reaches {self._beyond(mask)}"
            return Cause("closed_row", name, what, remedies.OPEN_ROWS)
        before = self.before(f)
        if before is not None:
            return before
        if self._is_stored and self._amax(v) > network.format(v).max:
            grown, parameters = self.grown(f)
            what = f"it computes numbers up to {self._beyond(v)}{self._reads(f)}{grown}"
            return Cause("overflow", name, what, remedies.of(f, too_large=True), parameters=parameters)
        what = f"it computes {self._sight.not_finite(v)} from finite numbers{self._reads(f)}{self._also}"
        grown, parameters = self.grown(f)
        g = remedies.difference_before(f)
        remedy = remedies.of(g) if g is not None and self._is_stored else remedies.of(f)
        if math.inf in map(abs, filter(_is_number, f.info.args.values())):
            remedy = remedies.MASK
        elif self._negatives(f) and remedy in (remedies.AWAY, remedies.LOG):
            remedy = remedies.ABOVE
        remedy = self._scaled_before(f, remedy)
        return Cause("not_finite", name, what + grown, remedy, parameters=parameters)

    def before(self, f: Any) -> Optional[Cause]:
        """Find what makes a function's inputs 0 or large: a constant as stored, a running variance of 0."""
        network = self._network
        for g in network.walk([w.parent for w in self._vanishing(f)], self._vanishing):
            constant = g.info.args.get("val") if g.info.type_name in _CONSTANTS else None
            stored = network.format(g.outputs[0])
            if constant and not stored.nearest(constant):
                what = f"its constant {constant:g} is 0 in {stored.name}{self._reads(f, network.name(f))}"
                remedy = remedies.HELD_IN_LOG if f.info.type_name == "Log" else remedies.HELD
                return Cause("lost_constant", network.name(g), what, self._scaled_before(f, remedy))
        for g in network.in_order(network.walk([f])):
            cause = self._variance(g)
            if cause is not None and not self._amax(g.outputs[0]) < _GROWN * self._amax(g.inputs[0]):
                return cause
        return None

    def _variance(self, f: Any) -> Optional[Cause]:
        """Cause of a normalization by a running variance that is 0."""
        if f.info.args.get("batch_stat", True) or not f.info.type_name.endswith("BatchNormalization"):
            return None
        v, network = f.inputs[4], self._network
        seen, parameters = self._in_fp32.data.get(hash(v)), network.parameters([v])
        zeros = 0 if seen is None else seen.zeros
        what = f"it divides by {network.called(v)}, which is 0 in {zeros} of {v.size} channels"
        found = Cause("zero_variance", network.name(f), what, remedies.STATISTICS, parameters=parameters)
        return found if zeros else None

    def _vanishing(self, f: Any) -> List[nn.Variable]:
        """Inputs of a function with elements that are 0 as stored alone."""
        return [v for v in f.inputs if self._vanished(v) > 0]

    def _vanished(self, v: nn.Variable) -> int:
        """Number of elements that are 0 as stored alone."""
        now, before = (one.data.get(hash(v)) for one in (self._sight, self._in_fp32))
        return now.zeros - before.zeros if now and before else 0

    def _first_zeros(self, v: nn.Variable) -> nn.Variable:
        """First variable on the way to another with at least half its share of numbers that become 0."""
        least = self._vanished(v) / v.size / 2.0

        def lost(g: Any) -> List[nn.Variable]:
            return [w for w in g.inputs if self._vanished(w) >= max(least * w.size, 1.0)]

        for g in self._network.in_order(self._network.walk([v.parent], lost)):
            leaves = [w for w in lost(g) if w.parent is None]
            if leaves or not lost(g):
                return [*leaves, *g.outputs][0]
        return v

    def _scaled_before(self, f: Any, remedy: str) -> str:
        """Remedy that also keeps the numbers that become 0 before a function, if those are most."""
        kind = f.info.type_name
        v = f.inputs[_NOT_ZERO[kind]] if kind in _NOT_ZERO else None
        if v is None or not self._is_stored or self._vanished(v) <= _MOST * v.size:
            return remedy
        first = self._first_zeros(v)
        g = first.parent
        if g is None:
            return f"{remedies.SCALE_DATA}, and {remedy}"
        if g.info.type_name == "PowScalar" or (g.info.type_name == "Mul2" and g.inputs[0] == g.inputs[1]):
            return f"multiply what {self._network.name(g)} reads by a constant first, and {remedy}"
        is_product = g.info.type_name in ("Mul2", "Prod") or is_matrix_product(g.info.type_name)
        return remedies.CHAIN if is_product else remedy

    def _amax(self, v: nn.Variable) -> float:
        seen = self._in_fp32.data.get(hash(v))
        return 0.0 if seen is None else FLOAT32.max if seen.nonfinite else seen.abs_max

    def _beyond(self, v: nn.Variable) -> str:
        stored = self._network.format(v)
        return f"{self._amax(v):.3g}, beyond {stored.name}, which ends at {stored.max:g}"

    def _reads(self, f: Any, subject: str = "it") -> str:
        """Clause about a function's inputs that explains its result."""
        kind, args, network = f.info.type_name, f.info.args, self._network
        power = args["val"] if kind == "PowScalar" else 0.5
        # A square of 0 is harmless.
        if kind in _NOT_ZERO and power < 1.0:
            v = f.inputs[_NOT_ZERO[kind]]
            negative = self._negatives(f)
            if negative:
                source = f" from {network.called(v)}{self._difference(f)}"
                return f", as {subject} reads {negative} number{'s' * (negative > 1)} below 0{source}"
            now, more = self._sight.data.get(hash(v)), self._vanished(v)
            if now is not None and now.zeros:
                verb = "divides by" if kind in _DIVISIONS else "reads"
                if more <= 0:
                    return f", as {subject} {verb} {now.zeros} zero{'s' * (now.zeros > 1)}"
                number = "1 number that becomes" if more == 1 else f"{more} numbers that become"
                first = self._first_zeros(v)
                begins = "" if first is v else f" from {network.called(first)} on"
                return f", as {subject} {verb} {number} 0 in {network.format(v).name}{begins}"
        sizes = [(self._amax(v), v) for v in f.inputs if hash(v) not in network.names]
        if not sizes:
            return ""
        size, v = max(sizes, key=lambda one: one[0])
        is_beyond = v.parent is not None and size > network.format(v).max
        what = f" from {network.called(_repeated(v))}" if v.parent is None or is_beyond else ""
        if kind == "Sum":
            return f", as it adds up {v.size // max(f.outputs[0].size, 1)} numbers of up to {size:.3g}{what}"
        factor = f", and multiplies by {args['val']:g}" if kind == "MulScalar" else ""
        return f", as it reads numbers up to {size:.3g}{what}{factor}"

    def _negatives(self, f: Any) -> int:
        """Number of negative inputs of a function that is not defined for them."""
        power = f.info.args["val"] if f.info.type_name == "PowScalar" else 0.5
        return self._sight.negatives.get(hash(f), 0) if power != int(power) else 0

    def _difference(self, f: Any) -> str:
        """Clause about a difference that is below 0 as stored but not in fp32."""
        g = remedies.difference_before(f)
        in_fp32 = not self._is_stored or self._in_fp32.negatives.get(hash(f))
        if in_fp32 or g is None:
            return ""
        largest = max(map(self._amax, g.inputs))
        return f", and in fp32 none: {self._network.name(g)} subtracts numbers up to {largest:.3g}"

    def grown(self, f: Any) -> Tuple[str, Tuple[str, ...]]:
        """Clause about the operand or recurrence that enlarged numbers before `f`; and its parameters."""
        steps = self._steps(f)
        start = min(range(len(steps)), key=lambda i: steps[i].before or math.inf)
        for g, before, after in reversed(steps[start:]):
            for what, name, added in self._addends(g):
                if 2.0 * added > after > 2.0 * before:
                    return f"; {what}{name} reaches {added:.3g}", (name,) * bool(name)
        return self._growth(steps[start:], "numbers")

    def _steps(self, f: Any) -> List[_Step]:
        """Functions up to `f`, along the largest inputs."""
        steps: List[_Step] = []
        while f is not None:
            known = [v for v in f.inputs if hash(v) not in self._network.names]
            read = max(known, key=self._amax, default=None)
            size = 0.0 if read is None else self._amax(read)
            # A nonfinite output does not show growth.
            made = max(map(self._amax, f.outputs))
            steps.insert(0, _Step(f, size, made if made < FLOAT32.max else size))
            f = None if read is None else read.parent
        return steps

    def _growth(
        self, steps: Sequence[_Step], noun: str, *, shrinks: bool = False
    ) -> Tuple[str, Tuple[str, ...]]:
        """Clause about operands that enlarge numbers, or shrink them, and the parameters among them."""
        uses: Dict[Tuple[str, str], List[float]] = {}
        first = ""
        sign, verb, size = (-1.0, "shrink", "smaller") if shrinks else (1.0, "grow", "larger")
        for g, before, after in steps:
            times = (after / before) ** sign if after and before else 0.0
            operand = self._factor(g, times) if times > 1.0 else ("", "")
            if any(operand) and not (shrinks and g.info.type_name in NORMALIZATIONS):
                first = first or self._network.name(g)
                uses.setdefault(operand, []).append(math.log(times))
        total = sum(map(sum, uses.values()))
        if total < math.log(_GROWN):
            return "", ()
        (factor, name), grown = max(uses.items(), key=lambda one: sum(one[1]))
        if sum(grown) < total / 2.0:
            times = min(math.exp(total), (steps[-1].after / (steps[0].before or math.inf)) ** sign)
            told = f"; {noun} {verb} from layer to layer, {times:.2g} times from {first} on"
            return told, tuple(name for _, name in uses if name)
        makes = f"makes {noun} {math.exp(sum(grown) / len(grown)):.2g} times {size}"
        if len(grown) > 1:
            makes = f"is applied {len(grown)} times, and {makes} each time"
        return f"; {factor}{name} {makes}", (name,) * bool(name)

    def exploded(self) -> Optional[Cause]:
        """Cause of a gradient that grows from function to function beyond its format."""
        network = self._network
        steps: List[_Step] = []
        f = max(map(network.function, network.nodes), key=self._gradient)
        stored, name, size = network.gradient_format(f.outputs[0]), network.name(f), self._gradient(f)
        while f is not None and size > stored.max:
            readers = (g for v in f.outputs for g in network.readers.get(hash(v), ()))
            of_nodes = (g for g in readers if hash(g) in network.nodes)
            behind = max(of_nodes, key=self._gradient, default=None)
            if behind is not None:
                steps.insert(0, _Step(behind, self._gradient(behind), self._gradient(f)))
            f = behind
        start = min(range(len(steps)), key=lambda i: steps[i].before or math.inf, default=0)
        grown, parameters = self._growth(steps[start:], "gradients")
        times = [after / (before or math.inf) for _, before, after in steps[start:]]
        if not grown or max(times) ** 2 > math.prod(times):
            return None
        what = f"its gradient reaches {size:.1e}, beyond {stored.name}, which ends at {stored.max:g}{grown}"
        return Cause("exploding_gradient", name, what, remedies.EXPLODING, False, (), parameters, True)

    def kept_in_fp32(self) -> Optional[Note]:
        """Note a loss beyond the format, which only fp32 at the loss keeps finite."""
        for f in self._network.graph.functions:
            v, seen = f.outputs[0], self._sight.data.get(hash(f.outputs[0]))
            if v.size == 1 and seen is not None and seen.abs_max > self._network.format(v).max:
                begin = f"The loss reaches {self._beyond(v)}, at "
                end = ": AdaptiveLossScalingUpdater computes it in fp32; without that it would be infinite"
                return Note(begin, [self._network.name(f)], f"{end}. {remedies.MEAN_LOSS}.")
        return None

    def _gradient(self, f: Any) -> float:
        known = (self._in_fp32.gradients.get(hash(v)) for v in f.outputs)
        return max((one.abs_max for one in known if one is not None), default=0.0)

    def lone_constants(self) -> Iterator[Cause]:
        """Constants that alone keep numbers from 0, and are so small that a derivative leaves the format."""
        network, gradients = self._network, self._sight.gradients
        for key, node in network.nodes.items():
            f = network.function(key)
            v = f.inputs[_NOT_ZERO[node.type_name]] if node.type_name in _NOT_ZERO else None
            g = None if v is None else v.parent
            if g is None or g.info.type_name not in _CONSTANTS or not 0.0 < g.info.args["val"] < _SMALL:
                continue
            constant, stored = g.info.args["val"], network.gradient_format(v)
            read = self._sight.data.get(hash(v))
            arriving, size = (gradients.get(hash(w)) for w in (f.outputs[0], v))
            is_alone = read is not None and read.abs_min <= 2.0 * constant
            if is_alone and arriving and size and arriving.abs_max <= stored.max < size.abs_max:
                what = (
                    f"it reads numbers that only the constant {constant:g} of {network.name(g)} keeps from 0"
                )
                before = [w.parent for w in self._vanishing(g) if w.parent is not None]
                if before and before[0].info.type_name == "RSubScalar":
                    one = before[0].info.args["val"]
                    what += f", as numbers near {one:g} become {one:g} in {stored.name}"
                what += f": its gradient reaches {size.abs_max:.1e}, beyond {stored.name}, "
                what += f"which ends at {stored.max:g}"
                remedy = remedies.HELD_IN_LOG if node.type_name == "Log" else remedies.HELD
                yield Cause("lone_constant", node.label, what, remedy, False, as_stored=True)

    def _addends(self, f: Any) -> Iterator[Tuple[str, str, float]]:
        """Constants and parameters that a function adds, in words and by name, and their magnitudes."""
        if f.info.type_name == "AddScalar":
            yield f"the constant of {self._network.name(f)}", "", abs(f.info.args["val"])
        for v in f.inputs[1:]:
            name = self._network.names.get(hash(v), "")
            if name and (v.ndim == 1 or name.endswith("beta") or f.info.type_name == "Add2"):
                yield "the bias ", name, self._amax(v)

    def _factor(self, f: Any, growth: float) -> Tuple[str, str]:
        """Operand by which a function enlarges numbers, in words and by name; empty for none."""
        kind, network = f.info.type_name, self._network
        if kind == "MulScalar":
            return f"the factor {f.info.args['val']:g} of {network.name(f)}", ""
        named = {network.names[hash(v)]: v for v in f.inputs if hash(v) in network.names and v.ndim > 1}
        if kind.endswith("Normalization"):
            for name, v in named.items():
                if name.endswith("gamma") and self._amax(v) ** 2 >= growth:
                    return "the weight ", name
            return f"the division by a small deviation in {network.name(f)}", ""
        weight = max(named, key=lambda name: self._amax(named[name]), default="")
        if weight:
            return "the weight ", weight
        if kind == "Div2":
            return f"the division by {network.called(f.inputs[1])}", ""
        return f"the product with {network.called(f.inputs[1])}" if kind == "Mul2" else "", ""

    def changed(self, damaged: Sequence[str]) -> Optional[Cause]:
        """Causes of differences of stored forward from fp32 that reach a loss or a damaged layer."""
        error_of, network = self._sight.error, self._network
        leads: Set[int] = set()
        origins: List[Tuple[Any, nn.Variable]] = []
        layers = [f for f in network.graph.functions if network.name(f) in damaged]
        behind = set(map(hash, network.behind(hash(v) for f in layers for v in f.outputs)))
        for f in reversed(network.graph.functions):
            single = (v for v in f.outputs if v.size == 1)
            leads.update(hash(v) for v in single if error_of(v) > _LOSS_DEVIATES)
            changed = not leads.isdisjoint(map(hash, f.outputs))
            # A factor that becomes 0 makes the other one's gradient 0.
            factors = f.inputs if f.info.type_name == "Mul2" and hash(f) in behind else ()
            vanishes = any(self._sight.lost(v)[0] == 1.0 for v in factors)
            if not (changed or vanishes or f in layers):
                continue
            before = [v for v in f.inputs if not error_of(v) < _DEVIATES]
            leads.update(map(hash, before))
            origins += [(f, v) for v in before if v.parent is None]
            error = max(map(error_of, f.outputs))
            # An error that accumulates over functions has no single origin.
            jumps = all(2.0 * error_of(v) < error for v in f.inputs)
            if changed and jumps and not (before or error < _DEVIATES):
                origins.append((f, f.outputs[0]))
        if not origins:
            return None
        origins.sort(key=lambda one: network.graph.numbers[hash(one[0])])
        cause = self._begins(*origins[0])
        if cause.remedy != remedies.LARGER:
            return cause
        alike = network.parameters(v for _, v in origins if self._sight.lost(v)[0] > _LOST)
        others = f" (like {listed(alike[1:])})" * bool(alike[1:])
        return cause._replace(what=cause.what + others, parameters=alike)

    def _begins(self, f: Any, v: nn.Variable) -> Cause:
        """Cause of a difference in a variable that `f` computes, or reads from a leaf."""
        network, name = self._network, self._network.name(f)
        # A function that only cuts or reshapes data computes nothing.
        source = _repeated(v)
        own, error, stored = source.parent is not None, self._sight.error(v), network.format(v)
        lost, typical_lost = self._sight.lost(v)
        subject = "it computes numbers" if own else f"it reads {network.called(source)}"
        if self._amax(v) > stored.max:
            grown, parameters = self.grown(f) if own else ("", ())
            what = f"{subject} up to {self._beyond(v)}{grown}"
            return Cause("overflow", name, what, remedies.of(f, too_large=True), parameters=parameters)
        largest = max(map(self._amax, f.inputs), default=0.0)
        # Rounding errors of its inputs are as large as its outputs.
        size = math.sqrt(self._in_fp32.data[hash(v)].mean_square)
        cancels = math.ldexp(largest, -stored.mantissa_bits) > _LOST * size
        if own and cancels and f.info.type_name in ("Add2", "Sub2", "AddScalar", "RSubScalar"):
            what = f"it computes the difference of numbers up to {largest:.3g}, which is so small "
            what += f"beside them that {stored.name} holds it with an error of {error:.0%}"
            return Cause("precision", name, what, remedies.of(f))
        before = f.inputs[0].parent if f.inputs else None
        if own and typical_lost > stored.smallest_subnormal and before is not None:
            # Its input was not 0, but for example 1 + 1e-5.
            what = f"it computes numbers, of which {lost:.0%} become 0 in {stored.name}, which "
            what += f"holds too few bits of the numbers up to {largest:.3g} that it reads from "
            what += network.name(before)
            return Cause("precision", name, what, remedies.SMALL_TERMS)
        if lost > _LOST:
            what = f"{subject}, {'of which' if own else 'of whose numbers'} {lost:.0%} become 0 in "
            what += f"{stored.name}, whose smallest is {stored.smallest_subnormal:.1g}"
            factors = factors_in_words(network, list(network.walk([f])))
            if hash(v) in network.names:
                what += factors
                return Cause("underflow", scope_of(network.names[hash(v)]), what, remedies.LARGER)
            steps = self._steps(f) if own and not factors else []
            start = max(range(len(steps)), key=lambda i: steps[i].before, default=0)
            shrunk, parameters = self._growth(steps[start:], "numbers", shrinks=True)
            remedy = remedies.VANISHING if parameters else remedies.TOO_SMALL
            if f.info.type_name == "Prod":
                remedy = remedies.LOGARITHMS
            elif not own and f.info.type_name != "Mul2":
                remedy = remedies.SCALE_DATA
            return Cause("underflow", name, what + factors + shrunk, remedy, parameters=parameters)
        what = f"{subject} that come out with an error of {error:.0%} in {stored.name}"
        what += self._reads(f) if own else ""
        periodic = own and f.info.type_name in ("Sin", "Cos")
        return Cause("precision", name, what, remedies.PERIOD if periodic else remedies.MORE_BITS)


def factors_in_words(network: Network, functions: List[Any]) -> str:
    """Product of small constant factors, if there are several."""
    found = [f for f in functions if f.info.type_name == "MulScalar" and 0.0 < abs(f.info.args["val"]) < 1.0]
    if len(found) < 2:
        return ""
    product = math.prod(abs(f.info.args["val"]) for f in found)
    told = ", ".join(f"{f.info.args['val']:g} in {network.name(f)}" for f in reversed(found[:4]))
    return f" (factors multiply to {product:.1e}: {told}{', ...' * (len(found) > 4)})"


def _repeated(v: nn.Variable) -> nn.Variable:
    """Variable that functions have only cut, reshaped or repeated."""
    while v.parent is not None and v.parent.info.type_name in (
        "Broadcast",
        "BroadcastTo",
        "Reshape",
        "Slice",
    ):
        v = v.parent.inputs[0]
    return v


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
