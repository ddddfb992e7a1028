# SPDX-License-Identifier: Apache-2.0
"""The updater's state: whole, exact, and of this network, or refused with nothing changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple
from zlib import crc32

import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    AmaxHistory,
    LogMonitor,
    LossScaleError,
    LossScaleWarning,
    Method,
    Needs,
)
from nnabla_adaloss.state.state_file import read_state, write_state
from tests.worlds.networks import two_layers
from tests.worlds.ranks import Pair
from tests.worlds.trainings import AS_THE_BASELINE, METHODS, Training, training, updater_of
from tests.worlds.trainings import updater_on as updater_of_training
from tests.worlds.values import assert_equal, data, snapshot
from tests.worlds.warned import silent, warned


def updater_on(train: Training, delay: int = 0, **options: Any) -> AdaptiveLossScalingUpdater:
    config = AdaLossConfig(delay=delay)
    return updater_of_training(train, **{"N": 5, "on_scale_floor": "skip", "config": config, **options})


def trained(
    iterations: int = 4, delay: int = 0, **options: Any
) -> Tuple[Training, AdaptiveLossScalingUpdater]:
    train = training(overflow=[2])
    updater = updater_on(train, delay, **options)
    for _ in range(iterations):
        updater.update()
    return train, updater


@pytest.mark.parametrize(
    ("saved", "options"),
    [
        (saved, {"config": AdaLossConfig(delay=delay, measure_every=every, loss_scale_method=method)})
        for saved, every in ((4, 1), (5, 3), (6, 3))
        for delay in (0, 1)
        for method in METHODS
    ]
    + [(3, {"accum_grad": 2}), (4, AS_THE_BASELINE)],
)
def test_going_on_from_a_file_is_going_on(tmp_path: Path, saved: int, options: Dict[str, Any]) -> None:
    """Save, train on; load into another updater, train on from the same data: not one bit differs."""
    train, updater = trained(saved, **options)
    updater.save_states(tmp_path / "scaling.json")
    train.solver.save_states(str(tmp_path / "solver.h5"))
    parameters, fed = snapshot(train.parameters), updater.counters.batches
    undisturbed = [(updater.update(), updater.state_dict()) for _ in range(8)]
    expected = snapshot(train.parameters)

    train = training(overflow=[2])
    for _ in range(fed):
        train.feed()
    for name, value in parameters.items():
        train.parameters[name].d = value
    updater = updater_on(train, **options)
    train.solver.load_states(str(tmp_path / "solver.h5"))
    updater.load_states(tmp_path / "scaling.json")
    assert [(updater.update(), updater.state_dict()) for _ in range(8)] == undisturbed
    assert_equal(snapshot(train.parameters), expected)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_state_survives_a_file(tmp_path: Path, delay: int) -> None:
    _, updater = trained(delay=delay)
    state = updater.state_dict()
    updater.save_states(tmp_path / "state")
    assert read_state(tmp_path / "state") == json.loads(json.dumps(state)) == state
    assert os.listdir(tmp_path) == ["state"]
    assert all(state["scaling"][part] for part in ("statistics", "components", "schedule"))


def double(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float, factor: float = 2.0) -> float:
    return factor


NUMPYS = {
    "config": AdaLossConfig(update_per_n_iteration=np.int64(2), scale_upper_bound=np.float32(8.0)),
    "scale": np.float32(8.0),
    "scaling_factor": np.float32(2.0),
    "N": np.int32(1),
    "min_scale": np.float32(1e-3),
    "hysteresis": np.int64(1),
    "accum_grad": np.int64(1),
    "average": np.bool_(True),
}


@pytest.mark.filterwarnings("ignore:the default method does not use scale_upper_bound")
@pytest.mark.parametrize(
    "options",
    [
        {"config": AdaLossConfig(loss_scale_method=double)},
        {"config": AdaLossConfig(loss_scale_method=functools.partial(double, factor=4.0))},
        {"config": AdaLossConfig(include=["h*", "o*"]), "monitors": [LogMonitor()]},
        {"N": math.inf},
        NUMPYS,
    ],
    ids=["function", "partial", "monitors", "infinite N", "NumPy numbers"],
)
def test_all_settings_can_be_saved(tmp_path: Path, options: Dict[str, Any]) -> None:
    updater = updater_on(training(overflow=range(1, 3)), **options)
    for _ in range(3):  # the first time before it ever ran
        updater.save_states(tmp_path / "state")
        updater.load_states(tmp_path / "state")
        updater.scale = np.float32(16.0)
        updater.update()
    assert updater.counters.updates


def unchanged_by(attempt: Callable[[AdaptiveLossScalingUpdater], None], **options: Any) -> None:
    train, updater = trained(**options)
    before, parameters = updater.state_dict(), snapshot(train.parameters)
    attempt(updater)
    assert updater.state_dict() == before
    assert_equal(snapshot(train.parameters), parameters)


def refused(state: Any, told: str, **options: Any) -> None:
    """A state, or what changes the updater's own to one, is refused and changes nothing."""

    def attempt(updater: AdaptiveLossScalingUpdater) -> None:
        with pytest.raises(ValueError, match=told):
            updater.load_state_dict(state(updater.state_dict()) if callable(state) else state)

    unchanged_by(attempt, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"N": 6}, "N=6"),
        ({"accum_grad": 2}, "accum_grad=2"),
        ({"average": True}, "average=True"),
        ({"on_overflow": "next"}, "on_overflow='next'"),
        ({"config": AdaLossConfig(delay=1)}, "delay=1"),
        ({"config": AdaLossConfig(delay=0, loss_scale_method=double)}, "loss_scale_method='.*:double'"),
        ({"config": AdaLossConfig(delay=0, exclude=("hidden/*",))}, "exclude="),
    ],
)
def test_other_settings_are_named_and_nothing_changes(options: Dict[str, Any], named: str) -> None:
    _, other = trained(1, **options)
    told = f"saved with {named}.*, this updater has .*: make the updater with the same settings$"
    refused(other.state_dict(), told)


