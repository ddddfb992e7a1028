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
    """What a method uses. The less it needs, the cheaper it is, and the more engines can run it.

    Attributes:
        NOTHING: neither gradient nor weight: nothing is measured for it.
        STATISTICS: `ArrayStatistics` of gradient and weight: works with `delay=1`, on a GPU without waiting
            for it.
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
    """The magnitudes to keep: `u_min` from underflow, `u_max` from overflow."""

    u_min: float
    u_max: float


class Method(ABC):
    """A way to compute a layer's loss scale, as an immutable value that holds its own parameters.

    A subclass writes `scale`, says in `needs` what it uses, and is usually a frozen dataclass. A field
    that is named like one of `AdaLossConfig` takes its value from there when the method is chosen by name.

    Attributes:
        needs: what `scale` is given.
        window: for `Needs.HISTORY`: how many iterations, this one included.

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
        """For `Needs.COMPONENTS`: how their scales follow from what was measured; as the global one does."""
        return of_global_scale

    @abstractmethod
    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        """The scale for the input gradient of a layer; positive and finite, before bounds and rounding.

        It is asked about finite arrays only, and its answer is kept below what could overflow.

        Args:
            g: the gradient of the layer's output, which carries its scale S, as `needs` says:
                `ArrayStatistics`, or None, or a NumPy array; with `Needs.HISTORY` a tuple of
                `ArrayStatistics`, one per iteration, this one last, all as if they carried S.
            W: the same of the layer's weight (of this iteration only); None for a layer without weight.
            range: the magnitudes to keep from underflow and overflow.
            fan_in: K, number of products summed into one element of the input gradient, on average.
        """


@dataclass(frozen=True)
class Fixed(Method):
    """The same scale for every layer, within the bounds and the room that gradients leave."""

    needs = Needs.NOTHING
    fixed_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        positive_number("fixed_loss_scale", self.fixed_loss_scale)

    def scale(self, g: None, W: None, *, range: Range, fan_in: float) -> float:
        """`fixed_loss_scale`, whatever the gradient."""
        return self.fixed_loss_scale


@dataclass(frozen=True)
class ArrayFunction(Method):
    """A function `f(g, W, *, config, fan_in) -> float` of NumPy arrays (`W` may be None)."""

    needs = Needs.ARRAYS
    function: Callable[..., float]
    config: Any

    def scale(self, g: NDArray[Any], W: Optional[NDArray[Any]], *, range: Range, fan_in: float) -> float:
        """What the function returns."""
        return self.function(g, W, config=self.config, fan_in=fan_in)


def overflow_limit(g: ArrayStatistics, W: Optional[ArrayStatistics], fan_in: float, u_max: float) -> float:
    """Largest scale under which no element of the input gradient can exceed `u_max`: (u_max / K) / (max|g| *
    max|W|), or u_max / max|g| without a weight; infinite when one of them is all zero.
    """
    largest = g.abs_max if W is None else g.abs_max * W.abs_max * fan_in
    return u_max / largest if largest else math.inf
