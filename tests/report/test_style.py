# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from nnabla_adaloss.report.style import strip, viridis


def test_it_is_viridis() -> None:
    from matplotlib import colormaps

    for value in np.linspace(0.0, 1.0, 101):
        expected = np.array(colormaps["viridis"](value)[:3]) * 255
        assert np.abs(np.array(viridis(value)) - expected).max() < 6.0  # it is straight between 17 places


def test_light_rises_evenly() -> None:
    light = [np.dot(viridis(v), (0.2126, 0.7152, 0.0722)) for v in np.linspace(0.0, 1.0, 65)]
    assert (np.diff(light) > 0).all()


@pytest.mark.parametrize(("value", "end"), [(-1.0, 0.0), (2.0, 1.0)])
def test_beyond_the_ends(value: float, end: float) -> None:
    assert viridis(value) == viridis(end)


def test_a_strip_is_a_picture() -> None:
    kind, _, content = strip([0.0, None, 1.0]).partition(",")
    assert kind == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    assert picture.size == (3, 1)
    assert [picture.getpixel((x, 0)) for x in range(3)] == [
        (*viridis(0.0), 255),
        (0, 0, 0, 0),
        (*viridis(1.0), 255),
    ]
