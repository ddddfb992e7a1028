# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis looks at: a loss, and what feeds it."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional

import nnabla as nn

from ..core.validation import integer
from ..graph.function_kinds import computes_in_half
from ..graph.loss_like import LossWrapper, variable_of

Feeder = Callable[[], Any]


class Target(NamedTuple):
    """A loss and its data.

    Attributes:
        loss: the loss Variable, of one element.
        feeder: called before each batch; None: the data that is there is the only batch.
        batches: how many batches are looked at.
        parameters: what an updater's solver calls its parameters; empty for a loss as it is.
    """

    loss: nn.Variable
    feeder: Optional[Feeder]
    batches: int
    parameters: Mapping[str, nn.Variable]


def target_of(loss_or_updater: Any, feeder: Optional[Feeder], batches: int) -> Target:
    """The loss of an updater with its feeder, or a loss as it is.

    Raises:
        TypeError: it is neither, or `feeder` cannot be called.
        ValueError: the loss needs no gradient, has several elements, or is computed in half precision
            already; or `batches` is less than 1.
    """
    loss = loss_or_updater
    parameters: Mapping[str, nn.Variable] = {}
    if not isinstance(loss, (nn.Variable, LossWrapper)):
        if not (hasattr(loss, "loss") and hasattr(loss, "data_feeder")):
            raise TypeError(
                "loss_or_updater must be a loss Variable, a wrapper of one, or an updater with .loss and "
                f".data_feeder, got {type(loss).__name__}"
            )
        feeder = loss.data_feeder if feeder is None else feeder
        solver, loss = getattr(loss, "solver", None), loss.loss
        parameters = {} if solver is None else solver.get_parameters()
    if feeder is not None and not callable(feeder):
        raise TypeError(f"feeder must be callable without arguments, got {type(feeder).__name__}")
    if integer("batches", batches) < 1:
        raise ValueError(f"batches={batches!r} must be 1 or more")
    variable = variable_of(loss)
    if variable.size != 1:
        raise ValueError(
            f"loss has shape {variable.shape}, not one element; reduce it with nnabla.functions.mean"
        )
    context = variable.parent.context
    if computes_in_half(context):
        raise ValueError(
            f"loss is computed in {context.backend[0]}, so there is no fp32 to compare with: build the "
            "network in a float context and say storage='float16'"
        )
    return Target(variable, feeder, 1 if feeder is None else batches, parameters)
