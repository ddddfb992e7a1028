# SPDX-License-Identifier: Apache-2.0
"""Restoration of state that passes over a graph change: data, gradients, the random state."""

from __future__ import annotations

import ctypes
import random
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional

import nnabla as nn
import nnabla.random
import numpy as np

from ..graph.functions import is_matrix_product
from ..graph.graph import Graph
from ..graph.hooks import root_cause
from ..kernels import Kernels
from ..undo.snapshot import ArraySnapshot

_TWISTER_BYTES = 625 * 8  # size of C++'s Mersenne Twister: 624 words of 8 bytes and a position


@contextmanager
def preserved(graph: Graph, kernels: Kernels) -> Iterator[Callable[..., None]]:
    """Restore data and gradients of a graph's leaves, and the random state, at the end. This does not include
    generators of a GPU, and of functions with a seed of their own.

    Yields a function to call before forward, so that it draws the same random numbers as the last time;
    functions with a seed restart from it. With `data=True` leaves that forward writes to are restored, too.
    """
    leaves = graph.leaves.values()
    python, parameters = random.getstate(), nnabla.random.prng.get_state()
    of_numpy = np.random.get_state()  # noqa: NPY002  # the global one, which feeders use
    generator = _functions_generator()
    functions = None if generator is None else ctypes.string_at(generator, _TWISTER_BYTES)
    kinds = zip(graph.functions, graph.described.type_names, graph.described.args)
    seeded = [f for f, kind, args in kinds if args.get("seed", -1) != -1 and not is_matrix_product(kind)]
    # A leaf that was never written is left alone: restoring it would hide that nobody has filled it.
    written = ArraySnapshot(kernels, [v for v in leaves if v.data.zeroing or v.data.modification_count])
    gradients = ArraySnapshot(kernels)
    gradients.save([leaf.grad for leaf in leaves])
    written.save()

    def again(*, data: bool = False) -> None:
        if data:
            written.restore()
        for f in seeded:
            f.setup(f.inputs, f.outputs)
        restore_generators()

    def restore_generators() -> None:
        if generator is not None and functions is not None:
            ctypes.memmove(generator, functions, _TWISTER_BYTES)
        # Generators that Python functions use.
        random.setstate(python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        nnabla.random.prng.set_state(parameters)

    def restore() -> None:
        written.restore()
        gradients.restore()
        restore_generators()

    with restored(restore):
        try:
            yield again
        except SystemError as error:
            # nnabla raises it in place of an interruption in a hook or in a user's function.
            raise root_cause(error) from None


@contextmanager
def restored(restore: Callable[[], None]) -> Iterator[None]:
    """Call `restore` at the end, and again if a signal interrupts it."""
    try:
        yield
    finally:
        try:
            restore()
        except BaseException:
            restore()
            raise


def _functions_generator() -> Optional[int]:
    """Address of the random generator of nnabla's functions, unknown to Python; None if not found."""
    try:
        library = ctypes.CDLL(str(Path(nn.__file__).parent / "libnnabla.so"))
        manager = library["_ZN4nbla16SingletonManager3getINS_13RandomManagerEEEPT_v"]
        generator = library["_ZN4nbla13RandomManager18get_rand_generatorEv"]
    except (OSError, AttributeError):
        return None
    manager.restype = generator.restype = ctypes.c_void_p
    generator.argtypes = [ctypes.c_void_p]
    address: Optional[int] = generator(manager())
    return address
