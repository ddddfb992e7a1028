# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
from matplotlib import colormaps

from nnabla_adaloss.report.style import strip, viridis


def test_it_is_viridis() -> None:
    values = np.linspace(0.0, 1.0, 101)
    found = np.array([tuple(bytes.fromhex(viridis(value)[1:])) for value in values], float)
    expected = np.array(colormaps["viridis"](values))[:, :3] * 255
    assert np.abs(found - expected).max() < 6.0  # it is straight between 17 places
    assert (np.diff(found @ (0.2126, 0.7152, 0.0722)) > 0).all()  # light rises evenly


def test_colours_have_edges_and_neighbours_share_one() -> None:
    dark, light = viridis(0.0), viridis(1.0)
    assert strip([0.0, None, 1.0, 1.0]) == (
        f"linear-gradient(90deg,{dark} 0%,{dark} 25%,#0000 25%,#0000 50%,{light} 50%,{light} 100%)"
    )
