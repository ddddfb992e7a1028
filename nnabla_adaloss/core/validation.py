# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with errors that name the argument, its value, or its replacement."""

from __future__ import annotations

import inspect
import math
import os
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import FunctionType, MethodType
from typing import Any, Callable, Iterable, Mapping, Tuple, Type, TypeVar, Union, cast, get_args

import numpy as np
from numpy.typing import NDArray

_Any = TypeVar("_Any")
_Number = TypeVar("_Number", int, float)
_Init = TypeVar("_Init", bound=Callable[..., None])


def number(name: str, value: object) -> float:
    """Convert a real number to float, infinities and NaN included; TypeError for others and booleans;
    ValueError for an integer that is too large.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond the range of floating-point numbers") from None


def integer(name: str, value: object) -> int:
    """Convert `value` to int; TypeError unless it is an integer other than a boolean."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def limited(
    convert: Callable[[str, object], _Number], accepts: Callable[[_Number], bool], complaint: str
) -> Callable[[str, object], _Number]:
    """Make a check that converts a value; ValueError with `complaint` unless `accepts(result)`."""

    def check(name: str, value: object) -> _Number:
        result = convert(name, value)
        if not accepts(result):
            raise ValueError(f"{name}={value!r} {complaint}")
        return result

    return check


positive_number = limited(number, lambda x: 0.0 < x < math.inf, "must be a positive finite number")
nonnegative_number = limited(number, lambda x: 0.0 <= x < math.inf, "must be a finite number, 0 or more")
positive_integer = limited(integer, lambda n: n >= 1, "must be 1 or more")
nonnegative_integer = limited(integer, lambda n: n >= 0, "must be 0 or more")


def boolean(name: str, value: object) -> bool:
    """Convert `value` to bool; TypeError unless it is True or False, or one of NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    return bool(value)


def choice(name: str, value: object, words: Any, otherwise: str = "") -> str:
    """Return `value`; ValueError, which ends in `otherwise`, unless it is one of the words of a `Literal`."""
    if not isinstance(value, str) or value not in get_args(words):
        accepted = ", ".join(map(repr, get_args(words)))
        raise ValueError(f"{name}={value!r} must be one of {accepted}{otherwise}")
    return value


def instance(name: str, value: _Any, kind: Type[Any], otherwise: str = "") -> _Any:
    """Return `value`; TypeError unless it is a `kind`. `otherwise`: words after the name of the kind."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}{otherwise}, got {type(value).__name__}")
    return value


def instance_or_none(name: str, value: _Any, kind: Type[Any]) -> _Any:
    """Return `value`; TypeError unless it is a `kind`, or None."""
    return value if value is None else instance(name, value, kind, " or None")


def callable_with(*arguments: Any, what: str, instead: str, **keywords: Any) -> Callable[[str, Any], Any]:
    """Make a check for callables that accept these arguments; its error: must be `what`, give `instead`."""

    def check(name: str, value: Any) -> Any:
        if not callable(value):
            raise TypeError(f"{name} must be {what}, got {type(value).__name__}: give {instead}")
        called = value if isinstance(value, (FunctionType, MethodType)) else value.__call__
        # Classes and functions in C are not checked: their signatures may not be what they accept.
        if isinstance(value, type) or not isinstance(getattr(called, "__func__", called), FunctionType):
            return value
        # A wrapper's own signature, not that of the function that it wraps, says what it accepts.
        signature = inspect.signature(called, follow_wrapped=False)
        try:
            signature.bind(*arguments, **keywords)
        except TypeError:
            shown = f"{getattr(value, '__name__', type(value).__name__)}{signature}"
            raise TypeError(f"{name} must be {what}, unlike {shown}: give {instead}") from None
        return value

    return check


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Make a check that accepts None, and applies `check` to other values."""
    return lambda name, value: None if value is None else check(name, value)


def array_of_numbers(name: str, value: Any) -> NDArray[Any]:
    """Convert `value` to an array; TypeError unless its elements are real numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__} of {array.dtype}")
    return array


def scalar(value: Any) -> Any:
    """Return the element of a 0-dim array; anything else unchanged."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def strings(name: str, value: Iterable[str], what: str) -> Tuple[str, ...]:
    """Convert an iterable of strings, named by `what`, to a tuple; TypeError for others, or one string."""
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a sequence of {what}; write ({value!r},)")
    try:
        result = tuple(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a sequence of {what}") from None
    for item in result:
        if not isinstance(item, str):
            raise TypeError(f"{name} holds {item!r}; {what} are strings")
    return result


def path_name(name: str, value: Union[str, os.PathLike[str]]) -> str:
    """Convert a path, which may be of bytes, to a string; TypeError for anything else."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a path, not {type(value).__name__}") from None


def explains_keywords(instead: Mapping[str, str]) -> Callable[[_Init], _Init]:
    """Make a decorator of `__init__` that raises TypeError with advice, `instead`, for unknown keywords."""

    def decorated(init: _Init) -> _Init:
        parameters = [*inspect.signature(init).parameters.values()][1:]  # without `self`
        names = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]
        by_lower = {name.lower(): name for name in names}

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            name = next((one for one in kwargs if one not in names), None)  # the first unknown keyword
            if name is not None:
                close = get_close_matches(name.lower(), by_lower, n=1)
                advice = f"did you mean {by_lower[close[0]]}=?" if close else f"it takes {', '.join(names)}"
                raise TypeError(f"{type(self).__name__} has no argument {name}; {instead.get(name, advice)}")
            init(self, *args, **kwargs)

        return cast(_Init, checked)

    return decorated
