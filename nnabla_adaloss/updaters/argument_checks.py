# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of updaters, made before anything is changed."""

from __future__ import annotations

from typing import Any, Collection, Dict, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.validation import integer, nonnegative_number
from ..graph.loss import Hook

HookLike = Union[Hook, Tuple[Optional[Hook], Optional[Hook]], None]
"""A hook for forward and backward, or one for each, or none."""

_SEARCHED = 'with global_scale="dynamic"'
TORCH_ARGUMENTS = {
    "init_scale": "use scale=",
    "growth_factor": f"use scaling_factor= {_SEARCHED}",
    "backoff_factor": f"use scaling_factor= {_SEARCHED}, by which the scale is divided",
    "growth_interval": f"use N= {_SEARCHED}",
    "enabled": "use nnabla's solver by itself, or FixedLossScalingUpdater(scale=1.0)",
}
"""Arguments of torch's `GradScaler`, and those of `AdaptiveLossScalingUpdater` that take their place."""


def check_arguments(
    solver: Any,
    data_feeder: Any,
    accum_grad: Any,
    weight_decay: Any,
    comm: Any,
    grads: Optional[Sequence[Any]],
) -> None:
    """Check what updaters have in common; TypeError or ValueError names the argument."""
    check_solver("solver", solver)
    check_data_feeder("data_feeder", data_feeder)
    check_count("accum_grad", accum_grad)
    check_decay("weight_decay", weight_decay)
    if comm is not None and not callable(getattr(comm, "all_reduce", None)):
        raise TypeError(
            f"comm must be a communicator with all_reduce(arrays, division, inplace); "
            f"{type(comm).__name__} has no all_reduce"
        )
    if grads is not None:
        _check_gradients(grads)
    if grads and comm is None:
        raise ValueError(
            "grads are exchanged through comm, but comm is None; pass a communicator, or no grads"
        )


def _check_gradients(grads: Any) -> None:
    if not isinstance(grads, Collection):
        raise TypeError(f"grads must be a list of NdArrays, got {type(grads).__name__}")
    for index, grad in enumerate(grads):
        if not isinstance(grad, nn.NdArray):
            raise TypeError(
                f"grads[{index}] must be an NdArray, such as a Variable's .grad, got {type(grad).__name__}"
            )


def check_solver(name: str, value: Any) -> Any:
    """`value` when it is a solver; else TypeError."""
    for method in ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters"):
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{name} must be an nnabla solver; {type(value).__name__} has no {method}()")
    return value


def check_data_feeder(name: str, value: Any) -> Any:
    """`value` when it can be called; else TypeError."""
    if not callable(value):
        raise TypeError(f"{name} must be callable without arguments, got {type(value).__name__}")
    return value


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` when it is an integer of at least `least`; else TypeError or ValueError."""
    if integer(name, value) < least:
        raise ValueError(f"{name}={value!r} must be {least} or more")
    return int(value)


def check_decay(name: str, value: Any) -> Any:
    """`value` when it is a finite number, 0 or more, or None; else TypeError or ValueError."""
    if value is not None:
        nonnegative_number(name, value)
    return value


def check_gradient_hook(name: str, value: Any) -> Any:
    """`value` when it can be called, or is None; else TypeError."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable with the solver, got {type(value).__name__}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value` when it is one of `choices`; else ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    return value


def hooks_by_pass(pre: Any, post: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """The arguments for forward, and for backward; TypeError unless both hooks are each a `HookLike`."""
    pairs = {}
    for name, given in (("function_pre_hook", pre), ("function_post_hook", post)):
        pairs[name] = pair = given if isinstance(given, tuple) else (given, given)
        if len(pair) != 2 or not all(hook is None or callable(hook) for hook in pair):
            raise TypeError(
                f"{name} must be a callable with a function, or a pair of these for forward and backward, "
                f"or None; got {given!r}"
            )
    forward, backward = ({name: pair[index] for name, pair in pairs.items()} for index in (0, 1))
    return forward, backward
