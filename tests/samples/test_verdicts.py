# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from report import percent, weight_label
from verdicts import Score, Verdicts


def verdicts(**accuracies: float) -> Verdicts:
    """One case for each method; "no_scaling" threw two batches away."""
    scores = [
        Score("mlp", 1e-3, name.replace("_", " "), accuracy, 2 * (name == "no_scaling"))
        for name, accuracy in accuracies.items()
    ]
    return Verdicts(scores)


@pytest.mark.parametrize(("accuracy", "works"), [(0.99, True), (0.92, True), (0.919, False)])
def test_three_points_below_fp32_are_the_same(accuracy: float, works: bool) -> None:
    found = verdicts(fp32=0.95, adaptive=accuracy)
    assert found.works("adaptive", ("mlp", 1e-3)) is works
    assert found.count("adaptive") == int(works)


def test_the_table_has_a_row_a_rule_and_a_last_line_for_each_method() -> None:
    found = verdicts(fp32=0.95, no_scaling=0.081, adaptive=0.947)
    assert found.table("ascii").isascii()
    lines = found.table().splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["loss", "weight", "1e-3"],
        ["fp32", "95.0%"],
        ["no", "scaling", "8.1%", "✗"],
        ["adaptive", "94.7%", "✓"],
    ]
    assert "at most 3 points below fp32" in lines[7]
    assert lines[-2:] == [
        "no scaling       works untouched in 0 of 1, 2 batches thrown away",
        "adaptive         works untouched in 1 of 1, 0 batches thrown away",
    ]


def test_where_fp32_has_not_learned_there_is_nothing_to_come_up_to() -> None:
    lines = verdicts(fp32=0.081, no_scaling=0.081, adaptive=0.081).table().splitlines()
    assert [line.split()[-1] for line in lines[3:6]] == ["8.1%"] * 3
    assert "fp32 has not learned" in lines[8]
    assert "0 of 0" in lines[-1]


def test_numbers_are_written_as_people_write_them() -> None:
    shares = [percent(share) for share in (0.0, 1e-9, 4.9e-5, 5.1e-5, 1.0)]
    assert shares == ["0.00%", "< 0.01%", "< 0.01%", "0.01%", "100.00%"]
    weights = [weight_label(weight) for weight in (1.0, 1e-4, 0.25, 100.0, 1e4)]
    assert weights == ["1", "1e-4", "2.5e-1", "100", "1e4"]
