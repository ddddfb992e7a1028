# SPDX-License-Identifier: Apache-2.0
"""Context for access to arrays' memory on the host, and views of it."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Iterable, Optional

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

# `NdArray.data_ptr(dtype, HOST)` converts as `cast()` does, which looks for nnabla_ext at every call (50 µs).
# It insists on a context that names an array class; the default one names none. Backends do not matter to
# arrays, and each name of one is converted at every call.
HOST = nn.Context([], "CpuCachedArray", "0")

FLOAT32 = np.dtype(np.float32)


def has_gpu(backends: Iterable[str]) -> bool:
    """True if one of these names of backends is a GPU's."""
    return any(name.startswith(("cuda", "cudnn")) for name in backends)


def is_on_host(context: nn.Context) -> bool:
    """True if arrays of `context` are in the host's memory."""
    # The names of all host classes begin so, and the default is the host. nnabla gives such a class to
    # functions without a GPU implementation, in any context.
    return not context.array_class or context.array_class.startswith("Cpu")


def dtype_of(array: nn.NdArray) -> np.dtype[Any]:
    """Dtype of an NdArray; float32 for one without memory."""
    try:
        return np.dtype(array.dtype)
    except RuntimeError:
        return FLOAT32


def host_view(
    array: nn.NdArray, dtype: Optional[np.dtype[Any]] = None, *, write_only: bool = False
) -> NDArray[Any]:
    """Make a flat, writable view of an NdArray, as `dtype`, until nnabla uses it; ends its lazy zero."""
    # `NdArray.data` takes 15 times as long: it builds a context each time.
    dtype = dtype_of(array) if dtype is None else dtype
    address = array.data_ptr(dtype, HOST, write_only)
    memory = array_type(ctypes.c_char, array.size * dtype.itemsize)
    return np.frombuffer(memory.from_address(address), dtype)


@lru_cache(maxsize=4096)
def array_type(of: Any, count: int) -> Any:
    """The type of ctypes for `count` elements of another type."""
    # ctypes drops unreferenced types, and making one takes ten times as long as the rest of a view.
    return of * count
