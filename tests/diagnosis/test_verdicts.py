# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Dict, Sequence

import pytest

from nnabla_adaloss.core.formats import get_format
from nnabla_adaloss.diagnosis.numbers import Kept, LayerNumbers, NetworkNumbers, Way
from nnabla_adaloss.diagnosis.verdicts import judge, power, serves

GOOD, LOST, OVERFLOWS = Kept(0.0, 0.0, 0.001), Kept(0.9, 0.0, 0.8), Kept(0.0, 0.3, math.inf)


def layer(name: str, amax: float = 1e-3, floor: float = 0.001, **kept: Kept) -> LayerNumbers:
    found: Dict[Way, Kept] = {way: kept.get(way.value, GOOD) for way in Way}
    return LayerNumbers(name, "Affine", amax, 100, floor, found, get_format("float16"))


def network(*layers: LayerNumbers) -> NetworkNumbers:
    scales = {Way.NONE: 1.0, Way.START: 8.0, Way.ONE: 2048.0, Way.END: 8192.0}
    return NetworkNumbers("float16", 4, 1.0, 1.0, scales, layers, [])


@pytest.mark.parametrize(
    ("layers", "needs", "line"),
    [
        ([layer("a")], Way.NONE, "float16 needs no scaling here."),
        ([layer("a", start=OVERFLOWS)], Way.NONE, "has no room for it: 8 overflows in a."),
        ([layer("a", none=LOST), layer("b")], Way.START, "One scale of 8 works for all layers"),
        (
            [layer("a", none=LOST, start=LOST), layer("b", none=LOST)],
            Way.ONE,
            "One scale of 2^11 works for all layers; 8, where nnabla's updater starts, fails for 1 of 2",
        ),
        (
            [layer("a", none=LOST, start=LOST, one=LOST)],
            Way.END,
            "One scale of 2^13 works for all layers",
        ),
        (
            [
                layer("a", 2.0**-16, none=LOST, start=LOST, one=LOST, end=LOST),
                layer("b", 2.0**-2, end=OVERFLOWS),
            ],
            Way.ADAPTIVE,
            "Layers a and b need scales 2^14 apart: use AdaptiveLossScalingUpdater",
        ),
        (
            [layer("a", none=LOST, start=LOST, one=LOST, end=LOST)],
            Way.ADAPTIVE,
            "No single scale works for layer a: use AdaptiveLossScalingUpdater at its defaults.",
        ),
        ([layer("a", **{way.value: LOST for way in Way}, floor=0.1)], None, "No scaling keeps all"),
    ],
)
def test_the_least_that_serves_is_said(layers: Sequence[LayerNumbers], needs: Way, line: str) -> None:
    verdict = judge(network(*layers))
    assert verdict.needs is needs
    assert line in verdict.line


def test_every_layer_has_a_line() -> None:
    verdict = judge(
        network(
            layer("sound", none=Kept(0.3, 0.0, 0.01)),
            layer("lost", none=LOST),
            layer("own", none=LOST, start=LOST, one=LOST, end=LOST),
        )
    )
    assert [judged.line for judged in verdict.layers] == [
        "needs no scaling; losing 30% does no harm",
        "needs scaling (90% lost without); 8 works",
        "needs a scale of its own (90% lost without)",
    ]


def test_the_right_scale_leaves_two_bits() -> None:
    (judged,) = judge(network(layer("a", 1.0))).layers
    assert judged.right_scale == 2.0**13
    (judged,) = judge(network(layer("a", 0.0))).layers
    assert judged.right_scale is None


@pytest.mark.parametrize(
    ("kept", "serve"),
    [
        (Kept(0.9, 0.0, 0.04), True),  # what is lost is too small to matter
        (Kept(0.0, 0.0, 0.2), True),  # as good as it gets in so narrow a format
        (Kept(0.0, 0.0, 0.3), False),
        (Kept(0.6, 0.0, 0.2), False),
        (Kept(0.0, 1e-6, 0.0), False),
        (Kept(0.0, 0.0, math.inf), False),
    ],
)
def test_what_serves(kept: Kept, serve: bool) -> None:
    others = {way.value: Kept(0.0, 0.0, 0.2) for way in Way}
    assert serves(layer("a", **{**others, "none": kept}), Way.NONE) is serve


def test_powers_are_written_as_one_writes_them() -> None:
    assert [power(2.0**k) for k in (0, 3, 5, 14, -3)] == ["1", "8", "2^5", "2^14", "2^-3"]
