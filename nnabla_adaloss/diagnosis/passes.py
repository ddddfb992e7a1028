# SPDX-License-Identifier: Apache-2.0
"""Backward passes whose gradients are kept, of each layer, as the layer reads them."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..engine import AdaptiveLossScaling
from ..graph.loss import Hook, LossLike, run_backward
from .layers import Layer

Forward = Callable[[], None]

_ATTEMPTS = 20


class LayerGradients(NamedTuple):
    """The gradients of a pass.

    Attributes:
        arrays: the gradient of each layer's outputs and weights, by key of the variable, as stored.
        scale_of: the scale that a gradient carries, by key.
    """

    arrays: Dict[int, NDArray[Any]]
    scale_of: Callable[[int], float]

    @property
    def finite(self) -> bool:
        """Whether there is neither an infinity nor a NaN."""
        return all(np.isfinite(array).all() for array in self.arrays.values())


class Passes:
    """Runs forward and backward and keeps gradients.

    Forward runs before each backward, which is free to drop what forward has left: dropout drops its mask.

    Args:
        layers: the layers whose gradients are kept.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._outputs = {key: v for layer in layers for key, v in layer.outputs.items()}
        self._weights = {key: v for layer in layers for key, v in layer.weights.items()}

    def with_one_scale(
        self, forward: Forward, loss: LossLike, scale: float, pre: Optional[Hook] = None
    ) -> LayerGradients:
        """Backward of `loss`, which leaves gradients scaled.

        Args:
            forward: runs forward, with the same random numbers each time.
            loss: the Variable, or its emulation.
            scale: the loss scale.
            pre: a hook that looks on.
        """
        arrays: Dict[int, NDArray[Any]] = {}

        def note(f: Any) -> None:
            self._note(f, arrays)
            if pre is not None:
                pre(f)

        forward()
        self._zero()
        run_backward(loss, scale, None, False, None, note, None)
        self._note_weights(arrays)
        return LayerGradients(arrays, lambda key: scale)

    def adaptive(self, forward: Forward, scaling: AdaptiveLossScaling, iteration: int) -> LayerGradients:
        """Backward with measured scales, again until they hold, as the updater does it."""
        for attempt in range(_ATTEMPTS):
            arrays: Dict[int, NDArray[Any]] = {}

            def note(f: Any, arrays: Dict[int, NDArray[Any]] = arrays) -> None:
                self._note(f, arrays)

            forward()
            self._zero()
            scaling.backward(None, function_pre_hook=note, iteration=iteration, again=attempt > 0)
            self._note_weights(arrays)
            overflow = not all(np.isfinite(arrays[key]).all() for key in self._weights)
            if overflow and not scaling.after_overflow():
                break
            if not overflow and scaling.settled:
                break
        scaling.after_update()
        scales = {key: scaling.scale_of(v) for key, v in self._outputs.items()}
        # Those of weights are unscaled already.
        return LayerGradients(arrays, lambda key: scales.get(key, 1.0))

    def _zero(self) -> None:
        for v in self._weights.values():
            v.grad.zero()

    def _note(self, f: Any, arrays: Dict[int, NDArray[Any]]) -> None:
        for v in f.outputs:
            if hash(v) in self._outputs:
                arrays[hash(v)] = _values(v.grad)

    def _note_weights(self, arrays: Dict[int, NDArray[Any]]) -> None:
        for key, v in self._weights.items():
            arrays[key] = _values(v.grad)


def _values(array: nn.NdArray) -> NDArray[Any]:
    return np.array(array.data, np.float32)
