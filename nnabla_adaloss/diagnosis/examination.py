# SPDX-License-Identifier: Apache-2.0
"""The examination of a training in one call, and what it returns."""

from __future__ import annotations

import math
import os
from collections import Counter
from functools import partial
from typing import (
    AbstractSet,
    Any,
    Dict,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
    overload,
)
from typing import Counter as CounterOf

import nnabla as nn
import numpy as np

from ..core.formats import Format, canonical_name
from ..core.precision import LayerPrecisions, PrecisionLike, StorageLike
from ..core.scale_history import HistoryPolicy
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from ..state.whole_file import replace_page
from .advice import PrecisionAdvice, advise, candidates_of
from .ends import Ends, Reach, ends_as_stored
from .finite import Cause, Finiteness, Network, listed
from .passes import (
    Forward,
    Kept,
    Layer,
    LayerGradients,
    NoBackward,
    Passes,
    Tally,
    parameter_layers,
    parts_of,
)
from .report import as_page, as_text
from .target import Examined, Feeder, input_name
from .verdicts import USELESS, LayerNumbers, NetworkNumbers, Verdict, Way, judge
from .watching import Sight, Watch

_CONSTANT = 65536.0
# What is tried beside the format that was asked for.
_FORMATS: Tuple[Literal["float16", "bfloat16", "fp8_hybrid"], ...] = ("float16", "bfloat16", "fp8_hybrid")
# Gradients that change by this share of themselves where all is rounded to 18 bits are rounding errors, which
# no narrower format can hold. Others change by some hundred thousandths.
_FINER, _NOISE = Format.ieee("finer", exponent_bits=8, mantissa_bits=18), 0.1
# The share of what a layer loses that the function at which it begins must lose.
_BEGINS = 0.5


