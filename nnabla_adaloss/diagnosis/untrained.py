# SPDX-License-Identifier: Apache-2.0
"""Parameters that the loss does not reach, or that no solver has."""

from __future__ import annotations

import gc
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import nnabla as nn
import numpy as np

from ..updaters.solvers import has
from . import remedies
from .causes import Cause, Note, listed
from .network import DIFFERENCES, Network, read_by, scope_of
from .target import input_name

# Begins of the names of functions whose outputs jump, so that nnabla passes no gradient through them.
_COMPARISONS = ("Greater", "Less", "Equal", "NotEqual", "Logical")
_STEPS = ("OneHot", "SearchSorted", *_COMPARISONS)
_Cut = Tuple[str, str, str]  # name of the function at whose output a gradient stops, why, and a remedy


def untrained(network: Network) -> Iterator[Cause]:
    """Parameters that a solver has but does not train."""
    solver, parameters = network.examined.solver, network.examined.parameters
    if solver is not None and not parameters:
        what = "it has no parameters, so that it trains nothing"
        yield Cause("empty_solver", "The solver", what, "call solver.set_parameters(nn.get_parameters())")
        return
    if (solver is not None or not network.reached_leaves) and (missed := _missed(network)):
        whose = "of the solver's parameters" if solver is not None else "parameters"
        nothing_learns = len(missed) == len(parameters) or not network.reached_leaves
        place, what, remedy = scope_of(next(iter(missed))), "the loss does not depend on", remedies.USE
        if cut := _cut(network, missed):
            place, how, remedy = cut
            what = f"its output {how}, and no gradient gets to"
        elif nothing_learns and network.graph.positions.keys().isdisjoint(missed.values()):
            # Of leaves with a gradient, those that the feeder fills are data, as in an adversarial attack.
            has_others = not network.leaves.keys() <= network.examined.fed
            remedy = remedies.OTHERS if has_others else remedies.NOT_DERIVED
        what += f" {len(missed)} {whose}: {listed([*missed])}"
        yield Cause("untrained", place, what, remedy, nothing_learns, parameters=(*missed,))


def notes(network: Network) -> Iterator[Note]:
    """Note parameters without a solver, or, for a loss alone, without a gradient: both may be on purpose."""
    examined = network.examined
    if examined.solver is None and network.reached_leaves and (missed := _missed(network)):
        cut = _cut(network, missed)
        where = "" if cut is None else f"; the gradient stops at {cut[0]}, whose output {cut[1]}"
        where += f". Unless that is on purpose, {remedies.USE if cut is None else cut[2]}."
        begin = f"No gradient gets to {len(missed)} parameter{'s' * (len(missed) > 1)}: "
        yield Note(begin, [*missed], where)
        return
    # A solver's own variables have need_grad=False, so arrays are compared.
    wanted = {hash(v.data) for v in nn.get_parameters().values()}
    constants = wanted & {hash(v.data) for v in network.graph.leaves.values() if not v.need_grad}
    constants -= {hash(v.data) for v in network.leaves.values()}  # such as a choice by the same network
    if fixed := sorted(name for name, v in examined.parameters.items() if hash(v.data) in constants):
        end = ", which this loss reads as constants (nn.no_grad or fix_parameters): it does not train them."
        yield Note("The solver has ", fixed, end)
    solvers = [one for one in gc.get_objects() if isinstance(one, nn.solver.Solver)]
    held = {hash(v) for one in solvers if has(one, "get_parameters") for v in one.get_parameters().values()}
    frozen = [(n, hash(v)) for n, v in nn.get_parameters(grad_only=False).items() if not v.need_grad]
    if late := [name for name, key in frozen if key in network.reached_leaves & held]:
        end = ", which a solver goes on training: set it before the layers are built."
        yield Note("need_grad=False comes too late for ", late, end)
    left = {key: v for key, v in network.leaves.items() if key in network.reached_leaves - held}
    if held.isdisjoint(network.reached_leaves):
        return
    if found := [name for key, name in network.names.items() if key in left]:
        end = ". If this program is to train them, call set_parameters after all layers are built, with "
        begin = f"No solver has {len(found)} of the parameters that get a gradient: "
        yield Note(begin, found, f"{end}reset=False after another call.")
    # Data that the feeder fills may get a gradient, too, as in an adversarial attack.
    if unnamed := [v for key, v in left.items() if key not in {*network.names, *examined.fed}]:
        end = ", which gets a gradient: create it by nn.parameter.get_parameter_or_create, if it is to learn."
        yield Note("No solver has ", [*map(input_name, unnamed)], end)


