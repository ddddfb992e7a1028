# SPDX-License-Identifier: Apache-2.0
"""Interface of a loss scale method: its parameters, the inputs that it needs, and one pure function."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, ClassVar, NamedTuple, Optional

from numpy.typing import NDArray

from ..scale_history import HistoryPolicy
from ..statistics import ArrayStatistics
from ..validation import positive_number


class Needs(str, Enum):
    """Inputs of a method. The fewer it needs, the cheaper it is, and the more engines can run it.

    Attributes:
        NOTHING: neither gradient nor weight, and no measurements.
        STATISTICS: `ArrayStatistics` of gradient and weight: with `delay=1` without waiting for a GPU.
        HISTORY: as `STATISTICS`, and the gradient's statistics of the iterations before.
        COMPONENTS: the largest magnitudes of components, over iterations: the engine chooses the scales.
        ARRAYS: the elements, as NumPy arrays: `delay=0` only, and on a GPU a copy to the host per layer.
    """

    NOTHING = "nothing"
    STATISTICS = "statistics"
    HISTORY = "history"
    COMPONENTS = "components"
    ARRAYS = "arrays"


class Range(NamedTuple):
    """Magnitudes to keep: `u_min` from underflow, `u_max` from overflow."""

    u_min: float
    u_max: float


class Method(ABC):
    """Method of computing a layer's loss scale: an immutable value with its parameters.

    A subclass implements `scale`, declares its inputs in `needs`, and is usually a frozen dataclass. A field
    named like one of `AdaLossConfig` takes its value from there when the method is chosen by name.

    Attributes:
        needs: the inputs of `scale`.
        window: for `Needs.HISTORY`: number of iterations, this one included.

    Example:
        >>> from dataclasses import dataclass
        >>> from nnabla_adaloss import AdaLossConfig, Method, Needs
        >>> @dataclass(frozen=True)
        ... class Headroom(Method):
        ...     '''Raises the largest element of the gradient to the margin below u_max.'''
        ...     needs = Needs.STATISTICS
        ...     margin: float = 16.0
        ...     def scale(self, g, W, *, range, fan_in):
        ...         return range.u_max / (self.margin * g.abs_max) if g.abs_max else 1.0
        >>> config = AdaLossConfig(loss_scale_method=Headroom(margin=64.0), delay=1)
    """

    needs: ClassVar[Needs] = Needs.STATISTICS
    window: Optional[int] = 1

    def policy(self, of_global_scale: HistoryPolicy) -> HistoryPolicy:
        """Policy of the components' scales, for `Needs.COMPONENTS`; by default that of the global scale."""
        return of_global_scale

    @abstractmethod
    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        """Compute the scale for a layer's input gradient; positive and finite, before bounds and rounding.

        Called for finite arrays only; methods of this package leave out infinities and NaNs, as
        `ArrayStatistics` does. Its result is limited so that it cannot overflow.

        Args:
            g: the gradient of the layer's output, with its scale S, according to `needs`: `ArrayStatistics`,
                or None, or a NumPy array; with `Needs.HISTORY` a tuple of `ArrayStatistics`, one per
                iteration, this one last, all with the scale S.
            W: the same of the layer's weight (of this iteration only); None for a layer without weight.
            range: the magnitudes to keep from underflow and overflow.
            fan_in: K, number of products summed into one element of the input gradient, on average.
        """


@dataclass(frozen=True)
class Fixed(Method):
    """The same scale for every layer, within the bounds and scale limits."""

    needs = Needs.NOTHING
    fixed_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        positive_number("fixed_loss_scale", self.fixed_loss_scale)

    def scale(self, g: None, W: None, *, range: Range, fan_in: float) -> float:
        return self.fixed_loss_scale


@dataclass(frozen=True)
class ArrayFunction(Method):
    """User-defined function `f(g, W, *, config, fan_in) -> float` of NumPy arrays (`W` may be None)."""

    needs = Needs.ARRAYS
    function: Callable[..., float]
    config: Any

    def scale(self, g: NDArray[Any], W: Optional[NDArray[Any]], *, range: Range, fan_in: float) -> float:
        return self.function(g, W, config=self.config, fan_in=fan_in)


def overflow_limit(g: ArrayStatistics, W: Optional[ArrayStatistics], fan_in: float, u_max: float) -> float:
    """Largest scale that cannot overflow, u_max / (K max|g| max|W|); without a weight u_max / max|g|."""
    largest = g.abs_max if W is None else g.abs_max * W.abs_max * fan_in
    return u_max / largest if largest else math.inf
