# SPDX-License-Identifier: Apache-2.0
"""Which cells pass."""

from __future__ import annotations

from statistics import stdev
from typing import Optional, Tuple

import pytest
from scaling_study.methods import REFERENCE
from scaling_study.nets import NETS
from scaling_study.training import Result, Run
from scaling_study.verdict import Key, Results, cells, count, references

Scores = Tuple[Optional[float], ...]
KEY = Key("lenet", "float16", "none")
USUAL = (0.94, 0.95, 0.96)


def result(score: Optional[float], error: str = "") -> Result:
    return Result(score, 100, 4, 2, 3, 0.25, 1.0, error)


def study(*scores: Optional[float], reference: Scores = USUAL) -> Results:
    known = {Run("lenet", "float32", 1.0, REFERENCE, i, 100): result(s) for i, s in enumerate(reference)}
    for seed, score in enumerate(scores):
        known[Run("lenet", "float16", 1.0, "none", seed, 100)] = result(score, "" if score else "no good")
    return known


@pytest.mark.parametrize(
    ("scores", "reference", "passes"),
    [
        ((0.9301, 0.9301), USUAL, True),
        ((0.9299, 0.9299), USUAL, False),
        # It is the mean that counts.
        ((0.92, 0.95), USUAL, True),
        ((0.90, 0.95), USUAL, False),
        ((0.95, None), USUAL, False),
        # What is below the resolution, which is 0.01, means nothing.
        ((0.9401,), (0.95, 0.95), True),
        ((0.9399,), (0.95, 0.95), False),
    ],
)
def test_a_cell_passes_within_two_standard_deviations(
    scores: Scores, reference: Scores, *, passes: bool
) -> None:
    assert stdev(USUAL) == pytest.approx(0.01)
    assert cells(study(*scores, reference=reference), NETS)[KEY].passes is passes


def test_without_a_spread_nothing_is_said() -> None:
    alone = study(0.95, reference=(0.95,))
    assert (references(alone, NETS), cells(alone, NETS)) == ({}, {})


def test_what_a_cell_tells() -> None:
    cell = cells(study(0.95, 0.97, None), NETS)[KEY]
    assert cell.score is None
    assert [cell.per_batch(field) for field in ("lost", "repeats", "overflows")] == [0.04, 0.02, 0.03]
    assert (cell.total("lost"), cell.underflow) == (12, 0.25)


def test_passes_are_counted_by_storage_and_method() -> None:
    known = dict(study(0.95))
    known[Run("mlp8", "float32", 1.0, REFERENCE, 0, 100)] = result(0.9)
    known[Run("mlp8", "float32", 1.0, REFERENCE, 1, 100)] = result(0.9)
    known[Run("mlp8", "float16", 1.0, "none", 0, 100)] = result(0.1)
    known[Run("lenet", "e4m3_stored", 1.0, "none", 0, 100)] = result(0.1)
    found = cells(known, NETS)
    counts = [
        count(found, *key) for key in (("float16", "none"), ("e4m3_stored", "none"), ("float16", "fixed_128"))
    ]
    assert counts == [(1, 2), (0, 1), (0, 0)]
