# SPDX-License-Identifier: Apache-2.0
"""The nnabla contexts by which memory of arrays is reached: from the host, or where it is."""

from __future__ import annotations

from functools import lru_cache

import nnabla as nn

# `NdArray.data_ptr(dtype, HOST)` converts as `cast()` does, which looks for nnabla_ext at every call (50 µs).
# It insists on a context that names an array class; the default one names none. Backends do not matter to
# arrays, and each name of one is converted at every call.
HOST = nn.Context([], "CpuCachedArray", "0")


def array_context(context: nn.Context) -> nn.Context:
    """A context for `NdArray.data_ptr` that reaches arrays where functions of `context` leave them."""
    # nnabla's default context names no array class; a cast wants one.
    return _context_of(context.array_class or HOST.array_class, context.device_id)


def is_on_host(context: nn.Context) -> bool:
    """Whether arrays that `context` reaches are in the host's memory.

    nnabla gives a function that has no implementation for a GPU the host's array class, whatever the context
    that it was made in: it runs on the host.

    Example:
        >>> import nnabla.functions as F
        >>> with nn.context_scope(nn.Context(["cuda:float", "cpu:float"], "CudaCachedArray", "0")):
        ...     total = F.sink(nn.Variable((2,)), nn.Variable((3,)))
        >>> is_on_host(total.parent.context)
        True
    """
    # So are all of them called, and a class that is not given is the host's.
    return not context.array_class or context.array_class.startswith("Cpu")


@lru_cache(maxsize=16)
def _context_of(array_class: str, device_id: str) -> nn.Context:
    return nn.Context(["cpu:float"], array_class, device_id)
