# SPDX-License-Identifier: Apache-2.0
"""The user's hooks around each function, such as those of nnabla's profiler and tracer."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple, Union

from ..graph.hooks import Hook

HookLike = Union[Hook, Tuple[Optional[Hook], Optional[Hook]], None]
"""A hook for forward and backward, or one for each, or none."""


class FunctionHooks(NamedTuple):
    """The user's hooks before and after a function's forward and backward."""

    forward_pre: Optional[Hook] = None
    forward_post: Optional[Hook] = None
    backward_pre: Optional[Hook] = None
    backward_post: Optional[Hook] = None


def function_hooks(pre: Any, post: Any) -> FunctionHooks:
    """The hooks of an updater's arguments; TypeError when one is neither a callable, nor a pair, nor None."""
    forward_pre, backward_pre = _pair("function_pre_hook", pre)
    forward_post, backward_post = _pair("function_post_hook", post)
    return FunctionHooks(forward_pre, forward_post, backward_pre, backward_post)


def _pair(name: str, given: Any) -> Tuple[Optional[Hook], Optional[Hook]]:
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2 or not all(hook is None or callable(hook) for hook in pair):
        raise TypeError(
            f"{name} must be a callable with a function, or a pair of these for forward and backward, "
            f"or None; got {given!r}"
        )
    return pair
