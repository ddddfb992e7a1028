# SPDX-License-Identifier: Apache-2.0
"""Checksums of arrays that survive a trip through float32."""

from __future__ import annotations

import zlib
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray


def crc32(array: NDArray[Any]) -> int:
    """The CRC-32 of the bytes of `array`."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def crc32_halves(arrays: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """The CRC-32 of each array in halves of 16 bits, which float32 holds exactly; shape (n, 2)."""
    found = np.array([crc32(a) for a in arrays], np.uint32)
    halves: NDArray[np.uint32] = np.stack([found >> 16, found & 0xFFFF], axis=1)
    return halves.astype(np.float32)
