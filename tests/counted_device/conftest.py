# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os
import platform
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Iterator

import pytest

from nnabla_adaloss.kernels import cuda, select
from nnabla_adaloss.kernels.arrays import addresses_of
from tests.counted_device.device import ARRAY_CLASS, CountedDevice, compile_counted_array
from tests.kernels.host_launcher import COMPILER, compile_for_host

# Test modules import networks of the samples at their head.
sys.path.append(str(Path(__file__).parents[2] / "samples"))


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> CountedDevice:
    """The counted device; its array class stays known to nnabla."""
    if COMPILER is None or platform.system() != "Linux":
        pytest.skip("g++ and nnabla's library for Linux are needed to count what a device is asked for")
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent  # which the workers share
    directory = run / "counted_device"
    directory.mkdir(exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return CountedDevice(compile_for_host(directory), compile_counted_array(directory))


@pytest.fixture
def on_device(device: CountedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedDevice]:
    """The counted device, whose kernels the package selects."""
    launcher = device.launcher
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    sys.modules["cupy"].__spec__ = ModuleSpec("cupy", None)
    monkeypatch.setattr(cuda, "CupyLauncher", lambda device_id: launcher)
    monkeypatch.setattr(cuda, "addresses_of", launcher.noting(addresses_of))
    monkeypatch.setattr(select, "DEVICE_ARRAY_CLASS", ARRAY_CLASS)
    select._cuda_kernels.cache_clear()
    yield device
    select._cuda_kernels.cache_clear()
