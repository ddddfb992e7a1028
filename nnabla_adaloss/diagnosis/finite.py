# SPDX-License-Identifier: Apache-2.0
"""First place of a pass that is not finite, beyond a format, or not as in fp32, and its inputs."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.formats import FLOAT32, Format
from ..graph.description import type_name_of
from .target import Network
from .watching import Sight

# Storage that changes an array by this share of it has made something else of it; and a loss.
_DEVIATES = 0.25
_LOSS_DEVIATES = 0.02
# How much weights must have enlarged numbers for that to be told.
_GROWN = 8.0
# The share of numbers that become 0 that is told.
_LOST = 0.1

_DIFFERENCE = "take the difference before numbers become large (subtract the mean first), or in fp32"

_SOFTMAX = {"Softmax", "LogSoftmax"}
# Which input must not be 0.
_NOT_ZERO = {"Log": 0, "PowScalar": 0, "Pow2": 0, "Div2": 1, "RDivScalar": 0}
_DIVISIONS = {"Div2", "RDivScalar"}


class Cause(NamedTuple):
    """Something that no loss scale mends, and what to do about it."""

    kind: str  # in a word: "dead_relu"
    function: str  # its name, as the updater has it
    what: str
    remedy: str
    fatal: bool = True  # whether nothing at all is learned before it is mended
    spoils: Tuple[str, ...] = ()  # the layers whose gradients no scale keeps for that

    def __str__(self) -> str:
        return f"{self.function}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}."


class Finiteness:
    """Search for the origin of NaNs and infinities in one batch, in fp32 or as stored."""

    def __init__(self, network: Network, sight: Sight) -> None:
        self._network, self._sight = network, sight
        self._in_fp32 = sight.in_fp32 or sight
        self._is_stored = sight.in_fp32 is not None
        self._also = "" if self._is_stored else ", in fp32 too"

    def cause(self) -> Optional[Cause]:
        """The first function in forward order that is to blame for a loss or a gradient, if there is one."""
        roots = self._bad(self._network.roots)
        return self._origin(roots) if roots else self._in_backward() or self._labels()

    def _bad(self, variables: Iterable[nn.Variable]) -> List[nn.Variable]:
        return [v for v in variables if hash(v) in self._sight.nans]

    def _labels(self) -> Optional[Cause]:
        """NaNs that a function takes for labels or indices, which harm nothing that can be seen."""
        for v in self._bad(self._network.graph.leaves.values()):
            for f in self._network.readers[hash(v)] if self._sight.nans[hash(v)] else ():
                if type_name_of(f.info.type_name).endswith(("CrossEntropy", "Embed", "OneHot")):
                    what = f"it takes {self._network.called(v)} for numbers of classes, which holds "
                    what += self._sight.not_finite(v)
                    return Cause("data_not_finite", self._network.name(f), what, "clean the data", False)
        return None

    def _in_backward(self) -> Optional[Cause]:
        gradients, network = self._sight.gradients, self._network
        found: List[Tuple[bool, bool, Any]] = []
        for key, node in network.nodes.items():
            arriving = [gradients[k] for k in network.keys(node.outputs) if k in gradients]
            handed_on = network.keys((*node.inputs, *node.leaves))
            broken = [k for k in handed_on if k in gradients and not gradients[k].finite]
            if broken and arriving and all(s.finite for s in arriving):
                f = network.function(key)
                # Where others read it as well, the gradient may be theirs.
                shared = all(len(network.readers[k]) > 1 for k in broken)
                found.append((shared, not (self._bad(f.inputs) or self._reads(f)), f))
        if not found:
            return None
        f = min(found, key=lambda one: one[:2])[2]
        bad = self._bad((*f.inputs, *f.outputs))
        if bad:
            return self._origin(bad)
        what = f"its gradient is not finite{self._reads(f)}{self._also}"
        return Cause("backward_not_finite", network.name(f), what, _remedy(f))

    def _origin(self, variables: List[nn.Variable]) -> Cause:
        """Go back from what is not finite to what is computed from finite numbers."""
        network, waiting, seen = self._network, list(variables), set()
        found: List[Tuple[Any, nn.Variable]] = []
        while waiting:
            v = waiting.pop()
            before = [] if hash(v) in seen else self._to_blame(v)
            waiting += before
            if not before and hash(v) not in seen:
                found.append((network.readers[hash(v)][0] if v.parent is None else v.parent, v))
            seen.add(hash(v))
        f, v = min(found, key=lambda one: network.graph.numbers[hash(one[0])])
        if v.parent is not None:
            return self._computed(f, v)
        others = sum(w.parent is None for _, w in found) - 1
        return self._leaf(
            f, v, f" ({others} other inputs or parameters are not finite either)" * (others > 0)
        )

    def _to_blame(self, v: nn.Variable) -> List[nn.Variable]:
        """Inputs that account for the NaNs and infinities of a variable computed from them."""
        if v.parent is None:
            return []
        bad = self._bad(v.parent.inputs)
        nans = [w for w in bad if self._sight.nans[hash(w)]]
        if not self._sight.nans[hash(v)]:
            return [w for w in bad if w not in nans] or bad
        # A softmax of minus infinities is fine, unless a row has nothing else.
        if nans or v.parent.info.type_name not in _SOFTMAX:
            return nans or bad
        return [w for w in bad if self._sight.infinities[hash(w)]]

    def _leaf(self, f: Any, v: nn.Variable, others: str) -> Cause:
        network, name = self._network, self._network.name(f)
        called, sight = network.called(v), self._sight
        if self._is_stored:
            what = f"it reads {called}, which reaches {self._beyond(v)}"
            return Cause("beyond_format", name, what, "bring it into range, or use a wider format")
        if not (sight.nans[hash(v)] or sight.infinities[hash(v)]):
            # A mask: whoever makes NaN of it.
            for g in network.graph.functions:
                if any(sight.nans.get(hash(w)) for w in g.outputs):
                    what = f"it makes NaN of the minus infinities that {called} holds"
                    what += ": 0 times infinity is NaN" * (g.info.type_name == "Mul2")
                    return Cause(
                        "not_finite", network.name(g), what, "mask with a finite number, such as -1e4"
                    )
        what = f"it reads {called}, which holds {sight.not_finite(v)}{others}"
        if hash(v) in network.names:
            return Cause("weight_not_finite", name, what, "restore earlier weights")
        return Cause("data_not_finite", name, what, "clean the data, or leave such samples out")

    def _computed(self, f: Any, v: nn.Variable) -> Cause:
        network, name, bad = self._network, self._network.name(f), self._bad(f.inputs)
        if bad:
            what = f"it reads rows of minus infinity alone from {network.called(bad[0])}{self._also}"
            leaves = [w for g in network.walk([f]) for w in g.inputs if w.parent is None and self._is_stored]
            for mask in [w for w in leaves if self._amax(w) > network.format(w).max][:1]:
                what += f", as {network.called(mask)} reaches {self._beyond(mask)}"
            remedy = "a mask must leave one place per row open, and mask with a number that the format holds"
            return Cause("closed_row", name, what, remedy)
        if self._is_stored and self._amax(v) > network.format(v).max:
            what = f"it computes numbers up to {self._beyond(v)}{self._reads(f)}{self._grown(f)}"
            return Cause("overflow", name, what, _remedy(f, too_large=True))
        what = f"it computes {self._sight.not_finite(v)} from finite numbers{self._reads(f)}{self._also}"
        what += self._grown(f)
        remedy = _DIFFERENCE if f.info.type_name == "PowScalar" and self._difference(f) else _remedy(f)
        return Cause("not_finite", name, what, remedy)

    def _amax(self, v: nn.Variable) -> float:
        seen = self._in_fp32.data.get(hash(v))
        return 0.0 if seen is None else FLOAT32.max if seen.nonfinite else seen.abs_max

    def _beyond(self, v: nn.Variable) -> str:
        stored = self._network.format(v)
        return f"{self._amax(v):.3g}, beyond {stored.name}, which ends at {stored.max:g}"

    def _reads(self, f: Any) -> str:
        """Clause about the numbers that a function reads, which explain its result."""
        kind, args, network = f.info.type_name, f.info.args, self._network
        power = args["val"] if kind == "PowScalar" else 0.5
        # A square of 0 is nothing to worry about.
        if kind in _NOT_ZERO and power < 1.0:
            v = f.inputs[_NOT_ZERO[kind]]
            negative = self._sight.negatives.get(hash(f), 0)
            if negative and power != int(power):
                return f", as it reads {negative} number{'s' * (negative > 1)} below 0{self._difference(f)}"
            now, before = (one.data.get(hash(v)) for one in (self._sight, self._in_fp32))
            if now is not None and now.zeros:
                verb = "divides by" if kind in _DIVISIONS else "reads"
                more = 0 if before is None else now.zeros - before.zeros
                if more <= 0:
                    return f", as it {verb} {now.zeros} zero{'s' * (now.zeros > 1)}"
                number = "1 number that becomes" if more == 1 else f"{more} numbers that become"
                stored = network.format(v)
                return f", as it {verb} {number} 0 in {stored.name}{_lost_constant(network, v, stored)}"
        sizes = [(self._amax(v), v) for v in f.inputs if hash(v) not in network.names]
        if not sizes:
            return ""
        size, v = max(sizes, key=lambda one: one[0])
        what = f" from {network.called(v)}" if v.parent is None else ""
        if kind == "Sum":
            return f", as it adds up {v.size // max(f.outputs[0].size, 1)} numbers of up to {size:.3g}{what}"
        factor = f", and multiplies by {args['val']:g}" if kind == "MulScalar" else ""
        return f", as it reads numbers up to {size:.3g}{what}{factor}"

    def _difference(self, f: Any) -> str:
        """The difference that is below 0 as stored, and not in fp32."""
        g = f.inputs[0].parent
        while g is not None and g.info.type_name in ("AddScalar", "MulScalar", "Reshape", "Broadcast"):
            g = g.inputs[0].parent
        in_fp32 = not self._is_stored or self._in_fp32.negatives.get(hash(f))
        if in_fp32 or g is None or g.info.type_name != "Sub2":
            return ""
        largest = max(map(self._amax, g.inputs))
        return f", and in fp32 none: {self._network.name(g)} subtracts numbers up to {largest:.3g}"

    def _grown(self, f: Any) -> str:
        """Clause about the weight or recurrence that made numbers grow on their way to `f`."""
        names = self._network.names
        # Functions, what they read, and what they compute.
        steps: List[Tuple[Any, float, float]] = []
        while f is not None:
            known = [v for v in f.inputs if hash(v) not in names]
            read = max(known, key=self._amax, default=None)
            size = 0.0 if read is None else self._amax(read)
            steps.insert(0, (f, size, max(map(self._amax, f.outputs))))
            f = None if read is None else read.parent
        start = min(range(len(steps)), key=lambda i: steps[i][1] or math.inf)
        uses: Dict[str, List[float]] = {}
        first = ""
        for g, before, size in reversed(steps[start:]):
            for v in g.inputs[1:]:
                if v.ndim == 1 and hash(v) in names and 2.0 * self._amax(v) > size > 2.0 * before:
                    return f"; the bias {names[hash(v)]} reaches {self._amax(v):.3g}"
        for g, before, size in steps[start:]:
            weight = next((names[hash(v)] for v in g.inputs if hash(v) in names and v.ndim > 1), "")
            if weight and size > before > 0.0:
                first = first or self._network.name(g)
                uses.setdefault(weight, []).append(math.log(size / before))
        total = sum(map(sum, uses.values()))
        if total < math.log(_GROWN):
            return ""
        weight, grown = max(uses.items(), key=lambda one: sum(one[1]))
        if sum(grown) < total / 2.0:
            return f"; numbers grow from layer to layer, {math.exp(total):.2g} times from {first} on"
        makes = f"makes numbers {math.exp(sum(grown) / len(grown)):.2g} times larger"
        if len(grown) == 1:
            return f"; the weight {weight} {makes}"
        return f"; the weight {weight} is applied {len(grown)} times, and {makes} each time"

    def changed(self, damaged: Sequence[str]) -> Optional[Cause]:
        """Where forward as stored begins to differ from fp32, if that reaches a loss or a damaged layer."""
        error_of, network = self._sight.error, self._network
        leads: Set[int] = set()
        origins: List[Tuple[Any, nn.Variable]] = []
        for f in reversed(network.graph.functions):
            single = (v for v in f.outputs if v.size == 1)
            leads.update(hash(v) for v in single if error_of(v) > _LOSS_DEVIATES)
            changed = not leads.isdisjoint(map(hash, f.outputs))
            if not (changed or network.name(f) in damaged):
                continue
            before = [v for v in f.inputs if not error_of(v) < _DEVIATES]
            leads.update(map(hash, before))
            origins += [(f, v) for v in before if v.parent is None]
            error = max(map(error_of, f.outputs))
            # What adds up from function to function begins nowhere.
            jumps = all(2.0 * error_of(v) < error for v in f.inputs)
            if changed and jumps and not (before or error < _DEVIATES):
                origins.append((f, f.outputs[0]))
        if not origins:
            return None
        return self._begins(*min(origins, key=lambda one: network.graph.numbers[hash(one[0])]))

    def _begins(self, f: Any, v: nn.Variable) -> Cause:
        """Cause of a difference in a variable that `f` computes, or reads from a leaf."""
        network, name = self._network, self._network.name(f)
        own, error, stored = v.parent is not None, self._sight.error(v), network.format(v)
        lost, typical_lost = self._sight.lost(v)
        subject = "it computes numbers" if own else f"it reads {network.called(v)}"
        if self._amax(v) > stored.max:
            what = f"{subject} up to {self._beyond(v)}{self._grown(f) if own else ''}"
            return Cause("overflow", name, what, _remedy(f, too_large=True))
        largest = max(map(self._amax, f.inputs), default=0.0)
        # Rounding errors of what it reads are of the size of what it computes.
        size = math.sqrt(self._in_fp32.data[hash(v)].mean_square)
        cancels = math.ldexp(largest, -stored.mantissa_bits) > _LOST * size
        if own and cancels and f.info.type_name in ("Add2", "Sub2", "AddScalar", "RSubScalar"):
            what = f"it computes the difference of numbers up to {largest:.3g}, which is so small "
            what += f"beside them that {stored.name} holds it with an error of {error:.0%}"
            return Cause("precision", name, what, _DIFFERENCE)
        before = f.inputs[0].parent
        if own and typical_lost > stored.smallest_subnormal and before is not None:
            # What it reads was not 0, but 1 + 1e-5.
            what = f"it computes numbers, of which {lost:.0%} become 0 in {stored.name}, which "
            what += f"holds too few bits of the numbers up to {largest:.3g} that it reads from "
            what += network.name(before)
            remedy = "keep small terms apart from large ones, or compute it in fp32"
            return Cause("precision", name, what, remedy)
        if lost > _LOST:
            what = f"{subject}, {'of which' if own else 'of whose numbers'} {lost:.0%} become 0 in "
            what += f"{stored.name}, whose smallest is {stored.smallest_subnormal:.1g}"
            what += factors_in_words(network, list(network.walk([f])))
            remedy = "bring them into range: divide later, or multiply the mean rather than the elements"
            return Cause("underflow", name, what, remedy)
        what = f"{subject} that come out with an error of {error:.0%} in {stored.name}"
        what += self._reads(f) if own else ""
        return Cause("precision", name, what, "use a format with more bits there")


def factors_in_words(network: Network, functions: List[Any]) -> str:
    """The product of small constant factors, if there are several of them."""
    found = [f for f in functions if f.info.type_name == "MulScalar" and 0.0 < abs(f.info.args["val"]) < 1.0]
    if len(found) < 2:
        return ""
    product = math.prod(abs(f.info.args["val"]) for f in found)
    told = ", ".join(f"{f.info.args['val']:g} in {network.name(f)}" for f in reversed(found[:4]))
    return f" (factors multiply to {product:.1e}: {told}{', ...' * (len(found) > 4)})"


def _lost_constant(network: Network, v: nn.Variable, stored: Format) -> str:
    """The constant that was to keep a variable away from 0, if the format does not hold it."""
    for f in [v.parent, *(w.parent for w in (v.parent.inputs if v.parent else ()))]:
        if f is not None and f.info.type_name in ("AddScalar", "MaximumScalar"):
            constant = f.info.args["val"]
            if constant and not stored.nearest(constant):
                return f": it does not hold the constant {constant:g} of {network.name(f)}"
    return ""


def _is_exponential(f: Any) -> bool:
    """Whether a function is an exponential, or a sum of such."""
    while f is not None and f.info.type_name in ("Sum", "Broadcast", "BroadcastTo", "Reshape"):
        f = f.inputs[0].parent
    return f is not None and f.info.type_name in ("Exp", "Sigmoid", "Softmax")


def _remedy(f: Any, *, too_large: bool = False) -> str:
    """Remedy for a function whose output or gradient is not finite."""
    kind = f.info.type_name
    away = "keep it away from 0 by a number that the format holds, such as 2**-14"
    remedies = {
        "Log": f"{away}; for a softmax or sigmoid, use F.log_softmax or F.sigmoid_cross_entropy",
        "Exp": "bound what it reads, or use F.softmax, which subtracts the largest number first",
        "Sum": "use F.mean, or sum less at a time",
        "BatchMatmul": "divide an operand before the product, not the result after it",
    }
    if not too_large and not (kind == "PowScalar" and f.info.args["val"] >= 1.0):
        remedies.update(dict.fromkeys(("Div2", "RDivScalar", "PowScalar", "Pow2"), away))
    if kind == "Div2" and _is_exponential(f.inputs[1].parent):
        remedies["Div2"] = "take the exponential of a difference instead, or F.softmax for a share of a sum"
    return remedies.get(kind, "make its weights or what it reads smaller, normalise, or use a wider format")
