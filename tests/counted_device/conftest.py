# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import platform
from pathlib import Path
from typing import Iterator

import pytest

from nnabla_adaloss.kernels import cuda, select
from nnabla_adaloss.kernels.addresses import addresses_of
from tests.counted_device.device import ARRAY_CLASS, CountedDevice
from tests.kernels.host_launcher import compiled, kernels_for_host, pretend_cupy

COUNTED_ARRAY = Path(__file__).parent / "counted_array.cpp"


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> CountedDevice:
    """The counted device; its array class stays known to nnabla."""
    if platform.system() != "Linux":
        pytest.skip("nnabla's library for Linux is needed to count what a device is asked for")
    array = compiled(tmp_path_factory, "counted_array", COUNTED_ARRAY.read_text("utf-8"))
    return CountedDevice(kernels_for_host(tmp_path_factory), array)


@pytest.fixture
def on_device(device: CountedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedDevice]:
    """The counted device, whose kernels the package selects."""
    launcher = device.launcher
    pretend_cupy(monkeypatch, lambda device_id: launcher)
    monkeypatch.setattr(cuda, "addresses_of", launcher.noting(addresses_of))
    monkeypatch.setattr(select, "DEVICE_ARRAY_CLASS", ARRAY_CLASS)
    select._cuda_kernels.cache_clear()
    yield device
    select._cuda_kernels.cache_clear()
