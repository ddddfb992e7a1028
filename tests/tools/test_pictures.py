# SPDX-License-Identifier: Apache-2.0
"""Pictures for the documentation: of components, of ranges, and of pages in a browser."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nnabla_adaloss import Recording
from tools import draw_components, draw_ranges, guide_pictures, report_pictures
from tools.draw_ranges import EXPONENTS, Spread, lost

BROWSER = any(map(shutil.which, report_pictures.BROWSERS))
HEAD = '<!DOCTYPE html><meta name="viewport" content="width=device-width"><body style="margin:0">'


def test_components_are_drawn_with_the_scales_of_the_engine(tmp_path: Path) -> None:
    engine = draw_components.train()
    schedule, amaxes = engine.result.schedule, draw_components.amaxes(engine)
    boxes, arrows = draw_components.read(engine)
    flow, _ = draw_components.figure_of(boxes, arrows).axes
    shown = [text.get_text() for text in flow.texts]
    scales = dict(zip(schedule.components.names, schedule.component_scales))
    titles = {box.name: draw_components.title(box) for box in boxes}
    assert [title for title in titles.values() if "/" not in title] == ["loss weight", "Mean"]
    for name, scale in scales.items():
        amax = math.log2(amaxes[name]) if name in amaxes else 0.0
        values = f"amax = $2^{{{amax:.1f}}}$    S = $2^{{{math.log2(scale):.0f}}}$".replace(".0}", "}")
        assert shown[shown.index(titles[name]) + 1] == values
    assert len(schedule.layers) == 3
    for layer, (_, alpha) in schedule.layers.items():
        assert f"{layer}:  alpha = $2^{{{math.log2(alpha):.0f}}}$" in shown
    draw_components.main(["--output", str(tmp_path / "new" / "components.png")])
    assert Image.open(tmp_path / "new" / "components.png").width == 960


def test_numbers_that_float16_makes_zero() -> None:
    shares = np.zeros(len(EXPONENTS))
    for exponent in (-26, -25, -10, 3):
        shares[EXPONENTS.index(exponent)] = 0.25
    # What is above half the smallest number is rounded to it.
    assert lost(Spread(shares, 0), scaled=True) == 0.25
    assert lost(Spread(shares, 1), scaled=False) == 0.5
    assert lost(Spread(shares, 1), scaled=True) == 0.25


@pytest.mark.slow
def test_ranges_are_those_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_ranges.main(["--output", str(tmp_path / "ranges.png")])
    assert Image.open(tmp_path / "ranges.png").size == (1080, 504)
    *layers, _ = capsys.readouterr().out.splitlines()
    assert len(layers) == 7
    for line in layers:
        assert float(line.split(": ")[1].split("%")[0]) > 97.0
        assert line.endswith("lost, with 2^36 0.0%")


def test_a_missing_browser_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no browser: none of chromium, .* is installed .*apt install"):
        report_pictures.main(["--output", str(tmp_path / "pictures")])
    assert not (tmp_path / "pictures").exists()


def test_the_empty_end_is_cut_away(tmp_path: Path) -> None:
    picture = Image.new("RGB", (50, 400), "#ffffff")
    picture.putpixel((10, 99), (200, 0, 0))
    picture.save(tmp_path / "picture.png")
    report_pictures.make_small(tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").size == (50, 124)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_the_training_has_the_troubles_that_the_page_shows(tmp_path: Path) -> None:
    report_pictures.record(tmp_path / "run.jsonl")
    recording = Recording.load(tmp_path / "run.jsonl")
    assert {found.layer for found in recording.underflows(above=0.5)} == {"join/affine", "conv2/conv"}
    assert recording.lost_batches() == {"nonfinite_loss": 3}


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and shutil.which("pdftoppm")), reason="needs a browser and pdftoppm")
def test_a_page_of_a_recording_is_photographed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!DOCTYPE html><title>page</title><h1>Hello</h1>")
    made = report_pictures.photograph(tmp_path / "page.html", tmp_path)
    assert [path.name for path in made] == ["report_desktop.png", "report_phone.png", "report_print.png"]
    assert [Image.open(path).width for path in made[:2]] == [1280, 390]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", *(path.name for path in made)]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs a Chromium")
def test_pages_of_the_guide_are_photographed_whole_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guide_pictures, "GUIDE", tmp_path)
    sheet = '<div style="height:3000px;background:#123456">all</div>'
    wide = '<div style="width:700px">wide</div>'
    (tmp_path / "good.html").write_text(f"{HEAD}{sheet}", "utf-8")
    (tmp_path / "bad.html").write_text(f'{HEAD}{wide}<img src="gone.png">', "utf-8")
    pictures = tmp_path / "pictures"
    assert guide_pictures.main(["good", "--output", str(pictures)]) == 0
    phone = Image.open(pictures / "good_phone.png")
    assert phone.size == (390, 3000)
    assert phone.getpixel((389, 2900)) == (0x12, 0x34, 0x56)
    assert sorted(path.name for path in pictures.iterdir()) == ["good_desktop.png", "good_phone.png"]
    assert Image.open(pictures / "good_desktop.png").size == (1280, 3000)
    capsys.readouterr()
    assert guide_pictures.main(["bad", "--output", str(pictures)]) == 1
    on_desktop, on_phone = capsys.readouterr().out.splitlines()
    assert "gone.png is missing" in on_desktop
    assert "pixels wide" not in on_desktop
    assert "it is 700 pixels wide, of 390" in on_phone
