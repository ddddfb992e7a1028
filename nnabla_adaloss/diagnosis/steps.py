# SPDX-License-Identifier: Apache-2.0
"""First steps of a solver, which lose gradients that have reached it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Dict, Iterable, Iterator, Optional, Sequence, Set, Tuple

import numpy as np
from numpy.typing import NDArray

from ..undo.snapshot import ArraySnapshot
from ..updaters.solvers import has
from . import remedies
from .causes import Cause, Note, listed
from .passes import Layer
from .preserved import restored
from .target import Subject
from .watching import Sight, largest

# Clause about the function that makes a layer's gradient small, and a remedy.
Shrinking = Callable[[str], Tuple[str, str]]

_BY_LEARNING_RATE = {"Sgd", "Momentum", "Nesterov", "SgdW"}  # steps are the gradient times the rate
_TAKEN = 8  # number of steps, after which a momentum has grown
_SHRUNK = 0.75  # a weight decay is too large if the steps leave less than this share of all parameters
_CLIPPED = 1e3  # `on_gradients` is at fault for small gradients if it divides them by more than this
_NO_STEP = 1e-5  # a thousand steps that change a smaller share of the weights change 1 % of them at most
_DECAYED = 0.01  # gradients below this share of the weight decay have no effect beside it


def _norm(arrays: Iterable[NDArray[Any]]) -> float:
    return float(np.linalg.norm([np.linalg.norm(x) for x in arrays]))


@dataclass
class _Record:
    """Largest numbers of a layer over the batches so far."""

    arriving: float = 0.0  # gradient before `on_gradients`
    left: float = 0.0  # gradient after it
    moved: float = 0.0  # share of a parameter that the steps change, where it has a gradient
    norm: float = 0.0  # norm of the gradient
    decay: float = 0.0  # norm that weight decay adds to it, in the last batch


class Steps:
    """First steps from the gradients of each batch, after `on_gradients`; all are undone."""

    def __init__(self, examined: Subject, layers: Sequence[Layer]) -> None:
        self._examined, self._layers, solver = examined, layers, examined.solver
        # nnabla crashes in methods that a Python class inherits.
        methods = "name", "info", "learning_rate", "get_states", "set_states", "get_parameters"
        self._solver: Any = solver if all(has(solver, one) for one in methods) else None
        self._records = {layer.name: _Record() for layer in layers}
        self._broken: Set[str] = set()  # parameters that the steps make nonfinite
        self._left_by_steps = 1.0  # smallest share of the norm of all parameters that the steps leave
        self._share = 0.0  # largest share of a parameter's norm by which a step changes it
        self._losses: Tuple[float, float] = (1.0, 1.0)  # before and after a step that makes it far larger

    def take(self, index: int, in_fp32: Sight) -> None:
        """Take some steps from the gradients of a batch, given by its number."""
        examined, solver = self._examined, self._solver
        if examined.on_gradients is not None:
            examined.on_gradients(examined.solver)
        for layer in self._layers:
            record, every = self._records[layer.name], list(layer.weights.values())
            if examined.on_gradients is not None:
                record.arriving = max(record.arriving, largest(map(in_fp32.gradients.get, layer.weights)))
            # Where a layer reads next to nothing, its weight gets a small gradient, but its bias a large one.
            weights = [v for v in every if v.ndim > 1 and v.g.any()] or every
            record.left = max(largest(in_fp32.statistics(v.grad) for v in weights), record.left)
            if examined.weight_decay:
                record.norm = max(record.norm, _norm(v.g for v in every))
                record.decay = examined.weight_decay * _norm(v.d for v in every)
        if solver is None or examined.warms_up or not solver.learning_rate():
            for record in self._records.values():
                record.moved = 1.0
            return
        parameters, states = solver.get_parameters(), solver.get_states()
        counts = [(state, state.t) for state in states.values()]
        arrays = [*parameters.values(), *(v for state in states.values() for v in state.pstate.values())]
        sound = [n for n, v in parameters.items() if np.isfinite(v.d).all() and np.isfinite(v.g).all()]
        before = {hash(v): v.d.copy() for v in parameters.values()}
        kept = ArraySnapshot(examined.kernels, arrays)
        kept.save()

        def restore() -> None:
            kept.restore()
            for state, count in counts:
                state.t = count
            solver.set_states(states)

        with restored(restore):
            solver.update()
            size = _norm(before.values())
            left = _norm(v.d for v in parameters.values()) / size if size else 1.0
            if solver.name in _BY_LEARNING_RATE:
                # With a momentum of 0.9, steps add up to ten times the learning rate.
                rate = solver.learning_rate() / max(1.0 - solver.info.get("momentum", 0.0), 0.01)
                left = min(left, abs(1.0 - rate * examined.weight_decay))
            self._left_by_steps = min(self._left_by_steps, left**_TAKEN)
            self._compare_losses(index, before)
            for _ in range(_TAKEN - 1):
                solver.update()
            now = {hash(v): v.d for v in parameters.values()}
            if size:
                nonzero = [key for key, x in before.items() if x.any()]
                # Any step is large beside a bias that has just left 0.
                weights = [key for key in nonzero if before[key].ndim > 1] or nonzero
                share = max(_norm([now[key] - before[key]]) / _norm([before[key]]) for key in weights)
                self._share = max(self._share, share / _TAKEN)
                self._left_by_steps = min(self._left_by_steps, _norm(now.values()) / size)
            self._broken |= {name for name in sound if not np.isfinite(parameters[name].d).all()}
            for layer in self._layers:
                own = [v for key, v in layer.weights.items() if key in before and v.g.any()]
                # Any step changes a bias of 0, even one that no weight notices.
                trained = [v for v in own if v.ndim > 1] or own
                shares = [float(np.mean((v.d != before[hash(v)])[v.g != 0.0])) for v in trained]
                # A layer that the solver does not have need not move.
                record, is_foreign = self._records[layer.name], before.keys().isdisjoint(layer.weights)
                record.moved = max([record.moved, *shares, float(is_foreign)])

    def _compare_losses(self, index: int, before: Dict[int, NDArray[Any]]) -> None:
        """Compare the loss after a step from the weights `before` it with that of the last forward."""
        examined, parameters = self._examined, self._solver.get_parameters().values()
        step, old = _norm(v.d - before[hash(v)] for v in parameters), _norm(before.values())
        # Only a step larger than the weights is worth a forward: most change some hundredths.
        if 0.0 < old < step < math.inf:
            loss = float(examined.loss.d)
            examined.forward(examined.loss, index)
            after = float(examined.loss.d)
            if not abs(after) < 1.2 * abs(loss):
                self._losses = loss, after

    def notes(self, shrinking: Optional[Shrinking] = None) -> Iterator[Note]:
        """Note gradients that `on_gradients` makes 0 or far smaller; with `shrinking`, also small steps."""
        (arriving, left), records = self._largest(), self._records
        zeroed = [name for name, record in records.items() if record.arriving and not record.left]
        if zeroed and left:
            yield Note("on_gradients makes all gradients 0 in ", zeroed, ".")
        # Less clipping is noted, too, if steps are small.
        least = 100.0 if 0.0 < self._share < 1e-4 else _CLIPPED
        if least * left < arriving < math.inf and left:
            end = f" leaves {left:.1e} of unscaled gradients of {arriving:.1e}: {remedies.CLIP_LESS}."
            yield Note("", ["on_gradients"], end)
        before, after = self._losses
        if abs(before) < abs(after) < 10.0 * abs(before):
            end = f" changes the loss from {before:.3g} to {after:.3g}, at a learning rate of "
            end += f"{self._solver.learning_rate():g}. Unless it falls again, {remedies.SMALLER_STEPS}."
            yield Note("The first step of ", [self._solver.name], end)
        if shrinking is not None and 0.0 < self._share < _NO_STEP:
            clause, remedy = self._slow(shrinking)
            yield Note("Steps of ", [self._solver.name], f" {clause}. Unless that is on purpose, {remedy}.")

    def _slow(self, shrinking: Shrinking) -> Tuple[str, str]:
        """Clause about steps that hardly move the weights, and a remedy."""
        clause, remedy = shrinking(max(self._records, key=lambda name: self._records[name].left))
        what = f"change {self._share:.0e} of the weights each, at a learning rate of "
        what += f"{self._solver.learning_rate():g}{clause}: 1,000 of them move the weights by "
        return f"{what}{1e3 * self._share:.2g} of their size at most", remedy or remedies.LEARNING_RATE

    def causes(self, noisy: AbstractSet[str], shrinking: Shrinking) -> Iterator[Cause]:
        """Causes, except for `noisy` layers."""
        (arriving, left), records = self._largest(), self._records
        if 0.0 < arriving < math.inf:
            if broken := [name for name, record in records.items() if not math.isfinite(record.left)]:
                what = f"it makes gradients that are not finite, of {listed(broken)}"
                yield Cause("on_gradients", "on_gradients", what, remedies.CHECK_DIVISION)
            elif not left:
                what = f"it makes all gradients 0, of which the largest was {arriving:.1e}"
                yield Cause("on_gradients", "on_gradients", what, remedies.CLIP_NORM)
        if self._solver is not None and not self._solver.learning_rate():
            what = "its learning rate is 0 after the feeder, so that nothing moves"
            yield Cause("learning_rate", self._solver.name, what, remedies.RATE)
        trained = {name: one.left for name, one in records.items() if one.left and name not in noisy}
        settings = {} if self._solver is None else self._solver.info
        beyond = [key for key in ("beta1", "beta2", "decay", "momentum") if settings.get(key, 0.0) >= 1.0]
        before, after = self._losses
        if beyond:
            what = f"its {beyond[0]} is {settings[beyond[0]]:g}"
            yield Cause("solver", self._solver.name, what, remedies.SETTINGS)
        elif self._broken or not abs(after) < 10.0 * abs(before):
            what = f"its first step changes the loss from {before:.3g} to {after:.3g}"
            if self._broken:
                what = f"its first steps make NaNs or infinities of {listed(sorted(self._broken))}"
            what += f", at a learning rate of {self._solver.learning_rate():g}"
            least = min((one.left for one in records.values() if one.left), default=1.0)
            shrinks = settings.get("wd", 0.0) * self._solver.learning_rate() > 1.0 - _SHRUNK ** (1.0 / _TAKEN)
            remedy = remedies.DECAY if shrinks else remedies.SMALLER_STEPS
            # Adam multiplies squares by 1 - beta2 = 1e-3: those of 1e-17 lose bits in fp32.
            if least < 1e-17 and self._solver.name not in _BY_LEARNING_RATE:
                what += f": the squares of gradients of {least:.1e} are next to 0 in fp32"
                remedy = remedies.LARGER_GRADIENTS
            yield Cause("solver", self._solver.name, what, remedy, parameters=(*sorted(self._broken),))
        elif self._solver is not None:
            yield from self._small(trained, shrinking)
        if self._left_by_steps < _SHRUNK:
            what = f"its first {_TAKEN} steps leave {self._left_by_steps:.1g} of all weights together"
            yield Cause("solver", self._solver.name, what, remedies.DECAY)
        yield from self._only_decaying(trained)

    def _largest(self) -> Tuple[float, float]:
        """Largest gradient before and after `on_gradients`."""
        pairs = [(one.arriving, one.left) for one in self._records.values()] or [(0.0, 0.0)]
        return max(arriving for arriving, _ in pairs), max(left for _, left in pairs)

    def _small(self, trained: Dict[str, float], shrinking: Shrinking) -> Iterator[Cause]:
        """Cause of gradients that are too small for the solver; `trained`: the largest one of each layer."""
        solver, kind, records = self._solver, self._solver.name, self._records
        # Lamb divides its steps by their norm, so that its epsilon makes none of them small.
        epsilon = 0.0 if kind == "Lamb" else float(solver.info.get("eps", 0.0))
        is_below_root = kind in ("AdaBelief", "Adadelta", "RMSpropGraves")  # where these solvers add it
        least = math.sqrt(epsilon) if is_below_root else epsilon
        small = [name for name, amax in trained.items() if amax < least or records[name].moved < 0.01]
        if not small:
            arriving, left = self._largest()
            if arriving > _CLIPPED * left and 0.0 < self._share < _NO_STEP:
                what = f"it leaves {left:.1e} of gradients of {arriving:.1e}, so that a step changes "
                what += f"{self._share:.0e} of the weights"
                yield Cause("on_gradients", "on_gradients", what, remedies.CLIP_LESS)
            elif 0.0 < self._share < _NO_STEP:
                clause, remedy = self._slow(shrinking)
                if "loss weight" in clause:
                    yield Cause("small_steps", kind, f"its steps {clause}", remedy)
            return
        name = min(small, key=trained.__getitem__)
        amax, arriving, rate = trained[name], records[name].arriving, solver.learning_rate()
        fault, remedy = "small_steps", remedies.LARGER_STEPS
        if amax > 1e19:
            fault, remedy, limit = "large_gradient", remedies.SMALLER_LOSS, "whose square fp32 does not hold"
        elif amax < least:
            fault, remedy = "epsilon", remedies.LARGER_LOSS if kind == "Adadelta" else remedies.EPSILON
            limit = f"below {'the root of ' * is_below_root}the solver's epsilon of {epsilon:.0e}"
        elif kind in _BY_LEARNING_RATE:
            remedy = remedies.LEARNING_RATE
            limit = f"and times the learning rate of {rate:g} it is below the last bit of its weights"
        else:
            limit = f"and the steps that {kind} makes of it, at a learning rate of {rate:g}, are below "
            limit += "the last bit of its weights"
            if kind in ("Lamb", "Lars"):  # their steps are in proportion to the norm of a parameter
                weights = next(layer.weights for layer in self._layers if layer.name == name)
                is_set = any(v.d.any() for v in weights.values())
                remedy = remedies.LARGER_SHARE if is_set else remedies.PROPORTIONAL
        what = f"its gradient reaches {amax:.1e}, {limit}"
        if arriving > _CLIPPED * amax:
            fault, remedy = "on_gradients", remedies.CLIP_LESS
            what = f"its gradient reaches {arriving:.1e}, of which on_gradients leaves {amax:.1e}, {limit}"
        others = [one for one in small if one != name]
        clause, known = shrinking(name)
        what += f" (as {'those' if others[1:] else 'that'} of {listed(others)})" * bool(others)
        what += f"{clause}: it hardly moves, whatever the loss scale, which is undone before the solver"
        if known == remedies.LARGER_FACTOR:
            known = f"{known}, or {remedy}"
        yield Cause(fault, name, what, known or remedy, len(small) == len(trained), tuple(small))

    def _only_decaying(self, trained: Dict[str, float]) -> Iterator[Cause]:
        """Cause of a weight decay beside which all gradients are far too small."""
        decaying = {name: one for name, one in self._records.items() if name in trained and one.decay}
        # At the end of a training, gradients and decay are as large as each other: that is not a fault.
        if decaying and all(one.norm < _DECAYED * one.decay for one in decaying.values()):
            name, most = max(decaying.items(), key=lambda item: item[1].decay)
            what = f"its gradient has a norm of {most.norm:.1e}, and weight decay adds one of "
            what += f"{most.decay:.1e}, so that the weights only shrink, whatever the loss scale"
            share = min(one.norm / one.decay for one in decaying.values())
            remedy = f"use a weight decay of {_DECAYED * self._examined.weight_decay * share:.0e} or less"
            yield Cause("weight_decay", name, what, remedy, True, (*decaying,))
