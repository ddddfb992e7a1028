# SPDX-License-Identifier: Apache-2.0
"""Devices without memory, libraries without code for the card: one sentence, and nothing has changed."""

from __future__ import annotations

import re
import sys
from itertools import count
from typing import Any, Dict

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater
from nnabla_adaloss.kernels import select
from tests.counted_device.device import CountedDevice
from tests.counted_device.test_same_as_on_a_cpu import decisive, training
from tests.kernels.host_launcher import pretend_cupy
from tests.worlds.values import assert_equal
from tests.worlds.warned import warned


def values() -> Dict[str, np.ndarray]:
    """Copies of all parameters, which stay where they are."""
    parameters = nn.get_parameters(grad_only=False)
    return {name: v.data.get_data("r").copy() for name, v in parameters.items()}


def made(device: CountedDevice, type_config: str) -> AdaptiveLossScalingUpdater:
    train = training(device.context(type_config))
    with warned():
        # In a float context, nothing is stored in half precision.
        return AdaptiveLossScalingUpdater(train.solvers[0], train.loss, train.feed)


def state_of(updater: AdaptiveLossScalingUpdater) -> str:
    """What decides the next scales; NaN, as before the first update, is equal to itself here."""
    return str(decisive(updater.state_dict()))


def check_without_memory(device: CountedDevice, updater: AdaptiveLossScalingUpdater, step: int) -> int:
    """Run one update, after some tries with memory for more and more arrays; return the number of tries."""
    for tries in count():
        state, before = state_of(updater), values()
        said = ""
        with device.room_for(step * tries):
            try:
                assert updater.update().updated
            except RuntimeError as error:
                said = str(error)
        if not said:
            return tries
        assert re.fullmatch("no memory is left for an update, which is undone: take smaller batches.*", said)
        # Where there was no memory to undo all of it, this does.
        assert state_of(updater) == state
        assert_equal(values(), before)
    raise AssertionError


@pytest.mark.parametrize("type_config", ["float", "half"])
def test_an_update_without_memory_is_undone_wherever_it_was(
    on_device: CountedDevice, type_config: str
) -> None:
    updater = made(on_device, type_config)
    for _ in range(3):
        updater.update()
    assert check_without_memory(on_device, updater, 3) > 10
    # What follows is as if nothing had happened; the data are those of later batches.
    assert updater.update().updated


def test_the_first_update_without_memory_is_undone_up_to_the_step(on_device: CountedDevice) -> None:
    assert check_without_memory(on_device, made(on_device, "half"), 9) > 15


def test_kernels_without_memory_for_their_tables(
    on_device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> Any:
        raise MemoryError("Out of memory allocating 512 bytes")

    updater = made(on_device, "half")
    state, before = state_of(updater), values()
    with monkeypatch.context() as patched:
        patched.setattr(on_device.launcher, "allocate", refuse)
        # There are more results than the tables have room for.
        patched.setattr(updater.scaling._graph.current().measurements, "_rows", 1)
        with pytest.raises(MemoryError, match="^no memory is left for an update") as raised:
            updater.update()
    assert isinstance(raised.value.__cause__, MemoryError)
    assert state_of(updater) == state
    assert_equal(values(), before)


def test_an_error_that_is_not_about_memory_is_handed_on_as_it_is(on_device: CountedDevice) -> None:
    updater = made(on_device, "half")

    def feed() -> None:
        raise RuntimeError("no more files")

    updater.data_feeder = feed
    with pytest.raises(RuntimeError, match="^no more files$"):
        updater.update()


def test_a_library_without_code_for_the_card_is_named_and_the_update_is_undone(
    on_device: CountedDevice,
) -> None:
    updater = made(on_device, "half")
    assert updater.update().updated
    state, before, given = state_of(updater), values(), updater.data_feeder

    def feed() -> None:
        # As nnabla's functions do at their first launch.
        raise RuntimeError("failed with: no kernel image is available for execution on the device (209)")

    updater.data_feeder = feed
    card = re.escape(
        "nnabla's CUDA extension was built without code for a card (compute capability 00): install"
    )
    with pytest.raises(RuntimeError, match=f"^{card} the extra for another CUDA version"):
        updater.update()
    assert state_of(updater) == state
    assert_equal(values(), before)
    updater.data_feeder = given
    assert updater.update().updated


def test_kernels_that_do_not_compile_for_the_card_are_an_error_before_anything_runs(
    on_device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device_id: int) -> Any:
        raise RuntimeError("nvrtc: error: invalid value for --gpu-architecture (-arch)")

    train = training(on_device.context("half"))
    before = values()
    pretend_cupy(monkeypatch, fail)
    select._cuda_kernels.cache_clear()
    with pytest.raises(RuntimeError, match="gpu-architecture"):
        AdaptiveLossScalingUpdater(train.solvers[0], train.loss, train.feed)
    assert_equal(values(), before)


def test_the_kernels_of_a_cpu_train_without_cupy_with_one_warning(
    on_device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    train = training(on_device.context("half"))
    with pytest.warns(RuntimeWarning, match="CuPy is not installed, so loss scaling on the GPU will be slow"):
        updater = AdaptiveLossScalingUpdater(train.solvers[0], train.loss, train.feed)
    with on_device as counts:
        assert updater.update().updated
    assert not counts.launches
