# SPDX-License-Identifier: Apache-2.0
"""Which formats are advised, from numbers alone and for networks, and training with them."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import FormatEmulation, LossScaleError, Precision, diagnose
from nnabla_adaloss.diagnosis import Harm, PrecisionAdvice, StorageEffect
from nnabla_adaloss.diagnosis.advice import bits_of, candidates_of, storage_of
from tests.worlds.trainings import updater_of

from .nets import Built, affine, cross_entropy, network

NONE = Harm(StorageEffect(0.0, 0.0, 0.03), 0.0, 0.0)
CANDIDATES = ["float16", "fp8_hybrid", "float8_e4m3"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (NONE, ""),
        (NONE._replace(data_overflow=0.01), "its data overflows"),
        (NONE._replace(data_underflow=0.6), "60% of its data become 0"),
        (NONE._replace(gradients=StorageEffect(0.0, 0.1, 0.0)), "its gradients overflow"),
        (NONE._replace(gradients=StorageEffect(0.7, 0.0, 0.0)), "70% of its gradients become 0"),
        (NONE._replace(gradients=StorageEffect(0.0, 0.0, 0.2)), "error 20%"),
        (NONE._replace(gradients=StorageEffect(0.0, 0.0, math.nan)), "error nan%"),
    ],
)
def test_harm_beyond_the_limits(harm: Harm, reason: str) -> None:
    assert harm.reason() == reason


def test_candidates_come_by_their_bits_and_fp32_comes_last() -> None:
    found = candidates_of(CANDIDATES)
    assert [(storage, bits_of(storage)) for storage in found] == [
        ("fp8_hybrid", 8),
        ("float8_e4m3", 8),
        ("float16", 16),
        ("float32", 32),
    ]
    assert len(candidates_of(["float32", "float16"])) == 2
    with pytest.raises(ValueError, match="storage='hafl' is unknown"):
        candidates_of(["hafl"])
    with pytest.raises(ValueError, match="empty list"):
        candidates_of([])


def test_the_most_frequent_finding_comes_last() -> None:
    eight, half, _ = candidates_of(["float8_e4m3", "float16"])
    layers = {"a": half, "rnn": half, "b": eight, "c": eight, "d": eight}
    assert list(storage_of(layers, {"rnn"}).items()) == [
        ("a", "float16"),
        ("rnn", "float16"),
        ("rnn#*", "float16"),
        ("*", "float8_e4m3"),
    ]


def separable(layers: Callable[[nn.Variable], nn.Variable]) -> Built:
    """Four classes of points around four centres."""
    x, t = nn.Variable((32, 8)), nn.Variable((32, 1))
    rng = np.random.default_rng(0)
    centres = 2.0 * rng.standard_normal((4, 8))

    def feed() -> None:
        t.d = rng.integers(0, 4, (32, 1))
        x.d = centres[t.d[:, 0].astype(int)] + 0.6 * rng.standard_normal((32, 8))

    return cross_entropy(affine(layers(x), 4, "head"), t), feed


def with_a_large_layer() -> Built:
    """The outputs of one layer lie beyond what float8_e4m3 holds, and are brought back behind it."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "first"))
        h = affine(h * 3e3, 16, "large") * (1.0 / 3e3)
        return F.tanh(affine(h, 16, "last"))

    return separable(layers)


def recurrent() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "in"))
        for _ in range(3):
            h = F.tanh(affine(h, 16, "state"))
        return h

    return separable(layers)


NETS: Dict[str, Callable[[], Built]] = {"large": with_a_large_layer, "recurrent": recurrent}


def advice_on(name: str) -> Tuple[PrecisionAdvice, Built]:
    built = NETS[name]()
    return diagnose(built[0], ["float8_e4m3", "float16"], built[1], 2), built


def test_the_layer_that_forbids_eight_bits_is_named_with_the_reason() -> None:
    advice, _ = advice_on("large")
    assert "large/affine" in advice.forbid
    large = next(layer for layer in advice.layers if layer.name == "large/affine")
    assert large.tried["float8_e4m3"].reason() == "its data overflows"
    assert large.storage == "float16"
    text = str(advice)
    assert "Layers that need more than 8 bits:" in text
    # What is printed is what can be pasted.
    assert eval(text[text.index("storage=") + len("storage=") :]) == advice.storage


def test_uses_of_one_weight_are_one_layer() -> None:
    advice, (loss, _) = advice_on("recurrent")
    assert sorted(layer.name for layer in advice.layers) == ["head/affine", "in/affine", "state/affine"]
    FormatEmulation(loss, advice.storage)
    FormatEmulation(loss, {"state/affine": "float16", "state/affine#*": "float16", "*": "float8_e4m3"})


def test_a_precision_of_ones_own_is_put_into_the_mapping_as_it_was_given() -> None:
    loss, feed = recurrent()
    own = Precision("float8_e4m3", "float8_e5m2", saturate=True)
    storage = diagnose(loss, [own, "float16"], feed, 1).storage
    assert any(given is own for given in storage.values())


def test_eight_bits_in_the_layer_that_forbids_them_do_not_train() -> None:
    loss, feed = with_a_large_layer()
    updater = updater_of(loss, feed, S.Momentum(0.05), storage="float8_e4m3")
    with pytest.raises(LossScaleError, match="first/affine/MulScalar"):
        updater.update()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_training_as_advised_ends_within_the_spread_of_fp32(name: str) -> None:
    loss, feed = NETS[name]()
    advised = diagnose(loss, ["fp8_hybrid", "float16"], feed, 2).storage
    assert "fp8_hybrid" in advised.values()

    def trained(storage: Any, skipped: int) -> float:
        """The mean loss of the last ten of 60 batches; `skipped` ones come first, which makes another run."""
        nn.clear_parameters()
        loss, feed = NETS[name]()
        for _ in range(skipped):
            feed()
        updater = updater_of(loss, feed, S.Momentum(0.05), storage=storage)
        losses: List[float] = []
        for _ in range(60):
            assert updater.update().updated
            losses.append(float(loss.d))
        return float(np.mean(losses[-10:]))

    in_fp32 = [trained("float32", skipped) for skipped in range(4)]
    as_advised = np.mean([trained(advised, skipped) for skipped in range(2)])
    assert as_advised <= np.mean(in_fp32) + max(2.0 * np.std(in_fp32, ddof=1), 0.01)


def test_a_precision_of_which_only_a_part_has_32_bits_is_tried() -> None:
    """Float32 is the last resort, unless data and gradients have 32 bits."""
    loss, feed = network()
    for forward, backward in (("float16", "float32"), ("float32", "float16")):
        assert candidates_of([Precision(forward, backward)])[-1] == "float32"
    assert candidates_of(["float32", "float16"]) == ["float16", "float32"]
    advised = diagnose(loss * 1e-12 + 1e6 * loss, [Precision("float16", "float32")], feeder=feed)
    assert all(advice.tried for advice in advised.layers)
