# SPDX-License-Identifier: Apache-2.0
"""Arrays over memory of one's own choosing, with as much of an NdArray's interface as kernels ask for."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, List, Optional, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


class MemoryArray:
    """Looks like an NdArray of shape (size,) at an offset in a buffer that may be unaligned or huge."""

    def __init__(self, memory: NDArray[np.uint8], dtype: Any, size: int, offset: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.size = size
        self.values: NDArray[Any] = memory[offset : offset + size * self.dtype.itemsize].view(self.dtype)

    @property
    def shape(self) -> Tuple[int]:
        return (self.size,)

    def data_ptr(self, dtype: Any, context: Optional[nn.Context] = None, write_only: bool = False) -> int:
        assert np.dtype(dtype) == self.dtype, "kernels never cast"
        return self.values.ctypes.data


def anywhere(dtype: Any, size: int) -> List[MemoryArray]:
    """Unaligned arrays, one that begins behind a page that nobody may touch, and one that ends before such a
    page: who reads or writes beside these is killed by a segmentation fault.
    """
    itemsize = np.dtype(dtype).itemsize
    length = size * itemsize
    pages = -(-length // PAGE) + 2
    found = [MemoryArray(np.zeros(length + 64, np.uint8), dtype, size, n * itemsize) for n in (1, 3, 5)]
    for start in (PAGE, (pages - 1) * PAGE - length):
        memory = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)
        for page in (0, pages - 1):
            assert _LIBC.mprotect(ctypes.c_void_p(memory.ctypes.data + page * PAGE), PAGE, 0) == 0
        found.append(MemoryArray(memory, dtype, size, start))
    return found


def reserved_zeros(dtype: Any, size: int) -> MemoryArray:
    """An array of zeros that takes memory only where it is written to, however large it is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, size * np.dtype(dtype).itemsize, flags=flags), np.uint8)
    return MemoryArray(memory, dtype, size)
