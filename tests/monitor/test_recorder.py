# SPDX-License-Identifier: Apache-2.0
"""Recorders in real trainings."""

from __future__ import annotations

from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Optional, Set, get_origin, get_type_hints

import nnabla as nn
import numpy as np
import pytest
from nnabla.ext_utils import get_extension_context

import nnabla_adaloss
from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    BatchRepeated,
    LayerRow,
    LogMonitor,
    LossScaleWarning,
    Precision,
    Recorder,
    Recording,
    TrainingBegan,
    UpdateEnded,
)
from nnabla_adaloss.emulation.format_emulation import FormatEmulation
from nnabla_adaloss.monitor.audience import Audience
from nnabla_adaloss.monitor.events import METHODS, Event, LayerScaled
from nnabla_adaloss.report.page import page_of
from tests.worlds.trainings import AS_THE_BASELINE, training, watched


def of_method(method: Any) -> Dict[str, Any]:
    return {"config": AdaLossConfig(loss_scale_method=method)}


VALUES: Dict[Any, Any] = {int: 1, float: 2.0, str: "word", bool: True}
RECORDED = [kind for kind in METHODS if kind not in (Event, LayerScaled)]


@pytest.mark.parametrize("kind", RECORDED)
def test_an_event_that_is_recorded_stands_on_the_page_of_recordings(kind: Any) -> None:
    page = Path(__file__).parents[2] / "docs" / "monitoring.md"
    assert f"`{kind.__name__}`" in page.read_text(encoding="utf-8")


def test_a_recorder_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    other, new, old = (tmp_path / name for name in ("other", "new.jsonl", "old.jsonl"))
    other.write_bytes(b"text")
    with pytest.raises(ValueError, match="is not a recording"):
        Recorder(other, tensorboard=tmp_path / "board")
    Recorder(old).close()
    for path in (new, old):
        with pytest.raises(FileExistsError):
            Recorder(path, tensorboard=other)
    assert {*tmp_path.iterdir()} == {other, old}
    Recorder(old).close()  # it is not open any more


@pytest.mark.parametrize("kind", RECORDED)
def test_every_kind_of_event_is_recorded_and_read_back(tmp_path: Path, kind: Any) -> None:
    # Tuples and dicts are empty.
    hints = get_type_hints(kind).items()
    event = kind(**{name: VALUES[hint] if hint in VALUES else get_origin(hint)() for name, hint in hints})
    with Recorder(tmp_path / "run.jsonl") as recorder:
        Audience([recorder]).tell(event)
    assert list(recorder.recording.rows) == list(Recording.load(tmp_path / "run.jsonl").rows) == [event]
    assert getattr(nnabla_adaloss, kind.__name__) is kind


def test_layers_losses_and_repeats() -> None:
    recorder = Recorder()
    updater = watched([recorder], 3)
    recording = recorder.recording
    assert recording.layers == updater.scaling.layers
    assert len(recording.of(LayerRow)) == 2 * (3 + 1)
    assert [row.cause for row in recording.of(BatchRepeated)] == ["first measurement"]
    assert [row.iteration for row in recording.of(UpdateEnded)] == [1, 2, 3]
    last = {name: recording.at(name, 3) for name in recording.layers}
    assert {name: row.scale for name, row in last.items()} == updater.scaling.accumulated_scales
    for row in last.values():
        assert (row.underflow, row.overflow, row.nonfinite) == (0.0, 0.0, 0)
        assert row.exponents is None
        assert row.weight_max is None


