# SPDX-License-Identifier: Apache-2.0
"""Which cells pass."""

from __future__ import annotations

from statistics import stdev
from typing import Optional

import pytest
from scaling_study.methods import REFERENCE
from scaling_study.nets import NETS
from scaling_study.training import Result, Run
from scaling_study.verdict import Key, Results, cells, count, references

REFERENCE_SCORES = (0.94, 0.95, 0.96)


def result(score: Optional[float], error: str = "") -> Result:
    return Result(score, 100, 4, 2, 3, 0.25, 1.0, error)


def study(*scores: Optional[float], reference: tuple[float, ...] = REFERENCE_SCORES) -> Results:
    known = {
        Run("lenet", "float32", 1.0, REFERENCE, seed, 100): result(score)
        for seed, score in enumerate(reference)
    }
    for seed, score in enumerate(scores):
        known[Run("lenet", "float16", 1e-3, "none", seed, 100)] = result(score, "" if score else "no good")
    return known


KEY = Key("lenet", "float16", 1e-3, "none")


@pytest.mark.parametrize(
    ("scores", "passes"),
    [
        ((0.95,), True),
        ((0.99, 0.99), True),
        ((0.9301, 0.9301), True),
        ((0.9299, 0.9299), False),
        # It is the mean that counts.
        ((0.92, 0.95), True),
        ((0.90, 0.95), False),
        ((0.95, None), False),
    ],
)
def test_a_cell_passes_within_two_standard_deviations(
    scores: tuple[Optional[float], ...], passes: bool
) -> None:
    assert stdev(REFERENCE_SCORES) == pytest.approx(0.01)
    assert cells(study(*scores), NETS)[KEY].passes is passes


@pytest.mark.parametrize(("score", "passes"), [(0.9401, True), (0.9399, False)])
def test_what_is_below_the_resolution_means_nothing(score: float, passes: bool) -> None:
    assert cells(study(score, reference=(0.95, 0.95)), NETS)[KEY].passes is passes


def test_without_a_spread_nothing_is_said() -> None:
    assert references(study(0.95, reference=(0.95,)), NETS) == {}
    assert cells(study(0.95, reference=(0.95,)), NETS) == {}


def test_what_a_cell_tells() -> None:
    cell = cells(study(0.95, 0.97, None), NETS)[KEY]
    assert cell.score is None
    assert [cell.per_batch(field) for field in ("lost", "repeats", "overflows")] == [0.04, 0.02, 0.03]
    assert cell.total("lost") == 12
    assert cell.underflow == 0.25


def test_passes_are_counted_by_storage_and_method() -> None:
    known = dict(study(0.95))
    known[Run("lenet", "float16", 1e-6, "none", 0, 100)] = result(0.1)
    known[Run("lenet", "e4m3", 1e-6, "none", 0, 100)] = result(0.1)
    found = cells(known, NETS)
    assert count(found, "float16", "none") == (1, 2)
    assert count(found, "e4m3", "none") == (0, 1)
    assert count(found, "float16", "fixed_128") == (0, 0)
