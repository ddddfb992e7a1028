# SPDX-License-Identifier: Apache-2.0
"""The loss scale methods by name, and how a method of one's own is plugged in.

A method of one's own is a function `f(g, W, *, config, fan_in) -> float` of NumPy arrays (`W` may be None).
It is named in the configuration as `"package.module:function"`, which needs no registration and survives
being saved, or given as the function itself.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Union

from .abs_range import abs_range
from .approx_range import approx_range
from .element_wise_range import element_wise_range
from .statistics import ArrayStatistics

if TYPE_CHECKING:
    from .config import AdaLossConfig


class Method(NamedTuple):
    """A way to compute a layer's scale.

    Attributes:
        function: `f(g, W, *, config, fan_in) -> float`.
        takes_statistics: g and W are `ArrayStatistics`; otherwise NumPy arrays.
    """

    function: Callable[..., float]
    takes_statistics: bool


def fixed(
    g: Optional[ArrayStatistics], W: Optional[ArrayStatistics], *, config: AdaLossConfig, fan_in: float
) -> float:
    """`config.fixed_loss_scale`, whatever the gradient."""
    return config.fixed_loss_scale


METHODS: Dict[str, Method] = {
    "approx_range": Method(approx_range, takes_statistics=True),
    "abs_range": Method(abs_range, takes_statistics=True),
    "element_wise_range": Method(element_wise_range, takes_statistics=False),
    "fixed": Method(fixed, takes_statistics=True),
}


def resolve_method(name_or_callable: Union[str, Callable[..., Any]]) -> Method:
    """The method of a built-in name, of `"package.module:function"`, or of a callable.

    Raises:
        ValueError: the name is unknown, or does not lead to anything.
        TypeError: what was given, or what the name leads to, cannot be called.
    """
    if not isinstance(name_or_callable, str):
        return Method(_callable(name_or_callable, name_or_callable), takes_statistics=False)
    if name_or_callable in METHODS:
        return METHODS[name_or_callable]
    if ":" not in name_or_callable:
        raise ValueError(
            f"loss_scale_method={name_or_callable!r} is unknown; choose one of {', '.join(METHODS)}, "
            'or name a function of your own as "package.module:function"'
        )
    try:
        found = resolve_name(name_or_callable)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"loss_scale_method={name_or_callable!r} cannot be imported: {error}") from error
    return Method(_callable(found, name_or_callable), takes_statistics=False)


def _callable(found: Any, given: Any) -> Callable[..., float]:
    if not callable(found):
        raise TypeError(
            f"loss_scale_method={given!r} must be a name or a callable f(g, W, *, config, fan_in)"
        )
    return found  # type: ignore[no-any-return]
