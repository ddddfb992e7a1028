# SPDX-License-Identifier: Apache-2.0
"""Settings in a saved state: writing, and reading those of another version.

A state has every setting, and the names of those that are not at their defaults. A version that lacks a
setting sees by these names whether it was used: if not, it ignores the setting with a warning. A setting that
is newer than the state was not used either; its default is accepted silently.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from .methods import Method
from .validation import integer


class SettingValue(NamedTuple):
    """Setting and its default."""

    value: Any
    default: Any = dataclasses.MISSING


def fields_of(value: Any) -> Dict[str, SettingValue]:
    """Fields of a dataclass as settings; empty for anything else."""
    settings: Dict[str, SettingValue] = {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(type(value)) else ():
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        settings[field.name] = SettingValue(getattr(value, field.name), default)
    return settings


def plain(value: Any) -> Any:
    """Convert a setting to the number, string, list or dict that a JSON file would return for it."""
    if dataclasses.is_dataclass(type(value)):
        return {"type": _name(type(value)), **as_plain(fields_of(value))}
    if callable(value) or isinstance(value, Method):
        # A function has a name of its own; a functools.partial, or another object, only its class has.
        return _name(value if hasattr(value, "__qualname__") else type(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    return value.item() if isinstance(value, np.generic) else value


def as_plain(settings: Mapping[str, SettingValue]) -> Dict[str, Any]:
    """Values of settings after a round trip through JSON."""
    return {name: plain(setting.value) for name, setting in settings.items()}


def not_default(settings: Mapping[str, SettingValue]) -> List[str]:
    """Names of settings that are not at their defaults, such as `config.margin` for a field of `config`."""
    names: List[str] = []
    for name, setting in settings.items():
        if not _is_default(setting):
            names.append(name)
        names += [f"{name}.{inner}" for inner in not_default(fields_of(setting.value))]
    return names


def with_known_names(
    saved: Mapping[str, Any],
    settings: Mapping[str, SettingValue],
    changed: Optional[Collection[str]],
    path: str = "",
) -> Tuple[Dict[str, Any], List[str]]:
    """Return the saved values of this version's `settings`, and the names of saved settings that it lacks.

    ValueError if a setting that only one of the two versions has is not at its default, so that the training
    would go on in another way. `changed`: names of saved settings that are not at their defaults; None, as in
    older states: any may be. `path`: prefix of these names for the fields of an object.
    """
    lacking = sorted(saved.keys() - settings.keys())
    for name in lacking:
        if changed is None or path + name in changed:
            raise ValueError(
                f"state was saved with {path}{name}={saved[name]!r}, which this version does not know: "
                "load it with the version of nnabla_adaloss that saved it"
            )
    read: Dict[str, Any] = {}
    foreign = [path + name for name in lacking]
    for name, setting in settings.items():
        kind = _name(type(setting.value))
        if name not in saved:
            # It is newer than the state.
            if not _is_default(setting):
                raise ValueError(
                    f"state was saved by a version without {path}{name}, which is {plain(setting.value)!r} "
                    f"here: leave {path}{name} out, or begin with a new state"
                )
            read[name] = plain(setting.value)
        elif isinstance(saved[name], Mapping) and _is_same_class(saved[name].get("type"), kind):
            # An object, such as a method, of the same class here: its fields are settings.
            fields = {"type": SettingValue(kind), **fields_of(setting.value)}
            saved_fields = {**saved[name], "type": kind}
            read[name], more = with_known_names(saved_fields, fields, changed, f"{path}{name}.")
            foreign += more
        else:
            read[name] = saved[name]
    return read, foreign


def foreign_settings_warning(foreign: Collection[str]) -> str:
    """Warning for settings of a state that this version lacks, all at their defaults."""
    return (
        f"state was saved by another version, which has the settings {', '.join(foreign)}: "
        "they were at their defaults, and are ignored"
    )


def check_version(version: Any, present: int) -> None:
    """Raise unless `version`, that of a saved state, is the `present` one."""
    if integer("version", version) != present:
        remedy = "update nnabla_adaloss" if version > present else "begin with a new state"
        raise ValueError(f"state has version {version}, this package knows {present}: {remedy}")


def _is_default(setting: SettingValue) -> bool:
    return setting.default is not dataclasses.MISSING and plain(setting.value) == plain(setting.default)


def _is_same_class(saved: Any, kind: str) -> bool:
    """True if both name the same class; those of this package may have moved within it."""
    in_package = all(str(name).startswith("nnabla_adaloss.") for name in (saved, kind))
    return bool(saved == kind or (in_package and saved.rpartition(":")[2] == kind.rpartition(":")[2]))


def _name(named: Any) -> str:
    return f"{named.__module__}:{named.__qualname__}"
