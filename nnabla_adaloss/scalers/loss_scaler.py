# SPDX-License-Identifier: Apache-2.0
"""One loss scale for a whole network, for custom training loops."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Union

import nnabla as nn
import numpy as np
from nnabla.solver import Solver
from numpy.typing import NDArray

from ..core import validation as check
from ..core.config import AdaLossConfig
from ..core.saved_settings import SettingValue, foreign_settings_warning, not_default, plain, with_known_names
from ..core.scale_policy import SMALLEST_SCALE, growth_factor
from ..errors import warn
from ..host_context import host_view

Gradient = Union[NDArray[Any], "nn.NdArray", "nn.Variable"]
Gradients = Union[Gradient, Iterable[Gradient]]
_KINDS = (np.ndarray, np.generic, nn.NdArray, nn.Variable)

_CHECKS: Dict[str, Callable[[str, object], Any]] = {
    "scale": check.positive_number,
    "initial_scale": check.positive_number,
    "dynamic_scaling": check.boolean,
    "growth_interval": check.positive_integer,
    "growth_factor": growth_factor,
    "backoff_factor": check.limited(check.positive_number, lambda x: x <= 1.0, "must not be larger than 1"),
    "min_scale": check.positive_number,
    "max_scale": check.positive_number,
}
_COUNTS = ("total_updates", "skipped_updates", "good_updates")


class LossScaler:
    """Scales a loss, unscales its gradients, and adjusts the scale after overflows.

    Gradients are NumPy arrays, NdArrays or Variables, one or a list; the gradient of a Variable is its
    `.grad`. They are divided in float32, or in float64 where they are float64. Arguments are attributes as
    well, and are checked when they are assigned.

    Args:
        initial_scale: the scale to start with.
        dynamic_scaling: adjust the scale; False keeps it.
        growth_interval: the scale grows after this many good updates in a row.
        growth_factor: the factor by which it grows.
        backoff_factor: the factor applied after an overflow.
        min_scale: the lower bound. The first overflow there causes a warning.
        max_scale: the upper bound.

    Attributes:
        scale: the current scale.
        total_updates: number of `unscale_gradients_and_check` since the start or the last `reset`.
        skipped_updates: number of those that found an overflow.

    Raises:
        TypeError, ValueError: an argument is of the wrong type (a boolean is not a number), or out of range.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import LossScaler
        >>> scaler = LossScaler(initial_scale=1024.0)
        >>> gradient = np.array([512.0, 2048.0], np.float32)
        >>> scaler.unscale_gradients_and_check(gradient)
        True
        >>> gradient
        array([0.5, 2. ], dtype=float32)
        >>> scaler.unscale_gradients_and_check(np.array([np.inf], np.float32)), scaler.scale
        (False, 512.0)
    """

    @check.explains_keywords({})
    def __init__(
        self,
        initial_scale: float = 65536.0,
        dynamic_scaling: bool = True,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
        max_scale: float = 16777216.0,
    ) -> None:
        if isinstance(initial_scale, (Solver, nn.Variable, AdaLossConfig)):
            raise TypeError("initial_scale must be a number; GradScaler takes solvers and config=")
        self.dynamic_scaling, self.growth_interval = dynamic_scaling, growth_interval
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.min_scale, self.max_scale, self.initial_scale = min_scale, max_scale, initial_scale
        self.reset()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, _CHECKS[name](name, value) if name in _CHECKS else value)

    @property
    def overflow_rate(self) -> float:
        """Share of the updates that were skipped; 0.0 before the first."""
        return self.skipped_updates / self.total_updates if self.total_updates else 0.0

    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss (Variable, NdArray, NumPy array or float) by the scale; float16 becomes float32.

        Raises:
            TypeError: `loss` is another object. A wrapper takes the scale in its own `backward(scale)`.
        """
        if callable(getattr(loss, "backward", None)) and not isinstance(loss, nn.Variable):
            raise TypeError(
                f"loss is a {type(loss).__name__}, which takes the scale in backward: call "
                "loss.backward(scaler.scale), then check_gradients(gradients) if that unscales by itself, as "
                "AdaptiveLossScaling does, else unscale_gradients_and_check(gradients)"
            )
        if isinstance(loss, (np.ndarray, np.generic)):
            return loss * np.asarray(self.scale, dtype=np.result_type(loss, np.float32))
        if isinstance(loss, (nn.Variable, nn.NdArray)):
            return loss * self.scale
        return check.number("loss", loss) * self.scale

    def unscale_gradient(self, gradient: Gradient) -> Gradient:
        """Divide one gradient by the scale.

        An NdArray or Variable is divided in place, ready for the solver, and returned; float16 becomes
        float32. A NumPy array is not changed; the result is a new one of float32 (or float64).

        Raises:
            TypeError: not a gradient, or not of a floating dtype.
            ValueError: nothing was ever written to the gradient.
        """
        return self.unscale_gradients([gradient])[0]

    def unscale_gradients(self, gradients: Gradients) -> List[Gradient]:
        """Apply `unscale_gradient` to each; if one of them is refused, none is changed."""
        return [_unscaled(gradient, self.scale) for gradient in _checked(gradients)]

    def has_overflow(self, x: Gradients) -> bool:
        """True if `x` (for a Variable: its gradient) has an infinity or a NaN; one or a list."""
        return not all(map(_is_finite, _checked(x)))

    def detect_overflow(self, gradients: Gradients) -> bool:
        """True if any of the gradients has an infinity or a NaN."""
        return self.has_overflow(gradients)

    def unscale_gradients_and_check(self, gradients: Gradients) -> bool:
        """Unscale the gradients in place, and adjust the scale; False: they overflowed, skip the update.

        NumPy arrays that cannot hold the result (float16, or read-only) are replaced in the list, by float32.

        Raises:
            TypeError: a NumPy array needs to be replaced, but `gradients` is not a list.
            TypeError, ValueError: as `unscale_gradient`. Nothing was changed.
        """
        items = _checked(gradients)
        # Refused before any is divided.
        if not isinstance(gradients, list) and not all(map(_holds_its_quotient, items)):
            raise TypeError(
                "gradients holds a float16 or read-only NumPy array, which cannot be unscaled in place; "
                "put the gradients in a list, where it is replaced by a float32 array"
            )
        items = [_unscaled(gradient, self.scale, in_place=True) for gradient in items]
        if isinstance(gradients, list):
            gradients[:] = items
        return self._learn(items)

    def check_gradients(self, gradients: Gradients) -> bool:
        """Check gradients that are unscaled already, and adjust the scale.

        For `AdaptiveLossScaling`, whose `scaling.backward(scaler.scale)` divides by the scale itself.
        """
        return self._learn(_checked(gradients))

    def reset(self, new_initial_scale: Optional[float] = None) -> None:
        """Reset the counts to 0 and the scale to `initial_scale`, or to a new initial scale."""
        initial = self.initial_scale if new_initial_scale is None else new_initial_scale
        if not self.min_scale <= check.positive_number("initial_scale", initial) <= self.max_scale:
            raise ValueError(
                f"initial_scale={initial!r} must lie between min_scale={self.min_scale!r} "
                f"and max_scale={self.max_scale!r}"
            )
        self.scale = self.initial_scale = initial
        self.total_updates = self.skipped_updates = self._good_updates = 0
        self._warned = False

    def __str__(self) -> str:
        kind = "dynamic" if self.dynamic_scaling else "constant"
        return (
            f"LossScaler: {kind} scale {self.scale:g}, {self.total_updates} updates, "
            f"{self.skipped_updates} skipped ({self.overflow_rate:.1%})"
        )

    def state_dict(self) -> Dict[str, Any]:
        """Settings, scale and counts as plain numbers, to resume from."""
        return {
            **{name: plain(getattr(self, name)) for name in (*_CHECKS, "total_updates", "skipped_updates")},
            "good_updates": self._good_updates,
            "chosen": not_default(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`, with its settings; nothing changes if this raises.

        Raises:
            TypeError, ValueError: an entry is missing, unknown, or invalid. A setting that only one of two
                versions has must be at its default; a LossScaleWarning names one of the state's.
        """
        try:
            own = {name: state[name] for name in ("scale", *_COUNTS)}
        except KeyError as error:
            raise ValueError(f"state has no {error}: it is not a LossScaler's") from None
        saved = {name: value for name, value in state.items() if name not in {*own, "chosen"}}
        known, foreign = with_known_names(saved, self._settings, state.get("chosen"))
        settings = {name: convert(name, {**known, **own}[name]) for name, convert in _CHECKS.items()}
        counts = {name: check.nonnegative_integer(name, own[name]) for name in _COUNTS}
        if foreign:
            warn(foreign_settings_warning(foreign))
        self._good_updates = counts.pop("good_updates")
        for name, value in {**settings, **counts}.items():
            setattr(self, name, value)

    @property
    def _settings(self) -> Dict[str, SettingValue]:
        """Arguments, all of which states hold, with their defaults."""
        arguments = inspect.signature(LossScaler).parameters
        return {name: SettingValue(getattr(self, name), one.default) for name, one in arguments.items()}

    def _learn(self, gradients: List[Gradient]) -> bool:
        """Count an update and adjust the scale; a scale that was set beyond its bounds moves no further."""
        usable = all(map(_is_finite, gradients))
        self.total_updates += 1
        self.skipped_updates += not usable
        self._good_updates = self._good_updates + 1 if usable else 0
        grows = self._good_updates >= self.growth_interval
        if grows:
            self._good_updates = 0
        lowest = max(self.min_scale, SMALLEST_SCALE)
        if self.dynamic_scaling and grows:
            self.scale = min(self.scale * self.growth_factor, max(self.max_scale, lowest, self.scale))
        elif self.dynamic_scaling and not usable:
            if self.scale <= self.min_scale and not self._warned:
                self._warned = True
                warn(
                    f"gradients overflow at min_scale={self.min_scale:g}: the scale is not the cause; "
                    "look at the loss, the data and the learning rate"
                )
            self.scale = max(self.scale * self.backoff_factor, min(lowest, self.scale))
        return usable


def _checked(gradients: Gradients) -> List[Gradient]:
    """List one gradient or an iterable of them; TypeError or ValueError names invalid ones."""
    if not isinstance(gradients, (*_KINDS, Iterable)):
        raise TypeError(f"gradients={gradients!r} must be a NumPy array, an NdArray, a Variable or a list")
    items: List[Any] = [gradients] if isinstance(gradients, _KINDS) else list(gradients)
    if not items:
        raise ValueError("gradients is empty; pass at least one gradient")
    for index, item in enumerate(items):
        name = f"gradients[{index}]"
        if not isinstance(item, _KINDS):
            kind = type(item).__name__
            raise TypeError(f"{name} is of type {kind}; gradients are NumPy arrays, NdArrays or Variables")
        try:
            dtype = np.dtype(_stored(item).dtype)
        except RuntimeError:
            raise ValueError(
                f"{name} holds nothing yet: run backward first (for a Variable, its .grad is the gradient)"
            ) from None
        if not np.issubdtype(dtype, np.floating):
            raise TypeError(f"{name} is of dtype {dtype}; gradients are of a floating dtype")
    return items


def _stored(gradient: Gradient) -> Any:
    """Array of a gradient: an NdArray, or a NumPy array."""
    return gradient.grad if isinstance(gradient, nn.Variable) else gradient


def _is_finite(gradient: Gradient) -> bool:
    """True if a gradient is finite; a lazily zero one stays so."""
    stored = _stored(gradient)
    if not isinstance(stored, nn.NdArray):
        return bool(np.isfinite(stored).all())
    return stored.zeroing or bool(np.isfinite(host_view(stored)).all())


def _unscaled(gradient: Gradient, scale: float, *, in_place: bool = False) -> Gradient:
    """Divide a gradient by `scale`: in place, except a NumPy array that must not or cannot change."""
    stored = _stored(gradient)
    wide: Any = np.result_type(stored.dtype, np.float32)
    if not isinstance(stored, nn.NdArray):
        out = stored if in_place and _holds_its_quotient(stored) else None
        return np.asanyarray(np.divide(stored, scale, out=out, dtype=wide))
    # A lazily zero gradient must stay so: solvers skip its parameter.
    if not stored.zeroing:
        values = host_view(stored, wide)
        np.divide(values, scale, out=values)
    return gradient


def _holds_its_quotient(gradient: Gradient) -> bool:
    """True if the gradient's array can hold the quotient."""
    if isinstance(gradient, np.ndarray):
        return gradient.flags.writeable and np.can_cast(np.float32, gradient.dtype)
    return isinstance(gradient, (nn.NdArray, nn.Variable))
