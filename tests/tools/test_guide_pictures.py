# SPDX-License-Identifier: Apache-2.0
"""Pages as a browser shows them, and what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tools import guide_pictures
from tools.guide_pictures import main
from tools.report_pictures import BROWSERS

HEAD = '<!DOCTYPE html><meta name="viewport" content="width=device-width"><body style="margin:0">'


def test_a_page_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guide_pictures, "GUIDE", tmp_path)
    with pytest.raises(SystemExit):
        main(["nowhere", "--output", str(tmp_path / "pictures")])
    assert "nowhere.html is not there: run `make docs`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs a Chromium")
def test_pages_are_photographed_whole_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guide_pictures, "GUIDE", tmp_path)
    sheet = '<div style="height:3000px;background:#123456">all</div>'
    (tmp_path / "good.html").write_text(f"{HEAD}{sheet}", "utf-8")
    (tmp_path / "bad.html").write_text(
        f'{HEAD}<div style="width:700px">wide</div><img src="gone.png">', "utf-8"
    )
    pictures = tmp_path / "pictures"
    assert main(["good", "--output", str(pictures)]) == 0
    phone = Image.open(pictures / "good_phone.png")
    assert phone.size == (390, 3000)
    assert phone.getpixel((389, 2900)) == (0x12, 0x34, 0x56)
    assert sorted(path.name for path in pictures.iterdir()) == ["good_desktop.png", "good_phone.png"]
    assert Image.open(pictures / "good_desktop.png").size == (1400, 3000)
    capsys.readouterr()
    assert main(["bad", "--output", str(pictures)]) == 1
    on_desktop, on_phone = capsys.readouterr().out.splitlines()
    assert "gone.png is missing" in on_desktop
    assert "pixels wide" not in on_desktop
    assert "it is 700 pixels wide, of 390" in on_phone
