# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import io

import numpy as np
from matplotlib import colormaps
from PIL import Image

from nnabla_adaloss.report.style import strip, viridis


def test_it_is_viridis() -> None:
    values = np.linspace(0.0, 1.0, 101)
    found = np.array([viridis(value) for value in values])
    expected = np.array(colormaps["viridis"](values))[:, :3] * 255
    assert np.abs(found - expected).max() < 6.0  # it is straight between 17 places
    assert (np.diff(found @ (0.2126, 0.7152, 0.0722)) > 0).all()  # light rises evenly
    assert (viridis(-1.0), viridis(2.0)) == (viridis(0.0), viridis(1.0))


def test_a_strip_is_a_picture() -> None:
    kind, _, content = strip([0.0, None, 1.0]).partition(",")
    assert kind == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    assert picture.size == (3, 1)
    pixels = [picture.getpixel((x, 0)) for x in range(3)]
    assert pixels == [(*viridis(0.0), 255), (0, 0, 0, 0), (*viridis(1.0), 255)]
