# SPDX-License-Identifier: Apache-2.0
"""The saved state of an adaptive updater, with which training goes on bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, NamedTuple

import numpy as np

from ..core.config import AdaLossConfig
from ..core.methods import Method
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.validation import integer, number
from .exchange import crc32
from .retries import Counters

_VERSION = 5
# Fields of the configuration that decide no result: monitoring, and ways to the same numbers.
_NOT_DECIDING = frozenset({"recorder", "debug_level", "planned_bytes"})


class UpdaterState(NamedTuple):
    """Everything that decides the next step, apart from parameters, solver states and data.

    Attributes:
        settings: the arguments that decide the next step, as `deciding_settings` returns them.
        scale_state: the global loss scale with its counters.
        last_good_scale: the scale of the last update.
        iteration: number of the last iteration.
        counters: the batches of the training.
        parameters: the checksum of the parameters.
        scaling: the state of the engine.
    """

    settings: Mapping[str, Any]
    scale_state: ScaleState
    last_good_scale: float
    iteration: int
    counters: Counters
    parameters: int
    scaling: Mapping[str, Any]

    def as_dict(self) -> Dict[str, Any]:
        """The state as plain numbers, strings, lists and dicts."""
        return {
            "version": _VERSION,
            **self._asdict(),
            "scale_state": {name: _plain(value) for name, value in self.scale_state._asdict().items()},
            "counters": self.counters.as_dict(),
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], settings: Mapping[str, Any], policy: ScalePolicy
    ) -> UpdaterState:
        """The state that `as_dict` returned, checked.

        Args:
            state: what `as_dict` returned.
            settings: those of the updater that goes on with it.
            policy: checks the global loss scale.

        Raises:
            ValueError: `state` is damaged, of another version, or of an updater with other settings.
        """
        try:
            version = integer("version", state["version"])
            if version != _VERSION:
                remedy = "update nnabla_adaloss" if version > _VERSION else "begin with a new state"
                raise ValueError(f"state has version {version}, this package knows {_VERSION}: {remedy}")
            _compare_settings(state["settings"], settings)
            return cls(
                settings,
                policy.checked(ScaleState(**state["scale_state"])),
                number("last_good_scale", state["last_good_scale"]),
                integer("iteration", state["iteration"]),
                Counters.from_dict(state["counters"]),
                integer("parameters", state["parameters"]),
                state["scaling"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is damaged, or not an updater's: {error!r}") from error


def deciding_settings(config: AdaLossConfig, policy: ScalePolicy, **others: Any) -> Dict[str, Any]:
    """The settings that decide the next step, as plain values.

    Args:
        config: how layers are scaled.
        policy: how the global loss scale is searched for.
        others: the updater's other arguments.
    """
    fields = (field.name for field in dataclasses.fields(config) if field.name not in _NOT_DECIDING)
    chosen = {
        **{name: getattr(config, name) for name in fields},
        **dataclasses.asdict(policy),
        **others,
    }
    return {name: _plain(value) for name, value in chosen.items()}


def parameter_checksum(solver: Any) -> int:
    """The CRC-32 of the parameters of a solver."""
    parameters = sorted(solver.get_parameters().items())
    return crc32(np.array([crc32(v.data.get_data("r")) for _, v in parameters], np.uint32))


def _plain(value: Any) -> Any:
    """`value` as JSON gives it back; NumPy's numbers cannot be saved, and tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parameters = {name: _plain(parameter) for name, parameter in dataclasses.asdict(value).items()}
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}", **parameters}
    if callable(value) or isinstance(value, Method):
        # A callable object, such as a functools.partial, goes by the name of its class.
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
