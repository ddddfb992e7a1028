# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from typing import Any

import pytest

from nnabla_adaloss import AdaLossConfig, LayerRecord, LayerScaled, LogMonitor, Monitor
from nnabla_adaloss.monitor.events import LayerLook
from tests.worlds.trainings import training, updater_on, watched

pytestmark = pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")


def told(caplog: pytest.LogCaptureFixture, *monitors: LogMonitor, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        watched(monitors, 4, training(overflow=[2]), **options)
    return [record.getMessage() for record in caplog.records if record.name == "nnabla_adaloss"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_layers_of_an_iteration_are_summarized_when_the_next_begins(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    lines = told(caplog, LogMonitor(level))
    summaries = [line for line in lines if "layers, scales" in line]
    of_layers = [line for line in lines if ", layer " in line]
    assert [line.split(":")[0] for line in summaries] == [f"iteration {i}" for i in (1, 2, 3) if level]
    # Each pass of an iteration counts.
    for iteration, line in enumerate(summaries, start=1):
        count = sum(one.startswith(f"iteration {iteration}, layer ") for one in of_layers)
        assert level == 1 or f"{count} layers, scales from " in line
    assert (level == 2) == bool(of_layers)


def test_a_layer_in_words(caplog: pytest.LogCaptureFixture) -> None:
    monitor, record = LogMonitor(2), LayerRecord(0, "a", 1.0, 2.0, 8.0, 8.0, 4.0, None, None)
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        monitor.on_layer_scaled(LayerScaled(record, LayerLook()))
        monitor.on_layer_scaled(LayerScaled(record._replace(iteration=1), LayerLook()))
    line = "layer a: scale 1 (unbounded 2), accumulated scale 8 -> 8, fan-in 4"
    summary = "iteration 0: 1 layers, scales from 1 to 1, largest accumulated scale 8"
    assert caplog.messages == [f"iteration 0, {line}", summary, f"iteration 1, {line}"]


def test_failures_are_written_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(caplog, LogMonitor(0), config=AdaLossConfig(measure_every=1, delay=0))
    assert lines[0] == "iteration 1, attempt 0: batch repeated: first measurement"
    assert lines[1] == "iteration 1: loss scale 8 -> 16384"
    bad = "first bad layer: output/affine/Add2"
    # With delay=0 each batch is measured before it counts.
    assert lines[2] == "iteration 2, attempt 0: batch repeated: first measurement"
    assert lines[3] == f"iteration 3, attempt 0: batch repeated: overflow; {bad}"
    assert f"iteration 3: 1 batch is lost: hopeless; {bad}" in lines


def test_every_nth_iteration(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(caplog, LogMonitor(2, every=2))
    assert {line.split(",")[0] for line in lines if ", layer " in line} == {"iteration 2", "iteration 4"}


class Records(Monitor):
    """The records of layers, looked at or not."""

    def __init__(self, *, looks: bool) -> None:
        self.looks, self.seen, self.looked = looks, [], 0

    def on_layer_scaled(self, event: LayerScaled) -> None:
        self.seen.append(event.record)
        self.looked += event.look.gradient is not None


def test_a_monitor_that_reads_records_only_needs_no_hooks_and_receives_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        kinds, monitors = [], (Records(looks=False), Records(looks=True))
        for monitor in monitors:
            updater = updater_on(training(overflow=[4]), monitors=[monitor, LogMonitor(2)])
            for _ in range(6):
                updater.update()
            kinds.append(updater.scaling.result.kind)
    assert kinds == ["hookless", "single functions are watched"]
    alone, looking = monitors
    assert alone.seen == looking.seen
    assert len(alone.seen) > 6
    assert (alone.looked, looking.looked > 6) == (0, True)
    assert any(", layer " in line for line in caplog.messages)
