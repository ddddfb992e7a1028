# SPDX-License-Identifier: Apache-2.0
"""The loss scale methods that have names: a line each in `METHODS`.

A method of one's own needs none: it is named in the configuration as `"package.module:name"`, which survives
being saved, or given as itself.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from inspect import signature
from pkgutil import resolve_name
from typing import Any, Callable, Dict, Literal, Type, Union

from .amax_history import AmaxHistory
from .approx_range import ApproxRange, LognormalRange
from .element_wise_range import AbsRange, ElementWiseRange
from .method import ArrayFunction, Fixed, Method, Needs, Range, overflow_limit

__all__ = [
    "METHODS",
    "AbsRange",
    "AmaxHistory",
    "ApproxRange",
    "ArrayFunction",
    "ElementWiseRange",
    "Fixed",
    "LognormalRange",
    "Method",
    "MethodLike",
    "MethodName",
    "Needs",
    "Range",
    "overflow_limit",
    "resolve_method",
]

MethodName = Literal["approx_range", "amax_history", "abs_range", "element_wise_range", "fixed"]
"""What `loss_scale_method=` takes by name."""

METHODS: Dict[MethodName, Type[Method]] = {
    "approx_range": ApproxRange,
    "amax_history": AmaxHistory,
    "abs_range": AbsRange,
    "element_wise_range": ElementWiseRange,
    "fixed": Fixed,
}

MethodLike = Union[MethodName, Method, Type[Method], Callable[..., float]]
"""What `resolve_method` takes; of names it also takes `"package.module:name"`, which no type can tell."""


def resolve_method(given: MethodLike, config: Any = None) -> Method:
    """The method that a name, a `Method`, a subclass of it, or a function stands for.

    A method that is given by name or class takes its parameters from the fields that `config` has too; a
    function is given `config` as it is.
    """
    found: Any = _imported(given) if isinstance(given, str) else given
    if isinstance(found, Method):
        return found
    if isinstance(found, type) and issubclass(found, Method):
        return _with_parameters_of(found, config)
    # To call a class would make an object, not a scale.
    if isinstance(found, type) or not callable(found):
        raise TypeError(
            f"loss_scale_method={given!r} must be a name or a callable f(g, W, *, config, fan_in), "
            "or a Method"
        )
    function: Callable[..., float] = found
    _check_arguments(given, function)
    return ArrayFunction(function, config)


def _imported(name: str) -> Any:
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ValueError(
            f"loss_scale_method={name!r} is unknown; choose one of {', '.join(METHODS)}, "
            'or name a method of your own as "package.module:name"'
        )
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"loss_scale_method={name!r} cannot be imported: {error}") from error


def _check_arguments(given: MethodLike, function: Callable[..., float]) -> None:
    try:
        arguments = signature(function)
    except (TypeError, ValueError):
        return  # Some of what is written in C does not tell.
    try:
        arguments.bind(None, None, config=None, fan_in=1.0)
    except TypeError as error:
        raise TypeError(
            f"loss_scale_method={given!r} must be callable as f(g, W, *, config, fan_in): {error}"
        ) from None


def _with_parameters_of(method: Any, config: Any) -> Method:
    names = [field.name for field in fields(method)] if is_dataclass(method) else []
    made: Method = method(**{name: getattr(config, name) for name in names if hasattr(config, name)})
    return made
