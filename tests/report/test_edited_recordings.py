# SPDX-License-Identifier: Apache-2.0
"""Whatever was done to a recording, the command makes a page of it, or says in one sentence what is wrong."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import Recorder, Recording
from nnabla_adaloss.__main__ import main
from tests.worlds.trainings import training, watched
from tests.worlds.warned import warned


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording with rows of all kinds."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    with Recorder(path, histograms=True, data=True) as recorder, warned():
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
LINES = [b"[" * 100000, b'{"event":' * 50000, b'{"event":"scale"}', b"\xff\xfe", b"\0"]


def edited(content: bytes, kind: str, at: int, other: int, noise: bytes) -> bytes:
    """What somebody, or a disk, does to a file."""
    lines = content.splitlines(keepends=True) or [b""]
    if kind == "moved":
        lines.insert(other % len(lines), lines.pop(at % len(lines)))
    elif kind == "line":
        lines.insert(at % len(lines), LINES[other % len(LINES)] + b"\n")
    whole = b"".join(lines)
    place = at % (len(whole) + 1)
    if kind == "bytes":
        return whole[:place] + noise + whole[place + len(noise) :]
    return whole[:place] if kind == "cut" else whole


PLACES = st.integers(0, 10**6)
EDITS = st.tuples(
    st.sampled_from(["moved", "line", "bytes", "cut"]), PLACES, PLACES, st.binary(min_size=1, max_size=8)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EDITS, min_size=1, max_size=3), st.booleans())
def test_an_edited_recording_is_answered(
    recorded: bytes, tmp_path_factory: pytest.TempPathFactory, edits: List[Any], compared: bool
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    content = recorded
    for edit in edits:
        content = edited(content, *edit)
    (folder / "run.jsonl").write_bytes(content)
    (folder / "whole.jsonl").write_bytes(recorded)
    assert_answered(folder / "run.jsonl", *([str(folder / "whole.jsonl")] if compared else []))


@pytest.mark.slow
@pytest.mark.gate
def test_each_field_may_hold_anything_or_be_gone(recorded: bytes, tmp_path: Path) -> None:
    header, *rows = recorded.splitlines(keepends=True)
    one_of_each = list({json.loads(row)["event"]: row for row in rows}.values())
    refused, answered = [], 0
    for index, line in enumerate(one_of_each):
        row = json.loads(line)
        changes = [{**row, key: value} for key, value in product(row, ODD)]
        changes += [{name: row[name] for name in row if name != gone} for gone in row]
        for changed in changes:
            lines = [header, *one_of_each[:index], json.dumps(changed).encode() + b"\n"]
            (tmp_path / "run.jsonl").write_bytes(b"".join([*lines, *one_of_each[index + 1 :]]))
            try:
                Recording.load(tmp_path / "run.jsonl")
            except ValueError as error:
                refused.append((f"run.jsonl is damaged in line {index + 2}: ", str(error)))
            else:
                assert_answered(tmp_path / "run.jsonl")
                answered += 1
    assert all(where in message for where, message in refused)
    assert len(refused) > answered > 100


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_a_page_never_replaces_its_recording(recorded: bytes, link: Any, tmp_path: Path) -> None:
    run, other, page = tmp_path / "run.jsonl", tmp_path / "other.jsonl", tmp_path / "page.html"
    run.write_bytes(recorded)
    other.write_bytes(recorded)
    if link is None:
        run = run.rename(page)
    else:
        link(run, page)
    code, _, err = told(str(other), str(run), "-o", str(page))
    assert code == 1
    assert "is not an HTML page and is not replaced: choose another name" in err
    assert run.read_bytes() == recorded


def test_an_older_page_is_replaced(recorded: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(recorded)
    (tmp_path / "run.html").touch()
    for _ in range(2):
        assert told(str(tmp_path / "run.jsonl"))[0] == 0
        assert "Underflow" in (tmp_path / "run.html").read_text("utf-8")
