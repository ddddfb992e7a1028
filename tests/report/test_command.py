# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from nnabla_adaloss import Recorder, Recording, UpdateEnded
from nnabla_adaloss.__main__ import main


def recording(folder: Path) -> Path:
    rows = [UpdateEnded(i, True, "updated", 8.0, 0, 1 / i) for i in range(1, 5)]
    Recording(rows).to_json_lines(folder / "run.jsonl")
    return folder / "run.jsonl"


def test_a_page_beside_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(recording(tmp_path))]) == 0
    page = (tmp_path / "run.html").read_text("utf-8")
    assert "<h1>run.jsonl</h1>" in page
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'run.html'} (")


def test_another_name_and_title(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert main(["report", str(recording(tmp_path)), "-o", str(output), "--title", "LeNet"]) == 0
    assert "<h1>LeNet</h1>" in output.read_text("utf-8")
    assert not (tmp_path / "run.html").exists()


def test_what_cannot_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    Recorder(path=tmp_path / "empty.jsonl").close()
    for name, message in (
        ("nothing.jsonl", "No such file or directory"),
        ("notes.txt", "notes.txt is not a recording of nnabla_adaloss"),
        ("empty.jsonl", "nothing was recorded"),
    ):
        assert main(["report", str(tmp_path / name)]) == 1
        told = capsys.readouterr().err
        assert told.startswith("report: ")
        assert message in told
    assert not list(tmp_path.glob("*.html"))


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert 'Recorder(path="run.jsonl", every=10)' in told
    assert "python -m nnabla_adaloss report run.jsonl -o page.html" in told