def alike_weights(network: Network) -> List[str]:
    """Weights of equal numbers whose units stay alike, as the next weights are of equal numbers, too."""
    # Each unit of a depthwise convolution reads numbers of its own.
    mixing = (f for f in network.weighted if not f.info.type_name.startswith("Depthwise"))
    weights = ((f, f.inputs[1]) for f in mixing if f.inputs[1].need_grad)
    alike = {f for f, v in weights if np.ptp(v.d) == 0.0 != v.d.flat[0]}

    def stay(f: Any) -> bool:
        behind = network.behind(map(hash, f.outputs), lambda g: g not in network.products)
        readers = {g for g in behind if g in network.products} - {f}
        several = f.outputs[0].shape[1 if "onvolution" in f.info.type_name else -1] > 1
        return several and bool(readers) and readers <= alike

    return list(network.parameters(f.inputs[1] for f in filter(stay, network.in_order(alike))))


def _missed(network: Network) -> Dict[str, int]:
    """Parameters that need a gradient and get none from this loss."""
    examined, registered = network.examined, nn.get_parameters(grad_only=False)
    # With `fix_parameters=True` the graph's leaf needs no gradient, which solvers cannot see.
    frozen = {hash(v) for v in (*network.graph.leaves.values(), *registered.values()) if not v.need_grad}
    wanted = registered if examined.solver is None else examined.parameters
    if examined.solver is None and not network.reached_leaves:
        return {name: key for key, name in network.names.items() if key not in frozen}
    got = network.reached_leaves | frozen
    # The last bias before nn.grad has no effect on a derivative.
    got |= read_by(network.walk(f for f in network.graph.functions if f.info.type_name == "GradEndFunction"))
    # Parameters in the scope of a moving average that the feeder writes, even if some have not changed yet.
    averages = {name.partition("/")[0] for name in examined.written}
    others = {n: hash(wanted[n]) for n in sorted(wanted) if n.partition("/")[0] not in averages}
    missed = {name: key for name, key in others.items() if key not in got}
    # A loss alone does not tell which parameters are to learn: a discriminator's loss reaches no generator.
    if examined.solver is None and not _cut_from_data(network):
        forgotten = _seem_forgotten(network)
        missed = {name: key for name, key in missed.items() if key in forgotten}
    return missed


def _seem_forgotten(network: Network) -> Set[int]:
    """Keys of leaves without a gradient that trained layers depend on; a frozen part or a teacher is none."""
    cut_off = [*_cut_off(network)]
    # Layers before an output with need_grad=False, which some trained layer reads alone.
    only_data = network.walk([v.parent for v in cut_off if _is_only_data(network, v)], _linked)
    found = {*network.walk(filter(_is_disabled, only_data), _linked)}
    # A mask of lengths is computed by a comparison, and the action that a critic reads by a choice.
    before = [*network.walk(v.parent for v in cut_off)]
    found.update(network.walk((g for g in before if g.info.type_name.startswith(_COMPARISONS)), _enabled))
    # A label of a teacher is a choice, too, but only the loss reads it.
    choices = (g for g in before if g.info.type_name == "OneHot")
    read = (g for g in choices if not network.trained.isdisjoint(network.behind(map(hash, g.outputs))))
    found.update(network.walk(read, _linked))
    # Leaves that meet outputs of trained layers, from where on no gradient comes back.
    outputs = (hash(v) for f in network.graph.functions if f in network.reached for v in f.outputs)
    beside = (f for f in network.behind(outputs) if f not in network.reached)
    return read_by(found) | {hash(v) for f in beside for v in f.inputs if v.parent is None}


def _is_only_data(network: Network, v: nn.Variable) -> bool:
    """True if some trained parameter is applied to nothing else, unlike a discriminator's to a fake."""
    behind = set(network.behind([hash(v)]))
    return any(behind.issuperset(network.readers[key]) for key in network.leaves)


