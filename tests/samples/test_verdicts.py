# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from verdicts import Verdicts


def verdicts(**accuracies: float) -> Verdicts:
    """One case for each method; "no_scaling" threw two batches away."""
    from verdicts import Score, Verdicts

    scores = [
        Score("mlp", 1e-3, name.replace("_", " "), accuracy, 2 * (name == "no_scaling"))
        for name, accuracy in accuracies.items()
    ]
    return Verdicts(scores)


@pytest.mark.parametrize(
    ("accuracy", "works"), [(0.99, True), (0.95, True), (0.92, True), (0.919, False), (0.1, False)]
)
def test_three_points_below_fp32_are_the_same(accuracy: float, works: bool) -> None:
    found = verdicts(fp32=0.95, adaptive=accuracy)
    assert found.works("adaptive", ("mlp", 1e-3)) is works
    assert found.count("adaptive") == int(works)
    assert ("✓" if works else "✗") in found.table().splitlines()[4]


def test_the_table_has_a_row_a_rule_and_a_last_line_for_each_method() -> None:
    lines = verdicts(fp32=0.95, no_scaling=0.081, adaptive=0.947).table().splitlines()
    assert lines[2].split() == ["loss", "weight", "1e-3"]
    assert lines[3].split() == ["fp32", "95.0%"]
    assert lines[4].split() == ["no", "scaling", "8.1%", "✗"]
    assert lines[5].split() == ["adaptive", "94.7%", "✓"]
    assert "at most 3 points below fp32" in lines[7]
    assert lines[-2:] == [
        "no scaling       works untouched in 0 of 1, 2 batches thrown away",
        "adaptive         works untouched in 1 of 1, 0 batches thrown away",
    ]


def test_where_fp32_has_not_learned_there_is_nothing_to_come_up_to() -> None:
    found = verdicts(fp32=0.081, no_scaling=0.081, adaptive=0.081)
    assert not {found.mark(method, ("mlp", 1e-3)) for method in found.methods} - {""}
    lines = found.table().splitlines()
    assert [line.split()[-1] for line in lines[3:6]] == ["8.1%"] * 3
    assert lines[8] == "no mark where fp32 has not learned (50%): more --iterations"
    assert lines[-1] == "adaptive         works untouched in 0 of 0, 0 batches thrown away"


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1", "no such"])
def test_terminals_without_marks_get_others(encoding: str) -> None:
    printed = verdicts(fp32=0.95, no_scaling=0.1, adaptive=0.95).table(encoding)
    assert "95.0% +" in printed
    assert "10.0% -" in printed
    assert printed.isascii()


def test_the_picture_is_written(tmp_path: Path) -> None:
    import verdicts_picture

    for fp32 in (0.08, 0.95):
        verdicts_picture.save(tmp_path / "demo.png", verdicts(fp32=fp32, dynamic=0.1, adaptive=0.95))
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00%"), (1e-9, "< 0.01%"), (4.9e-5, "< 0.01%"), (5.1e-5, "0.01%"), (1.0, "100.00%")],
)
def test_a_share_that_is_not_zero_does_not_look_like_zero(share: float, text: str) -> None:
    from report import percent

    assert percent(share) == text


@pytest.mark.parametrize(
    ("weight", "text"),
    [(1.0, "1"), (1e-4, "1e-4"), (1e-6, "1e-6"), (0.25, "2.5e-1"), (100.0, "100"), (1e4, "1e4")],
)
def test_a_loss_weight_is_written_as_people_write_it(weight: float, text: str) -> None:
    from report import weight_label

    assert weight_label(weight) == text
