# SPDX-License-Identifier: Apache-2.0
"""The picture of gradients beside the range of float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.draw_ranges import EXPONENTS, Spread, lost, main


def test_what_float16_makes_zero() -> None:
    shares = np.zeros(len(EXPONENTS))
    for exponent in (-26, -25, -10, 3):
        shares[EXPONENTS.index(exponent)] = 0.25
    assert lost(Spread(shares, 0), scaled=True) == 0.25, (
        "what is above half the smallest number is rounded to it"
    )
    assert lost(Spread(shares, 1), scaled=False) == 0.5
    assert lost(Spread(shares, 1), scaled=True) == 0.25


@pytest.mark.slow
def test_the_picture_shows_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--output", str(tmp_path / "ranges.png")])
    assert Image.open(tmp_path / "ranges.png").size == (1080, 504)
    *layers, _ = capsys.readouterr().out.splitlines()
    assert len(layers) == 7
    for line in layers:
        assert float(line.split(": ")[1].split("%")[0]) > 97.0
        assert line.endswith("lost, with 2^36 0.0%")
