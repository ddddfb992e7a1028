# SPDX-License-Identifier: Apache-2.0
"""State that passes over a graph change, restored at the end: data, gradients, the random state."""

from __future__ import annotations

import ctypes
import random
from functools import cache
from pathlib import Path
from typing import Optional

import nnabla as nn
import nnabla.random
import numpy as np

from ..graph.graph import Graph
from ..kernels import Kernels
from ..undo import ArraySnapshot

# A Mersenne Twister as the C++ library has it: 624 words of 8 bytes and a position.
_TWISTER_BYTES = 625 * 8
_MANAGER = "_ZN4nbla16SingletonManager3getINS_13RandomManagerEEEPT_v"
_GENERATOR = "_ZN4nbla13RandomManager18get_rand_generatorEv"


class Preserved:
    """The data and gradients of a graph's leaves and the random state, all put back at the end; but for the
    generators of functions with a seed of their own, and those of a GPU.
    """

    def __init__(self, graph: Graph, kernels: Kernels) -> None:
        leaves = list({hash(v): v for f in graph.functions for v in f.inputs if v.parent is None}.values())
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # the global one, which feeders use
        self._parameters = nnabla.random.prng.get_state()
        address = _functions_generator()
        self._functions = None if address is None else ctypes.string_at(address, _TWISTER_BYTES)
        self._gradients = ArraySnapshot(kernels)
        # What was never written holds nothing to go back to, and shows by that that nobody has fed it.
        written = [leaf for leaf in leaves if leaf.data.zeroing or leaf.data.modification_count]
        self._data = ArraySnapshot(kernels, written)
        self._gradients.save([leaf.grad for leaf in leaves])
        self._data.save()

    def __enter__(self) -> Preserved:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.restore()
        self._gradients.restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        nnabla.random.prng.set_state(self._parameters)
        self.draw_again()

    def draw_again(self) -> None:
        """Have the next forward draw the same random numbers as the last one."""
        address = _functions_generator()
        if address is not None and self._functions is not None:
            ctypes.memmove(address, self._functions, _TWISTER_BYTES)

    def begin_again(self) -> None:
        """Undo what forward has written to leaves as well."""
        self._data.restore()
        self.draw_again()


@cache
def _functions_generator() -> Optional[int]:
    """Where nnabla keeps the generator of its functions, which has no name in Python; None: not found."""
    try:
        library = ctypes.CDLL(str(Path(nn.__file__).parent / "libnnabla.so"))
        manager, generator = library[_MANAGER], library[_GENERATOR]
    except (OSError, AttributeError):
        return None
    manager.restype = generator.restype = ctypes.c_void_p
    generator.argtypes = [ctypes.c_void_p]
    address: Optional[int] = generator(manager())
    return address
