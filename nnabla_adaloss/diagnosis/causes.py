# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a network that is no matter of the loss scale: judged from numbers alone.

A cause is a function that yields what it finds; `causes_of` and `_gradient_ends` call all of them.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from .numbers import FunctionNumbers, LayerNumbers, NetworkNumbers, Training

# How many times larger than initialisations make it a weight may be after training before it is spoken of.
_EXPLODED = 32.0
# A relative error at which a gradient is not worth having.
_USELESS = 0.5
# An activation that has this share of its outputs where it is flat hardly learns.
_SATURATED = 0.9
# By how much a single function may change the size of gradients before it is spoken of.
_EXPLODES = 2.0**7
_SHRINKS = 2.0**-10
# By how much gradients may differ from layer to layer before it is spoken of, where no function stands out.
_SPREAD = 2.0**20
# A weight does not notice an update that is a smaller share of it, in fp32.
_UNNOTICED = 2.0**-24
# The share of a weight that may decay in an update.
_DECAYS = 0.01
# A part of the loss of this size is not small.
_LOUD_ENOUGH = 2.0**-6
# How many parameters are named that the loss does not depend on.
_NAMED = 4

_THE_UPDATER = "the updater"
_VARIED_DATA = "feed data that differs from sample to sample"

_INDEXED: FrozenSet[str] = frozenset({"Embed", "OneHot"})
_DIVISIONS: FrozenSet[str] = frozenset({"Div2", "RDivScalar"})
_RECTIFIERS: FrozenSet[str] = frozenset({"ReLU", "ReLU6", "CReLU"})
# They stop the gradient on purpose.
_STOPS: FrozenSet[str] = frozenset({"Unlink", "Sink"})
# What may stand between a softmax and the logarithm of it.
_REARRANGES: FrozenSet[str] = frozenset(
    {"Reshape", "Transpose", "Slice", "Split", "RSubScalar", "AddScalar", "MulScalar", "GatherNd", "Mul2"}
)
# What may stand between an exponential and the division by a sum of such.
_SUMS: FrozenSet[str] = frozenset({"Sum", "Mean", "Broadcast", "BroadcastTo", "Reshape", "AddScalar"})


# What a loss applies to its first input by itself, and what leaves numbers as they are.
_WITHIN = {
    "SoftmaxCrossEntropy": "Softmax",
    "SigmoidCrossEntropy": "Sigmoid",
    "CategoricalCrossEntropy": "LogSoftmax",  # the logarithm is applied twice
}
_SAME_NUMBERS: FrozenSet[str] = frozenset({"Reshape", "Transpose", "Slice", "Split", "Identity"})


class Cause(NamedTuple):
    """Something that is wrong, and what to do about it."""

    kind: str  # in a word: "dead_relu"
    layer: str  # the function where there is no layer, or the labels
    what: str
    remedy: str
    fatal: bool  # whether no loss scale helps

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}"


Found = Iterator[Cause]
Finder = Callable[[FunctionNumbers, NetworkNumbers], Found]


def causes_of(network: NetworkNumbers) -> List[Cause]:
    """Everything that is wrong, in forward order; what no scale helps first.

    Consequences of other causes are left out: data that is not finite comes before what is computed from
    it, weights that updates made too large before the activations that overflow. Of a layer that is used
    several times each kind is told once.
    """
    exploded, updates = list(_exploded(network))[:1], list(_too_large_update(network))[:1]
    found = [*_by_function(network, _wrong_targets, _closed_rows, _leaf_not_finite), *exploded]
    for finder in (_no_backward, _forward_not_finite, _backward_not_finite, _leaves_storage):
        found = found or _by_function(network, finder)
    # Neither follows from wrong labels, though it may from earlier updates.
    trained = network.training is not None and network.training.updates
    if all(cause.kind == "wrong_labels" for cause in found) and not (updates and trained):
        found += _gradient_ends(network)
    if updates and not exploded:
        # Overflow of the first forward is none of its consequences; nor are layers that enlarge gradients.
        loud = [] if found else _by_function(network, _resizing)
        found += [cause._replace(fatal=True) for cause in loud if cause.kind == "exploding"]
        found += updates
    found = found or list(_noise(network))
    found += [*_untrained(network), *_forgotten(network), *_by_function(network, _applied_twice)]
    if not exploded and not updates:
        found += _idle_updates(network)
        found += _sizes(network, found)
    once: Dict[Tuple[str, str], Cause] = {}
    for cause in found:
        once.setdefault((cause.kind, cause.layer.partition("#")[0]), cause)
    return sorted(once.values(), key=lambda cause: not cause.fatal)