def test_a_recording_begins_with_the_settings(tmp_path: Path) -> None:
    config = AdaLossConfig(loss_scale_method="approx_range", scale_upper_bound=4.0)
    with Recorder(tmp_path / "run.jsonl") as recorder:
        watched([recorder], 2, config=config, accum_grad=2)
    began, *others = Recording.load(tmp_path / "run.jsonl").rows
    assert isinstance(began, TrainingBegan)
    assert not any(isinstance(row, TrainingBegan) for row in others)
    assert (began.iteration, began.version) == (1, version("nnabla-adaloss"))
    assert abs(datetime.now().astimezone() - datetime.fromisoformat(began.date)) < timedelta(minutes=5)
    assert {
        "updater": "AdaptiveLossScalingUpdater",
        "storage": "float16",
        "accum_grad": "2",
        "global_scale": "history",
        "global_scale.max_scale": str(2.0**100),
        "config.scale_upper_bound": "4.0",
        "config.loss_scale_method": "approx_range",
        "solver": "Momentum",
        "ranks": "1",
    }.items() <= began.settings.items()


@pytest.mark.parametrize(
    ("options", "in_use"),
    [
        ({"global_scale": "dynamic"}, {"scale", "N", "scaling_factor", "hysteresis", "max_scale"}),
        (of_method("amax_history"), {"global_scale.max_scale"}),
        (of_method("fixed"), {"global_scale.max_scale", "config.fixed_loss_scale"}),
        (of_method("approx_range"), {"global_scale.max_scale", "config.n_uf_threshold"}),
        (of_method("element_wise_range"), {"global_scale.max_scale", "config.max_rescue_ratio"}),
    ],
)
def test_settings_that_are_not_in_use_are_not_told(options: Dict[str, Any], in_use: Set[str]) -> None:
    recorder = Recorder()
    watched([recorder], 1, **options)
    (began,) = recorder.recording.of(TrainingBegan)
    only_sometimes = {"scale", "N", "scaling_factor", "hysteresis", "max_scale", "global_scale.max_scale"}
    only_sometimes |= {"config.fixed_loss_scale", "config.n_uf_threshold", "config.max_rescue_ratio"}
    assert only_sometimes & set(began.settings) == in_use


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (Precision("float16", "float8_e5m2"), "float16 with gradients in float8_e5m2"),
        ({"*": Precision("bfloat16")}, "bfloat16"),
        ("fp8_hybrid", "fp8_hybrid"),
    ],
)
def test_a_storage_of_several_formats_has_a_name_which_the_page_has_for_its_title(
    storage: Any, words: str
) -> None:
    recorder = Recorder()
    watched([recorder], 1, storage=storage)
    (began,) = recorder.recording.of(TrainingBegan)
    assert began.settings["storage"] == words
    assert f"Training in {words}</h1>" in page_of(recorder.recording, "run.jsonl")


def test_settings_of_an_object_that_stands_for_a_solver() -> None:
    train, recorder = training(), Recorder()
    names = ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters", "check_inf_or_nan_grad")
    standing = SimpleNamespace(**{name: getattr(train.solver, name) for name in names})
    watched([recorder], 1, train._replace(solver=standing))
    (began,) = recorder.recording.of(TrainingBegan)
    assert (began.settings["solver"], began.settings["learning_rate"]) == ("SimpleNamespace", "unknown")


def test_a_recorder_selects_layers_and_iterations() -> None:
    recorder = Recorder(every=2, layers=["hid*"])
    watched([recorder], 5)
    rows = recorder.recording.of(LayerRow)
    assert [(row.iteration, row.layer) for row in rows] == [(2, "hidden/affine"), (4, "hidden/affine")]


def test_a_pattern_without_a_layer_is_warned_of_once() -> None:
    recorder = Recorder(every=2, layers=["hid*", "fc1", "conv*", "*"])
    told = r"'fc1', 'conv\*' matches no scaled layer; known layers: output/affine, hidden/affine$"
    with pytest.warns(LossScaleWarning, match=told) as warned:
        watched([recorder], 6)
    assert sum("Recorder" in str(warning.message) for warning in warned) == 1
    with pytest.warns(LossScaleWarning, match=told):
        watched([Recorder(every=2, layers=["fc1", "conv*"])], 3)  # of which one is recorded


