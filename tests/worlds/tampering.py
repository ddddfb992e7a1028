# SPDX-License-Identifier: Apache-2.0
"""Functions of a test's own that change a gradient on its way back."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from nnabla.function import PythonFunction


class Tampering(PythonFunction):
    """Identity forward; backward hands on what ``changed`` makes of the gradient."""

    @abstractmethod
    def changed(self, g: np.ndarray) -> np.ndarray:
        """Return the changed gradient."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def min_outputs(self) -> int:
        return 1

    def setup_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].reset_shape(inputs[0].shape, True)

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].data.copy_from(inputs[0].data)

    def backward_impl(self, inputs: Any, outputs: Any, propagate_down: Any, accum: Any) -> None:
        with np.errstate(all="ignore"):
            g = self.changed(outputs[0].g)
            inputs[0].g = inputs[0].g + g if accum[0] else g

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return False


class Gate(Tampering):
    """Identity whose gradient is multiplied by ``factor``, its first element by ``first``."""

    def __init__(self, ctx: Any = None) -> None:
        super().__init__(ctx)
        self.factor = self.first = 1.0

    def changed(self, g: np.ndarray) -> np.ndarray:
        result = g * np.float32(self.factor)
        result.flat[0] *= self.first
        return result


class Noise(Tampering):
    """Adds noise in forward, from the global generator of numpy or from one of its own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self._draw: Any = np.random.default_rng(0) if own else np.random

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].d = inputs[0].d + self._draw.standard_normal(inputs[0].shape)

    def changed(self, g: np.ndarray) -> np.ndarray:
        return g


class Interrupted(Gate):
    """The same; its backward is interrupted when its turn has come: the last of those that are ``left``."""

    left = 0

    def changed(self, g: np.ndarray) -> np.ndarray:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().changed(g)


class Sometimes(Gate):
    """The same; its backward writes its gradient only while it ``writes``."""

    writes = False

    def backward_impl(self, *args: Any) -> None:
        if self.writes:
            super().backward_impl(*args)
