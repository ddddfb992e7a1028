# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments that all updaters take, made before anything is changed."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from ..core.validation import integer, number


def keep_data() -> None:
    """The default data feeder: leaves the input variables as they are."""


def check_arguments(
    solver: Any,
    data_feeder: Any,
    accum_grad: Any,
    weight_decay: Any,
    comm: Any,
    grads: Optional[Sequence[Any]],
) -> None:
    """Check what updaters have in common.

    Raises:
        TypeError: an argument is of the wrong type; the message names it.
        ValueError: `accum_grad` is less than 1.
    """
    for method in ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters"):
        if not callable(getattr(solver, method, None)):
            raise TypeError(f"solver must be an nnabla solver; {type(solver).__name__} has no {method}()")
    if not callable(data_feeder):
        raise TypeError(f"data_feeder must be callable without arguments, got {type(data_feeder).__name__}")
    if integer("accum_grad", accum_grad) < 1:
        raise ValueError(f"accum_grad={accum_grad!r} must be 1 or more")
    if weight_decay is not None:
        number("weight_decay", weight_decay)
    if comm is not None and not callable(getattr(comm, "all_reduce", None)):
        raise TypeError(
            f"comm must be a communicator with all_reduce(arrays, division, inplace); "
            f"{type(comm).__name__} has no all_reduce"
        )
    if grads and comm is None:
        raise ValueError(
            "grads are exchanged through comm, but comm is None; pass a communicator, or no grads"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value` when it is one of `choices`.

    Raises:
        ValueError: it is not; the message names the argument and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    return str(value)
