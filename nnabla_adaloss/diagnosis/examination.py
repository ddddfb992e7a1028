# SPDX-License-Identifier: Apache-2.0
"""Examination of a training in one call."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union, overload

import numpy as np

from ..core.formats import canonical_name
from ..core.precision import LayerPrecisions, PrecisionLike, PrecisionName, StorageLike
from . import inputs, remedies
from .advice import PrecisionAdvice, advise, candidates_of
from .branches import Branches
from .causes import Cause, Note, distinct, summed_up
from .deviations import Deviations
from .ends import Ends
from .finite import not_finite
from .network import COMPARING, RECURRENT, Network, read_by
from .passes import FormatTrial, Layer, NoBackward, Passes, Tally, Way, parameter_layers
from .presentation import Diagnosis
from .rounding_noise import RoundingNoise
from .steps import Steps
from .target import Feeder, Subject
from .untrained import alike_weights, notes, untrained
from .verdicts import COARSE, USELESS, LayerNumbers, NetworkNumbers, serves
from .watching import REPEATED, Sight

# Formats tried besides the requested one.
_FORMATS: Sequence[PrecisionName] = ("float16", "bfloat16", "fp8_hybrid")
_NEGLIGIBLE = 2.0**11  # factor by which the largest numbers of an input exceed those that are negligible
_MANY_UNITS = 0.15  # share of a layer's units without a gradient that is noted


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
    """Find the effect of a narrow storage on a network's gradients, the scaling that keeps them, and places
    where they end or are not finite.

    Runs each batch forward and backward in fp32, and with emulated storage: without scaling, with a constant
    of 65536, with one measured scale, and with one per component. Takes some twenty passes per batch, and the
    memory of six more copies of the gradients and one of the activations. Parameters, gradients, running
    statistics, data, the random state, and a solver's state and `counters.fed` of an updater are restored
    afterwards; other arrays of the graph (`loss.d`) keep values of the last pass. Functions with a seed of
    their own restart from it in each pass, and random functions on a GPU continue from the last pass.

    Given a list of formats, it finds a format for each layer instead: see `PrecisionAdvice`. That takes a
    pass or two per batch for each layer and format.

    Args:
        loss_or_updater: the loss Variable of one element, or a wrapper of one; or an updater, nnabla's or one
            of this package. Of an updater, the loss and data feeder are used, the solver takes a few steps,
            which are undone, and `on_gradients` is called once per batch, unless there is a communicator.
        storage: the format to try: `"float16"`, `"bfloat16"`, `"fp8_hybrid"`, a `Format`, a `Precision`, or
            a mapping from patterns of layers. Or a list of formats: each layer gets the harmless one with
            the fewest bits, and of equally wide ones the first.
        feeder: called without arguments before each batch. None: the updater's, or the present data.
        data_feeder: another name of `feeder`, as updaters call it.
        batches: number of examined batches; 1 without a feeder. Default 4: enough to distinguish a rule from
            chance.

    Raises:
        TypeError: `loss_or_updater` is neither, a feeder cannot be called, or both names of it are given.
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
    examined = Subject(loss_or_updater, data_feeder if feeder is None else feeder, batches)
    if isinstance(storage, Sequence) and not isinstance(storage, str):
        return advise(examined, candidates_of(storage))
    LayerPrecisions(storage)  # refused before anything is fed
    with examined.preserved(), np.errstate(all="ignore"):
        return Diagnosis(_Examination(examined, storage).numbers())


