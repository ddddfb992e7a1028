# SPDX-License-Identifier: Apache-2.0
"""Where forward loses what is to be learned from, or backward the gradient, in fp32 too."""

from __future__ import annotations

from typing import FrozenSet, Iterator, List, Optional, Set

from ..numbers import FunctionNumbers, NetworkNumbers
from .cause import Cause, Kind, place, subject

_RECTIFIERS: FrozenSet[str] = frozenset({"ReLU", "ReLU6", "CReLU"})
# An activation that has this share of its outputs where it is flat hardly learns.
_SATURATED = 0.9
# They stop the gradient on purpose.
_STOPS: FrozenSet[str] = frozenset({"Unlink", "Sink"})


def gradient_ends(network: NetworkNumbers) -> List[Cause]:
    """The functions where it ends, in forward order; none that only follows from one before it."""
    starved = {layer.name for layer in network.layers if not layer.nonzero}
    found: List[Cause] = []
    follows: Set[int] = set()
    for index, f in enumerate(network.functions):
        if not follows.isdisjoint(f.inputs):
            follows.add(index)
            continue
        cause = _loses_the_input(f, network)
        if cause is None and starved:
            cause = _ends(f, network, fatal=_layers_before(f, network) <= starved)
        if cause is not None:
            follows.add(index)
            found.append(cause)
    return found


def _layers_before(f: FunctionNumbers, network: NetworkNumbers) -> Set[str]:
    """The layers that `f` depends on; where a gradient comes to one by another way, they may mend `f`."""
    found = set() if f.is_layer else {f.layer}
    return (found | {g.layer for g in _before(f, network)}) - {""}


def _before(f: FunctionNumbers, network: NetworkNumbers) -> Iterator[FunctionNumbers]:
    """All functions that `f` depends on."""
    waiting, seen = list(f.inputs), set(f.inputs)
    while waiting:
        g = network.functions[waiting.pop()]
        yield g
        waiting += set(g.inputs) - seen
        seen |= set(g.inputs)


def _loses_the_input(f: FunctionNumbers, network: NetworkNumbers) -> Optional[Cause]:
    """What forward makes of what it reads, whatever gradient arrives."""
    values = f.values
    if values.constant:
        return _constant(f, network)
    if values.saturated >= _SATURATED and not f.loss_section and f.gradient is not None:
        return _saturated(f)
    return None


def _constant(f: FunctionNumbers, network: NetworkNumbers) -> Cause:
    source = "what it reads"
    remedy = "check its input, or remove the normalization"
    if f.values.together == 1:
        what = f"{subject(f)} normalises one number at a time and turns all into zeros"
        remedy = "feed larger batches or maps, or remove the normalization"
        return Cause(Kind.CONSTANT_INPUT, place(f), what, remedy, True)
    names = _constant_inputs(f, network)
    if names:
        source = names[0]
        remedy = "feed data that differs from sample to sample"
    if f.type_name.endswith("BatchNormalization"):
        what = f"{source} is constant over the batch, so batch normalization turns it into zeros"
    else:
        what = f"{source} is constant, so {f.type_name} turns it into zeros"
    return Cause(Kind.CONSTANT_INPUT, place(f), what, remedy, True)


def _constant_inputs(f: FunctionNumbers, network: NetworkNumbers) -> List[str]:
    """The inputs of the network that are constant and that `f` depends on."""
    return [name for g in (f, *_before(f, network)) for name in g.constant_inputs]


def _saturated(f: FunctionNumbers) -> Cause:
    what = f"{subject(f)} is saturated: {f.values.saturated:.0%} of its outputs are where its derivative is 0"
    remedy = "start from smaller weights, or normalise before it (PF.batch_normalization)"
    if f.type_name == "Softmax":
        what = f"{subject(f)} is saturated: {f.values.saturated:.0%} of its rows are 1 in one place alone"
        remedy = "divide the queries by the root of their size, or start from smaller weights"
    return Cause(Kind.SATURATED, place(f), what, remedy, True)


def _ends(f: FunctionNumbers, network: NetworkNumbers, *, fatal: bool) -> Optional[Cause]:
    """Where no gradient passes, when some layer gets none."""
    # What reads nothing but zeros is not to blame for computing zeros.
    silent = not f.amax and any(network.functions[i].amax for i in f.inputs)
    if silent and f.type_name in _RECTIFIERS:
        what = "its ReLU is dead: every output is 0 in every batch, and so is every gradient behind it"
        remedy = "start again with biases of 0 or a smaller learning rate, or use F.leaky_relu"
        return Cause(Kind.DEAD_RELU, place(f), what, remedy, fatal)
    if silent and f.values.dropped:
        what = f"its Dropout drops everything: p={f.values.dropped:g} is the share it drops"
        return Cause(Kind.NO_GRADIENT, place(f), what, "lower p: 0.5 is usual", fatal)
    if f.stuck_weights:
        what = f"its weights are all 0 and get no gradient ({f.stuck_weights[0]})"
        return Cause(Kind.ZERO_WEIGHTS, place(f), what, "initialise them randomly", fatal)
    # Of labels it is told elsewhere; a loss of 0 on what is learned by heart is none.
    if not f.stops_gradient or f.type_name in _STOPS or f.values.targets is not None:
        return None
    names = _constant_inputs(f, network)
    if not f.amax and names:
        what = f"{names[0]} is constant over the batch, and {subject(f)} computes nothing but zeros"
        return Cause(
            Kind.CONSTANT_INPUT, place(f), what, "feed data that differs from sample to sample", fatal
        )
    what = f"{subject(f)} passes no gradient, in fp32 too"
    remedy = "check whether it masks everything or has no derivative"
    return Cause(Kind.NO_GRADIENT, place(f), what, remedy, fatal)