def test_a_loop_of_ones_own() -> None:
    recorder = Recorder(layers=["fc1", "*"])
    scaling = AdaptiveLossScaling(FormatEmulation(training().loss), monitors=[recorder])
    scaling.forward(clear_no_need_grad=True)
    scaling.backward(clear_buffer=True)
    scaling.forward()
    with pytest.warns(LossScaleWarning, match="'fc1' matches no scaled layer"):
        scaling.backward()
    assert [row.iteration for row in recorder.recording.of_layer("output/affine")] == [0, 1]


def test_underflow_is_found() -> None:
    recorder = Recorder(histograms=True)
    config = AdaLossConfig(loss_scale_method="fixed")
    watched([recorder], 2, scale=2.0**-20, config=config, **AS_THE_BASELINE)
    worst = recorder.recording.underflows()[0]
    assert (worst.since, worst.until) == (1, None)
    assert worst.last > 0.1
    row: Any = recorder.recording.at(worst.layer, 2)
    assert row.subnormals
    first, *counts = row.exponents
    assert first == -24  # nothing is smaller in float16
    assert sum(counts) == row.elements - row.zeros


def test_native_half_does_not_count_underflow() -> None:
    recorder = Recorder()
    config = AdaLossConfig(loss_scale_method="fixed")
    with nn.context_scope(get_extension_context("cpu", type_config="half")):
        watched([recorder], 1, scale=2.0**-20, config=config, storage=None, **AS_THE_BASELINE)
    rows = recorder.recording.of(LayerRow)
    assert any(row.zeros for row in rows)
    assert all(row.elements and row.subnormals is not None for row in rows)
    assert {(row.underflow, row.overflow) for row in rows} == {(None, None)}
    assert recorder.recording.underflows(above=0.0) == []


def test_the_file_holds_rows_that_memory_has_dropped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", limit=4)
    watched([recorder], 4)
    written = Recording.load(tmp_path / "run.jsonl")  # while it is open
    assert len(recorder.recording.rows) == 4
    assert list(written.rows)[-4:] == list(recorder.recording.rows)
    assert [row.iteration for row in written.of(UpdateEnded)] == [1, 2, 3, 4]
    recorder.close()
    recorder.close()
    with pytest.warns(LossScaleWarning, match="run.jsonl cannot be written: .* is closed") as warned:
        watched([recorder], 3)
    assert len(warned) == 1
    assert len(recorder.recording.rows) == 4


@pytest.mark.parametrize(
    ("monitor", "argument", "value"),
    [(Recorder, "every", 0), (Recorder, "limit", 0), (LogMonitor, "level", 3), (LogMonitor, "every", 0)],
)
def test_numbers_out_of_range_are_refused(monitor: Any, argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{argument}={value} must be"):
        monitor(**{argument: value})


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("storage", ["float16", None])
def test_weights_and_inputs(storage: Optional[str], tmp_path: Path) -> None:
    """Compared with the arrays themselves."""
    seen: Dict[str, Any] = {}
    keep = SimpleNamespace(on_layer_scaled=lambda e: seen.update({e.record.layer: e.look.arrays()}))
    train, recorder = training(), Recorder(tmp_path / "run.jsonl", data=True)
    for v in train.solver.get_parameters().values():
        v.d = np.where(np.arange(v.size).reshape(v.shape) % 4 == 0, 1e-6, v.d)  # subnormal in float16
    watched([keep, recorder], 1, train, storage=storage)
    recording = Recording.load(tmp_path / "run.jsonl")
    for name, of_layer in seen.items():
        row = recording.at(name, 1)
        for what in ("weight", "input"):
            values = np.abs(of_layer[what])
            assert getattr(row, f"{what}_max") == values.max()
            expected = (values[values > 0] < 2.0**-14).mean()
            assert getattr(row, f"{what}_subnormal") == pytest.approx(expected)
        assert (row.weight_subnormal or 0.0) > 0.2
        assert (row.underflow is None) == (row.overflow is None) == (storage is None)
