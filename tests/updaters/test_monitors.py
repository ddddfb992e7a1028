# SPDX-License-Identifier: Apache-2.0
"""What monitors and hooks are told of a training, and that they do not change it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any, Dict, List, Optional, Tuple, Type

import pytest
from nnabla.utils.inspection import NanInfTracer, TimeProfiler

from nnabla_adaloss import (
    AdaLossConfig,
    BatchRepeated,
    BatchThrownAway,
    LayerScaled,
    LossScaleError,
    Monitor,
    Overflowed,
    ScaleChanged,
    TrainingBegan,
    UpdateEnded,
)
from nnabla_adaloss.updaters import notifications
from tests.worlds.trainings import AS_THE_BASELINE, training, updater_on
from tests.worlds.values import assert_equal, snapshot

pytestmark = pytest.mark.any_context


class Everything(Monitor):
    """Keeps all events; of layers, what can be seen while it is told."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.events: List[Any] = []
        self.gradients: List[Any] = []

    def on_layer_scaled(self, event: LayerScaled) -> None:
        self.events.append(event)
        self.gradients.append(event.look.gradient)

    def keep(self, event: Any) -> None:
        self.events.append(event)

    on_overflowed = on_batch_repeated = on_batch_thrown_away = on_scale_changed = on_update_ended = keep

    def of(self, kind: Type[Any]) -> List[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("measured_every", [1, 3])
@pytest.mark.parametrize("storage", ["float16", "fp8_hybrid", None])
def test_watching_changes_nothing(storage: Optional[str], measured_every: int) -> None:
    found = []
    config = AdaLossConfig(update_per_n_iteration=measured_every)
    for monitors in ([], [Everything()], [Everything(every=3), Everything(every=2)]):
        train = training(overflow=[3])
        updater = updater_on(train, monitors=monitors, storage=storage, config=config)
        results = [updater.update() for _ in range(6)]
        found.append((results, updater.state_dict(), snapshot(train.parameters)))
    for results, state, parameters in found[1:]:
        assert (results, state) == found[0][:2]
        assert_equal(parameters, found[0][2])


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_the_story_of_a_training() -> None:
    everything = Everything()
    config = AdaLossConfig(loss_scale_method="approx_range", measure_every=1)
    updater = updater_on(training(overflow=[2]), monitors=[everything], config=config)
    results = [updater.update() for _ in range(4)]

    first, *overflows = everything.of(BatchRepeated)
    assert (first.iteration, first.attempt, first.cause, first.layers) == (1, 0, "first measurement", ())
    assert {(e.iteration, e.cause) for e in overflows} == {(3, "overflow")}
    assert [e.attempt for e in overflows] == [0, 1, 2]
    overflowed = everything.of(Overflowed)
    assert [(e.attempt, e.cause) for e in overflowed] == [(i, "overflow") for i in range(4)]
    assert overflowed[0].scale > overflowed[-1].scale
    assert {(e.layers[0], e.component) for e in overflowed} == {("output/affine/Add2", "output/affine/Add2")}
    (lost,) = everything.of(BatchThrownAway)
    assert (lost.iteration, lost.cause, lost.batches) == (3, "hopeless", 1)
    assert lost.layers == overflowed[-1].layers
    (change,) = everything.of(ScaleChanged)
    assert change == ScaleChanged(1, 8.0, results[0].scale)

    ended = everything.of(UpdateEnded)
    assert [e.iteration for e in ended] == [1, 2, 3, 4]
    assert [(e.updated, e.reason, e.scale, e.retries) for e in ended] == [
        (r.updated, r.reason, r.scale, r.retries) for r in results
    ]
    assert ended[-1].loss == float(updater.scaling.variable.d)
    # Everything that is told of an iteration is told before its end.
    iterations = [event.iteration for event in everything.events]
    assert iterations == sorted(iterations)
    assert isinstance(everything.events[-1], UpdateEnded)


def test_layers_as_they_were_scaled_and_stored() -> None:
    everything = Everything()
    updater = updater_on(training(), monitors=[everything])
    for _ in range(3):
        updater.update()
    layers = everything.of(LayerScaled)
    assert [e.record.layer for e in layers] == ["output/affine", "hidden/affine"] * 4
    assert [(e.iteration, e.record.attempt) for e in layers[::2]] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    last = {e.record.layer: e.record for e in layers[-2:]}
    assert {name: record.alpha for name, record in last.items()} == updater.scaling.layer_scales
    assert {
        name: record.accumulated_scale for name, record in last.items()
    } == updater.scaling.accumulated_scales
    for gradient in everything.gradients:
        assert gradient.format.name == "float16"
        assert gradient.statistics.count in (8 * 16, 8 * 4 * 6 * 6)
        assert gradient.exponents.sum() == gradient.statistics.count
        assert (gradient.underflowed, gradient.overflowed) == (0, 0)
        assert 1.0 < gradient.headroom < 20.0


def test_a_bad_batch_is_told_before_its_error() -> None:
    everything = Everything()
    updater = updater_on(training(nan=[1]), monitors=[everything])
    updater.update()
    with pytest.raises(LossScaleError):
        updater.update()
    (overflow,) = everything.of(Overflowed)
    (lost,) = everything.of(BatchThrownAway)
    assert (overflow.iteration, overflow.cause) == (2, "nonfinite_loss")
    assert (lost.iteration, lost.cause, lost.batches) == (2, "nonfinite_loss", 1)
    assert lost.detail == overflow.detail
    assert "conv/conv" in lost.detail
    assert [e.iteration for e in everything.of(UpdateEnded)] == [1]


@pytest.mark.parametrize("options", [{}, AS_THE_BASELINE])
def test_a_monitor_learns_how_many_accumulated_batches_were_lost(options: Dict[str, Any]) -> None:
    everything = Everything()
    options = {**options, "accum_grad": 3, "on_nonfinite_loss": "skip", "storage": None}
    updater = updater_on(training(nan=[1]), monitors=[everything], **options)
    assert not updater.update().updated
    told = [(e.iteration, e.cause, e.batches) for e in everything.of(BatchThrownAway)]
    assert told == [(1, "nonfinite_loss", 3)]
    assert updater.counters.lost == {"nonfinite_loss": 3}


def test_monitors_see_the_next_graph_as_well() -> None:
    everything = Everything()
    train = training()
    updater = updater_on(train, monitors=[everything])
    updater.update()
    updater.loss = train.loss * 1.0
    updater.update()
    assert {e.iteration for e in everything.of(LayerScaled)} == {1, 2}


def test_hooks_see_each_function_and_change_nothing() -> None:
    train = training()
    plain = updater_on(train)
    for _ in range(12):
        plain.update()
    expected = snapshot(train.parameters)

    seen: List[Tuple[str, str]] = []
    train = training()
    updater = updater_on(
        train,
        function_pre_hook=lambda f: seen.append(("before", f.info.type_name)),
        function_post_hook=(None, lambda f: seen.append(("behind backward", f.info.type_name))),
    )
    for _ in range(12):
        updater.update()
    assert_equal(snapshot(train.parameters), expected)
    assert updater.state_dict() == plain.state_dict()
    functions, backward = len(updater.scaling.graph.functions), len(updater.scaling.plan.nodes)
    passes = 12 + updater.counters.repeats
    assert seen.count(("behind backward", "Convolution")) == passes
    assert sum(kind == "behind backward" for kind, _ in seen) == passes * backward
    assert sum(kind == "before" for kind, _ in seen) == passes * (functions + backward)


def test_nnablas_profiler() -> None:
    profiler = TimeProfiler(ext_name="cpu", device_id="0")
    with profiler.scope("training"):
        # It has hooks within a scope only.
        updater = updater_on(
            training(), function_pre_hook=profiler.pre_hook, function_post_hook=profiler.post_hook
        )
        updater.update()
    profiler.calc_elapsed_time(["training"])
    assert "training" in profiler.get_all_results()


def test_nnablas_tracer_finds_the_nan_in_the_data() -> None:
    tracer = NanInfTracer(trace_nan=True, trace_inf=True, need_details=False)
    updater = updater_on(
        training(nan=[1]), function_post_hook=(tracer.forward_post_hook, tracer.backward_post_hook)
    )
    with tracer.trace():
        updater.update()
    with pytest.raises((ValueError, RuntimeError), match="Convolution|nan or inf|not finite"), tracer.trace():
        updater.update()


def test_a_checkout_that_is_not_installed_has_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise PackageNotFoundError(name)

    class Beginning(Monitor):
        def on_training_began(self, event: TrainingBegan) -> None:
            versions.append(event.version)

    monkeypatch.setattr(notifications, "version", fail)
    versions: List[str] = []
    updater_on(training(), monitors=[Beginning()]).update()
    assert versions == ["not installed"]
