# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Dict, Sequence

import pytest

from nnabla_adaloss.core.formats import get_format
from nnabla_adaloss.diagnosis import Cause, Kept, LayerNumbers, NetworkNumbers, Way
from nnabla_adaloss.diagnosis.verdicts import judge, power, serves

GOOD, LOST, OVERFLOWS = Kept(0.0, 0.0, 0.001), Kept(0.9, 0.0, 0.8), Kept(0.0, 0.3, math.inf)


def layer(name: str, amax: float = 1e-3, floor: float = 0.001, **kept: Kept) -> LayerNumbers:
    found: Dict[Way, Kept] = {way: kept.get(way.name.lower(), GOOD) for way in Way}
    return LayerNumbers(name, "Affine", amax, 100, floor, found, get_format("float16"))


def network(*layers: LayerNumbers, causes: Sequence[Cause] = ()) -> NetworkNumbers:
    scales = {Way.NONE: 1.0, Way.CONSTANT: 65536.0, Way.ONE: 2048.0}
    formats = {"float16": {one.name: one.kept for one in layers}, "bfloat16": {"a": dict.fromkeys(Way, GOOD)}}
    return NetworkNumbers("float16", 4, 1.0, 1.0, scales, layers, causes, formats, [])


COARSE = {way.name.lower(): Kept(0.0, 0.0, 0.7) for way in Way}
ALL = {way.name.lower(): LOST for way in Way}


@pytest.mark.parametrize(
    ("layers", "needs", "line"),
    [
        ([layer("a")], Way.NONE, "float16 needs no scaling here."),
        ([layer("a", constant=OVERFLOWS)], Way.NONE, "has no room for 65536, which overflows in a."),
        (
            [layer("a", none=LOST), layer("b")],
            Way.CONSTANT,
            "A scale of 65536 works for all layers; without it, a loses 90% to underflow.",
        ),
        (
            [layer("a", none=LOST, constant=OVERFLOWS), layer("b", none=LOST)],
            Way.ONE,
            "One measured scale works for all layers, 2^11 now; without it, a loses 90% to underflow (and 1 "
            "more layer); with 65536, a loses 30% to overflow.",
        ),
        (
            [
                layer("a", 2.0**-16, none=LOST, constant=LOST, one=LOST),
                layer("b", 2.0**-2, constant=OVERFLOWS),
            ],
            Way.ADAPTIVE,
            "Layers a and b need scales 2^14 apart: use AdaptiveLossScalingUpdater",
        ),
        (
            [layer("a", none=LOST, constant=LOST, one=LOST)],
            Way.ADAPTIVE,
            "No single scale works for layer a: use AdaptiveLossScalingUpdater at its defaults.",
        ),
        ([layer("a", **ALL)], None, "No scaling keeps all gradients in float16: a loses 90%"),
        ([layer("a", **ALL)], None, "Use bfloat16 without scaling."),
        (
            [layer("a", **COARSE)],
            None,
            "Scaling does not help: a has an error of 70%, as float16 is coarse.",
        ),
        (
            [
                layer("lost", **{**COARSE, "none": Kept(0.9, 0.0, 0.7)}),
                layer("worse", **{**COARSE, "none": Kept(0.0, 0.0, 0.9)}),
                layer("beyond", **{**COARSE, "none": OVERFLOWS}),
                layer("same", **COARSE),
            ],
            None,
            "Scaling helps 3 of 4 layers, but not enough: lost has an error of 70%, as float16 is coarse",
        ),
        (
            [layer("a", **{way.name.lower(): Kept(0.0, 0.0, 0.3) for way in Way})],
            Way.NONE,
            "In any case a has an error of 30%: float16 is coarse.",
        ),
    ],
)
def test_the_least_that_serves_is_said(layers: Sequence[LayerNumbers], needs: Way, line: str) -> None:
    verdict = judge(network(*layers))
    assert verdict.needs is needs
    assert line in verdict.line


