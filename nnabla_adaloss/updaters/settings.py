# SPDX-License-Identifier: Apache-2.0
"""Arguments of the adaptive updater as its attributes: set later, they are checked and obeyed, or refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable

from ..core.validation import boolean
from .argument_checks import (
    check_choice,
    check_count,
    check_data_feeder,
    check_decay,
    check_gradient_hook,
    check_solver,
)
from .exchange import check_interval

Check = Callable[[str, Any], Any]


def as_it_is(name: str, value: Any) -> Any:
    """`value`; what may be anything, or is checked elsewhere."""
    return value


class Setting:
    """An attribute that may be assigned between updates.

    Args:
        check: called with its name and what is assigned; returns what is kept, or raises.
    """

    def __init__(self, check: Check = as_it_is) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, updater: Any, owner: Any = None) -> Any:
        if updater is None:
            return self
        try:
            return vars(updater)[self._name]
        except KeyError:
            raise AttributeError(f"{self._name} is not known yet") from None

    def __set__(self, updater: Any, value: Any) -> None:
        vars(updater)[self._name] = self._check(self._name, value)

    def refuse(self) -> None:
        """Raise AttributeError: nothing must be assigned here."""
        raise AttributeError(
            f"{self._name} cannot be changed in an updater that was made: make another updater, and load the "
            "state of this one into it if its other settings are the same"
        )


class SetOnce(Setting):
    """An attribute that other things were made with: only the constructor assigns it."""

    def __set__(self, updater: Any, value: Any) -> None:
        if self._name in vars(updater):
            self.refuse()
        super().__set__(updater, value)


class TheSolver(Setting):
    """The solver: with a communicator, the gradients of the first one's parameters are exchanged."""

    def __set__(self, updater: Any, value: Any) -> None:
        before = vars(updater).get(self._name)
        if before not in (None, value) and updater.comm is not None:
            self.refuse()
        super().__set__(updater, value)


class OfPolicy(Setting):
    """A number of the updater's `ScalePolicy`, which checks it."""

    def __get__(self, updater: Any, owner: Any = None) -> Any:
        return self if updater is None else getattr(updater.policy, self._name)

    def __set__(self, updater: Any, value: Any) -> None:
        updater.policy = dataclasses.replace(updater.policy, **{self._name: value})


class OfSearchPolicy(OfPolicy):
    """One that measured scales have, too; they were made with it."""

    def __set__(self, updater: Any, value: Any) -> None:
        if updater.history is not None and value != updater.policy.min_scale:
            self.refuse()
        super().__set__(updater, value)


_POLICIES = partial(check_choice, choices=("raise", "skip", "warn"))


class Settings:
    """All that an updater is made with, but for its loss and scale, as attributes: what is assigned later is
    checked as the constructor checks it, and obeyed; or refused.
    """

    solver: Any = TheSolver(check_solver)
    data_feeder: Any = Setting(check_data_feeder)
    scaling_factor: Any = OfPolicy()
    N: Any = OfPolicy()
    clear_buffer: Any = Setting()
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
    min_scale: Any = OfSearchPolicy()
    max_scale: Any = OfPolicy()
    hysteresis: Any = OfPolicy()
    on_gradients: Any = Setting(check_gradient_hook)
    average: Any = Setting()
    check_every: Any = Setting(check_interval)
    monitors: Any = SetOnce()
    function_pre_hook: Any = SetOnce()
    function_post_hook: Any = SetOnce()
    float_tail: Any = SetOnce(boolean)
