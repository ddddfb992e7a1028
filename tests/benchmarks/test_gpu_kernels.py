# SPDX-License-Identifier: Apache-2.0
"""How kernels are timed, with a GPU made up for the purpose: machines that run these tests have none."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, List

import gpu_kernels
import pytest


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def gpu(spun: List[int]) -> Any:
    """A GPU of 1000 cycles per millisecond, on which ten runs take 40 ms."""
    return SimpleNamespace(
        RawKernel=lambda code, name: lambda grid, block, arguments: spun.append(arguments[0]),
        cuda=SimpleNamespace(
            Event=Event,
            Device=lambda: SimpleNamespace(attributes={"ClockRate": 1000}),
            get_elapsed_time=lambda start, stop: 40.0,
        ),
    )


def test_the_hosts_time_is_what_a_launch_took(monkeypatch: pytest.MonkeyPatch) -> None:
    spun: List[int] = []
    monkeypatch.setattr(gpu_kernels, "cupy", gpu(spun))
    device, host = gpu_kernels.Stopwatch(runs=10, repeat=2).milliseconds(lambda: None)
    assert device == 4.0
    assert 0.0 < host < 0.05
    # The device is busy for a millisecond or two at least, however short a launch is.
    assert spun == [2000] * 5


def test_the_device_is_busy_until_slow_launches_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    spun: List[int] = []
    monkeypatch.setattr(gpu_kernels, "cupy", gpu(spun))
    _, host = gpu_kernels.Stopwatch(runs=2, repeat=1).milliseconds(lambda: time.sleep(0.002))
    assert host >= 2.0
    assert min(spun[1:]) >= 2 * 1000 * 4
