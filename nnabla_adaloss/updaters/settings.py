# SPDX-License-Identifier: Apache-2.0
"""Arguments of the adaptive updater as attributes: a value assigned later is checked, or refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable, Dict, Optional

from ..core.layer_limits import LayerLimitPolicy
from ..core.saved_settings import Given
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.validation import boolean, instance
from ..emulation import with_storage
from ..engine import AdaptiveLossScaling
from ..graph.loss import LossLike
from ..monitor import Audience
from .argument_checks import (
    check_choice,
    check_count,
    check_data_feeder,
    check_decay,
    check_gradient_hook,
    check_solver,
)
from .global_scale import GlobalScale
from .states import deciding_settings

Check = Callable[[str, Any], Any]


def unchecked(name: str, value: Any) -> Any:
    """`value`, which may be anything, or is checked elsewhere."""
    return value


class Setting:
    """An attribute that may be assigned between updates.

    It has no `__get__`: Python reads the value from the instance, at no cost.

    Args:
        check: called with the name and the new value; returns the value to keep, or raises.
    """

    def __init__(self, check: Check = unchecked) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, updater: Any, value: Any) -> None:
        vars(updater)[self._name] = self._check(self._name, value)

    def refuse(self) -> None:
        """Raise AttributeError: this attribute cannot be assigned."""
        raise AttributeError(
            f"{self._name} cannot be changed after the updater was made: make another updater; a saved state "
            "can be loaded into it if its other settings are the same"
        )


class SetOnce(Setting):
    """An attribute that only the constructor assigns, because other objects were made with it."""

    def __set__(self, updater: Any, value: Any) -> None:
        if self._name in vars(updater):
            self.refuse()
        super().__set__(updater, value)


class SolverSetting(Setting):
    """The solver. With a communicator it stays, because its gradients are exchanged."""

    def __set__(self, updater: Any, value: Any) -> None:
        before = vars(updater).get(self._name)
        if before not in (None, value) and updater.comm is not None:
            self.refuse()
        super().__set__(updater, value)


class PolicySetting(Setting):
    """A field of the updater's `ScalePolicy`, which checks it."""

    def __get__(self, updater: Any, owner: Any = None) -> Any:
        return self if updater is None else getattr(updater.policy, self._name)

    def __set__(self, updater: Any, value: Any) -> None:
        updater.policy = dataclasses.replace(updater.policy, **{self._name: value})


class MinScaleSetting(PolicySetting):
    """`min_scale`. Measured scales were made with it, and keep it."""

    def __set__(self, updater: Any, value: Any) -> None:
        if updater.history is not None and value != updater.policy.min_scale:
            self.refuse()
        super().__set__(updater, value)


_POLICIES = partial(check_choice, choices=("raise", "skip", "warn"))


class Settings:
    """The arguments of an updater as attributes.

    A value assigned later is checked as in the constructor, and used from the next update on; or refused. The
    constructor assigns `_s0`, `_audience` and the settings that the engine needs before `loss`.

    Attributes:
        scaling: the engine of the present loss.
    """

    scaling: AdaptiveLossScaling
    _s0: GlobalScale
    _audience: Optional[Audience]
    _loss: Optional[LossLike] = None

    solver: Any = SolverSetting(check_solver)
    data_feeder: Any = Setting(check_data_feeder)
    scaling_factor: Any = PolicySetting()
    N: Any = PolicySetting()
    clear_buffer: Any = Setting(boolean)
    accum_grad: Any = Setting(check_count)
    weight_decay: Any = Setting(check_decay)
    comm: Any = SetOnce()
    grads: Any = SetOnce()
    global_scale: Any = SetOnce()
    history: Any = SetOnce()
    on_overflow: Any = SetOnce(partial(check_choice, choices=("repeat", "next")))
    config: Any = SetOnce()
    storage: Any = SetOnce()
    max_retries: Any = Setting(partial(check_count, least=0))
    on_nonfinite_loss: Any = Setting(_POLICIES)
    on_nonfinite_forward: Any = Setting(_POLICIES)
    on_scale_floor: Any = Setting(_POLICIES)
    min_scale: Any = MinScaleSetting()
    max_scale: Any = PolicySetting()
    hysteresis: Any = PolicySetting()
    on_gradients: Any = Setting(check_gradient_hook)
    average: Any = Setting(boolean)
    check_every: Any = Setting(partial(check_count, least=0))
    monitors: Any = SetOnce()
    function_pre_hook: Any = SetOnce()
    function_post_hook: Any = SetOnce()
    float_tail: Any = SetOnce(boolean)

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
            limit_policy=LayerLimitPolicy(self.policy.N),
            history=self.history,
            monitors=self._audience or (),
            float_tail=self.float_tail,
        )
        if scaling.variable.size != 1:
            raise ValueError(
                f"loss has shape {scaling.variable.shape}, not one element; "
                "reduce it with nnabla.functions.mean"
            )
        if self._loss is not None:
            scaling.go_on_from(self.scaling)
        self._loss, self.scaling = loss, scaling

    @property
    def policy(self) -> ScalePolicy:
        """The search of `global_scale="dynamic"`; `N`, `scaling_factor`, ... are its fields."""
        return self._s0.policy

    @policy.setter
    def policy(self, policy: ScalePolicy) -> None:
        if instance("policy", policy, ScalePolicy) != self._s0.policy:
            self._s0.change_policy(policy)
            self.scaling.limit_policy = LayerLimitPolicy(policy.N)

    @property
    def scale(self) -> float:
        """S0, the global loss scale; may be set between updates.

        With `global_scale="history"`: the scale of the last update; setting it starts anew from there.
        """
        return self._s0.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._s0.set(value)
        if self._s0.measured:
            self.scaling.restart(self._s0.scale)

    @property
    def _deciding_settings(self) -> Dict[str, Given]:
        """The settings that decide the next step."""
        return deciding_settings(
            self.scaling.config,
            self.policy,
            global_scale=Given("dynamic" if self.history is None else self.history, HistoryPolicy()),
            on_overflow=Given(self.on_overflow, "repeat"),
            accum_grad=Given(self.accum_grad, 1),
            average=Given(self.average, False),
        )

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters, as `global_scale="dynamic"` uses them."""
        return self._s0.state