class _Examination:
    """Measures a network whose batches are recorded."""

    def __init__(self, examined: Subject, storage: StorageLike) -> None:
        self._examined, self._emulation = examined, examined.emulated(storage)
        precisions = self._emulation.precisions
        self._storage = canonical_name(storage) if isinstance(storage, str) else str(precisions)
        self._layers = parameter_layers(examined.graph, examined.plan)
        self._passes = Passes(self._layers, examined.forward)
        self._network = Network(examined, self._emulation.emulated_storage)
        # By batch: arrays in fp32 and as stored, and the loss of both.
        self._in_fp32: List[Sight] = []
        self._as_stored: List[Sight] = []
        self._losses: List[Tuple[float, float]] = []
        # By format, except those in which nnabla raises, such as for an index beyond a table.
        self._tried: Dict[str, FormatTrial] = {}
        # Names of functions, and keys of gradients, that differ from pass to pass over the same batch.
        self._random: List[str] = []
        self._unsteady: Set[int] = set()
        # Keys of gradients whose errors are not judged: these, rounding errors, and those of jumps.
        self._left_out: Set[int] = set()
        self._noise = RoundingNoise(self._network, self._passes)
        self._steps = Steps(examined, self._layers)

    def numbers(self) -> NetworkNumbers:
        """Measure all numbers for the verdicts."""
        examined = self._examined
        layers: List[LayerNumbers] = []
        try:
            # Causes of which no pass can tell more.
            causes = [examined.beyond] if examined.beyond else []
            if examined.unfed and not causes:
                causes.append(inputs.blank(self._network, *examined.unfed))
            if not self._network.reached_leaves:  # backward has nothing to compute
                causes += untrained(self._network)
            causes = causes or self._observe()
            if not causes:
                self._branches = Branches(self._network, self._in_fp32)
                self._compare()
                causes += inputs.unfilled_targets(self._network)
                self._ends = Ends(self._network, self._in_fp32)
                self._deviations = [Deviations(self._network, one) for one in self._as_stored]
                layers = [*map(self._numbers, self._layers)]
                causes += self._of_gradients(layers)
        except NoBackward as error:
            what = f"it has no backward, so that nothing before it can be trained (nnabla: {error.reason})"
            # A loss has a backward, unless its labels are computed and need a gradient.
            is_loss = error.function.info.type_name.endswith(COMPARING)
            remedy = remedies.SCORES_FIRST if is_loss else remedies.NO_BACKWARD
            causes = [Cause("no_backward", self._network.name(error.function), what, remedy)]
        causes = list(summed_up(causes))
        formats = {
            name: {layer.name: one.effects(layer, self._left_out) for layer in self._layers}
            for name, one in self._tried.items()
        }
        in_fp32, as_stored = (float(np.mean(one)) for one in zip(*self._losses or [(math.nan, math.nan)]))
        return NetworkNumbers(
            storage=self._storage,
            batches=len(examined),
            loss=in_fp32,
            stored_loss=as_stored,
            scales=self._tried[self._storage].scales if self._tried else {},
            layers=layers,
            causes=causes,
            formats=formats,
            notes=[*examined.notes, *notes(self._network), *self._notes(layers, causes)],
        )

    def _observe(self) -> List[Cause]:
        """Run all batches in fp32, and with stored activations and weights; return causes that end this."""
        examined, network, emulation = self._examined, self._network, self._emulation
        for index in range(len(examined)):
            in_fp32 = Sight(network)
            as_stored = Sight(network, in_fp32, emulation.emulated_storage.data)
            self._passes.observe(examined.loss, index, in_fp32)
            if not index:
                self._noise.compare_forward(in_fp32)
                # Functions with other results for the same inputs have a random generator of their own.
                again = Sight(network, in_fp32)
                examined.forward(examined.loss, index, again.after_forward)
                self._random = [network.name(f) for f in again.origins_of_errors(REPEATED, REPEATED)]
            loss = float(examined.loss.d)
            self._steps.take(index, in_fp32)
            try:
                self._passes.observe(emulation, index, as_stored)
            except RuntimeError as error:
                return [self._refused(as_stored, error)]
            self._in_fp32.append(in_fp32)
            self._as_stored.append(as_stored)
            self._losses.append((loss, float(examined.loss.d)))
        fatal = [cause for cause in not_finite(self._network, self._in_fp32) if cause.fatal]
        # Gradients that are not finite tell nothing more; dead rectifiers show in forward alone.
        return [*fatal, *Ends(network, self._in_fp32).dead()] if fatal else []

    def _refused(self, as_stored: Sight, error: RuntimeError) -> Cause:
        """Cause of a function that nnabla refuses to run with its inputs as stored."""
        # It is the first function without an output, as forward ends there.
        f = next((f for f in self._network.graph.functions if hash(f.outputs[0]) not in as_stored.data), None)
        if f is None:
            raise error
        name, reason = self._network.name(f), str(error).strip().rpartition("\n")[2]
        if f.info.type_name.startswith(("Embed", "Gather", "OneHot", "Scatter")):
            what = f"it reads indices that {self._storage} rounds beyond its table (nnabla: {reason})"
            return Cause("rounded_index", name, what, remedies.FEED_INDICES, as_stored=True)
        what = f"nnabla cannot compute it from numbers that are rounded to {self._storage}: {reason}"
        return Cause("refused", name, what, remedies.MORE_BITS, as_stored=True)

    def _notes(self, layers: Sequence[LayerNumbers], causes: Sequence[Cause]) -> Iterator[Note]:
        """Note findings that are not faults, unless a cause explains them."""
        if self._tried:
            yield from self._notes_of_passes(layers, causes)
        if not any(cause.kind == "on_gradients" for cause in causes):
            yield from self._steps.notes(self._branches.shrinking if self._tried and not causes else None)
        if jumping := self._network.listed(f for sight in self._in_fp32 for f in sight.jumping):
            why = "which reads an image exactly at its pixels: gradients by these places are not judged."
            yield Note(f"Derivatives jump in {jumping}, {why}")
        if self._random:
            what = "Numbers that differ from pass to pass are computed by "
            yield Note(what, self._random, ": gradients that depend on them are not judged.")

    def _notes_of_passes(self, layers: Sequence[LayerNumbers], causes: Sequence[Cause]) -> Iterator[Note]:
        """Note findings of the passes with all ways of scaling, unless a cause explains them."""
        kinds = {cause.kind for cause in causes}
        if refused := [name for name in _FORMATS if name not in self._tried]:
            what = "nnabla raises an error with numbers that are rounded to "
            yield Note(what, refused, ", which is not tried.")
        yield from inputs.notes(self._network, self._in_fp32)
        if fused := [layer.name for layer in layers if layer.type_name in RECURRENT]:
            yield Note("Numbers between the steps of ", fused, " stay in fp32 here: they are not judged.")
        if "lost_constant" not in kinds:
            yield from inputs.lost_constants(self._network)
        if "saturated" not in kinds:
            yield from self._ends.saturated_gates()
        yield from self._branches.blank_inputs()
        if "equal_units" not in kinds and (alike := alike_weights(self._network)):
            yield Note("Units stay alike, as all numbers are equal in ", alike, f": {remedies.INITIALISE}.")
        if not causes:
            pairs = zip(self._layers, layers)
            yield from self._branches.blocked(one for one, n in pairs if not (n.nonzero or n.waits_for))
            lost = [n.name for n in layers if min(e.lost_units for e in n.effects.values()) > _MANY_UNITS]
            if lost:
                end = f" with any scale: in {self._storage} it is too small beside that of others: "
                yield Note("Many units lose their gradient in ", lost, f"{end}{remedies.ALIKE}.")
            # Half of the error that would be a fault, which in 8 bits is usual.
            coarse = [n.name for n in layers if n.is_judged and n.stored.bits > 8 and n.floor > COARSE / 2.0]
            changed = (one.changed(coarse) for one in self._deviations if coarse)
            yield from (Note(str(cause)) for cause in [*filter(None, changed)][:1])
        found = [note for one in self._deviations for note in one.notes()]
        yield from {tuple(note.names): note for note in found}.values()
        yield from self._deviations[0].nearly_overflowing()
        yield from self._branches.dead_units({cause.function for cause in causes})

    def _compare(self) -> None:
        """Try each format; find gradients that are rounding errors, or differ from pass to pass."""
        examined, network, passes = self._examined, self._network, self._passes
        amaxes: Dict[int, float] = {}
        for key, seen in (item for sight in self._in_fp32 for item in sight.gradients.items()):
            amaxes[key] = max(amaxes.get(key, 0.0), seen.abs_max)
        # The loss gradient is the scale itself, and limits none.
        amaxes.update(dict.fromkeys(map(hash, network.roots), 0.0))
        others = {str(name): examined.emulated(name) for name in _FORMATS if name != self._storage}
        emulations = {self._storage: self._emulation, **others}
        for v in filter(network.is_input, network.inputs.values()):
            # Negligible data that storage makes 0, such as the tails of a blob, are 0 in fp32, too. Otherwise
            # their signs alone would decide which ReLUs open behind biases of 0, and change fp32's gradients.
            least, readers = network.format(v).smallest_subnormal / 2.0, network.readers[hash(v)]
            if network.products.issuperset(readers) and self._branches.largest(v) > _NEGLIGIBLE * least:
                examined.flushed[hash(v)] = least
        tried = {n: FormatTrial(passes, one, examined.plain(one), amaxes) for n, one in emulations.items()}
        unsteady = Tally(key for layer in self._layers for key in (*layer.weights, *layer.outputs))
        for index in range(len(examined)):
            exact = self._noise.exact
            in_fp32, loss = passes.with_one_scale(exact, index), float(examined.loss.d)
            self._noise.compare(index, in_fp32, loss)
            self._branches.add(in_fp32)
            if self._random:
                unsteady.add(passes.with_one_scale(exact, index), in_fp32)
            for name, one in [*tried.items()]:
                try:
                    one.compare(index, in_fp32)
                except RuntimeError:
                    if name == self._storage:
                        raise
                    del tried[name]
        self._noise.end(self._in_fp32)
        self._unsteady = unsteady.differing(REPEATED)
        # Where a function samples an image exactly on pixels, derivatives by places jump. They are left out,
        # except of variables that the image is computed of, too.
        jumping = {f for sight in self._in_fp32 for f in sight.jumping}
        image, places = (read_by(network.walk(f.inputs[i].parent for f in jumping)) for i in (0, 1))
        self._left_out = self._unsteady | (places - image)
        self._noise.gradients -= self._left_out
        self._left_out |= self._noise.gradients
        self._tried = tried

    def _numbers(self, layer: Layer) -> LayerNumbers:
        noise, unsteady, left_out = self._noise.gradients, self._unsteady, self._left_out
        tried = self._tried[self._storage]
        nonzero, effects = tried.floor.nonzero(layer), tried.effects(layer, left_out)
        keys = [*layer.outputs, *layer.weights]
        known = (s.gradients[k].abs_max for s in self._in_fp32 for k in keys if k in s.gradients)
        losing = [way for way, one in effects.items() if one.overflow or one.underflow >= 0.01]
        return LayerNumbers(
            name=layer.name,
            type_name=layer.type_name,
            amax=max(known, default=0.0),
            nonzero=nonzero,
            floor=tried.floor.worst(layer, left_out).error,
            effects=effects,
            stored=self._emulation.emulated_storage.precision_of(keys[0]).stored_gradients,
            is_noise=bool(nonzero and layer.weights and layer.weights.keys() <= noise),
            waits_for="" if nonzero else self._branches.waits_for(layer),
            is_random=bool(unsteady and unsteady.issuperset(layer.weights or layer.outputs)),
            begins={way: tried.begins(self._network, layer, way, effects[way]) for way in losing},
            losing={way: tried.losing(self._network, layer, way, left_out) for way in Way},
        )

    def _of_gradients(self, layers: Sequence[LayerNumbers]) -> Iterator[Cause]:
        """Causes, in this order: nonfinite as stored, ends, rounding errors, storage, parameters, solver."""
        network, noise = self._network, self._noise
        noisy = [n.name for n in layers if n.is_noise]
        learning = [n for n in layers if n.is_judged]
        # No scale helps these layers: stored activations and weights alone make their gradients wrong. Errors
        # of a third are usual in formats of 8 bits.
        damaged = [n.name for n in learning if n.floor >= (USELESS if n.stored.bits <= 8 else COARSE)]
        beyond = not_finite(network, self._as_stored)
        if learning and all(serves(n.effects, Way.ADAPTIVE) for n in learning):
            # No gradient suffers: what overflows is the value of a loss, not its derivative.
            beyond = [cause._replace(fatal=False) for cause in beyond]
        yield from beyond
        ended = self._ends.functions()
        ends = list(distinct((*ended.values(), *self._ends.saturated(), *self._branches.clipped())).values())
        if not learning and all(cause.kind == "no_gradient" for cause in ends):
            ends = self._ends.zero_loss() or ends
        # Rounding errors need a cause, except of biases that a normalization removes. A layer `a` with a
        # computed weight, as by spectral normalization, has a bias alone: if its weight's layer, `a/...`,
        # learns, the bias is no fault.
        explained = {name for cause in ends for name in cause.spoils}
        unexplained = [
            layer.name
            for layer in self._layers
            if layer.name in noisy and layer.name not in explained and not noise.is_bias(layer)
            if not any(n.name.startswith(f"{layer.name}/") for n in learning)
        ]
        cancelling = noise.functions if noisy or damaged else []
        is_fatal = any(cause.fatal for cause in beyond)
        of_storage = None if is_fatal else next(self._of_storage(damaged, ended), None)
        # Errors behind a function that computes only rounding errors are due to that.
        behind = network.behind(hash(v) for f in cancelling for v in f.outputs)
        if of_storage is not None and of_storage.function in map(network.name, behind):
            of_storage = None
        fatal = not any(n.floor < USELESS for n in learning)
        # If storage makes the numbers of a saturated function 0, the reason for the saturation says more.
        same = [cause for cause in ends if of_storage is not None and cause.function == of_storage.function]
        for cause in ends:
            yield cause._replace(fatal=fatal, spoils=tuple(damaged)) if cause in same else cause
        if not beyond and (cancelling or unexplained):
            spoils = tuple(dict.fromkeys((*noisy, *damaged)))
            causes = [noise.cause_in_forward(spoils)] if cancelling else noise.causes(unexplained)
            yield from (cause._replace(fatal=not learning) for cause in causes)
        if of_storage is not None and not same:
            yield of_storage._replace(fatal=fatal, spoils=tuple(damaged), as_stored=True)
        yield from self._without_tail(learning)
        yield from untrained(network)
        yield from self._steps.causes({*noisy}, self._branches.shrinking)

    def _without_tail(self, learning: Sequence[LayerNumbers]) -> Iterator[Cause]:
        """Cause of gradients that any one scale loses, because only a float tail holds some numbers."""
        least = {n.name: next((way for way in Way if serves(n.effects, way)), None) for n in learning}
        spoiled = tuple(name for name, way in least.items() if way is Way.ADAPTIVE)
        network, has_fault = self._network, spoiled and not self._examined.has_tail
        for one, f in product(self._deviations, network.in_order(network.nodes) if has_fault else ()):
            v = f.outputs[0]
            if v.size > 1 and one.amax(v) > network.format(v).max:
                what = f"it computes numbers up to {one.beyond(v)}{one.reads(f)}. This training has no float "
                what += "tail: AdaptiveLossScalingUpdater computes it in fp32"
                yield Cause("no_float_tail", network.name(f), what, remedies.FLOAT_TAIL, False, spoiled)
                return

    def _of_storage(self, damaged: Sequence[str], ended: Mapping[Any, Cause]) -> Iterator[Cause]:
        """Causes that fp32 does not have; of damaged layers, the origins of their errors."""
        network, deviations = self._network, self._deviations
        yield from (cause for one in deviations for cause in one.wrong_rows())
        yield from filter(None, (Deviations(network, sight).exploded() for sight in self._in_fp32))
        yield from (cause for one in deviations for cause in one.lone_constants())
        if damaged:
            changed = filter(None, (one.changed(damaged) for one in deviations))
            yield from sorted(changed, key=lambda cause: network.positions.get(cause.function, -1))
            for f, cause in Ends(network, self._as_stored).functions().items():
                if f not in ended:
                    what = f"{cause.what}, as stored in {network.format(f.outputs[0]).name}, not in fp32"
                    yield cause._replace(kind=f"{cause.kind}_as_stored", what=what)
