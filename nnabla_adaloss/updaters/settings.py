# SPDX-License-Identifier: Apache-2.0
"""Arguments of updaters as attributes: checked, also when they are assigned later, or refused."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, Literal, Optional, Sequence, Tuple, Union, cast

import nnabla as nn

from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScaleState
from ..core.validation import boolean, choice, integer, nonnegative_number, positive_integer
from ..emulation import with_storage
from ..engine import AdaptiveLossScaling
from ..graph.hooks import Hook
from ..graph.loss import LossLike, LossWrapper, check_scale
from ..monitor import Audience
from .global_scale import GlobalScale
from .retries import Counters

HookLike = Union[Hook, Tuple[Optional[Hook], Optional[Hook]], None]
"""A hook for forward and backward, or one for each, or none."""

PassHooks = Tuple[Dict[str, Any], Dict[str, Any]]
"""Keyword arguments of forward, and of backward."""

GlobalScaleName = Literal["history", "dynamic"]
"""What `global_scale=` takes by name."""

OnOverflow = Literal["repeat", "next"]
"""What becomes of a batch that overflows."""

Policy = Literal["raise", "skip", "warn"]
"""What is done about what no scale helps."""

_SEARCHED = 'with global_scale="dynamic"'
TORCH_ARGUMENTS = {
    "init_scale": "use scale=",
    "growth_factor": f"use scaling_factor= {_SEARCHED}",
    "backoff_factor": f"use scaling_factor= {_SEARCHED}, by which the scale is divided",
    "growth_interval": f"use N= {_SEARCHED}",
    "enabled": "use nnabla's solver by itself, or FixedLossScalingUpdater(scale=1.0)",
}
"""Arguments of torch's `GradScaler`, and those of `AdaptiveLossScalingUpdater` that take their place."""

_METHODS = ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters")
_LOSS_AFTER_SOLVER = (((nn.Variable, LossWrapper), "the loss comes after the solver"),)


def keep_data() -> None:
    """The default data feeder: leaves the input variables as they are."""


def check_solver(
    name: str, value: Any, methods: Sequence[str] = _METHODS, instead: Any = _LOSS_AFTER_SOLVER
) -> Any:
    """`value` when it is a solver; else TypeError, with what to do `instead` where it is of these types."""
    advice = next((advice for kind, advice in instead if isinstance(value, kind)), None)
    if isinstance(value, type) or inspect.isroutine(value):
        advice = f"{value.__name__} makes one: call it, as in {value.__name__}(1e-3)"
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if advice or missing:
        raise TypeError(
            f"{name} must be an nnabla solver; {advice or f'{type(value).__name__} has no {missing[0]}()'}"
        )
    return value


def callable_with(*arguments: Any, what: str, instead: str) -> Callable[[str, Any], Any]:
    """A check that a value can be called with these arguments, as far as its signature tells."""

    def check(name: str, value: Any) -> Any:
        if not callable(value):
            raise TypeError(f"{name} must be {what}, got {type(value).__name__}: give {instead}")
        function = value if isinstance(value, (FunctionType, MethodType)) else value.__call__
        # What is written in C, or hands arguments on, may take what its signature does not say.
        if isinstance(value, type) or not isinstance(getattr(function, "__func__", function), FunctionType):
            return value
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind(*arguments)
        except TypeError:
            called = f"{getattr(value, '__name__', type(value).__name__)}{signature}"
            raise TypeError(f"{name} must be {what}, unlike {called}: give {instead}") from None
        return value

    return check


def count_from_zero(name: str, value: Any) -> int:
    """`value` when it is an integer from 0 on; else TypeError or ValueError."""
    if integer(name, value) < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more")
    return int(value)


def check_one_element(loss: nn.Variable) -> None:
    """Raise ValueError unless `loss` has one element."""
    if loss.size != 1:
        raise ValueError(
            f"loss has shape {loss.shape}, not one element; reduce it with nnabla.functions.mean"
        )


def history_of(
    global_scale: Union[GlobalScaleName, HistoryPolicy], start_scale: float, min_scale: float
) -> Optional[HistoryPolicy]:
    """The policy of measured scales for an argument `global_scale`; None for `"dynamic"`."""
    if isinstance(global_scale, HistoryPolicy):
        return global_scale
    name = choice("global_scale", global_scale, GlobalScaleName, ", or a HistoryPolicy")
    return HistoryPolicy(start_scale=start_scale, min_scale=min_scale) if name == "history" else None


def hooks_by_pass(pre: Any, post: Any) -> PassHooks:
    """The hooks of forward, and of backward; TypeError unless `pre` and `post` are each a `HookLike`."""
    pairs = {}
    for name, given in (("function_pre_hook", pre), ("function_post_hook", post)):
        pairs[name] = pair = given if isinstance(given, tuple) else (given, given)
        if len(pair) != 2 or not all(hook is None or callable(hook) for hook in pair):
            raise TypeError(
                f"{name} must be a callable with a function, or a pair of these for forward and backward, "
                f"or None; got {given!r}"
            )
    forward, backward = ({name: pair[index] for name, pair in pairs.items()} for index in (0, 1))
    return forward, backward


def always(updater: Any, before: Any, value: Any) -> bool:
    """What refuses any other value, because other objects were made with the first."""
    return True


