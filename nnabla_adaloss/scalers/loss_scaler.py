# SPDX-License-Identifier: Apache-2.0
"""One loss scale for a whole network, for custom training loops."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Union

import nnabla as nn
import numpy as np
from nnabla.solver import Solver

from ..core.config import AdaLossConfig
from ..core.formats import FLOAT16
from ..core.saved_settings import Given, not_default, of_another_version, plain, with_known_names
from ..core.scale_history import AmaxWindow, HistoryPolicy
from ..core.validation import boolean, explains_keywords, number, positive_number
from ..errors import warn
from ..updaters.global_scale import GlobalScaleName, history_of
from ..updaters.settings import check_count
from .gradients import Gradient, divisible_in_place, gradient_list, has_nonfinite, largest, unscaled

Gradients = Union[Gradient, Iterable[Gradient]]


def _growth_factor(name: str, value: object) -> float:
    if positive_number(name, value) < 1.0:
        raise ValueError(f"{name}={value!r} must be 1 or more")
    return number(name, value)


def _backoff_factor(name: str, value: object) -> float:
    if positive_number(name, value) > 1.0:
        raise ValueError(f"{name}={value!r} must not be larger than 1")
    return number(name, value)


_CHECKS: Dict[str, Callable[[str, object], Any]] = {
    "scale": positive_number,
    "initial_scale": positive_number,
    "dynamic_scaling": boolean,
    "growth_interval": check_count,
    "growth_factor": _growth_factor,
    "backoff_factor": _backoff_factor,
    "min_scale": positive_number,
    "max_scale": positive_number,
}
_COUNTS = ("total_updates", "skipped_updates")


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
        min_scale: the lower bound. An overflow there is warned of once.
        max_scale: the upper bound.
        global_scale: `"dynamic"`: grows and backs off as above. `"history"`: the largest scale, within
            `min_scale` and `max_scale`, that the gradients of the last iterations leave two bits of room for
            in float16, from the first check on; or a `HistoryPolicy` of your own. Only the gradients that
            are checked are measured, not those on the way to them: an overflow there lowers the scale.

    Attributes:
        scale: the current scale.
        total_updates: number of `unscale_gradients_and_check` since the start or the last `reset`.
        skipped_updates: how many of them found an overflow.

    Raises:
        TypeError: an argument is of the wrong type; a boolean is not taken for a number.
        ValueError: an argument is out of range.

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

    @explains_keywords({})
    def __init__(
        self,
        initial_scale: float = 65536.0,
        dynamic_scaling: bool = True,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
        max_scale: float = 16777216.0,
        global_scale: Union[GlobalScaleName, HistoryPolicy] = "dynamic",
    ) -> None:
        if isinstance(initial_scale, (Solver, nn.Variable, AdaLossConfig)):
            raise TypeError("initial_scale must be a number; GradScaler takes solvers and config=")
        self._history = history_of(global_scale)
        self.dynamic_scaling, self.growth_interval = dynamic_scaling, growth_interval
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.min_scale, self.max_scale, self.initial_scale = min_scale, max_scale, initial_scale
        self.reset()

    def __setattr__(self, name: str, value: object) -> None:
        check = _CHECKS.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

    @property
    def overflow_rate(self) -> float:
        """Share of the updates that were skipped; 0.0 before the first."""
        return self.skipped_updates / self.total_updates if self.total_updates else 0.0

    def scale_loss(self, loss: Any) -> Any:
        """The loss (Variable, NdArray, NumPy array or float) times the scale; float32 from float16.

        Raises:
            TypeError: it is none of these. A wrapper is given the scale in its own `backward(scale)`.
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
        return number("loss", loss) * self.scale

    def unscale_gradient(self, gradient: Gradient) -> Gradient:
        """Divide one gradient by the scale.

        An NdArray or Variable is divided in place, ready for the solver, and returned; float16 becomes
        float32. A NumPy array is left as it is; the result is a new one of float32 (or float64).

        Raises:
            TypeError: not a gradient, or not of a floating dtype.
            ValueError: nothing was ever written to the gradient.
        """
        return self.unscale_gradients([gradient])[0]

    def unscale_gradients(self, gradients: Gradients) -> List[Gradient]:
        """`unscale_gradient` of each; when one of them is refused, none is changed."""
        return [unscaled(gradient, self.scale) for gradient in gradient_list(gradients)]

    def has_overflow(self, x: Gradients) -> bool:
        """True when `x` (for a Variable: its gradient) holds an infinity or a NaN; one or a list."""
        return any(has_nonfinite(item) for item in gradient_list(x))

    def detect_overflow(self, gradients: Gradients) -> bool:
        """True when any of the gradients holds an infinity or a NaN."""
        return self.has_overflow(gradients)

    def unscale_gradients_and_check(self, gradients: Gradients) -> bool:
        """Unscale the gradients in place, look for an overflow, and adjust the scale.

        A NumPy array that cannot hold the result (float16, or read-only) is replaced in the list by one of
        float32.

        Returns:
            True when the gradients are finite; False when the update must be skipped.

        Raises:
            TypeError: a NumPy array needs to be replaced, but `gradients` is not a list.
            TypeError, ValueError: as `unscale_gradient`. Nothing was changed.
        """
        items = gradient_list(gradients)
        if not isinstance(gradients, list) and not all(map(divisible_in_place, items)):
            raise TypeError(
                "gradients holds a float16 or read-only NumPy array, which cannot be unscaled in place; "
                "put the gradients in a list, where it is replaced by a float32 array"
            )
        for i, gradient in enumerate(items):
            result = unscaled(gradient, self.scale)
            if isinstance(gradient, np.ndarray) and divisible_in_place(gradient):
                gradient[...] = result
            elif isinstance(gradients, list):
                gradients[i] = items[i] = result
        return self._check(items)

    def check_gradients(self, gradients: Gradients) -> bool:
        """Look for an overflow and adjust the scale, for gradients that are unscaled already.

        Those of `AdaptiveLossScaling` are: `scaling.backward(scaler.scale)` divides by the scale itself.

        Returns:
            True when the gradients are finite; False when the update must be skipped.

        Raises:
            TypeError, ValueError: as `unscale_gradient`. Nothing was changed.
        """
        return self._check(gradient_list(gradients))

    def reset(self, new_initial_scale: Optional[float] = None) -> None:
        """Reset the counts to 0 and the scale to `initial_scale`, or to a new initial scale."""
        initial = self.initial_scale if new_initial_scale is None else new_initial_scale
        if not self.min_scale <= positive_number("initial_scale", initial) <= self.max_scale:
            raise ValueError(
                f"initial_scale={initial!r} must lie between min_scale={self.min_scale!r} "
                f"and max_scale={self.max_scale!r}"
            )
        self.scale = self.initial_scale = initial
        self.total_updates = self.skipped_updates = self._good_updates = 0
        self._window, self._warned = AmaxWindow(), False

    def __str__(self) -> str:
        kind = "dynamic" if self.dynamic_scaling else "constant"
        return (
            f"LossScaler: {kind} scale {self.scale:g}, {self.total_updates} updates, "
            f"{self.skipped_updates} skipped ({self.overflow_rate:.1%})"
        )

    def state_dict(self) -> Dict[str, Any]:
        """Settings, scale and counts as plain numbers, to resume from."""
        return {
            **{name: plain(getattr(self, name)) for name in (*_CHECKS, *_COUNTS)},
            "good_updates": self._good_updates,
            "window": self._window.as_list(),
            "chosen": not_default(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned, with its settings; nothing changes when it raises.

        Raises:
            ValueError: an entry is missing, unknown, or out of range. A setting that only this version, or
                only that of the state, has may be at its default, of which a LossScaleWarning tells.
            TypeError: one is of the wrong type.
        """
        try:
            own = {name: state[name] for name in ("scale", *_COUNTS, "good_updates")}
        except KeyError as error:
            raise ValueError(f"state has no {error}: it is not a LossScaler's") from None
        # Versions before this one did not have these.
        window = AmaxWindow.from_list(state.get("window", AmaxWindow().as_list()))
        saved = {name: value for name, value in state.items() if name not in {*own, "window", "chosen"}}
        known, foreign = with_known_names(saved, self._settings, state.get("chosen"))
        settings = {name: check(name, {**known, **own}[name]) for name, check in _CHECKS.items()}
        counts = {name: check_count(name, own[name], least=0) for name in (*_COUNTS, "good_updates")}
        if foreign:
            warn(of_another_version(foreign))
        self._good_updates, self._window = counts.pop("good_updates"), window
        for name, value in {**settings, **counts}.items():
            setattr(self, name, value)

    @property
    def _settings(self) -> Dict[str, Given]:
        """The settings that are saved."""
        arguments = inspect.signature(LossScaler).parameters
        return {
            name: Given(getattr(self, name), arguments[name].default) for name in _CHECKS if name in arguments
        }

    def _check(self, gradients: List[Gradient]) -> bool:
        usable = not any(map(has_nonfinite, gradients))
        self.total_updates += 1
        self.skipped_updates += not usable
        if not self.dynamic_scaling:
            self._searched(usable)
            return usable
        if not usable and self.scale <= self.min_scale and not self._warned:
            self._warned = True
            warn(
                f"gradients overflow at min_scale={self.min_scale:g}: the scale is not the cause; "
                "look at the loss, the data and the learning rate"
            )
        if self._history is None:
            self.scale = self._searched(usable)
        else:
            self.scale = self._measured(self._history, max(map(largest, gradients)) if usable else None)
        return usable

    def _measured(self, policy: HistoryPolicy, amax: Optional[float]) -> float:
        """The scale after gradients with this largest magnitude; None: there was an overflow."""
        seen = FLOAT16.max / self.scale if amax is None else amax
        self._window = self._window.push(seen, policy.window)
        if amax is None:
            wanted = policy.after_overflow(self.scale)
        else:
            found = self._window.amax
            wanted = policy.scale(found, u_max=FLOAT16.max) if found else self.scale
        return min(max(wanted, self.min_scale), self.max_scale)

    def _searched(self, usable: bool) -> float:
        """The scale after a good update or an overflow; one that was set beyond them goes no further."""
        self._good_updates = self._good_updates + 1 if usable else 0
        if not usable:
            return max(self.scale * self.backoff_factor, min(self.min_scale, self.scale))
        if self._good_updates < self.growth_interval:
            return self.scale
        self._good_updates = 0
        return min(self.scale * self.growth_factor, max(self.max_scale, self.scale))
