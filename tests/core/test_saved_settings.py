# SPDX-License-Identifier: Apache-2.0
"""Settings as they are saved, and those of another version."""

from __future__ import annotations

import json
from dataclasses import field, make_dataclass
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from nnabla_adaloss.core.methods import AbsRange, Fixed
from nnabla_adaloss.core.saved_settings import (
    SettingValue,
    as_plain,
    check_version,
    fields_of,
    not_default,
    with_known_names,
)

OLD = make_dataclass("Policy", [("margin", float, 4.0), ("window", int, 64)], namespace={"__module__": "a"})
# A version that has one setting more, and one less.
NEW = make_dataclass(
    "Policy",
    [("margin", float, 4.0), ("slack", float, 1.5), ("steps", List[int], field(default_factory=list))],
    namespace={"__module__": "a"},
)


def settings(policy: Any, **others: SettingValue) -> Dict[str, SettingValue]:
    return {"N": SettingValue(5, 2000), "policy": SettingValue(policy, type(policy)()), **others}


def saved(settings: Dict[str, SettingValue]) -> Tuple[Dict[str, Any], List[str]]:
    return as_plain(settings), not_default(settings)


def test_settings_are_read_as_they_were_saved() -> None:
    own = settings(
        OLD(margin=2.0), include=SettingValue(("*",), ("*",)), factor=SettingValue(np.float32(2.0), 2.0)
    )
    values, chosen = saved(own)
    assert chosen == ["N", "policy", "policy.margin"]
    assert values["policy"] == {"type": "a:Policy", "margin": 2.0, "window": 64}
    assert type(values["factor"]) is float
    assert with_known_names(values, own, chosen) == (values, [])


def test_parameters_at_every_depth_are_as_json_returns_them() -> None:
    fields = [("policy", Any), ("steps", Any, ((1, np.float32(2.0)),)), ("names", Any, ())]
    method = make_dataclass("Method", fields, frozen=True, namespace={"__module__": "a"})
    (value,) = as_plain({"method": SettingValue(method(OLD(), names={1: (OLD(2.0),)}))}).values()
    policy = {"type": "a:Policy", "margin": 4.0, "window": 64}
    expected = {"type": "a:Method", "policy": policy, "steps": [[1, 2.0]]}
    assert value == {**expected, "names": {"1": [{**policy, "margin": 2.0}]}}
    assert json.loads(json.dumps(value)) == value


def test_settings_of_one_version_must_be_at_their_default_at_every_level() -> None:
    old, new = settings(OLD(margin=2.0), average=SettingValue(False, False)), settings(NEW(margin=2.0))
    read, foreign = with_known_names(*(saved(old)[0], new, saved(old)[1]))
    assert read == as_plain(new)
    assert foreign == ["average", "policy.window"]
    read, foreign = with_known_names(*(saved(new)[0], old, saved(new)[1]))
    assert read == as_plain(old)
    assert foreign == ["policy.slack", "policy.steps"]


@pytest.mark.parametrize("changed", [{"slack": 2.0}, {"steps": [1]}])
def test_settings_of_one_version_are_refused_if_they_are_used(changed: Dict[str, Any]) -> None:
    old, new, (name,) = settings(OLD()), settings(NEW(**changed)), changed
    values, chosen = saved(new)
    with pytest.raises(
        ValueError, match=rf"saved with policy\.{name}=.* does not know: load it with the version"
    ):
        with_known_names(values, old, chosen)
    values, chosen = saved(old)
    with pytest.raises(
        ValueError, match=rf"without policy\.{name}, which is .* here: leave policy\.{name} out"
    ):
        with_known_names({**values, "policy": {"type": "a:Policy", "margin": 4.0}}, new, chosen)


def test_a_state_without_the_chosen_settings_may_have_used_unknown_ones() -> None:
    new = saved(settings(NEW()))[0]
    with pytest.raises(ValueError, match=r"saved with policy\.slack=1\.5, which this version does not know"):
        with_known_names(new, settings(OLD()), None)


def test_a_setting_without_a_default_is_never_at_it() -> None:
    own = {"N": SettingValue(5), **fields_of(OLD())}
    assert not_default(own) == ["N"]
    with pytest.raises(ValueError, match="version without N, which is 5 here"):
        with_known_names(as_plain(fields_of(OLD())), own, [])


def test_another_type_is_read_as_it_is() -> None:
    own = settings(OLD())
    for other in ("dynamic", {"type": "b:Policy", "slope": 2.0}, None):
        assert with_known_names({"N": 5, "policy": other}, own, None) == ({"N": 5, "policy": other}, [])


def test_a_class_of_this_package_may_have_moved_since() -> None:
    for method, saved_type in (
        (Fixed(2.0), "nnabla_adaloss.core.methods.fixed:Fixed"),
        (AbsRange(), "nnabla_adaloss.core.methods.abs_range:AbsRange"),
    ):
        own = {"method": SettingValue(method, "fixed")}
        values, chosen = saved(own)
        before = {"method": {**values["method"], "type": saved_type}}
        assert with_known_names(before, own, chosen) == (values, [])
        for other in ("nnabla_adaloss.core.methods.fixed:Other", "elsewhere:Fixed", None):
            another = {"method": {**values["method"], "type": other}}
            assert with_known_names(another, own, chosen) == (another, [])


def test_versions_are_told_with_the_cure() -> None:
    check_version(5, 5)
    for version, cure in ((6, "update nnabla_adaloss"), (4, "begin with a new state")):
        with pytest.raises(ValueError, match=f"^state has version {version}, this package knows 5: {cure}$"):
            check_version(version, 5)
    with pytest.raises(TypeError, match="version='much' must be an integer"):
        check_version("much", 5)