class Setting:
    """An attribute that may be assigned between updates: `check` returns the value to keep, or raises;
    `refuses` is asked before, and an `optional` one may be None.
    """

    # It has no `__get__`: Python reads the value from the instance, at no cost.
    def __init__(
        self,
        check: Callable[[str, Any], Any] = lambda name, value: value,
        refuses: Callable[[Any, Any, Any], bool] = lambda updater, before, value: False,
        optional: bool = False,
    ) -> None:
        self._check, self.refuses, self._optional = check, refuses, optional

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, updater: Any, value: Any) -> None:
        held = vars(updater)
        if self._name in held and self.refuses(updater, held[self._name], value):
            refuse(self._name)
        checked = None if self._optional and value is None else self._check(self._name, value)
        held[self._name] = checked


def refuse(name: str) -> None:
    """Raise AttributeError: this attribute cannot be assigned."""
    raise AttributeError(
        f"{name} cannot be changed after the updater was made: make another updater; a saved state "
        "can be loaded into it if its other settings are the same"
    )


def exchanges(updater: Any, before: Any, solver: Any) -> bool:
    """With a communicator the solver stays, because its gradients are exchanged."""
    return before is not solver and updater.comm is not None


def field_of_policy(name: str) -> Any:
    """A field of the updater's `ScalePolicy`, which checks it, as an attribute."""

    def assign(updater: Any, value: Any) -> None:
        # Measured scales were made with it, and keep it.
        if name == "min_scale" and updater.history is not None and value != updater.min_scale:
            refuse(name)
        updater._s0.change(**{name: value})

    return property(lambda updater: getattr(updater._s0.policy, name), assign)


class CommonSettings:
    """The arguments that all updaters have."""

    solver: Any = Setting(check_solver, refuses=exchanges)
    data_feeder: Any = Setting(
        callable_with(what="callable without arguments", instead="feed, not feed(), or lambda: feed(...)")
    )
    clear_buffer: Any = Setting(boolean)
    accum_grad: Any = Setting(positive_integer)
    weight_decay: Any = Setting(nonnegative_number, optional=True)
    comm: Any = Setting(refuses=always)
    storage: Any = Setting(refuses=always)
    float_tail: Any = Setting(boolean, refuses=always)


class Settings(CommonSettings):
    """The arguments of an adaptive updater as attributes.

    A value assigned later is checked as in the constructor, and used from the next update on; or refused. The
    constructor assigns `_s0`, `_audience` and the settings that the engine needs before `loss`.
    """

    scaling: AdaptiveLossScaling  # the engine of the present loss
    iteration: int
    counters: Counters
    _s0: GlobalScale
    _audience: Optional[Audience]
    _loss: Optional[LossLike] = None

    scaling_factor: Any = field_of_policy("scaling_factor")
    N: Any = field_of_policy("N")
    grads: Any = Setting(refuses=always)
    global_scale: Any = Setting(refuses=always)
    history: Any = Setting(refuses=always)
    on_overflow: Any = Setting(partial(choice, words=OnOverflow), refuses=always)
    config: Any = Setting(refuses=always)
    max_retries: Any = Setting(count_from_zero)
    on_nonfinite_loss: Policy = cast(Any, Setting(partial(choice, words=Policy)))
    on_nonfinite_forward: Policy = cast(Any, Setting(partial(choice, words=Policy)))
    on_scale_floor: Policy = cast(Any, Setting(partial(choice, words=Policy)))
    min_scale: Any = field_of_policy("min_scale")
    max_scale: Any = field_of_policy("max_scale")
    hysteresis: Any = field_of_policy("hysteresis")
    on_gradients: Any = Setting(
        callable_with(None, what="callable with the solver", instead="lambda solver: hook(...)"),
        optional=True,
    )
    average: Any = Setting(boolean)
    check_every: Any = Setting(count_from_zero)
    monitors: Any = Setting(refuses=always)
    function_pre_hook: Any = Setting(refuses=always)
    function_post_hook: Any = Setting(refuses=always)

    @property
    def loss(self) -> LossLike:
        """The loss that is trained on; assign another for a graph that changes between iterations."""
        assert self._loss is not None
        return self._loss

    @loss.setter
    def loss(self, loss: LossLike) -> None:
        if self._loss is not None and loss is self._loss:
            return
        scaling = AdaptiveLossScaling(
            with_storage(
                loss, self.storage, float_tail=self.float_tail, parameters=self.solver.get_parameters
            ),
            # Checked and completed already, which takes longer than to read a small graph.
            self.config if self._loss is None else self.scaling.config,
            parameters=self.solver.get_parameters,
            history=self.history,
            monitors=self._audience or (),
            float_tail=self.float_tail,
        )
        check_one_element(scaling.variable)
        if self._loss is not None:
            scaling.go_on_from(self.scaling)
        self._loss, self.scaling = loss, scaling

    @property
    def scale(self) -> float:
        """S0, the global loss scale; may be set between updates.

        With `global_scale="history"`: the scale of the last update; setting it starts anew from there.
        """
        return self._s0.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._s0.state = self.scale_state._replace(scale=check_scale(value))
        if self._s0.measured:
            self.scaling.restart(self._s0.scale)

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters, as `global_scale="dynamic"` uses them."""
        return self._s0.state