def _linked(f: Any) -> List[nn.Variable]:
    return [] if f.info.type_name == "Unlink" else f.inputs


def _enabled(f: Any) -> List[nn.Variable]:
    return [v for v in _linked(f) if v.parent is not None and not _is_disabled(v.parent)]


def _is_step(f: Any) -> bool:
    """True for a function whose outputs jump, so that nnabla passes no gradient through it."""
    return bool(f.info.args.get("only_index") or f.info.type_name.startswith(_STEPS))


def _is_straight_through(network: Network, v: nn.Variable) -> bool:
    """True for the difference of a straight-through estimator: x + stop(chosen - x)."""
    difference = v.parent.inputs[0].parent if remedies.is_a(v.parent, "Identity", "Unlink") else v.parent
    if not remedies.is_a(difference, "Sub2"):
        return False
    added = (w for f in network.readers[hash(v)] if remedies.is_a(f, "Add2") for w in f.inputs)
    return not {hash(w.data) for w in difference.inputs}.isdisjoint(hash(w.data) for w in added)


def _is_disabled(f: Any) -> bool:
    """True if outputs have need_grad=False although an input needs a gradient."""
    return any(v.need_grad for v in f.inputs) and not any(v.need_grad for v in f.outputs)


def _cut_off(network: Network) -> Iterator[nn.Variable]:
    """Outputs that functions on the gradient's path read without handing it on."""
    read = (v for f in network.graph.functions if f in network.reached for v in f.inputs)
    return (v for v in read if v.parent is not None and v.parent not in network.reached)


def _cut_from_data(network: Network) -> bool:
    """True if trained layers read only data from parts without a gradient."""

    def is_passed(f: Any) -> bool:
        # A function without a trained input, such as of an augmentation, only prepares the data.
        is_cut = f.info.type_name == "Unlink" or any(v.need_grad for v in f.inputs)
        return f in network.reached or not is_cut

    fed = network.examined.fed
    read = network.behind(fed, is_passed)
    return bool(fed) and (network.reached & network.trained).isdisjoint(read)


def _cut(network: Network, missed: Mapping[str, int]) -> Optional[_Cut]:
    """Cut that keeps the gradient from parameters; None if unknown."""
    names = {key: name for name, key in missed.items()}
    behind = set(network.behind(names))
    # An index, and more so the target of a loss, may be cut off on purpose: other cuts come first.
    cuts: Tuple[List[_Cut], List[_Cut], List[_Cut]] = [], [], []
    plain, steps, targets = cuts
    for v in _cut_off(network):
        before, readers = network.in_order(network.walk([v.parent])), network.readers[hash(v)]
        walked = network.walk([v.parent], lambda f: [] if _is_step(f) else f.inputs)
        smooth = network.in_order(g for g in walked if not _is_step(g))
        if read_by(smooth).isdisjoint(names):
            ending = (network.name(g) for g in before if g in behind and _is_step(g))
            steps += [(name, "has no derivative", remedies.NO_DERIVATIVE) for name in ending]
            continue
        g, how = next(filter(_is_disabled, smooth), before[-1]), "has need_grad=False"
        if g.info.type_name == "Unlink":
            g, how = g.inputs[0].parent or g, "is unlinked"
        if _is_straight_through(network, v):
            targets.append((network.name(g), how, remedies.STRAIGHT))
            continue
        is_shared = not network.reached.isdisjoint(readers[1:])
        is_target = all(remedies.is_a(f, *DIFFERENCES) for f in readers)
        cut = network.name(g), how, remedies.CUT_COPY if is_shared else remedies.UNCUT
        (targets if is_target else plain).append(cut)
    if any(cuts):
        return next(filter(None, cuts))[0]
    # An unlinked output outside the graph shares its data with one of the graph's inputs.
    shared = {hash(v.data): v for v in network.graph.leaves.values() if hash(v) not in network.names}
    alive = [v for v in gc.get_objects() if isinstance(v, nn.Variable)]
    for v in (v for v in alive if hash(v.data) in shared):
        reader = network.name(network.readers[hash(shared[hash(v.data)])][0])
        for key in (hash(leaf) for g in network.walk([v.parent]) for leaf in g.inputs):
            if key in names:
                return scope_of(names[key]), f"is unlinked where {reader} reads it", remedies.UNCUT
    return None
