# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis looks at: a loss, and what feeds it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional

import nnabla as nn

from ..core.validation import integer
from ..graph.loss import LossWrapper, variable_of
from ..graph.plan import GraphPlan

Feeder = Callable[[], Any]


class Target(NamedTuple):
    """A loss and its data.

    Attributes:
        source: the loss, or the updater whose `loss` it is.
        feeder: called before each batch; None: the data that is there is the only batch. It may assign
            another loss to an updater.
        batches: how many batches are looked at.
        solver: what trains the parameters; None for a plain loss.
    """

    source: Any
    feeder: Optional[Feeder]
    batches: int
    solver: Optional[Any]

    @property
    def parameters(self) -> Mapping[str, nn.Variable]:
        """The solver's names of its parameters; empty for a plain loss."""
        return {} if self.solver is None else self.solver.get_parameters()

    def loss(self) -> nn.Variable:
        """The current loss, of one element.

        Raises:
            TypeError: it is neither a Variable nor a wrapper of one.
            ValueError: it needs no gradient, has several elements, or is computed in half precision.
        """
        variable = variable_of(self.source if _is_loss(self.source) else self.source.loss)
        if variable.size != 1:
            raise ValueError(
                f"loss has shape {variable.shape}, not one element; reduce it with nnabla.functions.mean"
            )
        reason = computed_in_half(variable)
        if reason:
            raise ValueError(reason)
        return variable

    @contextmanager
    def loss_kept(self) -> Iterator[None]:
        """Give an updater back the loss that it has now, whatever a feeder assigns."""
        if _is_loss(self.source):
            yield
            return
        before = self.source.loss
        try:
            yield
        finally:
            if self.source.loss is not before:
                self.source.loss = before


def target_of(loss_or_updater: Any, feeder: Optional[Feeder], batches: int) -> Target:
    """The loss of an updater with its feeder, or a plain loss.

    Raises:
        TypeError: it is neither, or `feeder` cannot be called.
        ValueError: `batches` is less than 1, or the loss cannot be examined: see `Target.loss`.
    """
    solver = None
    if not _is_loss(loss_or_updater):
        if not (hasattr(loss_or_updater, "loss") and hasattr(loss_or_updater, "data_feeder")):
            raise TypeError(
                "loss_or_updater must be a loss Variable, a wrapper of one, or an updater with .loss and "
                f".data_feeder, got {type(loss_or_updater).__name__}"
            )
        feeder = loss_or_updater.data_feeder if feeder is None else feeder
        solver = getattr(loss_or_updater, "solver", None)
    if feeder is not None and not callable(feeder):
        raise TypeError(f"feeder must be callable without arguments, got {type(feeder).__name__}")
    if integer("batches", batches) < 1:
        raise ValueError(f"batches={batches!r} must be 1 or more")
    target = Target(loss_or_updater, feeder, 1 if feeder is None else batches, solver)
    target.loss()
    return target


def computed_in_half(loss: nn.Variable) -> str:
    """Which function of the graph is the first that nnabla computes in half precision, and what to do about
    it; empty when none is.
    """
    structure = GraphPlan(loss).structure
    described = structure.described
    if not described.in_half:
        return ""
    first = described.in_half[0]
    return (
        f"{structure.labels[first]} is computed in {described.backends[first][0]}, so there is no fp32 to "
        "compare with: build the network in a float context (nnabla.Context(['cpu:float'])) and say "
        "storage='float16'"
    )


def _is_loss(source: Any) -> bool:
    return isinstance(source, (nn.Variable, LossWrapper))