def test_what_stops_all_learning_comes_first_and_what_does_not_comes_after_the_scale() -> None:
    partly = Cause("saturated", "a/Tanh", "it is flat", "mend it", fatal=False)
    verdict = judge(network(layer("a"), causes=[partly]))
    assert (verdict.needs, verdict.line) == (
        Way.NONE,
        "float16 needs no scaling here. But a/Tanh: it is flat. Mend it.",
    )
    verdict = judge(network(layer("a"), causes=[partly, partly._replace(fatal=True, function="b/Tanh")]))
    assert (verdict.needs, verdict.line) == (None, "No loss scale helps. b/Tanh: it is flat. Mend it.")


def test_what_spoils_one_layer_is_no_reason_to_say_nothing_of_the_others() -> None:
    spoils = Cause("underflow", "b/Mul2", "it computes zeros", "mend it", fatal=False, spoils=("b",))
    verdict = judge(network(layer("a", none=LOST), layer("b", floor=0.9, **ALL), causes=[spoils]))
    assert (verdict.needs, verdict.line) == (
        Way.CONSTANT,
        "A scale of 65536 works for all layers but b; without it, a loses 90% to underflow. But b/Mul2: it "
        "computes zeros. Mend it.",
    )


def test_without_any_gradient_nothing_is_said_of_scaling() -> None:
    verdict = judge(network(layer("a")._replace(nonzero=0))._replace(loss=0.0))
    assert (verdict.needs, verdict.line[:47]) == (None, "Nothing can be said: no layer gets a gradient, ")


def test_every_layer_has_a_line() -> None:
    verdict = judge(
        network(
            layer("sound", none=Kept(0.3, 0.0, 0.01)),
            layer("lost", none=LOST),
            layer("own", none=LOST, constant=LOST, one=LOST),
        )
    )
    assert [judged.line for judged in verdict.layers] == [
        "needs no scaling; losing 30% does no harm",
        "needs scaling; without, it loses 90% to underflow; 65536 works",
        "needs a scale of its own; without, it loses 90% to underflow",
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
    assert serves({**dict.fromkeys(Way, Kept(0.0, 0.0, 0.2)), Way.NONE: kept}, Way.NONE) is serve


def test_powers_are_written_as_one_writes_them() -> None:
    assert [power(2.0**k) for k in (0, 3, 5, 16, -3)] == ["1", "8", "2^5", "65536", "2^-3"]


def test_a_gradient_that_is_nan_is_called_so() -> None:
    nan = Kept(0.0, 0.0, math.inf)
    verdict = judge(network(layer("a", floor=math.inf, **{way.name.lower(): nan for way in Way})))
    assert verdict.layers[0].line.startswith("gets NaN with any scale")
    assert verdict.needs is None
    assert "%" not in verdict.layers[0].line


def test_what_cancels_is_no_underflow() -> None:
    cancels = layer("a", **ALL)._replace(cancels=dict.fromkeys(Way, "b/Tanh"))
    verdict = judge(network(cancels, layer("b")))
    assert (
        "a loses 90% at b/Tanh, where gradients that are added cancel, as float16 is coarse" in verdict.line
    )
    assert "underflow" not in verdict.line + verdict.layers[0].line


def test_layers_that_are_lost_for_a_known_reason_are_left_to_it() -> None:
    flat = Cause("saturated", "a/Softmax", "it is flat", "mend it", fatal=False, spoils=("a", "b"))
    verdict = judge(network(layer("a", floor=0.9, **ALL), layer("b"), layer("c"), causes=[flat]))
    assert (verdict.needs, verdict.line) == (
        Way.NONE,
        "float16 needs no scaling here for all layers but a. But a/Softmax: it is flat. Mend it.",
    )
    assert [one.line.endswith("; see a/Softmax") for one in verdict.layers] == [True, True, False]
