# SPDX-License-Identifier: Apache-2.0
"""Parameters that the loss does not reach, or that no solver has."""

from __future__ import annotations

import gc
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import nnabla as nn
import numpy as np

from ..updaters.solvers import has
from . import remedies
from .causes import Cause, Note, listed
from .network import DIFFERENCES, Network, read_by, scope_of
from .target import input_name

# Functions with steps that nnabla passes no gradient through.
_COMPARISONS = ("Greater", "Less", "Equal", "NotEqual", "Logical")
_STEPS = ("OneHot", "SearchSorted", *_COMPARISONS)


def untrained(network: Network) -> Iterator[Cause]:
    """Parameters that a solver has but does not train."""
    solver, parameters = network.examined.solver, network.examined.parameters
    if solver is not None and not parameters:
        what = "it has no parameters, so that it trains nothing"
        yield Cause("empty_solver", "The solver", what, "call solver.set_parameters(nn.get_parameters())")
        return
    missed = _missed(network)
    if missed and (solver is not None or not network.reached_leaves):
        whose = "of the solver's parameters" if solver is not None else "parameters"
        told = f"{len(missed)} {whose}: {listed([*missed])}"
        nothing = len(missed) == len(parameters) or not network.reached_leaves
        first, cut = next(iter(missed)), _cut(network, missed)
        place, what, remedy = scope_of(first), "the loss does not depend on", remedies.USE
        if cut is not None:
            place, how, remedy = cut
            what = f"its output {how}, and no gradient gets to"
        elif nothing and network.graph.positions.keys().isdisjoint(missed.values()):
            # Data with a gradient are no parameters.
            has_others = not network.leaves.keys() <= network.examined.fed
            remedy = remedies.OTHERS if has_others else remedies.NOT_DERIVED
        yield Cause("untrained", place, f"{what} {told}", remedy, nothing, parameters=(*missed,))


def notes(network: Network) -> Iterator[Note]:
    """Note parameters without a solver, or, for a loss alone, without a gradient: perhaps on purpose."""
    examined = network.examined
    missed = _missed(network) if examined.solver is None and network.reached_leaves else {}
    if missed:
        cut = _cut(network, missed)
        where = "" if cut is None else f"; the gradient stops at {cut[0]}, whose output {cut[1]}"
        where += f". Unless that is on purpose, {remedies.USE if cut is None else cut[2]}."
        begin = f"No gradient gets to {len(missed)} parameter{'s' * (len(missed) > 1)}: "
        yield Note(begin, [*missed], where)
        return
    # A solver's variables have need_grad=False.
    wanted = {hash(v.data) for v in nn.get_parameters().values()}
    constants = wanted & {hash(v.data) for v in network.graph.leaves.values() if not v.need_grad}
    constants -= {hash(v.data) for v in network.leaves.values()}  # such as a choice by the same network
    fixed = sorted(name for name, v in examined.parameters.items() if hash(v.data) in constants)
    if fixed:
        end = ", which this loss reads as constants (nn.no_grad or fix_parameters): it does not train them."
        yield Note("The solver has ", fixed, end)
    solvers = [one for one in gc.get_objects() if isinstance(one, nn.solver.Solver)]
    held = {hash(v) for one in solvers if has(one, "get_parameters") for v in one.get_parameters().values()}
    frozen = [(n, hash(v)) for n, v in nn.get_parameters(grad_only=False).items() if not v.need_grad]
    late = [name for name, key in frozen if key in network.reached_leaves & held]
    if late:
        end = ", which a solver goes on training: set it before the layers are built."
        yield Note("need_grad=False comes too late for ", late, end)
    left = {key: v for key, v in network.leaves.items() if key in network.reached_leaves - held}
    if held.isdisjoint(network.reached_leaves):
        return
    found = [name for key, name in network.names.items() if key in left]
    if found:
        end = ". If this program is to train them, call set_parameters after all layers are built, with "
        told = f"No solver has {len(found)} of the parameters that get a gradient: "
        yield Note(told, found, f"{end}reset=False after another call.")
    # Data with a gradient change, such as those of an adversary.
    unnamed = [v for key, v in left.items() if key not in {*network.names, *examined.fed}]
    if unnamed:
        end = ", which gets a gradient: create it by nn.parameter.get_parameter_or_create, if it is to learn."
        yield Note("No solver has ", [*map(input_name, unnamed)], end)


