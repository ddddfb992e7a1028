# SPDX-License-Identifier: Apache-2.0
"""Inputs and targets: unfilled ones, and functions that read them so that no layer can learn from them."""

from __future__ import annotations

import math
from typing import Any, Iterator, Optional, Sequence

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from . import remedies
from .causes import Cause, Note
from .finite import SOFTMAX_OR_LOSS
from .network import COMPARING, DIFFERENCES, RECURRENT, Network
from .operands import NOT_ZERO, Batches
from .target import input_name
from .watching import Sight

# Ranges of functions' outputs.
_RANGES = {
    **dict.fromkeys(("HardSigmoid", "Sigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("ReLU", "SoftPlus"), (0.0, math.inf)),
    **dict.fromkeys(("HardTanh", "Tanh"), (-1.0, 1.0)),
}
_ALIKE = 1e-3  # rows that deviate by less than this share of their size are alike
_PROBABILITIES = {"BinaryCrossEntropy", "SigmoidCrossEntropy"}


def notes(network: Network, sights: Sequence[Sight]) -> Iterator[Note]:
    """Note inputs with equal rows or lost columns, and functions that read inputs wrongly."""
    functions = network.graph.functions
    for f in (f for f in functions if f in network.nodes and f.inputs):
        for text in _of(f, network):
            yield Note("", [network.name(f)], f" {text}.")
    alike = [f for f in network.weighted if all(s.variation.get(f, 1.0) < _ALIKE for s in sights)]
    # Samples become different when weights of 0 have moved, or when several entries of a codebook are chosen.
    starts = any(v.ndim > 1 and not v.d.any() for key, v in network.leaves.items() if key in network.names)
    chosen = any(remedies.is_a(g, "Embed", "OneHot", "TopKData") for g in network.walk(alike[:1]))
    if alike and alike[-1] == network.weighted[-1] and len(sights) > 1 and not (starts or chosen):
        end = f" on: in each batch, the rows that it reads differ by less than {_ALIKE:.1%}."
        yield Note("With these weights no layer can tell samples apart, from ", [network.name(alike[0])], end)
    for f in filter(Batches(network, sights).is_disjoint, functions):
        if f.outputs[0].size > 1 and not f.outputs[0].need_grad:
            yield Note("", [network.name(f)], f" makes 0 of other numbers: {remedies.CHECK_MASK}.")
    # A loss is maximised if all elements of its gradient are one number below 0.
    for f in (f for f in functions if f.info.type_name.endswith(COMPARING)):
        seen = [s.gradients.get(hash(f.outputs[0])) for s in sights]
        if all(g and -g.sum > 0.999 * g.count * g.abs_max > 0.0 for g in seen):
            end = " gets larger by training, as its gradient is below 0."
            yield Note("", [network.name(f)], f"{end} Unless that is meant, check the signs.")
    fixed = (f for f in functions if remedies.is_a(f, "BatchNormalization") and not f.info.args["batch_stat"])
    if new := [network.name(f) for f in fixed if not f.inputs[-2].d.any() and (f.inputs[-1].d == 1.0).all()]:
        end = f": {remedies.STATISTICS}."
        yield Note("A mean of 0 and a variance of 1, as at the start, are used by ", new, end)
    for v in filter(network.is_input, network.inputs.values()):
        if (x := _numbers(v, network)) is not None and x.ndim > 2 and x.size:
            yield from _of_input(v, x.reshape(-1, x.shape[-1]), network)


def unfilled_targets(network: Network) -> Iterator[Cause]:
    """Causes of unfilled targets: unlike unfilled initial states, they reach a loss without a product."""
    for key in network.never_filled:
        uses = network.behind([key], lambda f: f not in network.products)
        if (reader := next((f for f in uses if f.info.type_name.endswith(COMPARING)), None)) is not None:
            what = f"it compares with {input_name(network.inputs[key])}, which nobody has filled"
            yield Cause("unfed", network.name(reader), what, remedies.FILL_TARGET, fatal=False)


def blank(network: Network, v: nn.Variable, f: Any) -> Cause:
    """Cause of an unfilled or zero leaf `v`, read by `f`, where no layer reads other data."""
    # An unfilled leaf that needs a gradient was unlinked from the function that computes it.
    if v.need_grad and hash(v) in network.never_filled:
        what = f"it reads a variable of shape {v.shape} that is unlinked: nothing computes it in forward"
        return Cause("unfed", network.name(f), what, remedies.FORWARD)
    how, remedy = network.emptiness(v)
    what = f"it reads {input_name(v)}, which {how}, and no layer reads other data"
    return Cause("unfed" if hash(v) in network.never_filled else "zero_input", network.name(f), what, remedy)


def _numbers(v: nn.Variable, network: Network) -> Optional[NDArray[Any]]:
    """Numbers of an input, which may be reshaped, by batch on the first axis; None for other variables."""
    v = remedies.source(v, "Broadcast", "BroadcastTo", "Reshape", "Transpose")
    return None if hash(v) in {*network.names, *network.never_filled} else network.examined.values(v)


def _of_input(v: nn.Variable, x: NDArray[Any], network: Network) -> Iterator[Note]:
    """Note numbers near their mean, and numbers that become 0 as stored: some of a weight, or a column."""
    stored, readers, name = network.format(v), network.readers[hash(v)], [network.called(v)]
    middle, deviation = float(x.mean()), float(x.std())
    if 1e-6 * abs(middle) < deviation < 0.01 * abs(middle):
        end = f" differ by {deviation:.2g} from {middle:.3g}, their mean: {remedies.NORMALISE_DATA}."
        yield Note("Numbers of ", name, end)
    is_small, is_set = np.abs(x) < stored.smallest_subnormal / 2.0, x != 0.0
    columns = is_small.all(axis=0) & is_set.any(axis=0)
    lost = np.count_nonzero(is_small & is_set) / max(np.count_nonzero(is_set), 1)
    if 0.1 < lost < 1.0 and not columns.any() and any(remedies.is_a(g, "Mul2") for g in readers):
        end = f", {lost:.0%} become 0 in {stored.name}: {remedies.SCALE_DATA}."
        yield Note("Of the numbers of ", name, end)
    if 0 < np.count_nonzero(columns) < columns.size:
        where = f"column {np.flatnonzero(columns)[0]} of its last axis becomes 0 in {stored.name}"
        is_data = any(g in network.weighted for g in readers)
        remedy = remedies.SCALE_DATA if is_data else remedies.INTO_RANGE
        yield Note("Of ", name, f", {where}: {remedy}.")


def _of(f: Any, network: Network) -> Iterator[str]:
    """Say how a function reads inputs wrongly: each clause goes on after its name."""
    kind, args = f.info.type_name, f.info.args
    first = _numbers(f.inputs[0], network)
    targets = _numbers(f.inputs[1], network) if len(f.inputs) > 1 else None
    before = f.inputs[0].parent.info.type_name if f.inputs[0].parent is not None else ""
    if kind == f"{before}CrossEntropy" or (before, kind) == ("LogSoftmax", "SoftmaxCrossEntropy"):
        yield f"applies a {before.lower()} to the output of one: give it the scores"
    if (before, kind) == ("Sigmoid", "SoftmaxCrossEntropy"):
        yield "reads the output of a sigmoid, which is from 0 to 1: give it the scores"
    if kind == "Dropout" and args["p"] >= 0.95:
        yield f"drops {args['p']:.0%} of all numbers: {remedies.DROPOUT}"
    scores, shape = remedies.origin(f.inputs[0]), f.inputs[0].shape
    if kind in SOFTMAX_OR_LOSS:
        axis = args["axis"]
        # A square matrix may have scores of all pairs of images and texts: both axes are those of samples.
        has_classes = len(shape) == 2 and shape[0] != shape[1]
        if axis == 0 and has_classes and network.nodes[f].loss_section:
            yield "normalises over the first axis, which is that of samples: choose the axis of classes"
        is_map = remedies.is_a(scores, "Convolution", "Deconvolution")
        if is_map and axis not in (1, 1 - len(shape)) and not scores.info.args.get("channel_last"):
            yield f"normalises over axis {axis}, where {network.name(scores)} has channels in axis 1"
    if first is not None and first.size:
        amax = np.abs(first).max()
        # Smaller numbers become 0 in float16, which has notes of its own.
        if 1e-7 < amax < 0.02 and f in network.weighted:
            yield f"reads numbers up to {amax:.2g} only: {remedies.NORMALISE_DATA}"
        if amax > 20.0 and kind in RECURRENT:
            yield f"reads numbers up to {amax:.3g}, which saturate its gates: {remedies.NORMALISE_DATA}"
    if targets is None or not targets.size:
        return
    least, most = targets.min(), targets.max()
    if kind in _PROBABILITIES and (least < 0.0 or most > 1.0):
        yield f"reads targets from {least:g} to {most:g}, where they must be from 0 to 1"
    if kind in _PROBABILITIES and targets.ndim == 3 and targets.shape[-1] > 1 and most == 0.0:
        yield f"reads targets that are all 0: {remedies.LABELS}"
    if kind in ("CategoricalCrossEntropy", "SoftmaxCrossEntropy"):
        by_batch = targets.reshape(len(targets), -1)
        is_single = by_batch.size > 16 and by_batch.shape[1] > 1 and (by_batch == by_batch[:, :1]).all()
        # A contrastive loss concatenates the score of the right pair, with label 0, and those of wrong ones.
        if is_single and least >= 0.0 and not remedies.is_a(scores, "Concatenate"):
            label = f"the label {least:g} of all samples" if least == most else "a single label in each batch"
            yield f"reads {label}: {remedies.LABELS}"
    if kind in DIFFERENCES:
        low, high = _RANGES.get(before, (-math.inf, math.inf))
        if np.mean((targets < low) | (targets > high)) > 0.5:
            yield f"compares numbers from {low:g} to {high:g} with targets from {least:.3g} to {most:.3g}"
        count = max(f.outputs[0].shape, default=0)
        if count > 1 and {v.shape for v in f.inputs} == {(count, 1), (1, count)}:
            what = f"compares each of {count} numbers with each of {count} targets"
            yield f"{what}: reshape one, unless all pairs are meant"


def lost_constants(network: Network) -> Iterator[Note]:
    """Note constants, stored as 0, that should keep the input of a logarithm, root or division from 0."""
    for f in network.graph.functions:
        kind, power = f.info.type_name, f.info.args.get("val", 0.0)
        if kind not in NOT_ZERO or (kind == "PowScalar" and power >= 1.0):
            continue
        g = f.inputs[NOT_ZERO[kind]].parent
        if remedies.is_a(g, "AddScalar", "MaximumScalar"):
            constant, stored = g.info.args["val"], network.format(g.outputs[0])
            if constant and not stored.nearest(constant):
                text = f" does not keep {network.name(f)} from 0: {constant:g} is 0 in {stored.name}"
                yield Note("", [network.name(g)], f"{text}: {remedies.held(f)}.")