def replaced(state: Dict[str, Any], path: Sequence[Any], value: Any) -> Dict[str, Any]:
    """The state with another entry; with `...`, without it."""
    state = copy.deepcopy(state)
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def changed(state: Dict[str, Any], path: str, value: Any = ...) -> Dict[str, Any]:
    """The state with one setting more, or with one less."""
    return replaced(state, ("settings", *path.split(".")), value)


MEASURED = {"config": AdaLossConfig(delay=1, loss_scale_method=AmaxHistory()), "hysteresis": 2}
LESS = ("accum_grad", "init_scale", "global_scale.window", "loss_scale_method.margin")
MORE = ("patience", "global_scale.slack", "loss_scale_method.slack")


def unknown(state: Dict[str, Any], path: str) -> Dict[str, Any]:
    """The state with a setting that is not at its default."""
    state = changed(state, path, 3)
    return {**state, "chosen": [*state["chosen"], path]}


def without(state: Dict[str, Any], *names: str) -> Dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


REFUSED = {
    "a newer version": (lambda s: {**s, "version": 99}, "version 99.*update nnabla_adaloss"),
    "an older version": (lambda s: {**s, "version": 3}, "version 3.*begin with a new state"),
    "of something else": (lambda s: {"scale": 8.0}, "not an updater.s"),
    **{
        f"no {key}": (lambda s, key=key: without(s, key), f"damaged.*{key}")
        for key in ("version", "settings", "scale_state", "counters", "iteration", "parameters", "scaling")
    },
    **{
        f"{key} of a wrong type": (lambda s, key=key: {**s, key: "much"}, f"damaged.*{key}='much' must be")
        for key in ("version", "last_good_scale", "iteration", "parameters")
    },
    # The parts are read one after the other: nothing of those before may be kept.
    "damaged scales": (
        lambda s: {**s, "iteration": 99, "scaling": {**s["scaling"], "components": 3}},
        "damaged",
    ),
    "damaged draws": (lambda s: {**s, "iteration": 99, "scaling": {**s["scaling"], "draws": "x"}}, "damaged"),
    "too small a scale": (
        lambda s: {**s, "scale_state": {**s["scale_state"], "scale": 5e-324}},
        "scale=5e-324 is too small to unscale",
    ),
    **{
        f"a setting {path} that was used": (
            lambda s, path=path: unknown(s, path),
            f"saved with {path}=3, which this version does not know: load it",
        )
        for path in MORE
    },
    "a setting less that is used here": (
        lambda s: changed(s, "hysteresis"),
        "by a version without hysteresis, which is 2 here: leave hysteresis out",
    ),
    # Whether it was used, states did not say once.
    "a setting that may have been used": (
        lambda s: without(unknown(s, "patience"), "chosen"),
        "saved with patience=3, which this version does not know",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_is_refused_changes_nothing(name: str) -> None:
    refused(*REFUSED[name], **MEASURED)


@pytest.mark.parametrize("path", [*LESS, *MORE])
def test_a_setting_that_only_one_of_two_versions_has_is_at_its_default(tmp_path: Path, path: str) -> None:
    train, updater = trained(**MEASURED)
    expected = updater.state_dict()
    write_state(tmp_path / "state", changed(expected, path, 3 if path in MORE else ...))
    updater = updater_on(train, **MEASURED)
    with warned() as told:
        updater.load_states(tmp_path / "state")
    # Nothing is lost where a setting is newer than the state.
    assert len(told) == (path in MORE)
    for text in told:
        assert f"state was saved by another version, which has the settings {path}: they" in text
    assert updater.state_dict() == expected
    with silent():  # there is none where nothing is missing
        updater.load_state_dict(without(expected, "chosen"))


@dataclasses.dataclass(frozen=True)
class Margin(Method):
    needs = Needs.STATISTICS
    margin: float = 2.0

    def scale(self, g: Any, W: Any, *, range: Any, fan_in: float) -> float:
        return self.margin


def test_a_method_is_saved_with_its_parameters() -> None:
    same, other = (AdaLossConfig(loss_scale_method=Margin(margin)) for margin in (4.0, 2.0))
    train, updater = trained(1, config=same)
    state = json.loads(json.dumps(updater.state_dict()))
    assert state["settings"]["loss_scale_method"] == {"type": f"{__name__}:Margin", "margin": 4.0}
    updater_on(train, config=same).load_state_dict(state)
    refused(state, "loss_scale_method={.*4.0}, this updater has {.*2.0}", config=other)


def test_the_checksum_of_the_parameters_is_the_same_everywhere() -> None:
    train, updater = trained(1)
    each = [crc32(v.d.tobytes()) for _, v in sorted(train.solver.get_parameters().items())]
    assert updater.state_dict()["parameters"] == crc32(np.array(each, "<u4").tobytes())


@pytest.mark.parametrize("delay", [0, 1])
def test_other_weights_drop_measurements_and_keep_the_scale(delay: int) -> None:
    train, updater = trained(delay=delay)
    state = updater.state_dict()
    train.parameters["conv/conv/W"].d *= 2.0
    with pytest.warns(
        LossScaleWarning, match="^the parameters are not those .*Load the parameters before the state$"
    ):
        updater.load_state_dict(state)
    now = updater.state_dict()
    assert now["scale_state"] == state["scale_state"]
    assert now["iteration"] == state["iteration"]
    assert state["scaling"]["components"]["windows"]
    assert now["scaling"]["components"]["windows"] == {}
    assert now["scaling"]["statistics"] == []
    assert now["scaling"]["schedule"]["chosen"] == []
    assert updater.update().updated


def test_another_network_is_named_and_nothing_changes() -> None:
    other = updater_of(two_layers(data(4, 3)), N=5, config=AdaLossConfig(delay=0)).state_dict()
    refused(other, "another network")


@pytest.mark.parametrize("delay", [0, 1])
def test_training_goes_on_with_a_batch_of_another_size(delay: int) -> None:
    config = AdaLossConfig(delay=delay)
    first, second = (updater_of(two_layers(data(batch, 3)), config=config) for batch in (4, 7))
    for _ in range(4):
        first.update()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    result = second.update()
    # Nothing is measured again.
    assert result.updated
    assert result.retries == 0
    assert second.scaling.can_measure_more
    assert second.scale == first.scale


def test_monitors_are_not_settings() -> None:
    train, updater = trained(1)
    other = updater_on(train, config=AdaLossConfig(delay=0), monitors=[LogMonitor()])
    other.load_state_dict(updater.state_dict())
    assert other.state_dict() == updater.state_dict()


def leaves_of(value: Any, path: Tuple[Any, ...] = ()) -> List[Tuple[Any, ...]]:
    """Paths to all entries; the first three of a list stand for the others."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:3]) if isinstance(value, list) else items
    found = [path] if path else []
    for key, inner in items:
        found += leaves_of(inner, (*path, key))
    return found


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("delay", [0, 1])
def test_any_entry_is_refused_and_changes_nothing_or_can_be_saved_and_loaded(delay: int) -> None:
    """A state that was edited by hand has no checksum to give it away."""
    options = {"on_nonfinite_loss": "skip", "on_nonfinite_forward": "skip", "min_scale": 2.0**-126}
    _, updater = trained(delay=delay, **options)
    updater.max_retries = 2
    state, accepted = updater.state_dict(), 0
    before = str(state)
    for path in leaves_of(state):
        # Each number is given to one of the two states.
        numbers = (5e-324, 2.0**-126, 1e300, 2**64, -1, 0, math.nan)[delay::2]
        for value in ("damaged", None, [], math.inf, *numbers):
            try:
                updater.load_state_dict(replaced(state, path, value))
            except ValueError:
                assert str(updater.state_dict()) == before, path
                continue
            accepted += 1
            updater.update()
            updater.load_state_dict(json.loads(json.dumps(updater.state_dict())))
            before = str(updater.state_dict())
    assert accepted > 20
    updater.load_state_dict(state)
    assert updater.update().updated


def test_a_scale_that_init_scale_makes_too_small_to_unscale_is_refused() -> None:
    config = AdaLossConfig(init_scale=1e-36)
    with pytest.raises(ValueError, match=r"scale \* init_scale=.* is too small to unscale"):
        AdaptiveLossScaling(training().loss, config).backward(2.0**-20)


def test_the_last_good_scale_is_told_of_after_loading_too() -> None:
    """It has grown since: the next scale is another."""
    told = []
    for loads in (False, True):
        train = training(overflow=range(2, 100))
        updater = updater_of_training(train, scale=32.0, N=0, **AS_THE_BASELINE)
        for _ in range(2):
            updater.update()
        if loads:
            state = updater.state_dict()
            updater = updater_of_training(train, scale=32.0, N=0, **AS_THE_BASELINE)
            updater.load_state_dict(state)
        updater.min_scale = updater.scale
        with pytest.raises(LossScaleError, match="last good scale: 32. The scale is 64 again") as error:
            updater.update()
        told.append(str(error.value))
    assert told[0] == told[1]


def test_an_interrupted_iteration_ends_with_loading() -> None:
    train, broken = training(overflow=[1, 3]), [2]

    def feed() -> None:
        if updater.counters.fed in broken:
            broken.clear()
            raise KeyError
        train.feed()

    updater = updater_on(train._replace(feed=feed), comm=Pair(), **AS_THE_BASELINE)
    updater.update()
    state = updater.state_dict()
    with pytest.raises(KeyError):
        updater.update()
    updater.load_state_dict(state)
    result = updater.update()
    assert (result.updated, result.retries) == (True, 0)
