# SPDX-License-Identifier: Apache-2.0
"""A plain function as a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

from numpy.typing import NDArray

from .method import Method, Needs, Range


@dataclass(frozen=True)
class ArrayFunction(Method):
    """A function `f(g, W, *, config, fan_in) -> float` of NumPy arrays (`W` may be None).

    Attributes:
        function: the function.
        config: what it is given as `config`.

    Example:
        >>> import numpy as np
        >>> method = ArrayFunction(lambda g, W, *, config, fan_in: config / abs(g).max(), config=64.0)
        >>> float(method.scale(np.array([2.0, -4.0]), None, range=Range(6e-8, 65504.0), fan_in=1))
        16.0
    """

    needs = Needs.ARRAYS
    function: Callable[..., float]
    config: Any

    def scale(self, g: NDArray[Any], W: Optional[NDArray[Any]], *, range: Range, fan_in: float) -> float:
        """What the function returns."""
        return self.function(g, W, config=self.config, fan_in=fan_in)
