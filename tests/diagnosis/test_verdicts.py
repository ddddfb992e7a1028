# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Dict, Optional, Sequence

import pytest

from nnabla_adaloss.core.formats import get_format
from nnabla_adaloss.diagnosis import Cause, LayerNumbers, NetworkNumbers, StorageEffect, Way
from nnabla_adaloss.diagnosis.verdicts import serves, verdict_of

GOOD, LOST, OVERFLOWS = (
    StorageEffect(0.0, 0.0, 0.001),
    StorageEffect(0.9, 0.0, 0.8),
    StorageEffect(0.0, 0.3, math.inf),
)


def layer(name: str, amax: float = 1e-3, floor: float = 0.001, **kept: StorageEffect) -> LayerNumbers:
    found: Dict[Way, StorageEffect] = {way: kept.get(way.name.lower(), GOOD) for way in Way}
    return LayerNumbers(name, "Affine", amax, 100, floor, found, get_format("float16"))


def network(*layers: LayerNumbers, causes: Sequence[Cause] = ()) -> NetworkNumbers:
    scales = {Way.NONE: 1.0, Way.CONSTANT: 65536.0, Way.ONE: 2048.0}
    formats = {
        "float16": {one.name: one.effects for one in layers},
        "bfloat16": {"a": dict.fromkeys(Way, GOOD)},
    }
    return NetworkNumbers("float16", 4, 1.0, 1.0, scales, layers, causes, formats, [])


UNITS = StorageEffect(0.2, 0.0, 0.001, 0.2)
COARSE = {way.name.lower(): StorageEffect(0.0, 0.0, 0.7) for way in Way}
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
            "Layers a and b need scales 2^14 apart: AdaptiveLossScalingUpdater works at its defaults.",
        ),
        (
            [layer("a", none=LOST, constant=LOST, one=LOST)],
            Way.ADAPTIVE,
            "No single scale works for layer a: AdaptiveLossScalingUpdater works at its defaults.",
        ),
        ([layer("a", **ALL)], None, "No scaling keeps all gradients in float16: a loses 90%"),
        ([layer("a", **ALL)], None, "Use bfloat16 without scaling."),
        (
            [layer("a", **COARSE)],
            None,
            "No scaling keeps all gradients in float16: a has an error of 70%, as float16 is coarse.",
        ),
        (
            [
                layer("lost", **{**COARSE, "none": StorageEffect(0.9, 0.0, 0.7)}),
                layer("worse", **{**COARSE, "none": StorageEffect(0.0, 0.0, 0.9)}),
                layer("beyond", **{**COARSE, "none": OVERFLOWS}),
                layer("same", **COARSE),
            ],
            None,
            "No scaling keeps all gradients in float16: lost has an error of 70%, as float16 is coarse",
        ),
        (
            [
                layer(
                    "a", none=LOST, one=StorageEffect(0.0, 0.0, 0.1), adaptive=StorageEffect(0.0, 0.0, 0.15)
                ),
                layer("b", constant=LOST, one=LOST),
            ],
            None,
            "AdaptiveLossScalingUpdater comes closest; without, a loses 90% to underflow. Use bfloat16",
        ),
        (
            [layer("a", none=UNITS, constant=UNITS._replace(lost_units=0.1))],
            Way.CONSTANT,
            "A scale of 65536 works for all layers; without it, a loses the whole gradient of 20% of its",
        ),
        ([layer("a", none=UNITS, constant=UNITS, one=UNITS, adaptive=UNITS)], Way.NONE, "needs no scaling"),
        (
            [layer("a", none=LOST, constant=LOST, adaptive=LOST)],
            Way.ONE,
            "FixedLossScalingUpdater keeps it; with AdaptiveLossScalingUpdater, a loses 90% to underflow.",
        ),
        (
            [
                layer("a", none=LOST, adaptive=StorageEffect(0.0, 0.0, 0.09)),
                layer("b", constant=LOST, one=LOST),
            ],
            Way.ADAPTIVE,
            "AdaptiveLossScalingUpdater works at its defaults",
        ),
        (
            [layer("a", **{way.name.lower(): StorageEffect(0.0, 0.0, 0.4) for way in Way})],
            Way.NONE,
            "float16 needs no scaling here. Errors of gradients reach 40% in a, as float16 is coarse.",
        ),
    ],
)
def test_the_least_that_serves_is_said(layers: Sequence[LayerNumbers], needs: Way, line: str) -> None:
    verdict = verdict_of(network(*layers))
    assert verdict.needs is needs
    assert line in verdict.line


def test_causes_that_stop_all_learning_come_first_and_others_after_the_scale() -> None:
    partly = Cause("saturated", "a/Tanh", "it is flat", "mend it", fatal=False)
    verdict = verdict_of(network(layer("a"), causes=[partly]))
    assert (verdict.needs, verdict.line) == (
        Way.NONE,
        "float16 needs no scaling here. But a/Tanh: it is flat. Mend it.",
    )
    verdict = verdict_of(network(layer("a"), causes=[partly, partly._replace(fatal=True, function="b/Tanh")]))
    assert (verdict.needs, verdict.line) == (None, "No loss scale helps. b/Tanh: it is flat. Mend it.")


