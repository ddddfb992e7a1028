# SPDX-License-Identifier: Apache-2.0
"""Addresses of nnabla arrays: through Python, or of many arrays on the host by one call into C."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any, List, Optional, Sequence, Union

import nnabla as nn
import numpy as np
from nnabla import _nd_array
from numpy.typing import NDArray

from ..host_context import HOST
from .arrays import FLOAT16, FLOAT32, Arrays, Halves, is_zeroing, memory_dtype
from .native import LIBRARY

Addresses = Union[Sequence[int], NDArray[np.int64]]

# For fewer arrays, the call into C takes longer.
_FEWEST = 8

_DATA_PTR = "_ZN4nbla7NdArray8data_ptrENS_6dtypesERKNS_7ContextEb"
_STRING = "St7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
_CONTEXT = f"_ZN4nbla7ContextC1ERKSt6vectorIN{_STRING}ESaIS7_EERKS7_SD_"
_TO_STRING = "_ZNK4nbla7Context9to_stringB5cxx11Ev"


def addresses_of(
    arrays: Arrays, halves: Halves, context: nn.Context, *, write_only: bool = False
) -> Addresses:
    """Addresses of arrays in the memory of `context`; all are float32, or become so, except `halves`."""
    flags = [False] * len(arrays) if halves is None else halves.tolist()
    dtypes: List[np.dtype[Any]] = [FLOAT16 if half else FLOAT32 for half in flags]
    if context is HOST and len(arrays) >= _FEWEST:
        direct = direct_addresses()
        if direct is not None and _have_that_memory(arrays, dtypes):
            return direct.of(arrays, halves, write_only=write_only)
    return [x.data_ptr(dtype, context, write_only) for x, dtype in zip(arrays, dtypes)]


def _have_that_memory(arrays: Arrays, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """True if nnabla need not allocate, fill or convert anything, which could raise an exception."""
    # With this extension, the memory of an array may be on a device, which cannot be queried.
    if "nnabla_ext.cuda" in sys.modules or any(map(is_zeroing, arrays)):
        return False
    try:
        return list(map(memory_dtype, arrays)) == dtypes
    except RuntimeError:
        return False


class DirectAddresses:
    """Addresses by nnabla's C++ method, four times as fast; ImportError if they differ from Python's."""

    # A C++ exception cannot pass through C and would end the process: the memory must exist, on the host.

    def __init__(self) -> None:
        nnabla = nnabla_library()
        # PyDLL keeps Python's lock, so that no other thread uses the arrays meanwhile.
        self._call = ctypes.PyDLL(str(LIBRARY)).adaloss_addresses
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [pointer, pointer, pointer, number, pointer, ctypes.c_bool]
        self._call.restype = None
        try:
            self._method = ctypes.cast(nnabla[_DATA_PTR], ctypes.c_void_p).value
            self._context = _make_context(nnabla)
        except AttributeError as error:
            raise ImportError(f"nnabla's library has no symbol {error}") from None
        # Compared with nnabla's on arrays that differ in dtype, memory and offset.
        whole, half, gradient = nn.NdArray((4, 6)), nn.NdArray((7,)), nn.Variable((2, 3)).grad
        half.cast(FLOAT16)[...] = 1.0
        arrays = [whole, half, whole.narrow(0, 1, 2), whole.view((3, 8)), gradient]
        halves = np.array([x is half for x in arrays], np.bool_)
        for write_only in (False, True):
            own = [x.data_ptr(FLOAT16 if x is half else FLOAT32, HOST, write_only) for x in arrays]
            if self.of(arrays, halves, write_only=write_only).tolist() != own:
                raise ImportError("nnabla's library gives other addresses than Python")

    def of(self, arrays: Arrays, halves: Halves, *, write_only: bool) -> NDArray[np.int64]:
        """Addresses of arrays on the host that are float32, or float16 where `halves` is true."""
        # The hash of an NdArray is the address of its C++ object; `arrays` keeps these alive.
        addresses = np.fromiter(map(hash, arrays), np.int64, len(arrays))
        flags = None if halves is None else halves.tobytes()
        where = ctypes.addressof(self._context)
        self._call(self._method, where, addresses.ctypes.data, len(arrays), flags, write_only)
        return addresses


def nnabla_library() -> Any:
    """The library whose symbols nnabla's module of arrays uses: a wheel has a second one."""
    return ctypes.CDLL(_nd_array.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL | os.RTLD_NOW)


@cache
def direct_addresses() -> Optional[DirectAddresses]:
    """Direct addresses; None if nnabla's library is not as expected, which `doctor` explains."""
    try:
        return DirectAddresses()
    except ImportError:
        return None


def _make_context(nnabla: Any) -> Any:
    """Construct nnabla's own context `HOST` in C++, for the lifetime of the process."""
    # C++ constructors fill this memory and its methods read it: it only has to be large enough.
    context, *strings, printed = [ctypes.create_string_buffer(1024) for _ in range(4)]
    for string, text in zip(strings, (HOST.array_class, HOST.device_id)):
        nnabla[f"_ZN{_STRING}C1Ev"](string)
        nnabla[f"_ZN{_STRING}6assignEPKc"](string, text.encode())
    no_backends = ctypes.create_string_buffer(1024)  # an empty vector: null pointers
    nnabla[_CONTEXT](context, no_backends, *strings)
    nnabla[_TO_STRING](printed, context)
    characters = nnabla[f"_ZNK{_STRING}5c_strEv"]
    characters.restype = ctypes.c_char_p
    if characters(printed).decode() != f"Context([], {HOST.array_class}, {HOST.device_id})":
        raise ImportError("nnabla's library makes other contexts than Python")
    return context
