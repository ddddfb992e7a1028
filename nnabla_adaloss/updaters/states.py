# SPDX-License-Identifier: Apache-2.0
"""The saved state of an adaptive updater, with which training goes on bit for bit."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import numpy as np

from ..core.saved_settings import (
    Given,
    as_plain,
    check_version,
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

_VERSION = 6


def as_saved(
    settings: Mapping[str, Given], scale_state: ScaleState, counters: Counters, **others: Any
) -> Dict[str, Any]:
    """The state of an updater as plain numbers, strings, lists and dicts; `read` takes it back."""
    return {
        "version": _VERSION,
        "settings": as_plain(settings),
        "chosen": not_default(settings),
        "scale_state": {name: plain(value) for name, value in scale_state._asdict().items()},
        "counters": counters.as_dict(),
        **others,
    }


def read(state: Mapping[str, Any], settings: Mapping[str, Given], policy: ScalePolicy) -> Dict[str, Any]:
    """What `as_saved` was given, but for the settings, which must be these; ValueError when the state is
    damaged or of another version. Of settings that only one of both has, at their defaults, a warning tells.
    """
    try:
        check_version(state["version"], _VERSION)
        foreign = _check_settings(state, settings)
        found = {
            "scale_state": policy.checked(ScaleState(**state["scale_state"])),
            "counters": Counters.from_dict(state["counters"]),
            "last_good_scale": number("last_good_scale", state["last_good_scale"]),
            "iteration": integer("iteration", state["iteration"]),
            "parameters": integer("parameters", state["parameters"]),
            "scaling": state["scaling"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"state is damaged, or not an updater's: {error!r}") from error
    if foreign:
        warn(of_another_version(foreign))
    return found


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
