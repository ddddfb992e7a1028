# SPDX-License-Identifier: Apache-2.0
"""Rows come back from a file, whatever happened to the process that wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import LayerRow, Overflowed, ScaleChanged
from nnabla_adaloss.monitor import row_file
from nnabla_adaloss.monitor.events import METHODS, Event, LayerScaled
from nnabla_adaloss.monitor.row_file import RowFile, read_rows, write_rows

COUNTS = st.integers(0, 2**63 - 1)
VALUES = {
    int: COUNTS,
    float: st.floats(),
    Optional[int]: st.none() | COUNTS,
    Optional[List[int]]: st.none() | st.just([]) | st.lists(st.integers(-130, 2**40), min_size=2),
}


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field."""
    if hint in VALUES:
        return VALUES[hint]
    kind, of = get_origin(hint), get_args(hint)
    if kind is tuple:
        return st.lists(of_type(of[0]), max_size=3).map(tuple)
    if kind is dict:
        return st.dictionaries(st.text(), of_type(of[1]), max_size=3)
    return st.from_type(hint)


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    """What a Recorder can write."""
    fields = {name: of_type(hint) for name, hint in get_type_hints(kind).items()}
    scales = dict.fromkeys(fields.keys() & {"alpha", "scale", "before", "after"}, st.floats(1e-300, 1e300))
    return st.builds(kind, **{**fields, **scales})


KINDS = [LayerRow, *(kind for kind in METHODS if kind not in (Event, LayerScaled))]
rows = st.lists(st.one_of(*map(of_kind, KINDS)), max_size=6)


def scale(iteration: int, after: float = 2.0) -> ScaleChanged:
    return ScaleChanged(iteration, 1.0, after)


def write(path: Path, rows: List[Event]) -> None:
    file = RowFile(path)
    for row in rows:
        file.append_row(row)
    file.close()


@given(rows)
def test_every_row_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: List[Event]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "appended", rows)
    write_rows(folder / "written", rows)
    # Their representation, for NaN is not itself.
    assert repr(read_rows(folder / "appended")) == repr(read_rows(folder / "written")) == repr(rows)
    assert (folder / "appended").read_bytes() == (folder / "written").read_bytes()
    assert b":null" not in (folder / "written").read_bytes()


@settings(max_examples=20)
@given(st.data())
def test_a_file_that_ends_anywhere_is_read_up_to_the_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("rows") / "run.jsonl"
    written: List[Event] = [scale(i) for i in range(5)]
    write(path, written)
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:length])
    whole = content[:length].count(b"\n")
    if whole:
        assert read_rows(path) == written[: whole - 1]
    # Whoever goes on takes away what was cut off.
    write(path, [scale(9)])
    assert read_rows(path) == [*written[: max(whole - 1, 0)], scale(9)]


def test_a_truncated_line_of_any_length_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    long = Overflowed(2, 0, "overflow", ("layer",) * 2**18, "", 8.0)
    write(path, [scale(1), long])
    os.truncate(path, path.stat().st_size - 1)
    write(path, [scale(2)])
    assert read_rows(path) == [scale(1), scale(2)]


def test_rows_repeated_after_a_crash_appear_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [scale(i) for i in range(1, 8)])
    write(path, [])  # killed before anything happened
    write(path, [scale(i, after=4.0) for i in range(5, 10)])
    assert read_rows(path) == [scale(i) for i in range(1, 5)] + [scale(i, 4.0) for i in range(5, 10)]


@pytest.mark.parametrize("content", [b"loss,scale\n1,2\n", b"{}\n", b"no line at all", b"\x89PNG\r\n\x1a\n"])
@pytest.mark.parametrize("opened", [RowFile, read_rows])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes, opened: Any) -> None:
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"results.csv is not a recording of nnabla_adaloss"):
        opened(path)
    assert path.read_bytes() == content


def test_files_that_others_may_write_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # which one would wait for
    with pytest.raises(ValueError, match=r"fifo is a FIFO: give the path of a file"):
        RowFile(tmp_path / "fifo")
    first = RowFile(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match=r"run.jsonl' is open in another recorder"):
        RowFile(tmp_path / "run.jsonl")
    first.append_row(scale(1))
    first.close()
    write(tmp_path / "run.jsonl", [scale(2)])
    assert read_rows(tmp_path / "run.jsonl") == [scale(1), scale(2)]


def test_a_file_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [scale(1)])
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":9'))
    with pytest.raises(ValueError, match=r"has version 9 of the format"):
        read_rows(path)


class ListsMeasured(NamedTuple):
    """An event with containers of numbers."""

    iteration: int
    bits: Tuple[int, ...]
    losses: Dict[str, float]
    why: Optional[Tuple[str, ...]] = None


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"bits": (1, 2), "losses": {"a": 0.5}, "why": ("x",)}, {"bits": (1, "2"), "losses": {}}),
        ({"bits": (), "losses": {}}, {"bits": (1,), "losses": {"a": "0.5"}}),
    ],
)
def test_fields_of_events_may_be_tuples_and_dicts_of_numbers(good: Any, bad: Any) -> None:
    hints = get_type_hints(ListsMeasured)
    checks = {name: row_file._check(name, hint) for name, hint in hints.items()}

    def is_valid(fields: Any) -> bool:
        read = json.loads(json.dumps(fields))
        return all(checks[name](value) for name, value in read.items())

    assert is_valid(good)
    assert not is_valid(bad)
    with pytest.raises(TypeError, match="field when is a .*, which files of rows cannot hold"):
        row_file._check("when", bytes)
