# SPDX-License-Identifier: Apache-2.0
"""Which cells pass."""

from __future__ import annotations

from statistics import stdev
from typing import Optional, Tuple

import pytest
from scaling_study.methods import REFERENCE
from scaling_study.nets import NETS
from scaling_study.training import Result, Run
from scaling_study.verdict import Key, Results, cells, references

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
