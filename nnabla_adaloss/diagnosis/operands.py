# SPDX-License-Identifier: Apache-2.0
"""Operands that make numbers large, small or 0, in one batch or in several."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import nnabla as nn
import numpy as np

from ..core.formats import FLOAT32
from ..graph.functions import is_matrix_product
from ..updaters.solvers import has
from . import remedies
from .causes import Cause
from .network import NORMALIZATIONS, Network
from .watching import Sight, largest

_RAW = 64.0  # data above this magnitude are not normalized
_BY_SIGN = {"Adam", "AdamW", "Adamax", "AMSGRAD", "AdaBelief"}  # first steps are the rate, for any gradient
_LARGE_STEP = 0.1  # share of a weight's largest number, or of 1
GROWN = 8.0  # growth by a smaller factor is not reported
FLOOR = 2.0**-13  # numbers below are changed by adding 2**-14, as remedies advise
NOT_ZERO = {"Log": 0, "PowScalar": 0, "Pow2": 0, "Div2": 1, "RDivScalar": 0}  # input that must not be 0
DIVISIONS = {"Div2", "RDivScalar"}
PRODUCTS = {"Mul2", "Div2"}
CONSTANTS = {"AddScalar", "MaximumScalar", "Constant"}  # functions whose constant may keep numbers from 0


class Step(NamedTuple):
    """Function, with the largest magnitude that it reads, and that it computes."""

    function: Any
    before: float
    after: float


class Growth(NamedTuple):
    """Operand that makes numbers large or small; without a clause, none was found."""

    clause: str = ""
    parameters: Tuple[str, ...] = ()
    remedy: str = ""  # empty if only the function that reads the numbers has one


class Operands:
    """Numbers of one batch, in fp32 or as stored, and the operands that made them so."""

    def __init__(self, network: Network, sight: Sight) -> None:
        self.network, self.sight = network, sight
        self.in_fp32 = sight.in_fp32 or sight
        self.is_stored = sight.in_fp32 is not None
        self.also = "" if self.is_stored else ", in fp32 too"  # clause about the place of a fault

    def bad(self, variables: Iterable[nn.Variable]) -> List[nn.Variable]:
        return [v for v in variables if hash(v) in self.sight.nans]

    def amax(self, v: nn.Variable) -> float:
        seen = self.in_fp32.data.get(hash(v))
        return 0.0 if seen is None else FLOAT32.max if seen.nonfinite else seen.abs_max

    def beyond(self, v: nn.Variable) -> str:
        stored = self.network.format(v)
        return f"{self.amax(v):.3g}, beyond {stored.name}, which ends at {stored.max:g}"

    def vanished(self, v: nn.Variable) -> int:
        """Number of elements that only storage makes 0."""
        now, before = (one.data.get(hash(v)) for one in (self.sight, self.in_fp32))
        return now.zeros - before.zeros if now and before else 0

    def vanishing(self, f: Any) -> List[nn.Variable]:
        """Inputs of a function with elements that only storage makes 0."""
        return [v for v in f.inputs if self.vanished(v) > 0]

    def zeros(self, v: nn.Variable) -> int:
        seen = self.sight.data.get(hash(v))
        return seen.zeros if seen else 0

    def first_zeros(self, v: nn.Variable) -> nn.Variable:
        """First variable on the way to `v` with at least half as large a share of zeros."""
        # Zeros that are 0 in fp32, too, do not explain those that storage makes.
        count = self.vanished if self.vanished(v) > 0 else self.zeros
        least = count(v) / v.size / 2.0

        def lost(g: Any) -> List[nn.Variable]:
            # A bias of 0 does not make a product 0.
            operands = g.inputs[: 2 if g in self.network.products else None]
            found = [w for w in operands if count(w) >= max(least * w.size, 1.0)]
            return [w for w in found if count(w) == w.size] or found

        for g in self.network.in_order(self.network.walk([v.parent], lost)):
            leaves = [w for w in lost(g) if w.parent is None]
            if leaves or not lost(g):
                return [*leaves, *g.outputs][0]
        return v

    def negatives(self, f: Any) -> int:
        """Number of negative inputs of a function that is not defined for them."""
        is_whole_power = f.info.type_name == "PowScalar" and f.info.args["val"] == int(f.info.args["val"])
        return 0 if is_whole_power else self.sight.undefined.get(f, 0)

    def overflow(self, f: Any, v: nn.Variable, subject: str, growth: Growth, reads: str = "") -> Cause:
        """Cause of a variable beyond its format that `f` computes or reads, enlarged by an operand."""
        remedy = remedies.of(f, growth.remedy, too_large=True)
        if remedy == remedies.AWAY and f.info.type_name in NOT_ZERO:
            divisor = f.inputs[NOT_ZERO[f.info.type_name]]
            # The small number that the remedy adds would change no divisor here, or all of them by far.
            if self.sight.data[hash(divisor)].abs_min > FLOOR and not self.zeros(divisor):
                remedy = remedies.MULTIPLY_FIRST.format("it")
            elif divisor.parent is not None and self.amax(divisor) < FLOOR:
                remedy = remedies.LARGER_UNITS.format(self.network.name(divisor.parent))
        what = f"{subject} up to {self.beyond(v)}{reads}{growth.clause}"
        return Cause("overflow", self.network.name(f), what, remedy, parameters=growth.parameters)

    def reads(self, f: Any, subject: str = "it") -> str:
        """Clause about a function's inputs that explains its result."""
        kind, args, network = f.info.type_name, f.info.args, self.network
        power = args["val"] if kind == "PowScalar" else 0.0
        negative = self.negatives(f)
        # 0 is harmless in a square.
        if kind in NOT_ZERO and (power < 1.0 or negative):
            v = f.inputs[NOT_ZERO[kind]]
            if negative:
                source = f" from {network.called(v)}{self._difference(f)}"
                return f", as {subject} reads {negative} number{'s' * (negative > 1)} below 0{source}"
            count, more = self.zeros(v), self.vanished(v)
            if count:
                verb = "divides by" if kind in DIVISIONS else "reads"
                number = f"{count} zero{'s' * (count > 1)}"
                if more > 0:
                    number = "1 number that becomes" if more == 1 else f"{more} numbers that become"
                    number += f" 0 in {network.format(v).name}"
                return f", as {subject} {verb} {number} from {network.called(self.first_zeros(v))} on"
            if kind in DIVISIONS or power < 0.0 or kind == "Log":
                verb = "reads" if kind == "Log" else "divides by"
                return f", as {subject} {verb} numbers down to {self.sight.data[hash(v)].abs_min:.2g}"
        if kind == "ACosh":
            return f", as {subject} reads numbers down to {self.sight.data[hash(f.inputs[0])].abs_min:g}"
        if kind in ("BatchInv", "BatchLogdet"):
            return f", as {subject} reads matrices that are singular, or nearly so"
        sizes = [(self.amax(v), v) for v in f.inputs if hash(v) not in network.names]
        if not sizes:
            return ""
        size, v = max(sizes, key=lambda one: one[0])
        is_beyond = v.parent is not None and size > network.format(v).max
        what = f" from {network.called(repeated(v))}" if v.parent is None or is_beyond else ""
        if kind == "Sum":
            return f", as it adds up {v.size // max(f.outputs[0].size, 1)} numbers of up to {size:.3g}{what}"
        factor = f", and multiplies by {args['val']:g}" if kind == "MulScalar" else ""
        return f", as it reads numbers up to {size:.3g}{what}{factor}"

    def _difference(self, f: Any) -> str:
        """Clause about a difference that only storage makes negative."""
        g = remedies.origin(f.inputs[0])
        in_fp32 = not self.is_stored or self.in_fp32.undefined.get(f)
        if in_fp32 or not remedies.is_a(g, "Sub2"):
            return ""
        largest = max(map(self.amax, g.inputs))
        return f", and in fp32 none: {self.network.name(g)} subtracts numbers up to {largest:.3g}"

    def grown(self, f: Any, *, trained: bool = False) -> Growth:
        """Operand, recurrence or input that made numbers before `f` large; `trained`: see `steps`."""
        steps = self.steps(f, trained=trained)
        # Numbers grow from their last zeros on, or from where they are smallest.
        zeros = [i for i, step in enumerate(steps) if not step.before]
        start = zeros[-1] if zeros else min(range(len(steps)), key=lambda i: steps[i].before)
        for g, before, after in reversed(steps[start:]):
            for added, growth in self._addends(g):
                is_last = steps[-1].before < GROWN * after  # nothing behind it makes numbers far larger
                if is_last and 2.0 * abs(added) > after > 2.0 * before:
                    return growth
        growth, first, network = self.growth(steps[start:], "numbers"), steps[0].function, self.network
        if growth.clause:
            return growth
        for v in first.inputs:
            if v.parent is None and self.amax(v) == steps[0].before > _RAW:
                # `reads` names the inputs of `f` itself.
                clause = f"; {network.called(v)} reaches {self.amax(v):.3g}" * (first is not f)
                return Growth(clause, remedy=remedies.NORMALISE_DATA)
        largest = max(first.inputs, key=self.amax, default=None)
        is_start = len(network.parameters(first.inputs)) == len(first.inputs)
        # A parameter itself may be this large, such as a temperature that multiplies scores.
        if largest is not None and is_start and 2.0 * self.amax(largest) > steps[-1].before:
            clause = f"; {network.called(largest)} reaches {_extreme(largest):.3g}"
            return Growth(clause, network.parameters([largest]), remedies.SMALLER_START)
        return Growth()

    def shifted(self, v: nn.Variable) -> Growth:
        """Bias or constant that makes most of the mean of a variable's numbers."""
        seen = self.in_fp32.data.get(hash(v))
        mean = seen.sum / seen.count if seen and seen.count else 0.0
        for added, growth in self._addends(v.parent) if v.parent is not None else ():
            if 0.5 * abs(mean) < abs(added) < 2.0 * abs(mean) and added * mean > 0.0:
                return growth
        return Growth()

    def shrunk(self, f: Any) -> Growth:
        """Operand that shrinks numbers on the way to `f`, from where they are largest; none for a leaf."""
        steps = self.steps(f)
        start = max(range(len(steps)), key=lambda i: steps[i].before, default=0)
        return self.growth(steps[start:], "numbers", shrinks=True)

    def steps(self, f: Any, *, trained: bool = False) -> List[Step]:
        """Functions up to `f`, along the largest inputs; `trained`: along inputs with a gradient, if any."""
        steps: List[Step] = []
        while f is not None:
            known = [v for v in f.inputs if hash(v) not in self.network.names]
            known = [v for v in known if v.need_grad and trained] or known
            read = max(known, key=self.amax, default=None)
            size = 0.0 if read is None else self.amax(read)
            made = max(map(self.amax, f.outputs))  # a nonfinite output does not show growth
            steps.insert(0, Step(f, size, made if made < FLOAT32.max else size))
            f = None if read is None else read.parent
        return steps

    def gradient(self, f: Any) -> float:
        """Largest magnitude in the gradients of a function's outputs."""
        known = (self.in_fp32.gradients.get(hash(v)) for v in f.outputs)
        return max((one.abs_max for one in known if one is not None), default=0.0)

    def gradient_steps(self, f: Any) -> List[Step]:
        """Functions from the loss to `f`, along the largest gradients: how each changes them."""
        network = self.network
        steps: List[Step] = []
        while f is not None:
            readers = (g for v in f.outputs for g in network.readers.get(hash(v), ()))
            behind = max((g for g in readers if g in network.nodes), key=self.gradient, default=None)
            if behind is not None:
                steps.insert(0, Step(behind, self.gradient(behind), self.gradient(f)))
            f = behind
        return steps

    def growth(self, steps: Sequence[Step], noun: str, *, shrinks: bool = False) -> Growth:
        """Operand that makes numbers larger in these steps, or smaller; several if none stands out."""
        logs: Dict[Growth, List[float]] = {}  # logarithms of the factors of steps, by operand
        first = ""
        sign, verb, size = (-1.0, "shrink", "smaller") if shrinks else (1.0, "grow", "larger")
        for g, before, after in steps:
            times = (after / before) ** sign if after and before else 0.0
            operand = self._factor(g, times) if times > 1.0 else Growth()
            # To make numbers smaller is a normalization's purpose, except by an eps above their variance.
            is_meant = g.info.type_name in NORMALIZATIONS and operand.remedy != remedies.SMALLER_EPS
            if operand.clause and not (shrinks and is_meant):
                first = first or self.network.name(g)
                logs.setdefault(operand, []).append(math.log(times))
        total = sum(map(sum, logs.values()))
        if total < math.log(GROWN):
            return Growth()
        operand, grown = max(logs.items(), key=lambda one: sum(one[1]))
        if sum(grown) < total / 2.0:
            # Steps of a state that is reached on many paths have a product beyond float64.
            times, (begin, end) = math.exp(min(total, 700.0)), (steps[0].before, steps[-1].after)
            if begin and end:
                times = min(times, (end / begin) ** sign)
            clause = f"; {noun} {verb} from layer to layer, {times:.2g} times from {first} on"
            names = tuple(name for one in logs for name in one.parameters)
            by_weights = sum(sum(logs[one]) for one in logs if one.parameters)
            remedy = remedies.EXPLODING if by_weights > total / 2.0 else remedies.UNWEIGHTED
            if shrinks:
                remedy = remedies.VANISHING if names else remedies.TOO_SMALL
            return Growth(clause, names, remedy)
        makes = f"makes {noun} {math.exp(sum(grown) / len(grown)):.2g} times {size}"
        if len(grown) > 1:
            makes = f"is applied {len(grown)} times, and {makes} each time"
        remedy = operand.remedy
        if shrinks and remedy != remedies.SMALLER_EPS:
            remedy = remedies.VANISHING if operand.parameters else remedies.TOO_SMALL
        return Growth(f"; {operand.clause} {makes}", operand.parameters, remedy)

    def _addends(self, f: Any) -> Iterator[Tuple[float, Growth]]:
        """Largest numbers of the constant, bias and beta that a function adds, and the growth by each."""
        if f.info.type_name == "AddScalar":
            clause = f"; the constant of {self.network.name(f)} reaches {f.info.args['val']:.3g}"
            yield f.info.args["val"], Growth(clause, remedy=remedies.SMALLER_CONSTANT)
        for v in map(repeated, f.inputs[1:]):
            name = self.network.names.get(hash(v), "")
            if name and (v.ndim == 1 or name.endswith("beta") or f.info.type_name == "Add2"):
                clause = f"; the bias {name} reaches {_extreme(v):.3g}"
                yield _extreme(v), Growth(clause, (name,), remedies.SMALLER_BIAS)

    def _factor(self, f: Any, times: float) -> Growth:
        """Operand by which a function makes numbers that many times larger; its clause is its name."""
        kind, args, network = f.info.type_name, f.info.args, self.network
        if kind == "MulScalar":
            return Growth(f"the factor {args['val']:g} of {network.name(f)}", remedy=remedies.SMALLER_FACTOR)
        named = {network.names[hash(v)]: v for v in f.inputs if hash(v) in network.names and v.ndim > 1}
        if kind.endswith("Normalization"):
            for name, v in named.items():
                if name.endswith("gamma") and self.amax(v) ** 2 >= times:
                    return Growth(f"the weight {name}", (name,), remedies.GAMMA)
            if (read := self.in_fp32.data.get(hash(f.inputs[0]))) and args.get("eps", 0.0) > read.mean_square:
                return Growth(f"a normalization's eps of {args['eps']:g}", remedy=remedies.SMALLER_EPS)
            return Growth(f"the division by a small deviation in {network.name(f)}")
        if named:
            weight = max(named, key=lambda name: self.amax(named[name]))
            rate, solver = network.examined.rates[-1], network.examined.solver
            is_large = rate > _LARGE_STEP * max(1.0, self.amax(named[weight]))
            if is_large and has(solver, "name") and solver.name in _BY_SIGN:
                clause = f"the weight {weight}, at a learning rate of {rate:g},"
                return Growth(clause, (weight,), remedies.SMALLER_STEPS)
            return Growth(f"the weight {weight}", (weight,), remedies.SMALLER_START)
        if kind == "Div2":
            return Growth(f"the division by {network.called(f.inputs[1])}", remedy=remedies.AWAY)
        return Growth(f"the product with {network.called(f.inputs[1])}") if kind == "Mul2" else Growth()


