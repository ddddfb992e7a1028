# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss import Format
from nnabla_adaloss.core.formats import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    canonical_name,
    get_format,
)


@given(st.floats(-1e5, 1e5) | st.floats(-1e-4, 1e-4) | st.sampled_from([math.inf, math.nan, -0.0]))
@example(65520.0)
def test_the_nearest_number_is_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.float16(value)
    np.testing.assert_equal(FLOAT16.nearest(value), float(expected))


@pytest.mark.parametrize("stored", [FLOAT8_E4M3, FLOAT8_E4M3.saturating(), FLOAT16.saturating()])
def test_an_infinity_becomes_what_numbers_beyond_the_format_become(stored: Format) -> None:
    for value in (math.inf, -math.inf):
        np.testing.assert_equal(stored.nearest(value), stored.nearest(math.copysign(1e30, value)))


@pytest.mark.parametrize("stored", FORMATS.values())
def test_numpy_and_ml_dtypes_agree(stored: Format) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    of_ml_dtypes = {"float8_e4m3": "float8_e4m3fn"}.get(stored.name, stored.name)
    dtype = getattr(np if stored in (FLOAT16, FLOAT32) else ml_dtypes, of_ml_dtypes)
    info = ml_dtypes.finfo(dtype)
    assert stored.max == float(info.max)
    assert stored.smallest_normal == float(info.smallest_normal)
    assert stored.smallest_subnormal == float(info.smallest_subnormal)
    assert (stored.exponent_bits, stored.mantissa_bits) == (info.nexp, info.nmant)
    with np.errstate(over="ignore"):
        beyond = np.array(1e39, np.float32).astype(dtype)
    assert stored.has_infinity == np.isinf(beyond.astype(np.float32))


@pytest.mark.parametrize(
    "page",
    [
        *("docs/how_it_works.md", "docs/choosing.md"),
        *("nnabla_adaloss/emulation/format_emulation.py", "nnabla_adaloss/functions/round_to_format.py"),
    ],
)
def test_pages_that_list_formats_list_all(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text("utf-8")
    assert [name for name in FORMATS if name != "float32" and f'`"{name}"`' not in text] == []


def test_names_lead_to_their_formats() -> None:
    for name, stored in FORMATS.items():
        assert get_format(name) is get_format(stored) is stored
        assert stored.name == name
        assert name.startswith((f"float{stored.bits}", f"bfloat{stored.bits}"))


def test_other_common_names() -> None:
    usual = ["half", "fp16", "bf16", "float", "fp32", "e5m2", "e4m3", "float8_e4m3fn"]
    canonical = ["float16"] * 2 + ["bfloat16"] + ["float32"] * 2 + ["float8_e5m2"] + ["float8_e4m3"] * 2
    assert [*map(canonical_name, usual)] == [*map(canonical_name, canonical)] == canonical
    assert all(get_format(name) is FORMATS[of] for name, of in zip(usual, canonical))
    for unknown in ("fp17", "", None, 16):
        with pytest.raises(ValueError, match=r"storage=.* choose one of float16, bfloat16"):
            get_format(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E5M2])
def test_a_format_follows_from_the_widths_of_its_fields(given: Format) -> None:
    assert Format.ieee(given.name, given.exponent_bits, given.mantissa_bits, u_min=given.u_min) == given
    plain = Format.ieee(given.name, given.exponent_bits, given.mantissa_bits)
    assert plain.u_min == plain.smallest_subnormal


def test_the_narrowest_and_the_widest_format() -> None:
    assert Format.ieee("float32", exponent_bits=8, mantissa_bits=23).max == FLOAT32.max
    narrow = Format(
        "two bits", 1, 1, max=1.5, smallest_normal=1.0, smallest_subnormal=0.5, has_infinity=False
    )
    assert narrow.u_min == 0.5
    assert Format.ieee("same", np.int64(5), np.int64(10)).max == FLOAT16.max
    with pytest.raises(ValueError, match=r"^exponent_bits=20 must lie in \[1, 8\]"):
        Format.ieee("float24", 20, 3)
    with pytest.raises(ValueError, match="^exponent_bits=1 must be 2 or more"):
        Format.ieee("x", 1, 3)
    with pytest.raises(TypeError, match="^exponent_bits='5' must be an integer"):
        Format.ieee("float12", "5", 6)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^mantissa_bits=24 must lie in \[1, 23\]"):
        Format.ieee("float33", 8, 24)
    with pytest.raises(ValueError, match=r"^mantissa_bits=23 of narrow must have the range of float32"):
        Format.ieee("narrow", 5, 23)  # numbers beyond its range would not be rounded
