# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, LogMonitor
from tests.updaters.networks import training


def told(caplog: pytest.LogCaptureFixture, iterations: int = 4, **options: object) -> list[str]:
    train = training(overflow=[2])
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        updater = AdaptiveLossScalingUpdater(
            train.solver, train.loss, train.feed, storage="float16", **options
        )
        for _ in range(iterations):
            updater.update()
    return [record.getMessage() for record in caplog.records if record.name == "nnabla_adaloss"]


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("level", [1, 2])
def test_layers_are_written_about_as_by_debug_level(level: int, caplog: pytest.LogCaptureFixture) -> None:
    of_config = told(caplog, config=AdaLossConfig(debug_level=level))
    of_monitor = told(caplog, monitors=[LogMonitor(level)])
    layers = [line for line in of_monitor if " scale " in line or "layers, scales" in line]
    assert [line for line in layers if "loss scale" not in line] == of_config
    assert of_config


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_what_goes_wrong_is_written_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(caplog, monitors=[LogMonitor(0)], config=AdaLossConfig(measure_every=1, delay=0))
    assert lines[0] == "iteration 1, attempt 0: batch repeated: first measurement"
    assert lines[1] == "iteration 1: loss scale 8 -> 16384"
    bad = "first bad layer: output/affine/Add2"
    # With delay=0 each batch is measured before it counts.
    assert lines[2] == "iteration 2, attempt 0: batch repeated: first measurement"
    assert lines[3] == f"iteration 3, attempt 0: batch repeated: overflow; {bad}"
    assert f"iteration 3: 1 batch is lost: hopeless; {bad}" in lines


def test_every_nth_iteration(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(caplog, 2, monitors=[LogMonitor(2, every=2)])
    assert {line.split(",")[0] for line in lines if ", layer " in line} == {"iteration 2"}


@pytest.mark.parametrize(
    ("arguments", "message"), [((3,), "level=3 must be 0, 1 or 2"), ((1, 0), "every=0 must be 1 or more")]
)
def test_bad_arguments_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogMonitor(*arguments)
