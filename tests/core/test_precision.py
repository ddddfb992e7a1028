# SPDX-License-Identifier: Apache-2.0
"""Formats of forward and backward, and the configuration's range that follows from them."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from nnabla_adaloss.core import (
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FORMATS,
    PRECISIONS,
    AdaLossConfig,
    Format,
    Precision,
    Range,
    get_precision,
)

OWN = Format.ieee("float12", exponent_bits=5, mantissa_bits=6)


def test_one_format_serves_both_unless_two_are_given() -> None:
    assert get_precision("float16") == Precision("float16") == Precision(FLOAT16, FLOAT16)
    hybrid = Precision("float8_e4m3", "float8_e5m2")
    assert (hybrid.forward.name, hybrid.backward.name) == ("float8_e4m3", "float8_e5m2")
    assert str(hybrid) == "float8_e4m3 with gradients in float8_e5m2"
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
    ("arguments", "error", "message"),
    [
        ({"forward": "hafl"}, ValueError, "forward='hafl' is unknown; choose one of float16"),
        ({"backward": "hafl"}, ValueError, "backward='hafl' is unknown"),
        ({"saturate": 1}, TypeError, "saturate=1"),
        ({"operands_only": 1}, TypeError, "operands_only=1"),
        ({"otherwise": "hafl"}, ValueError, "otherwise='hafl' is unknown; choose one of float16"),
        ({"otherwise": "float8_e5m2"}, ValueError, "otherwise='float8_e5m2' has 8 bits.* needs 16 or more"),
        ({"stochastic_seed": 1.5}, TypeError, "stochastic_seed=1.5"),
    ],
)
def test_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Precision(**arguments)
    with pytest.raises(ValueError, match="^storage='hafl' is unknown"):
        get_precision("hafl")
    with pytest.raises(ValueError, match="^kept_in='hafl' is unknown"):
        get_precision("hafl", "kept_in")
    for name in ("hafl", None, 8, ["float16"]):
        with pytest.raises(ValueError, match=r"storage=.* is unknown; choose one of float16.*fp8_hybrid"):
            get_precision(name)  # type: ignore[arg-type]


def test_other_common_names_are_those_of_formats() -> None:
    assert get_precision("fp16") == get_precision("half") == get_precision("float16")
    assert str(Precision("e4m3", "e5m2", otherwise="bf16", operands_only=True)).startswith(
        "bfloat16, and float8"
    )


def test_names_of_formats_and_of_precisions() -> None:
    assert list(PRECISIONS) == [*FORMATS, "fp8_hybrid"]
    for name, stored in FORMATS.items():
        assert get_precision(name) == Precision(stored) == get_precision(stored)


def test_fp8_hybrid() -> None:
    hybrid = get_precision("fp8_hybrid")
    assert hybrid == Precision("float8_e4m3", "float8_e5m2", True, operands_only=True)
    assert (hybrid.forward, hybrid.backward) == (FLOAT8_E4M3.saturating(), FLOAT8_E5M2.saturating())
    assert hybrid.stored_data is hybrid.stored_gradients is hybrid.otherwise is FLOAT16
    assert str(hybrid) == "float16, and float8_e4m3 with gradients in float8_e5m2 in matrix products"
    assert AdaLossConfig().stored_in(hybrid).range == Range(6e-8, 65504.0)
    with pytest.raises(ValueError, match="dtype='float8_e5m2', but storage keeps gradients in float16"):
        AdaLossConfig(dtype="float8_e5m2").stored_in(hybrid)
    assert pickle.loads(pickle.dumps(hybrid)) == hybrid
    assert hash(hybrid) == hash(PRECISIONS["fp8_hybrid"])


def test_what_is_stored_otherwise() -> None:
    assert (
        Precision("float8_e4m3", operands_only=True, otherwise="bfloat16").stored_gradients.name == "bfloat16"
    )
    stored = Precision("float8_e4m3", "float8_e5m2")
    assert (stored.stored_data, stored.stored_gradients) == (FLOAT8_E4M3, FLOAT8_E5M2)


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
    config = AdaLossConfig(n_uf_threshold=1e-4).stored_in(get_precision("float8_e4m3"))
    assert config.range == Range(2.0**-9, 448.0)
    assert config.dtype == "float8_e4m3"
    mixed = Precision("float8_e4m3", "float8_e5m2", saturate=True)
    assert AdaLossConfig().stored_in(mixed).range.u_max == 57344.0
    assert AdaLossConfig().stored_in(None).dtype == "float16"
    assert AdaLossConfig(u_max=100.0).stored_in(get_precision("float8_e4m3")).range.u_max == 100.0


def test_a_dtype_that_agrees_with_the_storage_may_be_given() -> None:
    config = AdaLossConfig(dtype="float8_e4m3")
    assert config.stored_in(get_precision("float8_e4m3")) is config
    assert config.stored_in(Precision("float16", FLOAT8_E4M3, saturate=True)) is config
    assert config.stored_in(None) is config


def test_a_dtype_that_disagrees_with_the_storage_is_an_error() -> None:
    with pytest.raises(ValueError, match="dtype='float16', but storage .* float8_e4m3: leave dtype out"):
        AdaLossConfig(dtype="float16").stored_in(get_precision("float8_e4m3"))
    with pytest.raises(ValueError, match="dtype='float12', but storage keeps gradients in float16"):
        AdaLossConfig(dtype=OWN).stored_in(get_precision("float16"))


def test_a_format_of_ones_own() -> None:
    config = AdaLossConfig().stored_in(get_precision(OWN))
    assert config.dtype is OWN
    assert config.range == AdaLossConfig(dtype=OWN).range == Range(2.0**-20, (2.0 - 2.0**-6) * 2.0**15)
    # The name of a format does not make another one the same.
    impostor = Format.ieee("float16", exponent_bits=5, mantissa_bits=6)
    assert AdaLossConfig().stored_in(get_precision(impostor)).dtype is impostor


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, TypeError, "name=''"),
        ({"exponent_bits": 9}, ValueError, "exponent_bits=9 must lie in"),
        ({"mantissa_bits": 0}, ValueError, "mantissa_bits=0 must lie in"),
        ({"mantissa_bits": 6.0}, TypeError, "mantissa_bits=6.0 must be an integer"),
        ({"max": math.inf}, ValueError, "max=inf"),
        ({"max": 1e39}, ValueError, "normal range of float32"),
        ({"smallest_normal": 2.0**-127}, ValueError, "normal range of float32"),
        (
            {"smallest_subnormal": 2.0**-10},
            ValueError,
            r"smallest_subnormal=.* must be smallest_normal \* 2\*\*-mantissa_bits$",
        ),
        ({"has_infinity": 1}, TypeError, "has_infinity=1"),
        ({"u_min": -1.0}, ValueError, "u_min=-1.0"),
    ],
)
def test_formats_that_cannot_be(changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(OWN, **changes)