class Batches:
    """Largest magnitudes over some batches, and the operands of the first one."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        self._network, self._sights, self._first = network, sights, Operands(network, sights[0])

    def largest(self, v: nn.Variable) -> float:
        """Largest magnitude of a variable; infinite if it is unknown."""
        known = (s.data.get(hash(v)) for s in self._sights)
        return max((math.inf if one is None else one.abs_max for one in known), default=math.inf)

    def gradient(self, keys: Iterable[int]) -> float:
        """Largest magnitude in gradients of variables; infinite if one is not finite."""
        return largest(s.gradients.get(key) for key in keys for s in self._sights)

    def arriving(self, f: Any) -> float:
        """Largest magnitude in the gradients that arrive at a function."""
        return self.gradient(map(hash, f.outputs))

    def factors(self, f: Any) -> List[nn.Variable]:
        """Inputs that a function multiplies by."""
        kind, names = f.info.type_name, self._network.names
        if kind in NORMALIZATIONS:
            return [v for v in f.inputs if names.get(hash(v), "").endswith("gamma")]
        return f.inputs[:2] if kind in PRODUCTS or f in self._network.products else []

    def zero_factors(self, f: Any) -> List[nn.Variable]:
        """Inputs of zeros that a function multiplies by."""
        return [v for v in self.factors(f) if not self.largest(v)]

    def is_disjoint(self, f: Any) -> bool:
        """True for a product that is 0 although no factor is, as if a mask opens only places of zeros."""
        is_zero = remedies.is_a(f, "Mul2") and not self.largest(f.outputs[0])
        return is_zero and all(map(self.largest, f.inputs))

    def zero_origin(self, v: nn.Variable) -> nn.Variable:
        """Variable from which zeros are only reshaped, or handed on by functions of this input alone."""
        while v.parent is not None:
            kind, read = v.parent.info.type_name, v.parent.inputs
            if v.parent in self._network.products:
                read = self.zero_factors(v.parent)[:1]
            read = read[1:2] if kind == "Embed" else read
            if len(read) != 1 or self.largest(read[0]):
                break
            v = read[0]
        return v


def _extreme(v: nn.Variable) -> float:
    """Number of the largest magnitude."""
    return float(v.d.flat[np.argmax(np.abs(v.d))])


def is_product(f: Any) -> bool:
    """True if a function multiplies computed numbers."""
    return f.info.type_name in ("Mul2", "Prod", "CumProd") or is_matrix_product(f.info.type_name)


def repeated(v: nn.Variable) -> nn.Variable:
    """Variable that functions have only cut, reshaped or repeated."""
    return remedies.source(v, "Broadcast", "BroadcastTo", "Reshape", "Slice")
