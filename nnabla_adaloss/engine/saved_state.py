# SPDX-License-Identifier: Apache-2.0
"""The saved state of an engine: which network it is of, and what was measured of it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..core.memory import Memory, Seen
from ..core.saved_settings import check_version
from ..core.validation import integer
from ..errors import warn
from ..graph.plan import GraphPlan
from .method_alphas import MethodAlphas
from .prepared_graph import PreparedGraph

SCHEMA = 2

# The schema of versions that remembered magnitudes, whatever loss weight they had come with.
_MAGNITUDES = 1


def state_of(
    prepared: PreparedGraph, seen: Seen, method_alphas: MethodAlphas, iteration: int, draws: int
) -> Dict[str, Any]:
    """What decides the next scales of a graph, as plain numbers, strings, lists and dicts."""
    return {
        "schema": SCHEMA,
        "iteration": iteration,
        "network": fingerprint(prepared.plan),
        "statistics": prepared.statistics.state(prepared.plan.measured),
        "components": seen.state_dict(),
        "schedule": prepared.schedules.state_dict(),
        "layers": method_alphas.state_dict(),
        "draws": draws,
    }


def load_state(
    state: Mapping[str, Any], prepared: PreparedGraph, memory: Memory, method_alphas: MethodAlphas
) -> Tuple[Memory, int, int]:
    """Take over what `state_of` returned; memory, iteration and draws. ValueError may leave it half done."""
    try:
        before = integer("schema", state["schema"]) == _MAGNITUDES
        if not before:
            check_version(state["schema"], SCHEMA)
        check_network(prepared.plan, list(state["network"]))
        found = integer("iteration", state["iteration"]), integer("draws", state["draws"])
        if before:
            prepared.statistics.load_state((), ())
            prepared.schedules = prepared.schedules.drop()
            method_alphas.forget()
            warn(
                "the state was saved by an earlier version, which did not remember with which loss weights "
                "it had measured: scales are measured anew, with the next batch"
            )
            return (Memory(memory.policy), *found)
        prepared.statistics.load_state(prepared.plan.measured, state["statistics"])
        prepared.schedules = prepared.schedules.loaded(
            state["schedule"],
            lambda scales, given_scale, weights, together: prepared.schedule(
                scales, given_scale, weights, prepared.joined if together else None
            ),
            power_of_two=prepared.config.power_of_two,
        )
        method_alphas.load_state_dict(state["layers"])
        return (memory.loaded(state["components"]), *found)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"state is damaged, or none of an AdaptiveLossScaling: {error!r}") from error


def fingerprint(plan: GraphPlan) -> List[str]:
    """Type, name, and shapes of the parameters of each function; batches of other sizes are no matter."""
    shapes = plan.described.shapes
    return [
        " ".join([node.type_name, node.label, *("x".join(map(str, shapes[leaf])) for leaf in node.leaves)])
        for node in plan.nodes
    ]


def check_network(plan: GraphPlan, network: Sequence[str]) -> None:
    """Raise ValueError unless `network` is the fingerprint of this one."""
    ours = fingerprint(plan)
    if list(network) != ours:
        theirs, mine = next((a, b) for a, b in zip_longest(network, ours) if a != b)
        raise ValueError(f"state is of another network: it has {theirs} where this one has {mine}")