def alike_weights(network: Network) -> List[str]:
    """Trained weights of one number, other than 0, whose units meet such weights again: they stay alike."""
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
    got = network.reached_leaves | frozen  # a solver's parameters have no order
    # A bias before nn.grad has no effect.
    ended = network.walk(f for f in network.graph.functions if f.info.type_name == "GradEndFunction")
    got |= read_by(ended)
    # An average, some of whose parameters are as they were, or nothing yet.
    averages = {name.partition("/")[0] for name in examined.written}
    unwritten = sorted(name for name in wanted if name.partition("/")[0] not in averages)
    missed = {name: hash(wanted[name]) for name in unwritten if hash(wanted[name]) not in got}
    # For a loss alone the parameters to train are unknown: a discriminator's loss reaches no generator, and a
    # frozen part has no gradient on purpose. Then those between trained layers and behind a variable with
    # need_grad=False count, or all if data reaches trained layers only through parts that are cut off.
    if examined.solver is None and not _cut_from_data(network):
        walked = network.walk([v.parent for v in _cut_off(network) if _is_only_data(network, v)], _linked)
        disabled = network.walk(filter(_is_disabled, walked), _linked)
        # A comparison is not part of a teacher, nor a choice that trained layers read, as a critic's do.
        before = [*network.walk([v.parent for v in _cut_off(network)])]
        compares = (g for g in before if g.info.type_name.startswith(_COMPARISONS))
        choices = (g for g in before if g.info.type_name == "OneHot")
        # A label meets only the loss.
        chooses = (g for g in choices if not network.trained.isdisjoint(network.behind(map(hash, g.outputs))))
        apart = (*disabled, *network.walk(compares, _enabled), *network.walk(chooses, _linked))
        # Leaves that are read without a gradient, together with outputs of trained layers.
        outputs = (hash(v) for f in network.graph.functions if f in network.reached for v in f.outputs)
        beside = [f for f in network.behind(outputs) if f not in network.reached]
        counted = {hash(v) for f in beside for v in f.inputs if v.parent is None}
        counted |= read_by(apart)
        missed = {name: key for name, key in missed.items() if key in counted}
    return missed


def _is_only_data(network: Network, v: nn.Variable) -> bool:
    """True if trained parameters are applied to nothing else; a target or a fake is cut off on purpose."""
    behind = set(network.behind([hash(v)]))
    return any(behind.issuperset(network.readers[key]) for key in network.leaves)


def _linked(f: Any) -> List[nn.Variable]:
    return [] if f.info.type_name == "Unlink" else f.inputs


def _enabled(f: Any) -> List[nn.Variable]:
    return [v for v in _linked(f) if v.parent is not None and not _is_disabled(v.parent)]


def _is_step(f: Any) -> bool:
    """True if nnabla passes no gradient through a function of steps."""
    return bool(f.info.args.get("only_index") or f.info.type_name.startswith(_STEPS))


def _is_straight_through(network: Network, v: nn.Variable) -> bool:
    """True for a difference of a choice and its input that is added to the input: x + stopped(chosen - x)."""
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
        # With nothing to train, it only prepares the data.
        is_cut = f.info.type_name == "Unlink" or any(v.need_grad for v in f.inputs)
        return f in network.reached or not is_cut

    fed = network.examined.fed
    read = network.behind(fed, is_passed)
    return bool(fed) and (network.reached & network.trained).isdisjoint(read)


def _cut(network: Network, missed: Mapping[str, int]) -> Optional[Tuple[str, str, str]]:
    """Function at whose output the gradient to parameters stops, why, and the remedy; None for none."""
    names = {key: name for name, key in missed.items()}
    behind = set(network.behind(names))
    steps: List[Tuple[str, str, str]] = []
    targets: List[Tuple[str, str, str]] = []
    for v in _cut_off(network):
        before = network.in_order(network.walk([v.parent]))
        walked = network.walk([v.parent], lambda f: [] if _is_step(f) else f.inputs)
        smooth = network.in_order(g for g in walked if not _is_step(g))
        if any(hash(w) in names for g in smooth for w in g.inputs):
            g, how = next(filter(_is_disabled, smooth), before[-1]), "has need_grad=False"
            if g.info.type_name == "Unlink":
                g, how = g.inputs[0].parent or g, "is unlinked"
            is_shared = any(f in network.reached for f in network.readers[hash(v)][1:])
            cut = network.name(g), how, remedies.CUT_COPY if is_shared else remedies.UNCUT
            if _is_straight_through(network, v):
                targets.append((*cut[:2], remedies.STRAIGHT))
            elif all(remedies.is_a(f, *DIFFERENCES) for f in network.readers[hash(v)]):
                targets.append(cut)  # of a loss, perhaps on purpose, if a step ends another way
            else:
                return cut
        else:
            # On purpose, perhaps, if another way is cut off.
            ending = (network.name(g) for g in before if g in behind and _is_step(g))
            steps += [(name, "has no derivative", remedies.NO_DERIVATIVE) for name in ending]
    if steps or targets:
        return [*steps, *targets][0]
    # Or outside the graph, which then has an input that shares its data with an output there.
    shared = {hash(v.data): v for v in network.graph.leaves.values() if hash(v) not in network.names}
    alive = [v for v in gc.get_objects() if isinstance(v, nn.Variable)]
    for v in (v for v in alive if hash(v.data) in shared):
        reader = network.name(network.readers[hash(shared[hash(v.data)])][0])
        for key in (hash(leaf) for g in network.walk([v.parent]) for leaf in g.inputs):
            if key in names:
                return scope_of(names[key]), f"is unlinked where {reader} reads it", remedies.UNCUT
    return None
