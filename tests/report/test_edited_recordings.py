# SPDX-License-Identifier: Apache-2.0
"""Whatever was done to a recording, the command makes a page of it, or says in one sentence what is wrong."""

from __future__ import annotations

import io
import json
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import Recorder, Recording
from nnabla_adaloss.__main__ import main
from tests.worlds.trainings import training, watched


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording with rows of all kinds."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    with Recorder(path, histograms=True, data=True) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched([recorder], 6, training(overflow=[3], nan=[5]), on_nonfinite_loss="skip")
    assert len({type(row) for row in recorder.recording.rows}) >= 6
    return path.read_bytes()


def told(*arguments: str) -> Tuple[int, str, str]:
    """What the command `report` returns and prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["report", *arguments])
    return code, out.getvalue(), err.getvalue()


def assert_answered(path: Path, *others: str) -> None:
    """A page, or one sentence, and nothing else."""
    before, page = path.read_bytes(), path.with_name("page.html")
    page.unlink(missing_ok=True)
    code, out, err = told(str(path), *others, "-o", str(page))
    assert path.read_bytes() == before
    if code == 0:
        assert (out.count("\n"), err) == (1, "")
        assert page.read_text("utf-8").endswith("</html>\n")
    else:
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("report: ")
        assert not page.exists()


ODD: List[Any] = [
    *(0, -1, 1, 2.5, 2**62, 2**63, 10**30, 10**400, 1e300, 1e-300, 5e-324, -8.0, 0.0, -0.0),
    *(float("nan"), float("inf"), -float("inf"), None, True, False, "", "x", "\ud800", "<script>", "\0"),
    *([], {}, [1], [-3, 1], ["a"], [[]], {"a": 1}, {"a": "b"}, {"": []}),
]


@st.composite
def edits(draw: st.DrawFn) -> Callable[[List[bytes]], bytes]:
    """What somebody, or a disk, does to a file: a function of its lines."""
    kind = draw(st.sampled_from(["field", "field", "field", "gone", "moved", "bytes", "cut", "line"]))
    at, other, name = (draw(st.integers(0, 10**6)) for _ in range(3))
    value, noise = draw(st.sampled_from(ODD)), draw(st.binary(min_size=1, max_size=8))
    deep = draw(
        st.sampled_from([b"[" * 100000, b'{"event":' * 50000, b'{"event":"scale"}', b"\xff\xfe", b"\0"])
    )

    def edited(lines: List[bytes]) -> bytes:
        lines, index = list(lines), at % len(lines)
        row: Dict[str, Any] = json.loads(lines[index])
        key = sorted(row)[name % len(row)]
        if kind == "field":
            row[key] = value
        elif kind == "gone":
            del row[key]
        if kind in ("field", "gone"):
            lines[index] = json.dumps(row).encode() + b"\n"
        elif kind == "moved":
            lines.insert(other % len(lines), lines.pop(index))
        elif kind == "line":
            lines.insert(index, deep + b"\n")
        whole = b"".join(lines)
        place = at % len(whole)
        if kind == "bytes":
            return whole[:place] + noise + whole[place + len(noise) :]
        return whole[:place] if kind == "cut" else whole

    return edited


@settings(max_examples=40, deadline=None)
@given(st.lists(edits(), min_size=1, max_size=3), st.booleans())
def test_an_edited_recording_is_answered(
    recorded: bytes,
    tmp_path_factory: pytest.TempPathFactory,
    edits: List[Callable[[List[bytes]], bytes]],
    compared: bool,
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    content = recorded
    for edit in edits:
        try:
            content = edit(content.splitlines(keepends=True))
        except (ValueError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
            break  # nothing is left that could be edited
    (folder / "run.jsonl").write_bytes(content)
    (folder / "whole.jsonl").write_bytes(recorded)
    assert_answered(folder / "run.jsonl", *([str(folder / "whole.jsonl")] if compared else []))


@pytest.mark.slow
@pytest.mark.gate
def test_each_field_may_hold_anything(recorded: bytes, tmp_path: Path) -> None:
    header, *rows = recorded.splitlines(keepends=True)
    one_of_each = list({json.loads(row)["event"]: row for row in rows}.values())
    refused, answered = [], 0
    for index, line in enumerate(one_of_each):
        row = json.loads(line)
        for key, value in product(row, ODD):
            changed = json.dumps({**row, key: value}).encode() + b"\n"
            lines = [header, *one_of_each[:index], changed, *one_of_each[index + 1 :]]
            (tmp_path / "run.jsonl").write_bytes(b"".join(lines))
            try:
                Recording.load(tmp_path / "run.jsonl")
            except ValueError as error:
                refused.append((f"run.jsonl is damaged in line {index + 2}: ", str(error)))
            else:
                assert_answered(tmp_path / "run.jsonl")
                answered += 1
    assert all(where in message for where, message in refused)
    assert len(refused) > answered > 100


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 100, b'{"kind":"nnabla_adaloss recording"}\n'])
def test_what_is_no_recording(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    assert_answered(tmp_path / "run.jsonl")


NAMES: Dict[str, Callable[[Path], Path]] = {
    "itself": lambda run: run,
    "another spelling": lambda run: run.parent / ".." / run.parent.name / run.name,
    "a link": lambda run: linked(run, os.symlink),
    "a hard link": lambda run: linked(run, os.link),
}


def linked(run: Path, link: Callable[[Path, Path], None]) -> Path:
    link(run, run.with_name("link"))
    return run.with_name("link")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("second", [True, False])
def test_a_page_never_replaces_what_it_is_made_from(
    recorded: bytes, name: str, second: bool, tmp_path: Path
) -> None:
    run, other = tmp_path / "run.jsonl", tmp_path / "other.jsonl"
    run.write_bytes(recorded)
    other.write_bytes(recorded)
    code, _, err = told(*map(str, [other, run] if second else [run]), "-o", str(NAMES[name](run)))
    assert code == 1
    assert "is no HTML page, and is not replaced: choose another name for the page" in err
    assert run.read_bytes() == recorded


def test_a_recording_whose_name_is_that_of_its_page(recorded: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.html").write_bytes(recorded)
    assert told(str(tmp_path / "run.html"))[0] == 1
    assert (tmp_path / "run.html").read_bytes() == recorded


def test_an_older_page_is_replaced(recorded: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(recorded)
    (tmp_path / "empty.html").touch()
    for name in ("run.html", "run.html", "empty.html"):
        assert told(str(tmp_path / "run.jsonl"), "-o", str(tmp_path / name))[0] == 0
        assert "Underflow" in (tmp_path / name).read_text("utf-8")