@pytest.mark.parametrize(
    ("kind", "headline"),
    [
        ("dead_relu", "No loss scale helps. "),
        *((kind, "Nothing is learned. ") for kind in ("untrained", "epsilon", "small_steps", "on_gradients")),
        *((kind, "Nothing can be said. ") for kind in ("unfed", "zero_input")),
    ],
)
def test_the_headline_fits_the_cause(kind: str, headline: str) -> None:
    cause = Cause(kind, "a", "it does not move", "mend it")
    verdict = verdict_of(network(layer("a"), causes=[cause]))
    assert (verdict.needs, verdict.line) == (None, f"{headline}a: it does not move. Mend it.")


def test_a_format_that_trains_is_named_where_storage_alone_is_at_fault() -> None:
    for as_stored, scaling in (
        (True, "No loss scale helps; bfloat16 without scaling works."),
        (False, "No loss scale helps."),
    ):
        cause = Cause("overflow", "a", "it is large", "mend it", as_stored=as_stored)
        assert verdict_of(network(layer("a", **ALL), causes=[cause])).scaling == scaling


def test_a_fault_that_damages_one_layer_is_not_hidden_by_the_others() -> None:
    spoils = Cause("underflow", "b/Mul2", "it computes zeros", "mend it", fatal=False, spoils=("b",))
    verdict = verdict_of(network(layer("a", none=LOST), layer("b", floor=0.9, **ALL), causes=[spoils]))
    assert (verdict.needs, verdict.trains["float16"], verdict.formats["float16"]) == (None, [], None)
    assert verdict.line == "No loss scale helps b. b/Mul2: it computes zeros. Mend it."
    assert [one.serves for one in verdict.layers] == [[Way.CONSTANT, Way.ONE, Way.ADAPTIVE], []]


NAN = StorageEffect(0.0, 0.0, math.inf)


@pytest.mark.parametrize(
    ("one", "line", "right_scale"),
    [
        (
            layer("sound", 1.0, none=StorageEffect(0.3, 0.0, 0.01)),
            "needs no scaling; losing 30% does no harm",
            2.0**13,
        ),
        (
            layer("lost", 0.0, none=LOST),
            "needs scaling; without, it loses 90% to underflow; 65536 would do for it alone",
            None,
        ),
        (
            layer("own", none=LOST, constant=LOST, one=LOST),
            "needs a scale of its own; without, it loses 90% to underflow",
            2.0**23,
        ),
        (
            layer("a", floor=math.inf, **{way.name.lower(): NAN for way in Way}),
            "with any scale, it gets NaN: stored activations and weights change its gradient",
            2.0**23,
        ),
    ],
)
def test_every_layer_has_a_line_and_a_scale_that_leaves_two_bits(
    one: LayerNumbers, line: str, right_scale: Optional[float]
) -> None:
    (judged,) = verdict_of(network(one)).layers
    assert (judged.line, judged.right_scale) == (line, right_scale)


@pytest.mark.parametrize(
    ("kept", "serve"),
    [
        (StorageEffect(0.9, 0.0, 0.04), True),  # what is lost is too small to matter
        (StorageEffect(0.0, 0.0, 0.2), True),  # as good as it gets in so narrow a format
        (StorageEffect(0.0, 0.0, 0.3), False),
        (StorageEffect(0.6, 0.0, 0.2), False),
        (StorageEffect(0.0, 1e-6, 0.0), False),
        (StorageEffect(0.0, 0.0, math.inf), False),
    ],
)
def test_kernels_that_serve(kept: StorageEffect, serve: bool) -> None:
    assert serves({**dict.fromkeys(Way, StorageEffect(0.0, 0.0, 0.2)), Way.NONE: kept}, Way.NONE) is serve


def test_only_gradients_that_a_scale_mends_are_called_small() -> None:
    errors = dict(zip(("none", "constant", "one", "adaptive"), (1.4, 1.4, 1.0, 1.4)))
    kept = {name: StorageEffect(float(error == 1.0), 0.0, error) for name, error in errors.items()}
    for floor, small in (0.1, True), (1.4, False):
        (judged,) = verdict_of(network(layer("a", floor=floor, **kept))).layers
        assert ("for numbers so small" in judged.line) is small


def test_a_bias_without_a_gradient_is_told_apart_from_its_computed_weight() -> None:
    bias = layer("a")._replace(nonzero=0)
    line = verdict_of(network(bias, layer("a/SpectralNorm"))).layers[0].line
    assert line == "gets no gradient in 4 batches, not even in fp32, apart from a/SpectralNorm"


def test_layers_that_are_lost_for_a_known_reason_are_left_to_it() -> None:
    flat = Cause("saturated", "a/Softmax", "it is flat", "mend it", fatal=False, spoils=("a", "b"))
    verdict = verdict_of(network(layer("a", floor=0.9, **ALL), layer("b"), layer("c"), causes=[flat]))
    assert (verdict.needs, verdict.line) == (
        None,
        "No loss scale helps a. a/Softmax: it is flat. Mend it.",
    )
    assert [one.line.endswith("; see a/Softmax") for one in verdict.layers] == [True, True, False]


# As text, as a dict, and as a page.
