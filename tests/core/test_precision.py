# SPDX-License-Identifier: Apache-2.0
"""Formats of forward and backward, and the configuration's range that follows from them."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, Format, Precision, Range
from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FORMATS
from nnabla_adaloss.core.precision import FP8_HYBRID, FP32, PRECISIONS, LayerPrecisions, get_precision, widest

OWN = Format.ieee("float12", exponent_bits=5, mantissa_bits=6)


def test_one_format_serves_both_unless_two_are_given() -> None:
    assert get_precision("float16") == Precision("float16") == Precision(FLOAT16, FLOAT16)
    hybrid = Precision("float8_e4m3", "float8_e5m2")
    assert (hybrid.forward.name, hybrid.backward.name) == ("float8_e4m3", "float8_e5m2")
    assert str(hybrid) == "float8_e4m3 with gradients in float8_e5m2"
    assert (hybrid.stored_data, hybrid.stored_gradients) == (FLOAT8_E4M3, FLOAT8_E5M2)
    assert get_precision(hybrid) is hybrid
    assert pickle.loads(pickle.dumps(hybrid)) == hybrid


def test_saturation_is_of_both() -> None:
    precision = Precision("float8_e4m3", "float16", saturate=True)
    assert precision.forward.beyond_max == 448.0
    assert precision.backward.beyond_max == 65504.0
    assert precision != Precision("float8_e4m3", "float16")
    assert math.isnan(Precision("float8_e4m3", saturate=False).forward.beyond_max)
    assert math.isnan(FLOAT8_E4M3.beyond_max)
    assert FLOAT16.beyond_max == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": "hafl"}, "forward='hafl' is unknown; choose one of float16"),
        ({"backward": "hafl"}, "backward='hafl' is unknown"),
        ({"saturate": 1}, "saturate=1"),
        ({"operands_only": 1}, "operands_only=1"),
        ({"otherwise": "hafl"}, "otherwise='hafl' is unknown"),
        ({"otherwise": "float8_e5m2"}, "otherwise='float8_e5m2' has 8 bits.* must have 16 or more"),
        ({"stochastic_seed": 1.5}, "stochastic_seed=1.5"),
    ],
)
def test_refused(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Precision(**arguments)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="^kept_in='hafl' is unknown"):
        get_precision("hafl", "kept_in")
    for name in ("hafl", None, 8, ["float16"]):
        with pytest.raises(ValueError, match=r"storage=.* is unknown; choose one of float16.*fp8_hybrid"):
            get_precision(name)  # type: ignore[arg-type]


def test_names_of_formats_and_of_precisions() -> None:
    assert list(PRECISIONS) == [*FORMATS, "fp8_hybrid"]
    for name, stored in FORMATS.items():
        assert get_precision(name) == Precision(stored) == get_precision(stored)
    assert get_precision("fp16") == get_precision("half") == get_precision("float16")
    other = Precision("e4m3", "e5m2", otherwise="bf16", operands_only=True)
    assert str(other).startswith("bfloat16, and float8")


def test_fp8_hybrid() -> None:
    hybrid = get_precision("fp8_hybrid")
    assert hybrid == Precision("float8_e4m3", "float8_e5m2", True, operands_only=True)
    assert (hybrid.forward, hybrid.backward) == (FLOAT8_E4M3.saturating(), FLOAT8_E5M2.saturating())
    assert hybrid.stored_data is hybrid.stored_gradients is hybrid.otherwise is FLOAT16
    assert str(hybrid) == "float16, and float8_e4m3 with gradients in float8_e5m2 in matrix products"
    assert AdaLossConfig().for_storage(hybrid).range == Range(6e-8, 65504.0)
    assert pickle.loads(pickle.dumps(hybrid)) == hybrid
    assert hash(hybrid) == hash(PRECISIONS["fp8_hybrid"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_single_element_is_never_narrower_than_16_bits(name: str) -> None:
    precision = Precision(name)
    for find in (precision.data_format, precision.gradient_format):
        assert find(2) == find(0) == FORMATS[name]
        assert find(1).bits >= 16
        assert find(1) == (FLOAT16 if FORMATS[name].bits < 16 else FORMATS[name])
    saturating = Precision(name, saturate=True)
    assert saturating.data_format(1).saturates
    hybrid = Precision(name, operands_only=True, saturate=True, otherwise="bfloat16")
    assert hybrid.data_format(1) == hybrid.gradient_format(7) == FORMATS["bfloat16"]


def test_the_range_follows_the_gradients() -> None:
    """Whatever else is configured: the storage owns the format."""
    config = AdaLossConfig(n_uf_threshold=1e-4).for_storage(get_precision("float8_e4m3"))
    assert config.range == Range(2.0**-9, 448.0)
    assert config.dtype == "float8_e4m3"
    mixed = Precision("float8_e4m3", "float8_e5m2", saturate=True)
    assert AdaLossConfig().for_storage(mixed).range == Range(2.0**-16, 57344.0)
    assert AdaLossConfig().for_storage(None).dtype == "float16"
    assert AdaLossConfig(u_max=100.0).for_storage(get_precision("float8_e4m3")).range.u_max == 100.0


def test_a_dtype_that_agrees_with_the_storage_may_be_given() -> None:
    config = AdaLossConfig(dtype="float8_e4m3")
    assert config.for_storage(get_precision("float8_e4m3")) is config
    assert config.for_storage(Precision("float16", FLOAT8_E4M3, saturate=True)) is config
    assert config.for_storage(None) is config


def test_a_dtype_that_disagrees_with_the_storage_is_an_error() -> None:
    with pytest.raises(ValueError, match="dtype='float16', but storage .* float8_e4m3: leave dtype out"):
        AdaLossConfig(dtype="float16").for_storage(get_precision("float8_e4m3"))
    with pytest.raises(ValueError, match="dtype='float12', but storage keeps gradients in float16"):
        AdaLossConfig(dtype=OWN).for_storage(get_precision("float16"))


def test_a_format_of_ones_own() -> None:
    config = AdaLossConfig().for_storage(get_precision(OWN))
    assert config.dtype is OWN
    assert config.range == AdaLossConfig(dtype=OWN).range == Range(2.0**-20, (2.0 - 2.0**-6) * 2.0**15)
    # The name of a format does not make another one the same.
    impostor = Format.ieee("float16", exponent_bits=5, mantissa_bits=6)
    assert AdaLossConfig().for_storage(get_precision(impostor)).dtype is impostor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name=''"),
        ({"exponent_bits": 9}, "exponent_bits=9 must lie in"),
        ({"mantissa_bits": 0}, "mantissa_bits=0 must lie in"),
        ({"mantissa_bits": 6.0}, "mantissa_bits=6.0 must be an integer"),
        ({"max": math.inf}, "max=inf"),
        ({"max": 1e39}, "normal range of float32"),
        ({"smallest_normal": 2.0**-127}, "normal range of float32"),
        ({"smallest_subnormal": 2.0**-10}, "smallest_subnormal=.* must be smallest_normal"),
        ({"smallest_normal": 1.5 * 2.0**-14, "smallest_subnormal": 1.5 * 2.0**-20}, "must be a power of two"),
        ({"max": 65000.0}, "max one of its numbers"),
        ({"has_infinity": 1}, "has_infinity=1"),
        ({"u_min": -1.0}, "u_min=-1.0"),
    ],
)
def test_formats_that_cannot_be(changes: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(OWN, **changes)


# ---- by layer


def test_the_first_pattern_that_matches_decides() -> None:
    precisions = LayerPrecisions({"head/out[0]": "float16", "head/*": "bf16", "*": "fp8_hybrid"})
    assert precisions.of("head/out[0]") == Precision("float16")
    assert precisions.of("head/fc") == Precision("bfloat16")
    assert precisions.of("body/conv") is FP8_HYBRID
    assert precisions.common is None
    assert str(precisions).startswith("float16 in head/out[0]; bfloat16 in head/*; ")
    assert LayerPrecisions({"head/*": "half"}).of("body/conv") is FP32


@pytest.mark.parametrize("storage", ["fp16", {"*": "half"}, {"**": Precision("float16")}])
def test_one_precision_is_that_of_all_layers(storage: Any) -> None:
    precisions = LayerPrecisions(storage)
    assert precisions.common == Precision("float16")
    assert str(precisions) == "float16"
    precisions.check(["a"])


def test_the_narrowest_is_the_one_whose_gradients_reach_least_far() -> None:
    precisions = LayerPrecisions({"a": "bfloat16", "b": Precision("float8_e5m2", "float8_e4m3"), "*": "fp16"})
    assert precisions.narrowest.backward.name == "float8_e4m3"
    wide = LayerPrecisions({"a": Precision("float8_e4m3", "bfloat16"), "*": "float16"})
    assert wide.narrowest == Precision("float16")
    assert LayerPrecisions({"a": "bfloat16"}).narrowest == get_precision("bfloat16")


def test_the_widest_of_several() -> None:
    eight, half, brain = map(get_precision, ("float8_e5m2", "float16", "bfloat16"))
    assert widest([eight, half]) is half
    assert widest([half, brain]) is brain  # its range holds what both hold
    assert widest([FP32, brain]) is FP32
    assert widest([FP8_HYBRID, half]) is FP8_HYBRID  # what it stores is as wide


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (
            {"*": "float16", "head/*": "float32"},
            r"storage has the pattern 'head/\*' after '\*'.*put",
        ),
        ({"head/*": "hafl"}, r"storage\['head/\*'\]='hafl' is unknown; choose one of float16"),
        ({3: "float16"}, "storage has the key 3"),
        ({}, "storage is an empty mapping"),
    ],
)
def test_storages_that_cannot_be(storage: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        LayerPrecisions(storage)


def test_a_pattern_that_decides_nothing_is_refused_with_the_layers_there_are() -> None:
    layers = ["head/affine", "body/conv"]
    with pytest.raises(ValueError, match=r"'tail/\*', which matches no layer.*are head/affine, body/conv"):
        LayerPrecisions({"tail/*": "float16", "*": "float16"}).check(layers)
    with pytest.raises(ValueError, match=r"'tail/\*', which matches no layer.*are none: it has no matrix"):
        LayerPrecisions({"tail/*": "float16"}).check([])
    with pytest.raises(ValueError, match=r"'head/affine', which matches only layers that an earlier"):
        LayerPrecisions({"head/*": "float16", "head/affine": "bfloat16"}).check(layers)
    LayerPrecisions({"head/*": "float16", "*": "bfloat16"}).check(["head/affine"])  # "*" may be left nothing


# ---- keys of random bits


def key_of(seed: Any, count: int) -> int:
    key = Precision(stochastic_seed=seed).random_key(count)
    assert key is not None
    return key


def test_keys_are_64_bits_and_differ() -> None:
    keys = [key_of(seed, count) for seed in (-1, 0, 1, 2, 2**63) for count in range(1000)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    ones = sum(bin(key).count("1") for key in keys) / len(keys)
    assert abs(ones - 32) < 0.5


def test_keys_do_not_change_from_version_to_version() -> None:
    assert (key_of(0, 0), key_of(7, 3)) == (0xA706DD2F4D197E6F, 0x9AAF21D8296E1E3D)
    assert key_of(np.int64(7), 3) == key_of(7, 3)  # not TypeError, from a bitwise operation of NumPy's