def _by_function(network: NetworkNumbers, *finders: Finder) -> List[Cause]:
    """What is found of each function, in forward order."""
    return [cause for f in network.functions for cause in _first(f, network, *finders)]


def _first(f: FunctionNumbers, network: NetworkNumbers, *finders: Finder) -> List[Cause]:
    """What the first that finds anything has found."""
    return next(filter(None, (list(find(f, network)) for find in finders)), [])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


# Data, labels and weights that are wrong before anything is computed from them.


def _wrong_targets(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    """Labels and indices that there is nothing for."""
    targets = f.values.targets
    if targets is None:
        return
    limit, least, largest, type_name = targets.limit, targets.least, targets.largest, f.type_name
    indices, binary = type_name in _INDEXED, type_name == "SigmoidCrossEntropy"
    run, within = f"they run from {least:g} to {largest:g}, and", least >= 0.0 and largest <= 1.0
    if targets.nans:
        what, remedy = f"{type_name} reads {_count(targets.nans, 'NaN')} from them", "clean them"
    elif not limit:
        if within:
            return
        what, remedy = f"{run} {type_name} takes numbers from 0 to 1", "map them to that range"
    elif not targets.whole:
        what = f"they are not whole numbers, and {type_name} reads 0.7 as 0"
        remedy = "use whole numbers; for soft labels, sum -t * F.log_softmax(y)"
        if binary:
            remedy = "use 0 and 1, or F.binary_cross_entropy(F.sigmoid(y), t)"
    elif binary:
        if within:
            return
        what, remedy = f"{run} {type_name} takes 0 or 1", "map them to 0 and 1"
    elif indices and (least < 0.0 or largest >= limit):
        has = "rows" if type_name == "Embed" else "classes"
        what = f"{run} {f.name} has {limit} {has}, 0 to {limit - 1}"
        remedy = f"count them from 0, or make it {largest + 1:g} {has}"
    elif largest >= limit:
        what = f"{run} {type_name} has {limit} classes, 0 to {limit - 1}: it reads beyond its array"
        remedy = (
            "count them from 0, map those without a class (void) to -1, which is ignored, or give the last "
        )
        remedy += f"layer {largest + 1:g} outputs"
    elif largest < 0.0:
        nothing = f"which {type_name} ignores: there is nothing to learn"
        what = f"all of them are negative ({least:g} to {largest:g}), {nothing}"
        remedy = "feed labels, or skip such batches"
    else:
        return
    kind = "wrong_indices" if indices else "wrong_labels"
    yield Cause(kind, targets.name, what, remedy, True)


def _closed_rows(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if f.values.closed and _suffers(network):
        rows = _count(f.values.closed, "row")
        what = (
            f"{f.subject} reads {rows} of minus infinity alone ({f.name}): no place is open, so it gives NaN"
        )
        remedy = (
            "a mask must leave at least one place per row open: leave out empty samples, or mask with -1e4"
        )
        yield Cause("closed_row", f.place, what, remedy, True)


def _leaf_not_finite(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    # An attention mask of minus infinity harms nobody, unless it closes a row, which is told of its softmax.
    harmful = _suffers(network) and not any(g.values.closed for g in network.functions)
    bad = [leaf for g in network.functions for leaf in g.leaves.values() if leaf.nans or harmful]
    weights = list(dict.fromkeys(leaf.name for leaf in bad if leaf.is_parameter))
    for leaf in filter(bad.__contains__, f.leaves.values()):
        # A bad update spoils them together.
        if leaf.name in weights[1:]:
            continue
        held = _count(leaf.nans, "NaN") if leaf.nans else f"{leaf.infinities} infinities"
        kind, what = "data_not_finite", f"it reads data that holds {held} ({leaf.name})"
        remedy = "clean the data, or drop what is not finite"
        if leaf.is_parameter:
            kind, what = "weight_not_finite", f"its parameter {leaf.name} holds {held}"
            remedy = "restore earlier weights and check what updates them"
            training = network.training
            if training is not None and training.updates:
                updates = _count(training.updates, "update")
                what += f", after {updates} with a learning rate of {training.learning_rate:g}"
                remedy = "restore earlier weights, and lower the learning rate or clip gradients"
            if len(weights) > 1:
                what += f" ({_count(len(weights) - 1, 'other parameter')} are not finite either)"
        yield Cause(kind, f.place, what, remedy, True)


def _suffers(network: NetworkNumbers) -> bool:
    """Whether the loss or a gradient is not finite in fp32."""
    return not math.isfinite(network.loss) or any(f.breaks_gradient for f in network.functions)


# What updates do to parameters: too much, or nothing.


def _exploded(network: NetworkNumbers) -> Found:
    """Layers whose weight updates have made too large."""
    training = network.training or Training(0.0, 0, [])
    for step in training.steps if training.updates else ():
        times = step.weight / step.usual
        if times > _EXPLODED:
            what = f"its weights are {times:.2g} times what is usual for its fan-in, after "
            what += f"{_count(training.updates, 'update')} with a learning rate of {training.learning_rate:g}"
            remedy = "start again with a smaller learning rate, or warm it up and clip gradients"
            yield Cause("learning_rate", step.layer, what, remedy, True)


def _too_large_update(network: NetworkNumbers) -> Found:
    """Layers whose weight the next update makes larger than itself."""
    training = network.training or Training(0.0, 0, [])
    for step in training.steps:
        size = max(step.weight, step.usual)
        if step.update > size:
            what = f"an update is {step.update / size:.2g} times as large as its weights, "
            what += f"with a learning rate of {training.learning_rate:g}"
            remedy = f"{'start again with' if training.updates else 'use'} a smaller learning rate"
            remedy += ", or warm it up and clip gradients"
            yield Cause("learning_rate", step.layer, what, remedy, True)


def _idle_updates(network: NetworkNumbers) -> Found:
    """Updates that no weight notices, or that let all weights decay."""
    training = network.training
    if training is None or not training.learning_rate:
        return
    rate, steps = training.learning_rate, [step for step in training.steps if step.before_hook]
    if training.decay > _DECAYS:
        what = f"weight decay takes {training.decay:.0%} of all weights away in each update"
        remedy = "use a smaller weight_decay, such as 1e-4"
        yield Cause("weight_decay", _THE_UPDATER, what, remedy, False)
    # Weights that the smallest steps do not change, all of them.
    if not steps or any(step.update >= _UNNOTICED * step.weight for step in steps):
        return
    if any(step.before_hook >= _UNNOTICED * step.weight for step in steps):
        what = "on_gradients makes gradients so small that an update changes no weight"
        yield Cause("idle_update", _THE_UPDATER, what, "clip to a larger norm, such as 1.0", False)
    elif any(step.before_hook / rate >= _SHRINKS * step.weight for step in steps):
        what = f"an update changes no weight, with a learning rate of {rate:g}"
        yield Cause("idle_update", _THE_UPDATER, what, "use a larger learning rate", False)


def _untrained(network: NetworkNumbers) -> Found:
    """Parameters that the loss does not depend on."""
    found = network.untrained
    if found is None:
        return
    layer, listed, number = *_listed(found.names), len(found.names)
    whose = "of the solver" if found.by_solver else "of nnabla.get_parameters()"
    what = f"the loss does not depend on {_count(number, 'parameter')} {whose}: {listed}"
    what += f"; the gradient stops at {found.cut}" if found.cut else ""
    remedy = "link it to the loss: look for unlinked(), need_grad=False or an unused output"
    remedy += "" if found.by_solver else ", unless it is frozen on purpose"
    yield Cause("untrained", layer, what, remedy, found.by_solver)


def _forgotten(network: NetworkNumbers) -> Found:
    """Parameters that get a gradient and are in no solver."""
    if network.forgotten:
        layer, listed = _listed(network.forgotten)
        what = f"no solver has {len(network.forgotten)} of the parameters that get a gradient: {listed}"
        remedy = "call set_parameters after all layers are built; set need_grad=False to freeze them"
        yield Cause("in_no_solver", layer, what, remedy, False)


def _listed(names: Sequence[str]) -> Tuple[str, str]:
    """The layer of the first of some parameters, and the names of the first few."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return names[0].rpartition("/")[0] or names[0], ", ".join(names[:_NAMED]) + more


# Functions that compute infinities or NaNs from finite numbers, in fp32 and as stored, or have no gradient.


def _no_backward(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if f.no_backward:
        what = f"{f.subject} has no backward ({f.name}), so that nothing before it can be trained"
        remedy = "use a function with a gradient (F.sigmoid, F.binary_sigmoid), or unlinked() before it"
        yield Cause("no_backward", f.place, what, remedy, True)


def _forward_not_finite(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if f.nonfinite and _suffers(network):
        what = f"{f.subject} computes {f.nonfinite} infinities or NaNs{_reads(f)}, in fp32 too"
        yield Cause("forward_not_finite", f.place, what, _remedy(f, network), True)


def _backward_not_finite(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    # Where others read it as well, the gradient may be theirs.
    if f.breaks_own_gradient or (
        f.breaks_gradient and not any(g.breaks_own_gradient for g in network.functions)
    ):
        whose = "its gradient" if f.name == f.place else f"the gradient of its {f.type_name}"
        what = f"{whose} is not finite{_reads(f)}, in fp32 too"
        yield Cause("backward_not_finite", f.place, what, _remedy(f, network), True)


def _reads(f: FunctionNumbers) -> str:
    """What is wrong with what it reads, where that is known."""
    values = f.values
    if values.negatives:
        return f" as it reads {_count(values.negatives, 'number')} below 0"
    if not values.zeros:
        return ""
    return f" as it {'divides by' if f.type_name in _DIVISIONS else 'reads'} {_count(values.zeros, 'zero')}"


def _remedy(f: FunctionNumbers, network: NetworkNumbers) -> str:
    """What to do about a function that computes what is not finite, or whose gradient is not."""
    eps = f"2**{round(math.log2(network.tiny))}"
    away = "away from 0 by a number the storage can hold"
    remedies = {
        "Log": f"keep its input {away}: F.log(F.maximum_scalar(x, {eps}))",
        **dict.fromkeys(_DIVISIONS, f"keep the divisor {away}: add {eps} to it"),
        "PowScalar": f"keep its input {away}: (x + {eps}) before the root",
        "Exp": "bound its input: F.minimum_scalar(x, 10.0)",
    }
    source = _source(f, network.functions) if f.type_name == "Log" else ""
    if source == "Softmax":
        return "use F.log_softmax for both, or F.softmax_cross_entropy of what the softmax reads"
    if source == "Sigmoid":
        return "use F.sigmoid_cross_entropy of what the sigmoid reads"
    if f.type_name == "Div2" and any(g.type_name == "Exp" for g in _before(f, network, _SUMS)):
        return "use F.softmax, which subtracts the largest number first"
    readers = [g for g in network.functions if any(network.functions[i] is f for i in g.inputs)]
    if f.type_name == "Exp" and any(g.type_name == "Sum" for g in readers):
        return "use F.softmax, or F.log_softmax, which subtract the largest number first"
    other = "check its input: a logarithm, root or division at 0, or an exponential of a large number"
    return remedies.get(f.type_name, other)


def _source(
    f: FunctionNumbers, functions: Sequence[FunctionNumbers], through: FrozenSet[str] = _REARRANGES
) -> str:
    """The type of the function that the first input of `f` comes from, by way of those of some types."""
    while f.inputs:
        f = functions[f.inputs[0]]
        if f.type_name not in through:
            return f.type_name
    return ""


def _before(
    f: FunctionNumbers, network: NetworkNumbers, through: Optional[FrozenSet[str]] = None
) -> Iterator[FunctionNumbers]:
    """All functions that `f` depends on; by way of functions of some types, if they are given."""
    waiting, seen = list(f.inputs), set(f.inputs)
    while waiting:
        g = network.functions[waiting.pop()]
        yield g
        if through is None or g.type_name in through:
            waiting += set(g.inputs) - seen
            seen |= set(g.inputs)


def _leaves_storage(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if not (f.beyond or f.overflowed) or not _suffers_as_stored(network):
        return
    ends, amax = f"{f.stored.name}, which ends at {f.stored.max:g}", f"{f.amax:.2g}"
    kind, layer = "activation_overflow", f.place
    what = f"what {f.subject} computes reaches {amax}, beyond {ends}"
    remedy = "normalise its input, make its weights smaller, keep it in fp32, or use bfloat16"
    if f.beyond:
        kind, what = "beyond_storage", f"{f.beyond} holds numbers beyond {ends}"
        remedy = "bring them into range: normalise the data, or start from smaller weights"
    elif f.scores:
        kind, layer = "attention_overflow", f.name
        what = f"its scores of an attention reach {amax}, beyond {ends}"
        remedy = (
            "normalise queries and keys, and divide the queries by the root of their size before the "
            "product, not the scores after it"
        )
    elif f.stored_zeros and f.amax <= f.stored.max:
        kind, remedy = "stored_zero", _remedy(f, network)
        what = f"{f.subject} reads {_count(f.stored_zeros, 'number')} that become 0 in {f.stored.name}"
    elif f.loss_section and f.type_name in ("MulScalar", "Sum"):
        kind, what = "large_loss", f"the loss behind it reaches {amax} in {f.subject}, beyond {ends}"
        remedy = "use F.mean" if f.type_name == "Sum" else "remove the factor and adapt the learning rate"
    elif f.loss_section and f.type_name == "SquaredError":
        remedy = "bring targets and predictions into a smaller range, such as -1 to 1"
    elif f.type_name == "Exp":
        remedy = _remedy(f, network)
    yield Cause(kind, layer, what, remedy, True)


def _suffers_as_stored(network: NetworkNumbers) -> bool:
    """Whether the loss or a gradient is of no use with activations and weights as stored."""
    useful = all(layer.floor < _USELESS for layer in network.layers)
    return not (math.isfinite(network.stored_loss) and useful)


# Where forward loses what is to be learned from, or backward the gradient, in fp32 too.


def _gradient_ends(network: NetworkNumbers) -> List[Cause]:
    """The functions where it ends, in forward order; none that only follows from one before it."""
    # What forward makes of what it reads, whatever gradient arrives; and what is told where layers get none.
    finders: List[Finder] = [_constant_input, _saturated]
    if _starved(network):
        finders += [_silent, _zero_weights, _no_gradient]
    found: List[Cause] = []
    follows: Set[int] = set()
    for index, f in enumerate(network.functions):
        late = not follows.isdisjoint(f.inputs)
        causes = [] if late or _blank(f, network) else _first(f, network, *finders)
        if causes or late:
            follows.add(index)
        found += causes
    return found


def _blank(f: FunctionNumbers, network: NetworkNumbers) -> bool:
    """Whether it computes from inputs that nobody has filled yet, so that nothing can be said of it."""
    reads = [f, *_before(f, network)] if network.note else []
    return any(g.reads_blank for g in reads) and not any(g.reads_data for g in reads)


def _noise(network: NetworkNumbers) -> Found:
    """Layers whose gradient is zero but for rounding errors."""
    noisy = [layer.name for layer in network.layers if layer.is_noise]
    if noisy:
        what = "its gradient in fp32 is nothing but rounding errors"
        what += f", and that of {_count(len(noisy) - 1, 'layer')} before it" if noisy[1:] else ""
        remedy = (
            "check what the loss computes of it: a mean or sum over all classes of a softmax, or over what a "
            "normalization brings to a mean of 0, is constant"
        )
        yield Cause(
            "rounding_noise",
            noisy[-1],
            what,
            remedy,
            len({*noisy} | _starved(network)) == len(network.layers),
        )


def _applied_twice(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    """A softmax, sigmoid or logarithm before a loss that applies it itself."""
    first = _WITHIN.get(f.type_name)
    if first is not None and _source(f, network.functions, _SAME_NUMBERS) == first:
        logarithm = first == "LogSoftmax"
        twice = "the logarithm" if logarithm else first
        what = f"{twice} is applied twice: {f.type_name} applies it to what it reads"
        remedy = f"remove F.{first.lower()} before the loss, and keep it for predictions"
        if logarithm:
            remedy = "use F.softmax_cross_entropy of what the log_softmax reads"
        yield Cause("applied_twice", f.place, what, remedy, logarithm)


def _constant_input(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    """A normalization that reads the same everywhere."""
    if not f.values.constant:
        return
    names = _same_inputs(f, network)
    source = names[0] if names else "what it reads"
    remedy = _VARIED_DATA if names else "check its input, or remove the normalization"
    if f.values.together == 1:
        what = f"{f.subject} normalises one number at a time and turns all into zeros"
        remedy = "feed larger batches or maps, or remove the normalization"
    elif f.type_name.endswith("BatchNormalization"):
        what = f"{source} is constant over the batch, so batch normalization turns it into zeros"
    else:
        what = f"{source} is constant, so {f.type_name} turns it into zeros"
    yield Cause("constant_input", f.place, what, remedy, True)


def _saturated(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if f.values.saturated < _SATURATED or f.loss_section or not f.gets_gradient:
        return
    if f.type_name == "Softmax" and f.values.together == 1:
        what = f"{f.subject} is constant: it runs over an axis of size 1, so all its outputs are 1"
        yield Cause("constant_softmax", f.place, what, "choose the axis of the places that it weighs", True)
        return
    what = "its outputs are where its derivative is 0"
    remedy = "start from smaller weights, or normalise before it (PF.batch_normalization)"
    if f.type_name == "Softmax":
        what = "its rows are 1 in one place alone"
        remedy = "divide the queries by the root of their size, or start from smaller weights"
    what = f"{f.subject} is saturated: {f.values.saturated:.0%} of {what}"
    yield Cause("saturated", f.place, what, remedy, True)


def _silent(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    """A ReLU or a dropout that computes zeros, and not because it reads nothing else."""
    if f.amax or not any(network.functions[i].amax for i in f.inputs):
        return
    if f.type_name in _RECTIFIERS:
        what = "its ReLU is dead: every output is 0 in every batch, and so is every gradient behind it"
        remedy = "start again with biases of 0 or a smaller learning rate, or use F.leaky_relu"
        yield Cause("dead_relu", f.place, what, remedy, _nothing_learns_before(f, network))
    elif f.values.dropped:
        what = f"its Dropout drops everything: p={f.values.dropped:g} is the share it drops"
        yield Cause("no_gradient", f.place, what, "lower p: 0.5 is usual", _nothing_learns_before(f, network))


def _zero_weights(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    name = next((name for name, stuck in f.stuck_weights.items() if stuck), None)
    if name is not None:
        what = f"its weights are all 0 and get no gradient ({name})"
        remedy = "initialise them randomly"
        yield Cause("zero_weights", f.place, what, remedy, _nothing_learns_before(f, network))


def _no_gradient(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    # Of labels it is told elsewhere; a loss of 0 on what is learned by heart is none.
    if not f.stops_gradient or f.type_name in _STOPS or f.values.targets is not None:
        return
    names = [] if f.amax else _same_inputs(f, network)
    kind, what = "no_gradient", f"{f.subject} passes no gradient, in fp32 too"
    remedy = "check whether it masks everything or has no derivative"
    if names:
        kind, remedy = "constant_input", _VARIED_DATA
        what = f"{names[0]} is constant over the batch, and {f.subject} computes nothing but zeros"
    yield Cause(kind, f.place, what, remedy, _nothing_learns_before(f, network))


def _same_inputs(f: FunctionNumbers, network: NetworkNumbers) -> List[str]:
    """The inputs of the network that are the same for all samples and that `f` depends on."""
    return [name for g in (f, *_before(f, network)) for name, same in g.same_inputs.items() if same]


def _starved(network: NetworkNumbers) -> Set[str]:
    """The layers that get no gradient."""
    return {layer.name for layer in network.layers if not layer.nonzero}


def _nothing_learns_before(f: FunctionNumbers, network: NetworkNumbers) -> bool:
    """Whether no layer that `f` depends on gets a gradient by another way, and may mend `f`."""
    layers = {g.layer for g in _before(f, network)} | ({f.layer} if f.layer != f.name else set())
    return layers - {""} <= _starved(network)


# Functions and layers that change the size of gradients: a scale may do, but there is more to mend.


def _sizes(network: NetworkNumbers, found: Sequence[Cause]) -> List[Cause]:
    """What changes the size of gradients, but for layers that are named and what depends on fatal causes."""
    accused = {cause.layer for cause in found if cause.fatal}
    sizes: List[Cause] = []
    for f in network.functions:
        causes = _first(f, network, _small_loss, _resizing)
        if causes and not any(g.place in accused for g in _before(f, network)):
            sizes += causes
    sizes = sizes or ([] if found else list(_spread(network.layers)))
    named = {cause.layer for cause in found}
    return [cause for cause in sizes if cause.layer not in named]


def _small_loss(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    weighs = f.loss_section and f.type_name in ("MulScalar", "Mul2")
    # The factor of a mean makes nothing small; of blank data it is not known what it makes of a sum.
    mean = f.amax >= _LOUD_ENOUGH or (_source(f, network.functions) == "Sum" and _blank(f, network))
    if weighs and f.growth is not None and f.growth <= _SHRINKS and not mean:
        what = f"the loss behind it is multiplied by {f.growth:.1e}"
        remedy = "adapt the learning rate instead, or let the scale be measured"
        yield Cause("small_loss", f.place, what, remedy, False)


def _resizing(f: FunctionNumbers, network: NetworkNumbers) -> Found:
    if f.loss_section or f.growth is None or _SHRINKS < f.growth < _EXPLODES or _blank(f, network):
        return
    if f.growth >= _EXPLODES:
        kind, what = "exploding", f"{f.subject} makes gradients {f.growth:.1e} times larger"
        remedy = "start from smaller weights, normalise, or clip gradients"
    else:
        kind, what = "shrinking", f"{f.subject} makes gradients {1.0 / f.growth:.1e} times smaller"
        remedy = "start from larger weights, normalise, or take the factor out"
    yield Cause(kind, f.place, what, remedy, False)


def _spread(layers: Sequence[LayerNumbers]) -> Found:
    """Layers that together change the size of gradients."""
    known = [layer for layer in layers if layer.amax]
    if not known:
        return
    largest, smallest = (find(known, key=lambda layer: layer.amax) for find in (max, min))
    ratio = largest.amax / smallest.amax
    if ratio < _SPREAD:
        return
    vanish = known.index(smallest) < known.index(largest)
    what = (
        f"gradients {'vanish' if vanish else 'explode'} on their way to the input: they differ {ratio:.1e} "
        f"times between {smallest.name} and {largest.name}"
    )
    remedy = "normalise, add residual connections, or choose another activation or initialisation"
    yield Cause("spread", smallest.name if vanish else largest.name, what, remedy, False)
