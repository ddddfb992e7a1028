# SPDX-License-Identifier: Apache-2.0
"""The loss, a Variable or what wraps one and acts like it; what backward starts from; hooks that raise."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any, Callable, Optional, Protocol, Union, runtime_checkable

import nnabla as nn
import numpy as np
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.power_of_two import floor_power_of_two
from ..core.scale_policy import global_scale
from ..core.validation import array_of_numbers, scalar
from ..host_context import array_context, host_view
from .description import GraphDescription, visited

Seed = Union[NDArray[Any], nn.NdArray]
"""The seed gradient of a loss that a user gives."""

Hook = Callable[[Any], None]
"""What nnabla calls before or after a function, with the function."""

_FLOAT32 = np.dtype(np.float32)

# What divides by the scale. An updater with a loop of its own, though derived from nnabla's, may not.
_DIVIDING_LOOP = DynamicLossScalingUpdater.update.__code__


@runtime_checkable
class LossWrapper(Protocol):
    """A loss with the two methods of a Variable, around a Variable."""

    @property
    def variable(self) -> nn.Variable:
        """The wrapped loss itself."""

    def forward(
        self,
        clear_buffer: bool = False,
        clear_no_need_grad: bool = False,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
    ) -> None:
        """Run forward as `Variable.forward` does."""

    def backward(
        self,
        scale: float = 1.0,
        clear_buffer: bool = False,
        communicator_callbacks: Optional[Any] = None,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
        *,
        grad: Optional[Seed] = None,
    ) -> None:
        """Run backward with the seed gradient `scale * grad`."""


LossLike = Union[nn.Variable, LossWrapper]
"""A Variable of one element, or what wraps one and acts like it."""


def variable_of(loss: LossLike) -> nn.Variable:
    """The Variable behind `loss`; TypeError when there is none, ValueError when it needs no gradient."""
    if isinstance(loss, nn.Variable):
        variable = loss
    elif isinstance(loss, LossWrapper):
        variable = loss.variable
    else:
        instead = ": add the losses, or train on each by itself" if isinstance(loss, (list, tuple)) else ""
        raise TypeError(
            f"loss must be an nnabla.Variable or a wrapper of one, got {type(loss).__name__}{instead}"
        )
    # nnabla finds out in the next forward what a leaf that needs a gradient means for a rewired graph.
    if variable.parent is None or not (
        variable.need_grad
        or any(v.need_grad and v.parent is None for read in visited(variable)[1] for v in read)
    ):
        raise ValueError(
            "loss needs no gradient: it is not computed from any variable with need_grad=True; "
            "pass the output of the network's loss function"
        )
    return variable


def refuse_a_loss_that_scales_itself(described: GraphDescription) -> None:
    """Raise ValueError when functions in the graph of a loss scale its gradients already."""
    if "ScaledLoss" in described.type_names:
        raise ValueError(
            "loss scales itself already, by nnabla_adaloss.loss_scaling with a tracker: "
            "train on it as it is, or wrap the loss that was given to loss_scaling"
        )


def refuse_a_second_division(loss: Any) -> None:
    """Raise TypeError if the loop of nnabla's `DynamicLossScalingUpdater` runs `loss`, which unscales."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _DIVIDING_LOOP and frame.f_locals["self"].loss is loss:
            updater = type(frame.f_locals["self"]).__name__
            raise TypeError(
                f"{updater} divides gradients by the scale, but its loss is an {type(loss).__name__}, which "
                "unscales them by itself: give the loss that was wrapped in it to "
                "nnabla_adaloss.AdaptiveLossScalingUpdater"
            )
        frame = frame.f_back


def check_scale(scale: Any, name: str = "scale") -> float:
    """`scale` as a Python float; TypeError or ValueError unless gradients can be unscaled in float32."""
    if isinstance(scale, AdaLossConfig):
        raise TypeError(
            f"{name} must be a number; AdaptiveLossScalingUpdater takes an AdaLossConfig as config="
        )
    if isinstance(scale, str):
        raise TypeError(f"{name}={scale!r} must be a number; a format is given as storage=")
    return global_scale(name, scalar(scale))


