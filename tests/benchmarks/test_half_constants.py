# SPDX-License-Identifier: Apache-2.0
"""Constants in losses: natively as good as emulated, or it is said."""

from __future__ import annotations

import pytest
from half_constants import CASES, measure

# Two losses, one a billionth of the other: float16 holds both with few bits of the smaller one.
APART = {"mean(a) + 1e-9 * mean(b)", "sum(stack(mean(a), 1e-9 * mean(b)))"}
# An array of numbers that are too small for float16 is zero there, whatever is done at the loss.
LOST = {"mean(a * Variable(1e-9))"}


@pytest.mark.parametrize("name", CASES)
def test_native_half_is_as_good_as_the_emulation(name: str) -> None:
    row = measure(name)
    if name in LOST:
        assert (row.half, row.emulated, row.said) == (1.0, 1.0, "zero_gradients")
        return
    assert row.said == ""
    assert row.half < (0.1 if name in APART else 0.01)
    assert row.half < 3.0 * row.emulated


@pytest.mark.parametrize("name", ["mean(a) * 1e-7", "mean(a) + 1e-9 * mean(b)", "mean over 65536 elements"])
def test_constants_are_wrong_without_the_float_tail(name: str) -> None:
    assert measure(name).half_without > 0.1
