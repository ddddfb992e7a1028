# SPDX-License-Identifier: Apache-2.0
"""Saved state of an engine: identity of the network, and measurements."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple
from zlib import crc32

from ..core.memory import Memory, Observations
from ..core.saved_settings import check_version, plain
from ..core.schedule_cache import ScheduleCache
from ..core.statistics import ArrayStatistics
from ..core.validation import integer
from ..errors import warn
from ..graph.plan import GraphPlan
from .latest_statistics import LatestStatistics
from .method_alphas import MethodAlphas
from .prepared_graph import PreparedGraph

SCHEMA = 2
_MAGNITUDES = 1  # of versions that remembered magnitudes without their loss weights

Saved = Mapping[str, Any]


class LoadedState(NamedTuple):
    """Parts of a saved state that belong to no graph."""

    memory: Memory
    iteration: int
    random_draws: int
    other_topologies: List[Saved]  # each a `topology_state`, the latest last


def state_of(
    prepared: PreparedGraph,
    others: Sequence[Saved],
    observations: Observations,
    method_alphas: MethodAlphas,
    iteration: int,
    random_draws: int,
) -> Dict[str, Any]:
    """State that determines the next scales; `others`: states of other topologies, the latest last."""
    statistics = prepared.statistics.state(prepared.plan.measured)
    # The rows of `statistics` lack parameters that only other topologies have.
    weights = prepared.statistics.weights if others else {}
    return {
        "schema": SCHEMA,
        "iteration": iteration,
        "dtype": plain(prepared.config.dtype),
        **topology_state(prepared.plan, statistics, prepared.schedules),
        "topologies": list(others),
        "weights": {name: list(one) for name, one in weights.items()},
        "components": observations.next_memory().state_dict(),
        "layers": method_alphas.state_dict(),
        "draws": random_draws,
    }


def topology_state(plan: GraphPlan, statistics: Sequence[Any], schedules: ScheduleCache) -> Dict[str, Any]:
    """Part of a state for one topology; `select_state` finds it by network and wiring."""
    return {
        "network": fingerprint(plan),  # functions, names, and shapes of leaves
        "wiring": _wiring(plan),  # which function reads the output of which other
        "statistics": statistics,
        "schedule": schedules.state_dict(),
    }


def load_state(state: Saved, prepared: PreparedGraph, memory: Memory, alphas: MethodAlphas) -> LoadedState:
    """Load a `state_of` into `prepared` and `alphas`, and return the rest of it; an error changes nothing."""
    try:
        lacks_loss_weights = integer("schema", state["schema"]) == _MAGNITUDES
        if not lacks_loss_weights:
            check_version(state["schema"], SCHEMA)
        topologies = topologies_of(state)
        own = select_state(prepared.plan, topologies)
        if own is None:
            # The graph may be another one of the same network, whose components have kept their names.
            _check_network(prepared.plan, topologies)
        iteration, draws = integer("iteration", state["iteration"]), integer("draws", state["draws"])
        if lacks_loss_weights:
            warn(
                "the state was saved by an earlier version, which did not remember with which loss weights "
                "it had measured: scales are measured again, with the next batch"
            )
            prepared.statistics.load({}, {})
            alphas.load({})
            prepared.schedules = prepared.schedules.drop()
            return LoadedState(Memory(memory.policy), iteration, draws, [])
        statistics, schedules = read_topology(own, prepared) if own else ({}, prepared.schedules.drop())
        others = [one for one in topologies if one is not own]
        # All topologies share one cycle of measuring: its start is saved with the last graph's schedule.
        schedules = schedules.moved_to_cycle(integer("since", state["schedule"]["since"]))
        # Older states lack them: statistics of weights are in their topologies only.
        weights = {
            str(name): ArrayStatistics.from_list(one) for name, one in state.get("weights", {}).items()
        }
        renamed = _renaming(prepared.plan, own)  # of components and layers, named after functions
        histories = MethodAlphas.read_state(renamed(state["layers"]))
        memory = memory.with_state({kind: renamed(by_name) for kind, by_name in state["components"].items()})
        # Amaxes do not depend on the format; scales do, and are chosen again. Older states lack the format.
        dtype = plain(prepared.config.dtype)
        if state.get("dtype", dtype) != dtype:
            schedules, others = schedules.drop(), [*map(without_schedule, others)]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"state is damaged, or not of an AdaptiveLossScaling: {error!r}") from error
    prepared.statistics.load(statistics, weights)
    alphas.load(histories)
    prepared.schedules = schedules
    return LoadedState(memory, iteration, draws, others)


def read_topology(saved: Saved, prepared: PreparedGraph) -> Tuple[Dict[int, ArrayStatistics], ScheduleCache]:
    """Read statistics and schedules for the plan of `prepared`, unchanged; raise if `saved` is damaged."""
    statistics = LatestStatistics.read_state(prepared.plan.measured, saved["statistics"])
    # A scale that is not S0 times a power of two is damaged, unless the config has power_of_two=False.
    power_of_two = prepared.config.power_of_two
    schedules = prepared.schedules.with_state(saved["schedule"], prepared.schedule, power_of_two=power_of_two)
    return statistics, schedules


def topologies_of(state: Saved) -> List[Saved]:
    """Copy the `topology_state`s of a state, the last graph's at the end; raise if the state is damaged."""
    # States of earlier versions have only the last graph's, without its wiring.
    return [
        {
            "network": [*map(str, one["network"])],
            "wiring": one.get("wiring"),
            "statistics": list(one["statistics"]),
            "schedule": {**one["schedule"]},
        }
        for one in (*state.get("topologies", ()), state)
    ]


