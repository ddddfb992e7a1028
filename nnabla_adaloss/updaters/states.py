# SPDX-License-Identifier: Apache-2.0
"""Saved state of an updater, from which training resumes bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping

import numpy as np

from ..core.saved_settings import (
    SettingValue,
    as_plain,
    check_version,
    fields_of,
    foreign_settings_warning,
    not_default,
    plain,
    with_known_names,
)
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScaleState
from ..core.validation import integer, number
from ..errors import warn
from .exchange import crc32
from .retries import Counters

_VERSION = 6


def saved_state(updater: Any, saved: Mapping[str, Any]) -> Dict[str, Any]:
    """State of an updater as plain values; `saved`: arguments to include, with defaults."""
    settings = _deciding_settings(updater, saved)
    return {
        "version": _VERSION,
        "settings": as_plain(settings),
        "chosen": not_default(settings),
        "scale_state": {name: plain(value) for name, value in updater.scale_state._asdict().items()},
        "counters": dataclasses.asdict(updater.counters),
        "last_good_scale": updater._s0.last_good,
        "iteration": updater.iteration,
        "parameters": parameter_checksum(updater.solver),
        "scaling": updater.scaling.state_dict(),
    }


def read_saved(state: Mapping[str, Any], updater: Any, defaults: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the parts of a `saved_state`; ValueError if it is damaged, or of other settings."""
    settings = _deciding_settings(updater, defaults)
    try:
        check_version(state["version"], _VERSION)
        saved, foreign = with_known_names(state["settings"], settings, state.get("chosen"))
        for name, value in as_plain(settings).items():
            # `dtype` may differ: the engine chooses scales again for another format. Old states do not name
            # theirs.
            if saved[name] != value and not (name == "dtype" and "dtype" in state["scaling"]):
                raise ValueError(
                    f"state was saved with {name}={saved[name]!r}, this updater has {value!r}: "
                    "make the updater with the same settings"
                )
        parts = {
            "scale_state": updater._s0.policy.checked(ScaleState(**state["scale_state"])),
            "counters": Counters.from_dict(state["counters"]),
            "last_good_scale": number("last_good_scale", state["last_good_scale"]),
            "iteration": integer("iteration", state["iteration"]),
            "parameters": integer("parameters", state["parameters"]),
            "scaling": state["scaling"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"state is damaged, or not an updater's: {error!r}") from error
    if foreign:
        warn(foreign_settings_warning(foreign))
    return parts


def parameter_checksum(solver: Any) -> int:
    """CRC-32 of the parameters of a solver."""
    parameters = sorted(solver.get_parameters().items())
    return crc32(np.array([crc32(v.data.get_data("r")) for _, v in parameters], np.uint32))


def _deciding_settings(updater: Any, defaults: Mapping[str, Any]) -> Dict[str, SettingValue]:
    """Settings that determine the next step, with their defaults."""
    own = {name: SettingValue(getattr(updater, name), default) for name, default in defaults.items()}
    del own["config"]
    return {
        **fields_of(updater.scaling.config),
        **own,
        "global_scale": SettingValue(updater.history or "dynamic", HistoryPolicy()),
    }
