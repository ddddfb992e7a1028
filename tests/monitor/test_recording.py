# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest

from nnabla_adaloss import BatchThrownAway, LayerRow, Recorder, Recording, Underflow

from .watched import layer, whole


def of_shares(name: str, *percent: int) -> List[LayerRow]:
    return [layer(i, name, underflowed=share) for i, share in enumerate(percent, start=1)]


@pytest.mark.parametrize(
    ("percent", "found"),
    [
        ((9, 0, 0, 5, 5), (1, None, 0.09, 0.05, 0.6, 5)),
        ((9, 0, 0, 0, 5, 5), (5, None, 0.09, 0.05, 1.0, 2)),
        ((0, 5, 7, 1), (2, 3, 0.07, 0.01, 1.0, 2)),
        ((0, *[5] * 50, 0, *[5] * 49), (2, None, 0.05, 0.05, 0.99, 100)),
    ],
)
def test_the_stretch_in_which_a_layer_underflows(percent: Tuple[int, ...], found: Tuple[Any, ...]) -> None:
    assert Recording(of_shares("a", *percent)).underflows() == [Underflow("a", *found)]


def test_the_worst_layer_comes_first_and_those_in_order_not_at_all() -> None:
    unknown = layer(1, "d", underflowed=None)
    recording = Recording([*of_shares("a", 0, 1), *of_shares("b", 3, 0), *of_shares("c", 0, 8), unknown])
    assert [(u.layer, u.until) for u in recording.underflows()] == [("c", None), ("b", 1)]
    assert [u.layer for u in recording.underflows(above=0.05)] == ["c"]


def test_a_layer_at_an_iteration() -> None:
    rows = [layer(10, "a"), layer(20, "a", attempt=0), layer(20, "a", attempt=1), layer(20, "b")]
    recording = Recording(rows)
    assert recording.layers == ["a", "b"]
    assert recording.at("a", 20).attempt == 1
    assert recording.at("a", 19) == recording.at("a", 10) == rows[0]
    with pytest.raises(KeyError, match="'a' was recorded from iteration 10 on, not in 9"):
        recording.at("a", 9)
    with pytest.raises(KeyError, match="no layer 'c' was recorded; there are a, b"):
        recording.at("c", 9)
    assert [row.attempt for row in recording.of_layer("a")] == [0, 1]
    assert recording.by_layer() == {"a": [rows[0], rows[2]], "b": [rows[3]]}


def test_lost_batches() -> None:
    lost = [("overflow", 1), ("nonfinite_loss", 2), ("overflow", 4)]
    recording = Recording([BatchThrownAway(i, cause, (), n) for i, (cause, n) in enumerate(lost)])
    assert recording.lost_batches() == {"overflow": 5, "nonfinite_loss": 2}


def test_the_last_rows_are_kept_up_to_the_limit() -> None:
    recording = Recording(limit=3)
    recording.rows.extend(layer(i, "a") for i in range(10))
    assert [row.iteration for row in recording.rows] == [7, 8, 9]


def test_files_and_tables(tmp_path: Path) -> None:
    whole().to_json_lines(tmp_path / "run.jsonl")
    assert Recording.load(tmp_path / "run.jsonl").rows == whole().rows
    whole().to_csv(tmp_path / "layers.csv")
    with open(tmp_path / "layers.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["layer"], first["iteration"], first["scale"]) == ("conv/conv", "1", "8.0")
    assert (second["underflow"], second["headroom"]) == ("0.05", "")
    assert "exponents" not in first
    pytest.importorskip("pandas")
    frame = whole().to_pandas()
    assert list(frame.columns) == list(first)
    assert list(frame.iteration) == [1, 3]
    assert list(frame.underflow) == [0.0, 0.05]
    assert frame.groupby("layer").scale.max()["conv/conv"] == 24.0


def test_monitor_series_are_nnablas(tmp_path: Path) -> None:
    recording = whole()
    recording.rows.append(BatchThrownAway(4, "overflow", (), 2))
    recording.to_monitor_series(tmp_path / "series")
    written = {path.name.removesuffix(".series.txt") for path in (tmp_path / "series").iterdir()}
    assert {"loss", "loss_scale", "retries", "conv.conv.alpha", "conv.conv.scale"} <= written
    for name, expected in (
        ("loss_scale", [[1, 1024], [2, 512], [3, 512]]),
        ("batches_lost", [4, 2]),
        ("retries", [[1, 1], [3, 0]]),
        ("conv.conv.scale", [[1, 8], [3, 24]]),
    ):
        np.testing.assert_array_equal(np.loadtxt(tmp_path / f"series/{name}.series.txt"), expected)


@pytest.mark.parametrize(
    "needing",
    [
        lambda path: whole().to_pandas(),
        lambda path: whole().to_tensorboard(path),
        lambda path: Recorder(path / "run.jsonl", tensorboard=path),
    ],
)
def test_missing_packages_are_named(
    needing: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("pandas", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'nnabla-adaloss\[monitor\]'"):
        needing(tmp_path)
    assert list(tmp_path.iterdir()) == []
