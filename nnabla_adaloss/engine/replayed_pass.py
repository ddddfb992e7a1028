# SPDX-License-Identifier: Apache-2.0
"""What passes with scales that are known have in common, however they apply them."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import compress
from typing import List, Mapping, Optional, Sequence, Set

from ..graph.node import Node
from ..kernels.arrays import stored_dtype
from .component_scales import ComponentPass
from .held_scales import Brought, HeldScales
from .pass_context import PassContext


class ReplayedPass:
    """A backward pass that does what one before it did, and looks at nothing but the gradients of leaves.

    Args:
        context: what the pass works with.
        held: the scales.

    Attributes:
        seed: what the loss gradient starts with.
        found_inf: layers whose parameter gradients are not finite, first in backward order first.
        nonzero: keys of the leaves whose gradients are not all zeros.
        state_finite: whether what forward has written is finite; None: nobody has looked.
    """

    def __init__(self, context: PassContext, held: HeldScales) -> None:
        self.plan, self.kernels, _, self.statistics, self._storage, _, self._by_layer, _ = context
        self._held = held
        self.seed = held.seed
        self._scales = held.scales
        self.found_inf: List[str] = []
        self.nonzero: Set[int] = set()
        self.state_finite: Optional[bool] = None

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """What each gradient carries in the end, by variable key."""
        keys = self.plan.keys
        return {keys[position]: scale for position, scale in self._scales.items()}

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The functions, by key; they are made when somebody asks for them."""
        return self.plan.nodes

    @cached_property
    def components(self) -> Optional[ComponentPass]:
        """The scale of each component; None where there are none."""
        scales = self._held.components
        if scales is None:
            return None
        return ComponentPass(self.plan.components(by_layer=self._by_layer), scales)

    @property
    def loss_scale(self) -> float:
        """The scale with which the gradient left the functions of one element at the loss."""
        return self._held.loss_scale

    @property
    def measures_loss(self) -> bool:
        """Whether that was chosen from what was measured."""
        return self._held.given is None

    @property
    def matched(self) -> int:
        """How many gradients were brought to the scale of a branch that they meet."""
        return self._held.matched

    @property
    def layer_scales(self) -> Mapping[str, float]:
        """Alpha by layer."""
        return self._held.layer_scales

    @property
    def accumulated_scales(self) -> Mapping[str, float]:
        """The scale S on each layer's input gradient, by layer."""
        return self._held.accumulated_scales

    def bring(self, brought: Sequence[Brought]) -> None:
        """Multiply gradients in place, between two functions."""
        plan = self.plan
        for position, factor in brought:
            array = plan.all_variables[position].grad
            if stored_dtype(array) is None:
                continue
            self.kernels.scale_(array, factor)
            if self._storage is not None:
                self._storage.store_gradient(plan.keys[position], array)

    def _conclude(self, keys: Sequence[int], largest: Sequence[float]) -> None:
        """Take over the largest magnitude of each leaf's gradient; infinity where it is not finite."""
        self.nonzero = set(compress(keys, largest))
        if math.inf not in largest:
            return
        bad = {key for key, amax in zip(keys, largest) if amax == math.inf}
        nodes = [node for node in self.nodes.values() if not bad.isdisjoint(node.leaf_keys)]
        self.found_inf = [node.label for node in nodes]
        if self.components is not None:
            # Where the gradient of a layer is not finite, that of its weight is not.
            self.components.overflowed = self.components.producers[nodes[0].function_key] if nodes else None