class Diagnosis:
    """What storing a network's numbers in a narrow format does to its gradients; `print` it.

    Args:
        numbers: what was measured.

    Attributes:
        numbers: everything that was measured, per layer.
        verdict: what that means: one line, what is needed at least, what no loss scale mends, a line per
            layer, what each format needs.
    """

    def __init__(self, numbers: NetworkNumbers) -> None:
        self.numbers: NetworkNumbers = numbers
        self.verdict: Verdict = judge(numbers)

    def __str__(self) -> str:
        return as_text(self.numbers, self.verdict)

    def as_dict(self) -> Dict[str, Any]:
        """Numbers and verdicts as plain dicts, lists, strings and numbers; what is not finite is None."""
        numbers, verdict = self.numbers, self.verdict
        return {
            "verdict": verdict.line,
            "needs": None if verdict.needs is None else verdict.needs.value,
            "causes": [{**cause._asdict(), "spoils": list(cause.spoils)} for cause in verdict.causes],
            "formats": {name: None if way is None else way.value for name, way in verdict.formats.items()},
            "storage": numbers.storage,
            "batches": numbers.batches,
            "notes": list(numbers.notes),
            "loss": _plain(numbers.loss),
            "stored_loss": _plain(numbers.stored_loss),
            "scales": {way.value: scale for way, scale in numbers.scales.items()},
            "layers": [
                {
                    "name": layer.name,
                    "type": layer.type_name,
                    "largest_gradient": _plain(layer.amax),
                    "nonzero_elements": layer.nonzero,
                    "error_with_gradients_in_fp32": _plain(layer.floor),
                    "right_scale": judged.right_scale,
                    "verdict": judged.line,
                    "ways": {
                        way.value: {name: _plain(value) for name, value in kept._asdict().items()}
                        for way, kept in layer.kept.items()
                    },
                }
                for layer, judged in zip(numbers.layers, verdict.layers)
            ],
        }

    def write_html(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write a page that needs nothing else, no network either.

        Raises:
            ValueError: there is a file that is no page. It is left as it is.
            OSError: it cannot be written.
        """
        replace_page(path, as_page(self.numbers, self.verdict))


@overload
def diagnose(
    loss_or_updater: Any,
    storage: StorageLike = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
) -> Diagnosis: ...


@overload
def diagnose(
    loss_or_updater: Any,
    storage: Sequence[PrecisionLike],
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
) -> PrecisionAdvice: ...


def diagnose(
    loss_or_updater: Any,
    storage: Union[StorageLike, Sequence[PrecisionLike]] = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
) -> Union[Diagnosis, PrecisionAdvice]:
    """What a narrow storage does to the gradients of a network, which way of scaling keeps them, and where
    they end or are not finite.

    Runs each batch forward and backward in fp32, and beside it as it would be stored, emulated: without
    scaling, with a constant of 65536, with one measured scale, and with one per component. It does not judge
    what is no matter of numbers: learning rates, labels, initial weights, weight decay, architecture, signs.

    Takes some twenty passes per batch, and the memory of three more copies of the gradients and one of the
    activations. Parameters, gradients, running statistics, data, the random state and an updater's
    `counters.fed` are put back afterwards; what other arrays of the graph hold (`loss.d`) is of the last
    pass. Functions with a seed of their own, and those of a GPU, go on from where the passes have left them.

    Given a list of formats, it tells instead which of them each layer can have: see `PrecisionAdvice`. Each
    layer is tried alone with each format, a pass or two per batch, and then all of them together.

    Args:
        loss_or_updater: the loss Variable of one element, or a wrapper of one; or an updater, nnabla's or one
            of this package, whose loss and data feeder are taken, and whose `on_gradients` is called once
            per batch, unless it has a communicator.
        storage: the format that is tried, as everywhere: `"float16"`, `"bfloat16"`, `"fp8_hybrid"`, a
            `Format`, a `Precision`, or a mapping from patterns of layers; or a list of formats, of which each
            layer gets the one with the fewest bits that does no harm, and of equally wide ones the first.
        feeder: called without arguments before each batch. None: the updater's, or the data that is there.
        data_feeder: the same as `feeder`, by the name that updaters have for it.
        batches: how many batches are looked at; 1 where there is no feeder. 4: enough to tell a rule from an
            accident.

    Raises:
        TypeError: `loss_or_updater` is neither, `feeder` cannot be called, or `data_feeder` is given as well.
        ValueError: the loss needs no gradient, has several elements, scales itself, or is computed in half
            precision; or `storage` is unknown, or `batches` less than 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import diagnose
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> diagnosis = diagnose(loss * 1e-12)
        >>> print(diagnosis.verdict.needs.value)
        one
        >>> diagnose(loss).verdict.line
        'float16 needs no scaling here.'
        >>> advised = diagnose(loss, ["fp8_hybrid", "float16"]).storage
        >>> "*" in advised, set(advised.values()) <= {"fp8_hybrid", "float16"}
        (True, True)
    """
    if feeder is not None and data_feeder is not None:
        raise TypeError("feeder and data_feeder are the same argument: give one of them")
    examined = Examined(loss_or_updater, data_feeder if feeder is None else feeder, batches)
    if isinstance(storage, Sequence) and not isinstance(storage, str):
        return advise(examined, candidates_of(storage))
    LayerPrecisions(storage)  # is refused before anything is fed
    with examined.preserved():
        return Diagnosis(_Examination(examined, storage).numbers())


class _Tried:
    """What each way of scaling leaves of the gradients in one format."""

    def __init__(self, examined: Examined, layers: Sequence[Layer], precisions: LayerPrecisions) -> None:
        self.emulation = FormatEmulation(
            examined.loss, precisions.storage, float_tail=True, parameters=examined.parameters
        )
        self.u_max = precisions.narrowest.stored_gradients.max
        self._adaptive = AdaptiveLossScaling(self.emulation)
        self._examined, self._passes = examined, Passes(layers)
        # The parameters of each layer, by its name.
        self._parts = {layer.name: parts_of(layer) for layer in layers}
        self._floors = {name: [Tally() for _ in parts] for name, parts in self._parts.items()}
        self._ways = {
            name: {way: [Tally() for _ in parts] for way in Way} for name, parts in self._parts.items()
        }
        # By way and key: elements that were not 0 before a gradient was rounded, and what became of them.
        self._rounded: Dict[Way, Dict[int, CounterOf[str]]] = {way: {} for way in Way}

    def kept(self, noise: AbstractSet[int]) -> Dict[str, Dict[Way, Kept]]:
        """What is left, by layer: the worst of its parameters, but for those whose gradients are noise."""
        return {
            name: {way: self._worst(name, tallies, noise) for way, tallies in ways.items()}
            for name, ways in self._ways.items()
        }

    def floor(self, name: str, noise: AbstractSet[int]) -> Tuple[int, float]:
        """Of a layer, the elements that are not 0 in fp32, and the error with gradients in fp32."""
        nonzero = sum(tally.nonzero for tally in self._floors[name])
        return nonzero, self._worst(name, self._floors[name], noise).error

    def _worst(self, name: str, tallies: Sequence[Tally], noise: AbstractSet[int]) -> Kept:
        parts = zip(self._parts[name], tallies)
        kept = [tally.kept() for part, tally in parts if noise.isdisjoint(part.weights)]
        return Kept(*map(max, zip(*kept))) if kept else Kept(0.0, 0.0, 0.0)

    def compare(self, index: int, in_fp32: LayerGradients, scales: Mapping[Way, float]) -> None:
        """Every way of scaling, on one batch."""
        forward: Forward = partial(self._examined.forward, self.emulation, index)
        # Of the same activations: what is lost is lost by storing gradients.
        unstored = self._passes.with_one_scale(forward, self.emulation, round_gradients=False)
        for name, parts in self._parts.items():
            for part, tally in zip(parts, self._floors[name]):
                tally.add(part, unstored, in_fp32)
        for way in Way:
            if way is Way.ADAPTIVE:
                stored = self._passes.adaptive(forward, self._adaptive, index)
            else:
                stored = self._passes.with_one_scale(forward, self.emulation, scales[way])
            for name, parts in self._parts.items():
                for part, tally in zip(parts, self._ways[name][way]):
                    tally.add(part, stored, in_fp32, unstored)
            for key, seen in self.emulation.emulated_storage.gradients.items():
                nonzero = seen.statistics.count - seen.statistics.zeros + seen.underflowed
                counted = self._rounded[way].setdefault(key, Counter())
                counted.update(nonzero=nonzero, underflow=seen.underflowed, overflow=seen.overflowed)

    def begins(self, network: Network, layer: Layer, way: Way, kept: Kept) -> str:
        """The first function of each branch in whose backward most of what a layer loses is lost; empty: it
        is lost bit by bit.
        """
        counts = self._rounded[way]
        what = "overflow" if kept.overflow else "underflow"
        least = 0.0 if kept.overflow else max(_BEGINS * kept.underflow, 0.01)

        def loses(v: nn.Variable) -> bool:
            counted = counts.get(hash(v))
            return counted is not None and counted[what] > least * counted["nonzero"]

        def arrives(v: nn.Variable) -> bool:
            counted = counts.get(hash(v))
            return counted is None or counted["nonzero"] > counted["underflow"]

        behind = {hash(f): f for f in network.behind(layer.outputs or layer.weights)}
        waiting, seen, found = [v.parent for v in network.plan.roots], set(), []
        while waiting:
            f = waiting.pop()
            if hash(f) in seen or hash(f) not in behind or not any(map(arrives, f.outputs)):
                continue
            seen.add(hash(f))
            before = [v for v in f.inputs if v.parent is not None and hash(v.parent) in behind]
            if any(map(loses, before)):
                found.append(f)
            else:
                waiting += [v.parent for v in before]
        # Or in that of the layer.
        found = found or [
            f for f in behind.values() if any(hash(v) in layer.weights and loses(v) for v in f.inputs)
        ]
        return listed([network.name(f) for f in sorted(found, key=lambda f: network.number[hash(f)])])

    def losing(self, network: Network, layer: Layer, way: Way, noise: AbstractSet[int]) -> str:
        """The parameters of a layer that lose, if others do not."""
        parts = list(zip(self._parts[layer.name], self._ways[layer.name][way]))
        kept = {key: tally.kept() for part, tally in parts for key in part.weights if key not in noise}
        found = [key for key, own in kept.items() if own.overflow or own.error > 0.05]
        names = network.plan.names
        return ", ".join(names.get(key, "an input") for key in found) if len(found) < len(kept) else ""


class _Examination:
    """Measures a network whose batches are recorded."""

    def __init__(self, examined: Examined, storage: StorageLike) -> None:
        self._examined, precisions = examined, LayerPrecisions(storage)
        self._storage = canonical_name(storage) if isinstance(storage, str) else str(precisions)
        self._layers = parameter_layers(examined.plan)
        self._passes = Passes(self._layers)
        self._tried = _Tried(examined, self._layers, precisions)
        self._network = Network(examined.plan, self._tried.emulation.emulated_storage)
        self._reach = Reach(examined, self._network)
        self._finer = FormatEmulation(examined.loss, _FINER)
        self._in_fp32: List[Sight] = []
        self._as_stored: List[Sight] = []
        self._losses: List[Tuple[float, float]] = []
        # By layer, of what the solver gets.
        self._for_solver: Dict[str, float] = {}

    def numbers(self) -> NetworkNumbers:
        """Everything that verdicts are made from."""
        examined, batches = self._examined, range(len(self._examined))
        causes = list(self._unfed())
        scales: Dict[Way, float] = {}
        formats: Dict[str, Dict[str, Dict[Way, Kept]]] = {}
        layers: List[LayerNumbers] = []
        if not causes:
            try:
                for index in batches:
                    self._observe(index)
                causes += [cause for cause in self._not_finite(self._in_fp32) if cause.fatal]
                if not causes:
                    scales, formats, noise = self._compare(batches)
                    layers = [self._numbers(layer, noise) for layer in self._layers]
                    causes = list(self._of_gradients(layers))
            except NoBackward as error:
                what = "it has no backward, so that nothing before it can be trained"
                remedy = "use a function with a gradient, or unlinked() before it"
                name = self._network.name(self._network.function(error.function))
                causes = [Cause("no_backward", name, what, remedy)]
        losses = self._losses or [(math.nan, math.nan)]
        in_fp32, as_stored = (float(np.mean(one)) for one in zip(*losses))
        return NetworkNumbers(
            self._storage,
            len(examined),
            in_fp32,
            as_stored,
            scales,
            layers,
            causes,
            formats,
            [note for note in (examined.note, self._reach.note()) if note],
        )

    def _unfed(self) -> Iterator[Cause]:
        for v, f in self._examined.unfed[:1]:
            what = f"it reads {input_name(v)}, which nobody has filled, and no layer reads other data"
            remedy = "fill it, or give a feeder that does"
            if v.need_grad:
                what = (
                    f"it reads a variable of shape {v.shape} that is unlinked: nothing computes it in forward"
                )
                remedy = "link it, or run forward of it in the feeder"
            yield Cause("unfed", self._network.name(f), what, remedy)

    def _observe(self, index: int) -> None:
        """Look at a batch in fp32, and with activations and weights as stored."""
        examined, plan = self._examined, self._examined.plan
        in_fp32 = Watch(plan, examined.kernels)
        forward = partial(examined.forward, examined.loss, index, in_fp32.after_forward)
        self._passes.with_one_scale(forward, examined.loss, pre=in_fp32.before_backward)
        self._in_fp32.append(in_fp32.end())
        loss = float(examined.loss.d)
        if examined.on_gradients is not None:
            examined.on_gradients(examined.solver)
        for layer in self._layers:
            known = [in_fp32.statistics(v.grad) for v in layer.weights.values()]
            largest = max((one.abs_max for one in known if one is not None), default=0.0)
            self._for_solver[layer.name] = max(self._for_solver.get(layer.name, 0.0), largest)
        as_stored = Watch(plan, examined.kernels, in_fp32)
        forward = partial(examined.forward, self._tried.emulation, index, as_stored.after_forward)
        self._passes.with_one_scale(
            forward, self._tried.emulation, pre=as_stored.before_backward, round_gradients=False
        )
        self._as_stored.append(as_stored.end())
        self._losses.append((loss, float(examined.loss.d)))

    def _not_finite(self, *sights: Sequence[Sight]) -> List[Cause]:
        """The first in forward order that is found in any batch."""
        found = (Finiteness(self._network, *of_batch).cause() for of_batch in zip(*sights))
        return sorted((cause for cause in found if cause), key=self._network.position)[:1]

    def _compare(
        self, batches: Sequence[int]
    ) -> Tuple[Dict[Way, float], Dict[str, Dict[str, Dict[Way, Kept]]], Set[int]]:
        """The scales, what is left in each format, and keys of the parameters whose gradients are noise."""
        examined, passes = self._examined, self._passes
        roots = set(map(hash, examined.plan.roots))
        seen = [item for sight in self._in_fp32 for item in sight.gradients.items()]
        amax = max((one.abs_max for key, one in seen if key not in roots), default=0.0)
        tried = {self._storage: self._tried}
        for other in _FORMATS:
            if other not in tried:
                tried[other] = _Tried(examined, self._layers, LayerPrecisions(other))
        scales = {
            name: {
                Way.NONE: 1.0,
                Way.CONSTANT: _CONSTANT,
                Way.ONE: HistoryPolicy().scale(amax, u_max=one.u_max) if amax else 1.0,
            }
            for name, one in tried.items()
        }
        noise = {key for layer in self._layers for key in layer.weights}
        for index in batches:
            forward = partial(examined.forward, examined.loss, index)
            in_fp32 = passes.with_one_scale(forward, examined.loss)
            finer = passes.with_one_scale(partial(examined.forward, self._finer, index), self._finer)
            noise = self._differ(noise, finer, in_fp32)
            if noise:
                # Not random numbers of every pass.
                noise -= self._differ(noise, passes.with_one_scale(forward, examined.loss), in_fp32)
            for name, one in tried.items():
                one.compare(index, in_fp32, scales[name])
        return scales[self._storage], {name: one.kept(noise) for name, one in tried.items()}, noise

    def _differ(self, keys: AbstractSet[int], a: LayerGradients, b: LayerGradients) -> Set[int]:
        """Those of some parameters whose gradients are finite and not the same."""
        found: Set[int] = set()
        for part in (part for layer in self._layers for part in parts_of(layer)):
            tally = Tally()
            tally.add(part, a, b)
            if keys & part.weights.keys() and _NOISE < tally.error < math.inf:
                found.update(part.weights)
        return found

    def _numbers(self, layer: Layer, noise: AbstractSet[int]) -> LayerNumbers:
        tried, keys = self._tried, [*layer.outputs, *layer.weights]
        (nonzero, floor), kept = tried.floor(layer.name, noise), tried.kept(noise)[layer.name]
        known = (s.gradients[k].abs_max for s in self._in_fp32 for k in keys if k in s.gradients)
        losing = [way for way, one in kept.items() if one.overflow or one.underflow >= 0.01]
        return LayerNumbers(
            layer.name,
            layer.type_name,
            max(known, default=0.0),
            nonzero,
            floor,
            kept,
            tried.emulation.emulated_storage.precision_of(keys[0]).stored_gradients,
            bool(nonzero and layer.weights and layer.weights.keys() <= noise),
            {way: tried.begins(self._network, layer, way, kept[way]) for way in losing},
            {way: tried.losing(self._network, layer, way, noise) for way in Way},
        )

    def _of_gradients(self, layers: Sequence[LayerNumbers]) -> Iterator[Cause]:
        """What is wrong where fp32 is finite everywhere."""
        network = self._network
        damaged = {n.name for n in layers if not n.floor < USELESS and not n.is_noise and n.nonzero}
        beyond = self._not_finite(self._in_fp32, self._as_stored)
        yield from beyond
        ends = Ends(network, self._in_fp32)
        ended = ends.functions()
        once: Dict[Tuple[str, str], Cause] = {}
        for cause in (*ended.values(), *ends.saturated()):
            once.setdefault((cause.kind, cause.function.partition("#")[0]), cause)
        yield from once.values()
        yield from self._noise(layers)
        if damaged and not any(cause.fatal for cause in beyond):
            sights = zip(self._in_fp32, self._as_stored)
            changed = (Finiteness(network, *of_batch).changed(damaged) for of_batch in sights)
            first = sorted((cause for cause in changed if cause), key=network.position)
            stored = ends_as_stored(network, Ends(network, self._as_stored), ended)
            everything = len(damaged) == sum(bool(n.nonzero) for n in layers if not n.is_noise)
            found = [*first, *([] if stored is None else [stored])][:1]
            spoilt = tuple(n.name for n in layers if n.name in damaged)
            yield from (cause._replace(fatal=everything, spoils=spoilt) for cause in found)
        yield from self._reach.causes()
        noise = {layer.name for layer in layers if layer.is_noise}
        small = self._reach.epsilon({n: amax for n, amax in self._for_solver.items() if n not in noise})
        yield from [] if small is None else [small]

    def _noise(self, layers: Sequence[LayerNumbers]) -> Iterator[Cause]:
        noisy = [layer.name for layer in layers if layer.is_noise]
        single = self._network.normalization_of_single_numbers()
        if noisy and single:
            what = "it passes no gradient: it normalises one number at a time"
            yield Cause("constant_input", single, what, "feed larger batches or maps", False)
        elif noisy:
            what = "its gradient in fp32 is nothing but rounding errors"
            what += f" (one of {len(noisy)} layers)" if noisy[1:] else ""
            remedy = "check what the loss computes of it: a mean over all classes of a softmax is constant"
            nothing = all(layer.is_noise or not layer.nonzero for layer in layers)
            yield Cause("rounding_noise", noisy[-1], what, remedy, nothing)


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else None
