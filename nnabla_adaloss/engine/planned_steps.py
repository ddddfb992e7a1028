# SPDX-License-Identifier: Apache-2.0
"""Whether all steps of a backward pass can be taken before it starts and after it ends, and which they are.

Then nnabla's backward runs without a hook: every weight is swapped beforehand for its scaled copy, parameter
gradients are written where they belong, and all of them are unscaled at the end. What cannot be taken at once
are gradients that are multiplied between two functions; a function that needs that is followed by a call.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from ..core.power_of_two import is_power_of_two
from ..graph.node import Node, Scaling
from ..graph.plan import GraphPlan
from ..graph.renaming import Renaming
from .held_scales import Brought, HeldScales, Step
from .leaf_gradients import TakenLeaf
from .planned_leaves import PlannedLeaves
from .scaled_factors import PlannedFactor

# Powers of two that every storage of 16 bits holds, and that leave float32 room on both sides: above less, as
# what overflows is seen.
_SEED_RANGE_16 = 2.0**-14, 2.0**15
_SEED_RANGE_32 = 2.0**-60, 2.0**100


class PlannedSteps(NamedTuple):
    """What a planned pass does.

    Attributes:
        factors: weights to be swapped, each once.
        leaves: leaves that get a gradient.
        seed: what the loss gradient starts with.
        scales: what each gradient carries in the end, by variable key.
        between: gradients that are multiplied all the same, by the function after which.
    """

    factors: List[PlannedFactor]
    leaves: PlannedLeaves
    seed: float
    scales: Mapping[int, float]
    between: Mapping[int, Tuple[Brought, ...]]

    def renamed(self, names: Renaming) -> Optional[PlannedSteps]:
        """The same for another graph that was built alike; None where a weight is not the same there."""
        if any(factor.key not in names.kept for factor in self.factors):
            return None
        scales = {names.variables[key]: scale for key, scale in self.scales.items()}
        between = {
            names.functions[key]: tuple(one.renamed(names) for one in brought)
            for key, brought in self.between.items()
        }
        return self._replace(scales=scales, between=between)


class Obstacle(str):
    """Why steps cannot be taken at once, in words."""

    def renamed(self, names: Renaming) -> Obstacle:
        """The same: what stands in the way follows from how the graph is built."""
        return self


def plan_steps(
    held: HeldScales, *, rounded: bool, at_random: bool, max_bytes: Optional[int]
) -> Union[PlannedSteps, Obstacle]:
    """The steps of a pass taken at once, or what stands in the way.

    Args:
        held: the steps one by one.
        rounded: whether an emulated storage rounds gradients after each function.
        at_random: whether it rounds them at random: then each must be rounded as often as before.
        max_bytes: how much memory scaled weights may take. None: as much as they need.
    """
    plan = held.plan
    if plan.recomputes:
        return Obstacle("activations are computed again in backward")
    factors = _factors(held, max_bytes)
    if isinstance(factors, Obstacle):
        return factors
    half = any(node.half for node in plan.nodes.values())
    leaves = _leaves(held, rounded=rounded)
    if isinstance(leaves, Obstacle):
        return leaves
    seed, scales, steps = _with_other_seed(held, rounded=rounded or half)
    between = _between(plan, steps)
    low, high = _SEED_RANGE_16 if rounded or half else _SEED_RANGE_32
    seeded = seed == held.seed or (low <= seed <= high and is_power_of_two(seed) and not at_random)
    if between is None or not seeded:
        return Obstacle("the loss gradient is brought to another scale, which its storage may not hold")
    return PlannedSteps(factors, PlannedLeaves(leaves), seed, scales, between)


def _factors(held: HeldScales, max_bytes: Optional[int]) -> Union[List[PlannedFactor], Obstacle]:
    found: Dict[int, Tuple[Scaling, float]] = {}
    readers: Dict[int, Set[int]] = {}
    for key, step in held.steps.items():
        for scaling, alpha in zip(held.plan.nodes[key].scalings, step.alphas):
            known = found.setdefault(scaling.factor_key, (scaling, alpha))
            if known[1] != alpha:
                return Obstacle(f"{scaling.layer} shares a weight with a layer of another scale")
            readers.setdefault(scaling.factor_key, set()).add(key)
    factors = [(scaling, alpha) for scaling, alpha in found.values() if alpha != 1.0]
    for scaling, _ in factors:
        if scaling.factor.parent is not None:
            return Obstacle(f"{scaling.layer} is multiplied by an activation, which others read")
        if held.plan.readers[scaling.factor_key] != readers[scaling.factor_key]:
            return Obstacle(f"the weight of {scaling.layer} is read by other functions as well")
    needed = sum(4 * scaling.factor.size for scaling, _ in factors)
    if max_bytes is not None and needed > max_bytes:
        return Obstacle(f"scaled weights would take {needed} bytes at once, more than {max_bytes}")
    return [PlannedFactor(s.layer, s.factor, s.factor_key, alpha, s.half) for s, alpha in factors]


def _leaves(held: HeldScales, *, rounded: bool) -> Union[List[TakenLeaf], Obstacle]:
    found: Dict[int, TakenLeaf] = {}
    for function_key, step in held.steps.items():
        node = held.plan.nodes[function_key]
        targets = step.targets(node)
        for variable, key in zip(node.leaves, node.leaf_keys):
            scale = targets.get(key, step.scale)
            known = found.get(key)
            if known is None:
                found[key] = TakenLeaf(variable, key, scale, node.half, node.in_place)
            elif known.scale != scale:
                return Obstacle(f"{node.label} adds to a gradient of another scale")
            elif rounded or node.half or known.half or not is_power_of_two(scale):
                return Obstacle(f"{node.label} adds to a gradient that is rounded in between")
    if found.keys() != held.plan.leaves.keys():
        return Obstacle("backward has not come to all parameters")
    return [found[key] for key in held.plan.leaves]


def _with_other_seed(
    held: HeldScales, *, rounded: bool
) -> Tuple[float, Mapping[int, float], Mapping[int, Step]]:
    """The loss gradient's scale with which fewest gradients are left to be multiplied, the scales that
    gradients carry then, and the steps that are left.
    """
    nodes = list(held.plan.nodes.values())
    seed, scales = held.seed, dict(held.scales)
    steps = dict(held.steps)
    # From function to function, as long as all of the gradient passes through one array: what that is
    # multiplied by it may as well be multiplied by before. Rounded numbers can leave the range on the way.
    behind: List[int] = []
    for index, node in enumerate(nodes):
        step = steps.get(node.function_key)
        own = node.single
        if step is not None and step.before:
            if any(b.key != own for b in step.before) or (rounded and index):
                break
            for b in step.before:
                seed *= b.factor
                scales.update((key, scales[key] * b.factor) for key in behind)
            steps[node.function_key] = step = step._replace(before=())
        if not _single_path(node, nodes[index + 1 :]) or rounded:
            break
        if own is not None:
            behind.append(own)
        if step is not None and step.after:
            if any(b.key != node.input_keys[0] for b in step.after):
                break
            for b in step.after:
                seed *= b.factor
                scales.update((key, scales[key] * b.factor) for key in behind)
            steps[node.function_key] = step._replace(after=())
    return seed, scales, steps


def _single_path(node: Node, following: List[Node]) -> bool:
    """Whether all of the gradient that functions further on get comes through `node`, and nothing else uses
    it.
    """
    return (
        not node.leaves
        and not node.scalings
        and not node.non_homogeneous
        and len(node.input_keys) == 1
        and bool(following)
        and following[0].single == node.input_keys[0]
    )


def _between(plan: GraphPlan, steps: Mapping[int, Step]) -> Optional[Dict[int, Tuple[Brought, ...]]]:
    """What is to be multiplied after each function; None where that is before the first one."""
    found: Dict[int, Tuple[Brought, ...]] = {}
    before: Optional[int] = None
    for key in plan.nodes:
        step = steps.get(key)
        if step is not None and step.before:
            if before is None:
                return None
            found[before] = found.get(before, ()) + step.before
        if step is not None and step.after:
            found[key] = step.after
        before = key
    return found
