# SPDX-License-Identifier: Apache-2.0
"""Checksums that all ranks, and later versions, compute alike."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from nnabla_adaloss.updaters.checksums import crc32, crc32_halves

ARRAYS = [np.arange(count, dtype=np.float32) for count in range(8)]


def test_it_is_the_crc_of_the_bytes_in_the_order_of_the_elements() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert crc32(table) == crc32(np.asfortranarray(table)) == zlib.crc32(table.tobytes())
    assert crc32(table.T) == zlib.crc32(table.T.copy().tobytes()) != crc32(table)


def test_halves_are_whole_numbers_that_float32_holds() -> None:
    halves = crc32_halves(ARRAYS)
    assert halves.dtype == np.float32
    assert [int(high) << 16 | int(low) for high, low in halves] == [crc32(array) for array in ARRAYS]
    # Some fill all the bits there are.
    assert max(map(crc32, ARRAYS)) >= 2**31


@pytest.mark.parametrize("position", range(0, 28, 5))
def test_any_byte_counts(position: int) -> None:
    other = ARRAYS[7].copy()
    other.view(np.uint8)[position] ^= 1
    assert (crc32_halves([ARRAYS[7]]) != crc32_halves([other])).any()