def check_seed(loss: nn.Variable, grad: Optional[Seed]) -> None:
    """Raise TypeError or ValueError unless backward of `loss` can start from `grad`."""
    if grad is None:
        if loss.size != 1:
            raise ValueError(
                f"loss has shape {loss.shape}, not one element: pass its gradient as grad=..., "
                "or reduce it with nnabla.functions.mean"
            )
        return
    shape = tuple((grad if isinstance(grad, nn.NdArray) else array_of_numbers("grad", grad)).shape)
    if math.prod(shape) != loss.size or (shape and shape != loss.shape):
        raise ValueError(f"grad has shape {shape}, but loss has shape {loss.shape}")


def seed_weight(grad: Seed, *, on_host: bool) -> float:
    """What a seed gradient makes of all gradients behind it, as a loss weight does: the power of two at or
    below its largest magnitude. 1 where that is 0 or not finite, or would have to be fetched from a device.
    """
    if isinstance(grad, nn.NdArray):
        if not on_host:
            return 1.0
        grad = host_view(grad)
    largest = float(np.max(np.abs(grad), initial=0.0))
    return floor_power_of_two(largest) if 0.0 < largest < math.inf else 1.0


class LossSeed:
    """Makes the gradient that backward starts from, on the device: the GPU would wait for one of the host."""

    def __init__(self, loss: nn.Variable) -> None:
        self._loss = loss
        # nnabla frees what is in it when buffers are cleared, and leaves the array to us.
        self._array: Optional[nn.NdArray] = None
        self._context: Optional[nn.Context] = None

    def gradient(self, scale: float, grad: Optional[Seed] = None) -> Union[nn.NdArray, NDArray[np.float32]]:
        """`scale * grad`, ones when `grad` is None; an array that is handed out is used again next time."""
        if grad is not None:
            check_seed(self._loss, grad)
            array = np.asarray(grad.data if isinstance(grad, nn.NdArray) else grad, dtype=np.float32)
            return array.reshape(self._loss.shape) * np.float32(scale)
        if self._array is None:
            check_seed(self._loss, None)
            # The array last: a signal may interrupt us between any two lines.
            self._context = array_context(self._loss.parent.context)
            self._array = nn.NdArray(self._loss.shape)
        self._array.fill(scale)
        self._array.data_ptr(_FLOAT32, self._context)
        return self._array


def run_backward(
    loss: LossLike,
    scale: float,
    grad: Optional[Seed],
    clear_buffer: bool,
    communicator_callbacks: Optional[Any],
    pre: Optional[Hook],
    post: Optional[Hook],
    seed: Optional[LossSeed] = None,
) -> None:
    """Call `loss.backward` with the seed gradient `scale * grad` (ones when `grad` is None)."""
    if not isinstance(loss, nn.Variable):
        loss.backward(scale, clear_buffer, communicator_callbacks, pre, post, grad=grad)
        return
    loss.backward(
        (seed or LossSeed(loss)).gradient(scale, grad),
        clear_buffer=clear_buffer,
        communicator_callbacks=communicator_callbacks,
        function_pre_hook=pre,
        function_post_hook=post,
    )


class HookGuard:
    """Runs hooks until one raises, keeps its exception as `error`, and calls `on_error` at once: nnabla runs
    the remaining functions all the same, and raises a SystemError that hides the cause.
    """

    def __init__(self, on_error: Optional[Callable[[], None]] = None) -> None:
        self.error: Optional[BaseException] = None
        self._on_error = on_error

    def chain(self, *hooks: Optional[Hook]) -> Optional[Hook]:
        """One hook that calls `hooks` in order; None when there is none."""
        present = [hook for hook in hooks if hook is not None]
        if not present:
            return None

        def guarded(f: Any) -> None:
            if self.error is not None:
                return
            try:
                for hook in present:
                    hook(f)
            except BaseException as error:
                self.error = error
                if self._on_error is not None:
                    self._on_error()

        return guarded

    def run(self, call: Callable[[], None]) -> None:
        """Call `call` and raise what a hook raised, as it was."""
        try:
            call()
        except BaseException as error:
            raise (self.error or root_cause(error)) from None
        if self.error is not None:
            raise self.error


def root_cause(error: BaseException) -> BaseException:
    """What a SystemError raised by nnabla hides: a signal may arrive between two of our lines."""
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error
