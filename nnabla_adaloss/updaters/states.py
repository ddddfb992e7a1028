# SPDX-License-Identifier: Apache-2.0
"""What an adaptive updater must remember to go on bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Optional, Protocol

import numpy as np

from ..core.methods import Method
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.validation import integer, number
from ..engine import AdaptiveLossScaling
from ..errors import warn
from .checksums import crc32
from .counters import Counters

_VERSION = 4
# Of the configuration: who watches, and how the same is done.
_NOT_DECIDING = frozenset({"recorder", "debug_level", "planned_bytes"})


class Resumable(Protocol):
    """What is saved of an updater, or compared with what was saved."""

    policy: ScalePolicy
    scaling: AdaptiveLossScaling
    solver: Any
    history: Optional[HistoryPolicy]
    on_overflow: str
    accum_grad: int
    average: bool
    last_good_scale: float
    iteration: int
    counters: Counters

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters."""

    @scale_state.setter
    def scale_state(self, state: ScaleState) -> None: ...


def state_of(updater: Resumable) -> Dict[str, Any]:
    """The state of `updater` as plain numbers, strings, lists and dicts."""
    return {
        "version": _VERSION,
        "settings": _settings(updater),
        "scale_state": {name: _plain(value) for name, value in updater.scale_state._asdict().items()},
        "last_good_scale": updater.last_good_scale,
        "iteration": updater.iteration,
        "counters": updater.counters.as_dict(),
        "parameters": _parameter_checksum(updater),
        "scaling": updater.scaling.state_dict(),
    }


def restore(updater: Resumable, state: Mapping[str, Any]) -> None:
    """Make `updater` go on from `state`.

    Raises:
        ValueError: `state` is damaged, of another version, of another network, or of an updater with other
            settings. Nothing changes then.
    """
    try:
        version = integer("version", state["version"])
        if version != _VERSION:
            remedy = "update nnabla_adaloss" if version > _VERSION else "begin with a new state"
            raise ValueError(f"state has version {version}, this package knows {_VERSION}: {remedy}")
        _compare_settings(state["settings"], _settings(updater))
        scale_state = updater.policy.checked(ScaleState(**state["scale_state"]))
        last_good_scale = number("last_good_scale", state["last_good_scale"])
        iteration = integer("iteration", state["iteration"])
        counters = Counters.from_dict(state["counters"])
        parameters, scaling = integer("parameters", state["parameters"]), state["scaling"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"state is damaged, or none of an updater: {error!r}") from error
    updater.scaling.load_state_dict(scaling)
    updater.scale_state = scale_state
    updater.last_good_scale = last_good_scale
    updater.iteration, updater.counters = iteration, counters
    if parameters != _parameter_checksum(updater):
        updater.scaling.forget()
        warn(
            "the parameters are not those that the state was saved with: what was learned of the layers is "
            "dropped, the loss scale is kept. Load the parameters before the state"
        )


def _settings(updater: Resumable) -> Dict[str, Any]:
    """What was chosen, as far as it decides the next step."""
    config = {
        field.name: getattr(updater.scaling.config, field.name)
        for field in dataclasses.fields(updater.scaling.config)
        if field.name not in _NOT_DECIDING
    }
    chosen = {
        **config,
        **dataclasses.asdict(updater.policy),
        "global_scale": "dynamic" if updater.history is None else updater.history,
        "on_overflow": updater.on_overflow,
        "accum_grad": updater.accum_grad,
        "average": bool(updater.average),
    }
    return {name: _plain(value) for name, value in chosen.items()}


def _plain(value: Any) -> Any:
    """`value` as JSON gives it back; NumPy's numbers cannot be saved, and tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parameters = {name: _plain(parameter) for name, parameter in dataclasses.asdict(value).items()}
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}", **parameters}
    if callable(value) or isinstance(value, Method):
        # An object that is called, such as a functools.partial, goes by the name of its class.
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _compare_settings(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    for name in sorted({*saved, *present}):
        if saved.get(name) != present.get(name):
            raise ValueError(
                f"state was saved with {name}={saved.get(name)!r}, this updater has {present.get(name)!r}: "
                "make the updater with the same settings"
            )


def _parameter_checksum(updater: Resumable) -> int:
    parameters = sorted(updater.solver.get_parameters().items())
    return crc32(np.array([crc32(v.data.get_data("r")) for _, v in parameters], np.uint32))
