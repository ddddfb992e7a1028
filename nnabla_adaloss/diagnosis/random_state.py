# SPDX-License-Identifier: Apache-2.0
"""The state of what draws random numbers: kept, so that passes draw the same and leave no trace."""

from __future__ import annotations

import ctypes
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

import nnabla as nn
import nnabla.random
import numpy as np

# A Mersenne Twister as the C++ library has it: 624 words of 8 bytes and a position.
_TWISTER_BYTES = 625 * 8
_MANAGER = "_ZN4nbla16SingletonManager3getINS_13RandomManagerEEEPT_v"
_GENERATOR = "_ZN4nbla13RandomManager18get_rand_generatorEv"


class RandomState(NamedTuple):
    """The generators of Python, NumPy, nnabla's parameters and nnabla's functions on the CPU.

    Generators that a function has of its own, because it was given a seed, are out of reach, and so are those
    of a GPU.

    Example:
        >>> import nnabla.functions as F
        >>> state, x = RandomState.now(), F.randn(shape=(3,))
        >>> x.forward()
        >>> drawn = x.d.copy()
        >>> state.restore()
        >>> x.forward()
        >>> bool((x.d == drawn).all())
        True
    """

    python: Any
    numpy: Any
    parameters: Any
    functions: Optional[bytes]

    @classmethod
    def now(cls) -> RandomState:
        """The current state."""
        address = _functions_generator()
        return cls(
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002  # the global one, which feeders use
            nnabla.random.prng.get_state(),
            None if address is None else ctypes.string_at(address, _TWISTER_BYTES),
        )

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        nnabla.random.prng.set_state(self.parameters)
        self.restore_functions()

    def restore_functions(self) -> None:
        """Put that of nnabla's functions back alone: the next pass draws what the last one did."""
        address = _functions_generator()
        if address is not None and self.functions is not None:
            ctypes.memmove(address, self.functions, _TWISTER_BYTES)


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
