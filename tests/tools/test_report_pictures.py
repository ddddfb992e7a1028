# SPDX-License-Identifier: Apache-2.0
"""The pictures of a recorded training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from nnabla_adaloss import Recording
from tools.report_pictures import BROWSERS, main, make_small, photograph, record


def test_without_a_browser_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no browser: none of chromium, .* is installed .*apt install"):
        main(["--output", str(tmp_path / "pictures")])
    assert not (tmp_path / "pictures").exists()


def test_the_empty_end_is_cut_away(tmp_path: Path) -> None:
    picture = Image.new("RGB", (50, 400), "#ffffff")
    picture.putpixel((10, 99), (200, 0, 0))
    picture.save(tmp_path / "picture.png")
    make_small(tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").size == (50, 124)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_the_training_has_the_troubles_that_the_page_shows(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl")
    recording = Recording.load(tmp_path / "run.jsonl")
    assert {found.layer for found in recording.underflows(above=0.5)} == {"join/affine", "conv2/conv"}
    assert recording.lost_batches() == {"nonfinite_loss": 3}


@pytest.mark.slow
@pytest.mark.skipif(
    not (any(map(shutil.which, BROWSERS)) and shutil.which("pdftoppm")), reason="needs a browser and pdftoppm"
)
def test_a_page_is_photographed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!DOCTYPE html><title>page</title><h1>Hello</h1>")
    made = photograph(tmp_path / "page.html", tmp_path)
    assert [path.name for path in made] == ["report_desktop.png", "report_phone.png", "report_print.png"]
    assert [Image.open(path).width for path in made[:2]] == [1280, 390]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", *(path.name for path in made)]
