# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import pytest

from nnabla_adaloss import Reason, Recording
from nnabla_adaloss.report.layers import advice, scale_maps, underflow_map
from nnabla_adaloss.report.page import page_of
from nnabla_adaloss.report.pieces import Timeline, strip

from .parsed import Parsed
from .test_page import layer


def test_small_scales_are_dark_and_large_ones_light() -> None:
    scales = ((1, 2.0), (3, 64.0), (4, 2048.0))
    layers = {"a": [layer(i)._replace(alpha=alpha, scale=alpha**3) for i, alpha in scales]}
    accumulated, alphas = scale_maps(layers, Timeline(1, 4, 4))
    assert strip([0.0, None, 0.5, 1.0]) in alphas
    assert "a: 2^11 at the end, from 2 to 2^11" in alphas
    assert "<span>2</span><span>2^6</span><span>2^11</span>" in alphas
    assert "<span>8</span><span>2^18</span><span>2^33</span>" in accumulated
    place = 1.0 + math.log10(5 / 95) / 3.0
    assert strip([place, None, place, place]) in underflow_map(layers, Timeline(1, 4, 4))


def test_colours_span_ten_bits_at_least() -> None:
    alike = {"a": [layer(1)._replace(alpha=4.0), layer(2)._replace(alpha=8.0)]}
    assert "<span>2^-2</span><span>8</span><span>2^8</span>" in scale_maps(alike, Timeline(1, 2, 2))[1]
    odd = {"a": [layer(1)._replace(alpha=1.0), layer(2)._replace(alpha=2.0**11)]}
    assert "<span>1</span><span>2^6</span><span>2^12</span>" in scale_maps(odd, Timeline(1, 2, 2))[1]


def test_constant_scales_are_told_and_not_drawn() -> None:
    layers = {
        name: [layer(i)._replace(alpha=alpha) for i in (1, 2)] for name, alpha in zip("abc", (4.0, 1.0, 4.0))
    }
    page = Parsed(scale_maps(layers, Timeline(1, 2, 2))[1])
    assert page.definitions == {"4": "a, c", "1": "b"}
    assert "strip" not in [element.get("class") for element in page.of("div")]


@pytest.mark.parametrize(("lost", "drawn"), [(0, False), (1, False), (2, True)])
def test_underflow_that_harms_nothing_is_not_drawn(lost: int, drawn: bool) -> None:
    rows = [layer(i, elements=1000, zeros=lost, underflowed=lost) for i in (1, 2)]
    assert ("strip" in underflow_map({"a": rows}, Timeline(1, 2, 2))) == drawn


def test_layers_in_numbers() -> None:
    rows = [
        layer(1, nonfinite=3, weight_max=2.0, weight_subnormal=0.5, headroom=9.5),
        layer(2, underflowed=1, input_max=7.0, input_subnormal=0.25, loss_weight=2.0**-30)._replace(
            layer="fc"
        ),
        layer(2, underflowed=15, zeros=20, headroom=2.5, loss_weight=1.0)._replace(scale=32.0),
    ]
    page = Parsed(page_of(Recording(rows), "run"))
    head, *body = page.tables["The layers, from the loss backwards"]
    conv, fc = (dict(zip(head, row)) for row in body)
    assert conv == {
        "layer": "conv/conv",
        "alpha": "4",
        "why this alpha": "method",
        "S": "2^5 (8 to 2^5)",
        "loss weight": "1",
        "underflow": "15.8 %",
        "worst underflow": "15.8 %",
        "iterations above 1 %": "2 of 2, from 1 on",
        "subnormal": "2 %",
        "zero": "20 %",
        "headroom": "2.5",
        "not finite": "1",
    }
    assert (fc["S"], fc["loss weight"], fc["not finite"]) == ("8", "2^-30", "–")
    assert [
        row[1:] for row in page.tables["Weights and inputs of the layers, from the loss backwards"][1:]
    ] == [
        ["2", "50 %", "–", "not counted"],
        ["–", "not counted", "7", "25 %"],
    ]
    # What only others have takes no column.
    alone = Parsed(page_of(Recording(rows[:1]), "run")).tables["The layers, from the loss backwards"]
    assert "loss weight" not in alone[0]


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (("method", "accumulated bound", "held"), "accumulated bound"),
        (("held", "held"), "not recorded"),
    ],
)
def test_the_reason_of_a_layers_scale_is_that_of_its_last_choice(
    reasons: Tuple[str, ...], shown: str
) -> None:
    rows = [layer(i)._replace(reason=reason) for i, reason in enumerate(reasons)]
    page = page_of(Recording(rows), "run")
    assert f'<td data-head="why this alpha">{shown}</td>' in page
    assert shown in Parsed(page).definitions


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.HELD])
def test_every_reason_is_explained(reason: Reason) -> None:
    page = Parsed(page_of(Recording([layer(1)._replace(reason=reason.value)]), "run"))
    assert page.definitions[reason.value]
    assert {"alpha", "S", "headroom", "subnormal"} < page.definitions.keys()


@pytest.mark.parametrize(
    ("reason", "headroom", "said"),
    [
        ("scale bound", 9.0, "9 bits of headroom are unused. Raise AdaLossConfig(scale_upper_b"),
        ("accumulated bound", 9.0, "Raise AdaLossConfig(accum_upper_bound=...)."),
        ("method", 9.0, 'Try AdaLossConfig(loss_scale_method="amax_history")'),
        ("scale limit", 9.0, "Other gradients share its scale and need that headroom: store gradients in"),
        ("equalized", 9.0, "Other gradients share its scale"),
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
