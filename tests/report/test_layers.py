# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import pytest

from nnabla_adaloss import Recording
from nnabla_adaloss.report.layers import advice, layer_maps
from nnabla_adaloss.report.page import page_of
from nnabla_adaloss.report.pieces import Timeline, strip

from .parsed import Parsed
from .test_page import layer


def test_small_scales_are_dark_and_large_ones_light() -> None:
    scales = ((1, 2.0), (3, 64.0), (4, 2048.0))
    layers = {"a": [layer(i)._replace(alpha=alpha, scale=alpha**3) for i, alpha in scales]}
    accumulated, alphas, underflow = layer_maps(layers, Timeline(1, 4, 4))
    assert strip([0.0, None, 0.5, 1.0]) in alphas
    assert "a: 2¹¹ at the end, from 2 to 2¹¹" in alphas
    assert "<span>2</span><span>2⁶</span><span>2¹¹</span>" in alphas
    assert "<span>8</span><span>2¹⁸</span><span>2³³</span>" in accumulated
    place = 1.0 + math.log10(5 / 95) / 6.0
    assert strip([place, None, place, place]) in underflow


def test_colours_span_ten_bits_at_least() -> None:
    alike = {"a": [layer(1)._replace(alpha=4.0), layer(2)._replace(alpha=8.0)]}
    assert "<span>2⁻²</span><span>8</span><span>2⁸</span>" in layer_maps(alike, Timeline(1, 2, 2))[1]
    odd = {"a": [layer(1)._replace(alpha=1.0), layer(2)._replace(alpha=2.0**11)]}
    assert "<span>1</span><span>2⁶</span><span>2¹²</span>" in layer_maps(odd, Timeline(1, 2, 2))[1]


def test_layers_in_numbers() -> None:
    rows = [
        layer(1, nonfinite=3, weight_max=2.0, weight_subnormal=0.5, headroom=9.5),
        layer(2, underflowed=1, input_max=7.0, input_subnormal=0.25)._replace(scale=2.0, layer="fc"),
        layer(2, underflowed=15, zeros=20, headroom=2.5)._replace(scale=32.0),
    ]
    text = Parsed(page_of(Recording(rows), "run")).text
    assert "conv/conv 4 2⁵ 8 to 2⁵ method 15.8 % 15.8 % from 1 (100 %) 2 % 20 % 2.5 1 " in text
    assert "fc 4 2 2 to 2 method 1.1 % 1.1 % from 2 (100 %) 2 % 10 % 3.0 0 " in text
    assert "conv/conv 2 50 % – not counted fc – not counted 7 25 %" in text


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (("method", "accumulated bound", "held"), "accumulated bound"),
        (("held", "held"), "not recorded"),
    ],
)
def test_why_a_layer_has_its_scale_is_what_was_last_measured(reasons: Tuple[str, ...], shown: str) -> None:
    rows = [layer(i)._replace(reason=reason) for i, reason in enumerate(reasons)]
    assert f'<td data-head="why this alpha">{shown}</td>' in page_of(Recording(rows), "run")


@pytest.mark.parametrize(
    ("reason", "headroom", "said"),
    [
        ("scale bound", 9.0, "9 bits of headroom are unused. Raise AdaLossConfig(scale_upper_b"),
        ("accumulated bound", 9.0, "Raise AdaLossConfig(accum_upper_bound=...)."),
        ("method", 9.0, 'Try AdaLossConfig(loss_scale_method="amax_history")'),
        ("room", 9.0, "Other gradients share its scale and need that room: store gradients in a wider"),
        ("level", 9.0, "Other gradients share its scale"),
        ("meeting of branches", 9.0, "Other gradients share its scale"),
        ("weight range", 9.0, "The scaled copy of its weight would overflow: store weights in a wider"),
        ("method", 1.0, "no scale keeps both. Store gradients in a wider format, such as bfloat16."),
    ],
)
def test_advice_for_a_layer_that_is_mostly_subnormal(reason: str, headroom: float, said: str) -> None:
    row = layer(1, subnormals=87, headroom=headroom)._replace(reason=reason)
    found = advice([row]) or ""
    assert found.startswith("conv/conv: 96.7 % of the nonzero elements are subnormal")
    assert said in found
    assert found in Parsed(page_of(Recording([row]), "run")).text


@pytest.mark.parametrize(
    ("fields", "advised"),
    [
        ({"zeros": 50, "subnormals": 30}, True),  # of the others
        ({"subnormals": 44}, False),
        ({"zeros": 100, "subnormals": 0}, False),
        ({"subnormals": None}, False),
        ({"elements": None, "zeros": None, "subnormals": None}, False),
    ],
)
def test_advice_is_about_elements_that_are_not_zero(fields: Dict[str, Any], advised: bool) -> None:
    assert bool(advice([layer(1, **fields)])) == advised
