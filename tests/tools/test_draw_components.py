# SPDX-License-Identifier: Apache-2.0
"""The picture of components and their scales."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image

from tools.draw_components import figure_of, main, read, train


def test_the_picture_shows_the_scales_of_the_engine() -> None:
    engine = train()
    schedule, amaxes = engine.result.schedule, engine.components.amaxes()
    flow, _ = figure_of(*read(engine)).axes
    shown = [text.get_text() for text in flow.texts]
    scales = dict(zip(schedule.components.names, schedule.component_scales))
    assert len(scales) == 5, "two of single elements at the loss, and one between two layers each"
    for name, scale in scales.items():
        amax = math.log2(amaxes[name]) if name in amaxes else 0.0
        values = f"amax = $2^{{{amax:.1f}}}$    S = $2^{{{math.log2(scale):.0f}}}$".replace(".0}", "}")
        assert shown[shown.index(name) + 1] == values
        assert 2**12 < 2.0**amax * scale < 65504
    assert set(schedule.layers) == {"last/affine", "hidden/affine", "residual/affine"}
    for layer, (_, alpha) in schedule.layers.items():
        assert f"{layer}:  alpha = $2^{{{math.log2(alpha):.0f}}}$" in shown
    assert shown.count("skip") == 1
    assert sum(label.startswith("loss section") for label in shown) == 2
    assert len({*schedule.layers.values()}) == 3, "a picture of equal alphas shows little"


def test_it_is_a_file_for_the_page(tmp_path: Path) -> None:
    main(["--output", str(tmp_path / "new" / "components.png")])
    assert Image.open(tmp_path / "new" / "components.png").width == 960
