# SPDX-License-Identifier: Apache-2.0
"""The file of results, after a kill as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from scaling_study import records


def test_what_was_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.jsonl"
    assert records.read(path) == []
    with records.appending(path) as file:
        file.add({"net": "lenet", "weight": 1e-9, "score": None})
        file.add({"net": "mlp8"})
    assert records.read(path) == [{"net": "lenet", "weight": 1e-9, "score": None}, {"net": "mlp8"}]


@pytest.mark.parametrize("cut", range(1, 17))
def test_a_line_that_was_cut_off_is_ignored_and_does_no_harm_to_the_next(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    with records.appending(path) as file:
        file.add({"first": 1})
        file.add({"second": 22})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = records.read(path)
    # Without its line end, a line is whole all the same.
    assert kept == ([{"first": 1}, {"second": 22}] if cut == 1 else [{"first": 1}])
    with records.appending(path) as file:
        file.add({"third": 3})
    assert records.read(path) == [*kept, {"third": 3}]


def test_numbers_that_json_does_not_know_are_refused(tmp_path: Path) -> None:
    with records.appending(tmp_path / "results.jsonl") as file, pytest.raises(ValueError, match="JSON"):
        file.add({"score": float("nan")})


def test_two_studies_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with records.appending(path), pytest.raises(SystemExit, match="another study"), records.appending(path):
        pass
    with records.appending(path):
        pass
