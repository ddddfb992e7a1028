# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from nnabla_adaloss import Recorder, Recording, UpdateEnded
from nnabla_adaloss.__main__ import main

from .parsed import Parsed


def recording(folder: Path, name: str = "run.jsonl") -> str:
    rows = [UpdateEnded(i, True, "updated", 8.0, 0, 1 / i) for i in range(1, 5)]
    (folder / name).parent.mkdir(exist_ok=True)
    Recording(rows).to_json_lines(folder / name)
    return str(folder / name)


def test_a_page_beside_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", recording(tmp_path)]) == 0
    page = tmp_path / "run.html"
    assert Parsed(page.read_text("utf-8")).texts("li")[0] == "run.jsonl"
    assert capsys.readouterr().out.startswith(f"wrote {page} (")
    page.unlink()
    other = tmp_path / "page.html"
    assert main(["report", recording(tmp_path), "-o", str(other), "--title", "LeNet"]) == 0
    assert "<h1>LeNet</h1>" in other.read_text("utf-8")
    assert not page.exists()


@pytest.mark.parametrize(
    ("second", "page", "heading"),
    [
        ("other.jsonl", "run_and_other.html", "run and other"),
        ("other/run.jsonl", "run_and_run.html", "{0}/run.jsonl and {0}/other/run.jsonl"),
        ("run.jsonl", "run_and_run.html", "{0}/run.jsonl and {0}/run.jsonl, again"),
    ],
)
def test_two_are_compared(second: str, page: str, heading: str, tmp_path: Path) -> None:
    assert main(["report", recording(tmp_path), recording(tmp_path, second)]) == 0
    assert f"<h1>{heading.format(tmp_path)}</h1>" in (tmp_path / page).read_text("utf-8")


def test_a_file_that_cannot_be_drawn_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    Recorder(path=tmp_path / "empty.jsonl").close()
    for name, code, message in (
        ("nothing.jsonl", 2, "report: there is no file"),
        ("notes.txt", 1, "notes.txt is not a recording of nnabla_adaloss"),
        ("empty.jsonl", 1, "report: nothing was recorded in"),
        ("/", 1, "Is a directory"),
    ):
        for others in ([], [recording(tmp_path)]):
            assert main(["report", *others, str(tmp_path / name)]) == code
            assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    assert 'Recorder("run.jsonl", every=10)' in capsys.readouterr().out
