# SPDX-License-Identifier: Apache-2.0
"""What is measured about measuring, and what the tables and the picture make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
from scaling_study import measuring
from scaling_study.measuring import MeasuringJob, experiment, work
from scaling_study.measuring_picture import draw
from scaling_study.measuring_table import by_key, markdown, relative_time, until


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ITERATIONS", 16)


def test_a_training_tells_how_many_iterations_measured_and_what_all_lost() -> None:
    line = work(MeasuringJob("lenet", "float16", "amax_history", 8, "none", 0))
    assert line["error"] == ""
    assert line["measured"] == 2 / 16
    assert 0.0 <= line["underflow"] < 1.0
    assert line["scales"][0][0] == 1


def test_two_players_are_counted_together() -> None:
    line = work(MeasuringJob("gan", "float16", "approx_range", 4, "none", 0))
    assert line["batches"] == 32
    assert line["measured"] == 1 / 4


def test_times_are_of_nnabla_alone() -> None:
    line = work(MeasuringJob("lenet", "native", "approx_range", 2, "none", 0))
    assert line["measured"] == 1 / 2
    assert line["holding_over_measuring"] > 0.0
    assert line["scales"] == []


def test_every_jump_has_a_training_without_one() -> None:
    jobs = experiment(None).jobs
    assert len(set(jobs)) == len(jobs)
    assert {job._replace(jump="none") for job in jobs} <= set(jobs)


def record(every: int, jump: str, scales: List[Any], storage: str = "float16") -> Dict[str, Any]:
    job = MeasuringJob("lenet", storage, "approx_range", every, jump, 0)
    counts = {"batches": 300, "lost": 0, "repeats": every, "overflows": 3, "score": 0.5, "error": ""}
    shares = {"underflow": 0.25, "underflow_after": 0.5, "measured": 1 / every, "holding_over_measuring": 0.5}
    return {**job._asdict(), **counts, **shares, "scales": scales}


RECORDS = [
    record(2, "none", [], "native"),
    *(record(every, "none", [[1, 8.0], [50, 16.0]]) for every in (1, 8)),
    record(1, "2^-10, for good", [[1, 8.0], [50, 16.0], [164, 26.0]]),
    record(8, "2^-10, for good", [[1, 8.0], [50, 16.0]]),
]


def test_a_scale_is_followed_from_where_it_changed() -> None:
    known = by_key(RECORDS)
    assert until(RECORDS[3], known) == 63
    assert until(RECORDS[4], known) is None


def test_time_is_that_of_both_kinds_of_iterations() -> None:
    assert relative_time(1.0, 0.5) == 1.0
    assert relative_time(0.25, 0.5) == 0.625


def test_the_table_and_the_picture_show_each_distance(tmp_path: Path) -> None:
    text = markdown("measuring.png", RECORDS)
    assert "| 8 | 25.00 %, 10.0" in text
    assert "63, 50.00 % (50.00 %), 0" in text
    assert "never" in text
    draw(tmp_path / "measuring.png", RECORDS)
    assert (tmp_path / "measuring.png").read_bytes().startswith(b"\x89PNG\r\n")