def without_schedule(saved: Saved) -> Saved:
    """Remove the schedules of a `topology_state`, so that scales are chosen again."""
    return {**saved, "schedule": {**saved["schedule"], "chosen": []}}


def select_state(plan: GraphPlan, states: Sequence[Saved]) -> Optional[Saved]:
    """Select the latest `topology_state` of graphs with this plan; None: no state fits."""
    network, wiring = fingerprint(plan), _wiring(plan)
    for one in reversed(states):
        # Earlier versions saved no wiring, and named functions without leaves otherwise: see `_renaming`.
        same_functions = len(one["network"]) == len(network) and all(
            line == own or (not node.leaves and line.startswith(f"{node.type_name} "))
            for line, own, node in zip(one["network"], network, plan.nodes)
        )
        if same_functions and one["wiring"] in (None, wiring):
            return one
    return None


def _renaming(plan: GraphPlan, saved: Optional[Saved]) -> Callable[[Saved], Dict[str, Any]]:
    """Make a function that replaces, in saved keys, an earlier version's names of functions by the plan's."""
    lines = zip([] if saved is None else saved["network"], plan.nodes)
    # Only functions without leaves may differ. Their line of a `fingerprint` is "type name".
    names = {line[len(node.type_name) + 1 :]: node.label for line, node in lines if not node.leaves}

    def renamed(by_name: Saved) -> Dict[str, Any]:
        # The key of a component or layer may end with the function's input.
        parts = [(*name.partition(":"), value) for name, value in by_name.items()]
        return {names.get(base, base) + colon + end: value for base, colon, end, value in parts}

    return renamed


def fingerprint(plan: GraphPlan) -> List[str]:
    """Type, name, and shapes of the leaves with a gradient, of each function: "Affine b/affine 3x2 2"."""
    # Data without a gradient are left out: another batch size has the same fingerprint.
    shapes = plan.described.shapes
    return [
        " ".join([node.type_name, node.label, *("x".join(map(str, shapes[leaf])) for leaf in node.leaves)])
        for node in plan.nodes
    ]


def _wiring(plan: GraphPlan) -> int:
    """CRC-32 of the variables that each function reads and writes, and of the positions of scalars."""
    described = plan.described
    return crc32(repr((described.inputs, described.outputs, sorted(plan.scalars))).encode())


def _check_network(plan: GraphPlan, topologies: Sequence[Saved]) -> None:
    """Raise ValueError unless `plan`, a new topology, may belong to the network of these topologies."""
    ours, last = fingerprint(plan), topologies[-1]["network"]
    saved = {line for one in topologies for line in one["network"]}
    # Of each function that reads leaves: its line, and how that begins, before the shapes of the leaves.
    starts = {line: f"{node.type_name} {node.label} " for line, node in zip(ours, plan.nodes) if node.leaves}
    # A function may be new, but one of its type and name in the last topology must have the same shapes.
    new = [(own, start) for own, start in starts.items() if own not in saved]
    differences = [(theirs, own) for own, start in new for theirs in last if theirs.startswith(start)]
    if saved.isdisjoint(starts):
        # Nothing shows that the networks are related: the first functions that differ are named.
        pairs = zip_longest(last, ours, fillvalue="nothing")
        differences += [(theirs, own) for theirs, own in pairs if theirs != own]
    if differences:
        theirs, own = differences[0]
        raise ValueError(f"state is of another network: it has {theirs} where this one has {own}")
