# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments that are unknown, with a sentence about what to use instead."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from functools import wraps
from typing import Any, Callable, Mapping, TypeVar, cast

_Init = TypeVar("_Init", bound=Callable[..., None])


def explains_keywords(instead: Mapping[str, str]) -> Callable[[_Init], _Init]:
    """A decorator of `__init__`: a keyword argument that it does not take is a TypeError with advice.

    Args:
        instead: what other libraries call an argument, and what to use instead.

    Example:
        >>> class Scaler:
        ...     @explains_keywords({"init_scale": "use scale="})
        ...     def __init__(self, scale: float = 8.0) -> None: ...
        >>> Scaler(init_scale=2.0)
        Traceback (most recent call last):
        TypeError: Scaler has no argument init_scale; use scale=
    """

    def decorated(init: _Init) -> _Init:
        known = list(inspect.signature(init).parameters)[1:]
        by_lower_case = {name.lower(): name for name in known}

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    close = get_close_matches(name.lower(), by_lower_case, n=1)
                    if name in instead:
                        advice = instead[name]
                    elif close:
                        advice = f"did you mean {by_lower_case[close[0]]}=?"
                    else:
                        advice = f"it takes {', '.join(known)}"
                    raise TypeError(f"{type(self).__name__} has no argument {name}; {advice}")
            init(self, *args, **kwargs)

        return cast(_Init, checked)

    return decorated
