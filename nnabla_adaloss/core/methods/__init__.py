# SPDX-License-Identifier: Apache-2.0
"""Named loss scale methods, a line each in `METHODS`; user-defined ones need no entry."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from inspect import signature
from pkgutil import resolve_name
from typing import Any, Callable, Dict, Literal, Type, Union

from .amax_history import AmaxHistory as AmaxHistory
from .approx_range import ApproxRange as ApproxRange
from .approx_range import LognormalRange as LognormalRange
from .element_wise_range import AbsRange as AbsRange
from .element_wise_range import ElementWiseRange as ElementWiseRange
from .method import ArrayFunction as ArrayFunction
from .method import Fixed as Fixed
from .method import Method as Method
from .method import Needs as Needs
from .method import Range as Range
from .method import overflow_limit as overflow_limit

MethodName = Literal["approx_range", "amax_history", "abs_range", "element_wise_range", "fixed"]
"""Names that `loss_scale_method=` accepts."""

METHODS: Dict[MethodName, Type[Method]] = {
    "approx_range": ApproxRange,
    "amax_history": AmaxHistory,
    "abs_range": AbsRange,
    "element_wise_range": ElementWiseRange,
    "fixed": Fixed,
}

MethodLike = Union[MethodName, Method, Type[Method], Callable[..., float]]
"""Arguments of `resolve_method`, which also accepts names as `"package.module:name"`."""


def resolve_method(given: MethodLike, config: Any = None) -> Method:
    """Find a method by name, class, value or function; fields of `config` are parameters of the same name."""
    method: Any = _imported(given) if isinstance(given, str) else given
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        own: Any = method
        names = [field.name for field in fields(own)] if is_dataclass(own) else []
        return method(**{name: getattr(config, name) for name in names if hasattr(config, name)})
    # Calling a class would make an object, not a scale.
    if isinstance(method, type) or not callable(method):
        raise TypeError(
            f"loss_scale_method={given!r} must be a name or a callable f(g, W, *, config, fan_in), "
            "or a Method"
        )
    function: Callable[..., float] = method
    _check_arguments(given, function)
    return ArrayFunction(function, config)


def _imported(name: str) -> Any:
    """Method of this name in `METHODS`, or any object named as `"package.module:name"`."""
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
    """Raise TypeError, naming the argument as `given`, if the function does not take a method's arguments."""
    try:
        arguments = signature(function)
    except (TypeError, ValueError):
        return  # some C functions have no signature
    try:
        arguments.bind(None, None, config=None, fan_in=1.0)
    except TypeError as error:
        raise TypeError(
            f"loss_scale_method={given!r} must be callable as f(g, W, *, config, fan_in): {error}"
        ) from None
