# SPDX-License-Identifier: Apache-2.0
"""Arguments of the adaptive updater as attributes: a value assigned later is checked, or refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable, Dict, Optional

from ..core.saved_settings import Given, fields_of
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

Check = Callable[[str, Any], Any]

# Fields of the configuration that decide no result: monitoring, and ways to the same numbers.
_NOT_DECIDING = frozenset({"recorder", "debug_level", "planned_bytes"})


def always(updater: Any, before: Any, value: Any) -> bool:
    """What refuses any other value, because other objects were made with the first."""
    return True


class Setting:
    """An attribute that may be assigned between updates: `check` returns the value to keep, or raises;
    `refuses` is asked before. It has no `__get__`: Python reads the value from the instance, at no cost.
    """

    def __init__(
        self, check: Optional[Check] = None, refuses: Optional[Callable[[Any, Any, Any], bool]] = None
    ) -> None:
        self._check, self.refuses = check, refuses

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, updater: Any, value: Any) -> None:
        held = vars(updater)
        if self.refuses and self._name in held and self.refuses(updater, held[self._name], value):
            refuse(self._name)
        held[self._name] = self._check(self._name, value) if self._check else value


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
        if name == "min_scale" and updater.history is not None and value != updater.policy.min_scale:
            refuse(name)
        updater.policy = dataclasses.replace(updater.policy, **{name: value})

    return property(lambda updater: getattr(updater.policy, name), assign)


_POLICIES = partial(check_choice, choices=("raise", "skip", "warn"))


class Settings:
    """The arguments of an updater as attributes.

    A value assigned later is checked as in the constructor, and used from the next update on; or refused. The
    constructor assigns `_s0`, `_audience` and the settings that the engine needs before `loss`.

    Attributes:
        scaling: the engine of the present loss.
    """

    scaling: AdaptiveLossScaling
    iteration: int
    _s0: GlobalScale
    _audience: Optional[Audience]
    _loss: Optional[LossLike] = None

    solver: Any = Setting(check_solver, refuses=exchanges)
    data_feeder: Any = Setting(check_data_feeder)
    scaling_factor: Any = field_of_policy("scaling_factor")
    N: Any = field_of_policy("N")
    clear_buffer: Any = Setting(boolean)
    accum_grad: Any = Setting(check_count)
    weight_decay: Any = Setting(check_decay)
    comm: Any = Setting(refuses=always)
    grads: Any = Setting(refuses=always)
    global_scale: Any = Setting(refuses=always)
    history: Any = Setting(refuses=always)
    on_overflow: Any = Setting(partial(check_choice, choices=("repeat", "next")), refuses=always)
    config: Any = Setting(refuses=always)
    storage: Any = Setting(refuses=always)
    max_retries: Any = Setting(partial(check_count, least=0))
    on_nonfinite_loss: Any = Setting(_POLICIES)
    on_nonfinite_forward: Any = Setting(_POLICIES)
    on_scale_floor: Any = Setting(_POLICIES)
    min_scale: Any = field_of_policy("min_scale")
    max_scale: Any = field_of_policy("max_scale")
    hysteresis: Any = field_of_policy("hysteresis")
    on_gradients: Any = Setting(check_gradient_hook)
    average: Any = Setting(boolean)
    check_every: Any = Setting(partial(check_count, least=0))
    monitors: Any = Setting(refuses=always)
    function_pre_hook: Any = Setting(refuses=always)
    function_post_hook: Any = Setting(refuses=always)
    float_tail: Any = Setting(boolean, refuses=always)

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
        return {
            **{
                name: given
                for name, given in fields_of(self.scaling.config).items()
                if name not in _NOT_DECIDING
            },
            **fields_of(self.policy),
            "global_scale": Given("dynamic" if self.history is None else self.history, HistoryPolicy()),
            "on_overflow": Given(self.on_overflow, "repeat"),
            "accum_grad": Given(self.accum_grad, 1),
            "average": Given(self.average, False),
        }

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters, as `global_scale="dynamic"` uses them."""
        return self._s0.state
