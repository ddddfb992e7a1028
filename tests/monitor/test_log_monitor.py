# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from typing import Any

import pytest

from nnabla_adaloss import AdaLossConfig, LogMonitor
from tests.worlds.trainings import training, watched

pytestmark = pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")


def told(caplog: pytest.LogCaptureFixture, *monitors: LogMonitor, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        watched(monitors, 4, training(overflow=[2]), **options)
    return [record.getMessage() for record in caplog.records if record.name == "nnabla_adaloss"]


@pytest.mark.parametrize("level", [1, 2])
def test_layers_are_written_about_as_by_debug_level(level: int, caplog: pytest.LogCaptureFixture) -> None:
    of_config = told(caplog, config=AdaLossConfig(debug_level=level))
    of_monitor = told(caplog, LogMonitor(level))
    layers = [line for line in of_monitor if " scale " in line or "layers, scales" in line]
    assert [line for line in layers if "loss scale" not in line] == of_config
    assert of_config


def test_what_goes_wrong_is_written_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
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
