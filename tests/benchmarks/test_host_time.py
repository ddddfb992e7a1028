# SPDX-License-Identifier: Apache-2.0
"""benchmarks/host_time.py: the calls of an update go by lists of layers, not by layer."""

from __future__ import annotations

from functools import partial

import pytest
from host_time import CONTEXTS, chain, classified, steady_calls, training


def calls(layers: int, kind: str) -> float:
    """The calls of an update that goes on with scales in use."""
    with training(partial(classified, partial(chain, layers=layers), (1, 2)), kind) as (updater, device, _):
        before = device.fetches
        found = steady_calls(updater)
        assert updater.scaling.result.kind == "hookless"
        assert device.fetches == before + 16
    return found


@pytest.mark.parametrize("kind", CONTEXTS)
def test_an_update_makes_as_many_calls_for_40_layers_as_for_10(kind: str) -> None:
    assert calls(40, kind) <= calls(10, kind) + 2


def test_half_makes_few_calls_more_than_float() -> None:
    assert calls(20, "half") <= 1.3 * calls(20, "float")
