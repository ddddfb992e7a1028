# SPDX-License-Identifier: Apache-2.0
"""Losses of a training loop, each with its engine; measurements outlive rebuilt graphs."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..engine.saved_state import of_topology, topologies_of
from ..graph.loss import LossLike, variable_of
from ..undo import ForwardState

# Number of remembered losses of different networks. Each keeps the last graph of its network, as nnabla's
# Variables have no weak references.
_REMEMBERED = 8


class ScaledLosses:
    """Engine of each loss; that of a rebuilt network takes over the measurements."""

    def __init__(self, make: Callable[[LossLike, Optional[ForwardState]], AdaptiveLossScaling]) -> None:
        # State that forward writes; all losses share it.
        self.forward_state: Optional[ForwardState] = None
        self._make = make
        # By labels of the functions, in the order of use.
        self._engines: Dict[Tuple[str, ...], AdaptiveLossScaling] = {}
        # Saved states whose networks have not been seen yet.
        self._saved: List[Mapping[str, Any]] = []

    def of(self, loss: LossLike) -> AdaptiveLossScaling:
        """Return the engine of a loss, made at its first use with the measurements of the last loss of the
        same functions, or of a saved state. The least recent losses are forgotten.
        """
        key = hash(variable_of(loss))
        for structure, scaling in self._engines.items():
            if hash(scaling.variable) == key:
                self._engines[structure] = self._engines.pop(structure)
                return scaling
        scaling = self._make(loss, self.forward_state)
        self.forward_state = scaling.guard.state
        structure = tuple(node.label for node in scaling.plan.nodes)
        before = self._engines.pop(structure, None)
        if before is not None:
            scaling.go_on_from(before)
        else:
            self._saved = [state for state in self._saved if not _loaded(scaling, state)]
        # After loading, which sets the random stream of its state: a late loss continues that of the others.
        for other in self._engines.values():
            scaling.share_with(other)
        self._engines[structure] = scaling
        if len(self._saved) + len(self._engines) > _REMEMBERED:
            # Forget the oldest: a saved state, if there is one.
            if self._saved:
                del self._saved[0]
            else:
                del self._engines[next(iter(self._engines))]
        return scaling

    @property
    def engines(self) -> List[AdaptiveLossScaling]:
        """Engines, in the order of use."""
        return list(self._engines.values())

    def states(self) -> List[Mapping[str, Any]]:
        """States of the engines, in the order of use."""
        return [*self._saved, *(scaling.state_dict() for scaling in self._engines.values())]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from a result of `states`; ValueError, without any change, if a state is damaged."""
        # If one state is damaged, engines that have loaded others go back.
        before = [(scaling, scaling.state_dict()) for scaling in self._engines.values()]
        left = list(states)
        try:
            for scaling in self._engines.values():
                left = [state for state in left if not _loaded(scaling, state)]
        except ValueError as error:
            for scaling, state in before:
                scaling.load_state_dict(state)
            raise ValueError(f"state is damaged: {error}") from error
        self._saved = left


def _loaded(scaling: AdaptiveLossScaling, state: Mapping[str, Any]) -> bool:
    """Load a state if it is of this engine's network; return True if so."""
    own = bool(of_topology(scaling.plan, topologies_of(state)))
    if own:
        scaling.load_state_dict(state)
    return own
