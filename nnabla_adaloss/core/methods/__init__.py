# SPDX-License-Identifier: Apache-2.0
"""Named loss scale methods, a line each in `METHODS`; user-defined ones need no entry."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, Callable, Dict, List, Literal, Type, Union

from ..validation import callable_with
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


def resolve_method(method: MethodLike, config: Any = None) -> Method:
    """Find a method by name, class, value or function. A class takes parameters from `config`, by name."""
    value: Any = _find_named(method) if isinstance(method, str) else method
    if isinstance(value, Method):
        return value
    if isinstance(value, type) and issubclass(value, Method):
        names = parameter_names(value)  # those that `config` lacks keep their defaults
        return value(**{name: getattr(config, name) for name in names if hasattr(config, name)})
    what = "a name, a Method, or callable as f(g, W, *, config, fan_in)"
    # Calling a class would make an object, not a scale.
    if isinstance(value, type):
        raise TypeError(f"loss_scale_method={method!r} must be {what}")
    check = callable_with(None, None, config=None, fan_in=1.0, what=what, instead="such a function")
    return ArrayFunction(check(f"loss_scale_method={method!r}", value), config)


def parameter_names(method: Union[Method, Type[Method]]) -> List[str]:
    """Names of a method's parameters: the fields of a dataclass."""
    return [field.name for field in fields(method)] if is_dataclass(method) else []


def _find_named(name: str) -> Any:
    """Class of this name in `METHODS`, or any object named as `"package.module:name"`."""
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
