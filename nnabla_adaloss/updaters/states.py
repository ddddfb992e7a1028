# SPDX-License-Identifier: Apache-2.0
"""The saved state of an adaptive updater, with which training goes on bit for bit."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple

import numpy as np

from ..core.config import AdaLossConfig
from ..core.saved_settings import (
    Given,
    as_plain,
    check_version,
    fields_of,
    not_default,
    of_another_version,
    plain,
    with_known_names,
)
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.validation import integer, number
from ..errors import warn
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

    settings: Mapping[str, Given]
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
            "settings": as_plain(self.settings),
            "chosen": not_default(self.settings),
            "scale_state": {name: plain(value) for name, value in self.scale_state._asdict().items()},
            "counters": self.counters.as_dict(),
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], settings: Mapping[str, Given], policy: ScalePolicy
    ) -> UpdaterState:
        """The state that `as_dict` returned, checked.

        Args:
            state: what `as_dict` returned.
            settings: those of the updater that goes on with it.
            policy: checks the global loss scale.

        Raises:
            ValueError: `state` is damaged, of another version, or of an updater with other settings. Of those
                that only one of both has, at their defaults, a LossScaleWarning tells.
        """
        try:
            check_version(state["version"], _VERSION)
            foreign = _check_settings(state, settings)
            found = cls(
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
        if foreign:
            warn(of_another_version(foreign))
        return found


def deciding_settings(config: AdaLossConfig, policy: ScalePolicy, **others: Given) -> Dict[str, Given]:
    """The settings that decide the next step.

    Args:
        config: how layers are scaled.
        policy: how the global loss scale is searched for.
        others: the updater's other arguments.
    """
    of_config = {name: given for name, given in fields_of(config).items() if name not in _NOT_DECIDING}
    return {**of_config, **fields_of(policy), **others}


def parameter_checksum(solver: Any) -> int:
    """The CRC-32 of the parameters of a solver."""
    parameters = sorted(solver.get_parameters().items())
    return crc32(np.array([crc32(v.data.get_data("r")) for _, v in parameters], np.uint32))


def _check_settings(state: Mapping[str, Any], settings: Mapping[str, Given]) -> List[str]:
    """Raise unless the settings of `state` are these; the names of those that only one of both has."""
    saved, foreign = with_known_names(state["settings"], settings, state.get("chosen"))
    for name, value in as_plain(settings).items():
        if saved[name] != value:
            raise ValueError(
                f"state was saved with {name}={saved[name]!r}, this updater has {value!r}: "
                "make the updater with the same settings"
            )
    return foreign
