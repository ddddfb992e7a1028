# SPDX-License-Identifier: Apache-2.0
"""The saved state of an engine: which network it is of, and what was measured of it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..core.layer_alpha import History
from ..core.memory import Memory, Seen
from ..core.saved_settings import check_version, plain
from ..core.schedule_cache import ScheduleCache
from ..core.statistics import ArrayStatistics
from ..core.validation import integer
from ..errors import warn
from ..graph.plan import GraphPlan
from .method_alphas import MethodAlphas
from .prepared_graph import PreparedGraph
from .statistics import Statistics

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
        "dtype": plain(prepared.config.dtype),
        "statistics": prepared.statistics.state(prepared.plan.measured),
        "components": seen.state_dict(),
        "schedule": prepared.schedules.state_dict(),
        "layers": method_alphas.state_dict(),
        "draws": draws,
    }


def load_state(
    state: Mapping[str, Any], prepared: PreparedGraph, memory: Memory, method_alphas: MethodAlphas
) -> Tuple[ScheduleCache, Memory, int, int]:
    """Take over statistics and histories of a `state_of`; return its schedules, memory, iteration and draws.
    After a ValueError nothing has changed.
    """
    try:
        before = integer("schema", state["schema"]) == _MAGNITUDES
        if not before:
            check_version(state["schema"], SCHEMA)
        check_network(prepared.plan, list(state["network"]))
        iteration, draws = integer("iteration", state["iteration"]), integer("draws", state["draws"])
        schedules, memory = prepared.schedules.drop(), Memory(memory.policy)
        statistics: Dict[int, ArrayStatistics] = {}
        histories: Dict[str, History] = {}
        if before:
            warn(
                "the state was saved by an earlier version, which did not remember with which loss weights "
                "it had measured: scales are measured anew, with the next batch"
            )
        else:
            statistics = Statistics.loaded(prepared.plan.measured, state["statistics"])
            schedules = schedules.loaded(
                state["schedule"],
                lambda scales, given_scale, weights, together: prepared.schedule(
                    scales, given_scale, weights, prepared.joined if together else None
                ),
                power_of_two=prepared.config.power_of_two,
            )
            histories = MethodAlphas.loaded(state["layers"])
            memory = memory.loaded(state["components"])
            # Gains do not depend on the format; scales do, and are chosen again. Older states do not have it.
            dtype = plain(prepared.config.dtype)
            if state.get("dtype", dtype) != dtype:
                schedules = schedules.drop()
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"state is damaged, or none of an AdaptiveLossScaling: {error!r}") from error
    prepared.statistics.load(statistics)
    method_alphas.load(histories)
    return schedules, memory, iteration, draws


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
