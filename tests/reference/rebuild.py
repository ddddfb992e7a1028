# SPDX-License-Identifier: Apache-2.0
"""Rebuild the arrays of the oracle from their recipes (numpy only).

A recipe is a string: a python expression evaluated with two names, `np` (numpy)
and `rs` (np.random.RandomState(seed), fresh for each case).  Expressions use only
operations that are exact in IEEE arithmetic (or RandomState legacy streams), so
that they give identical bytes under any numpy (no exp/log/pow, which numpy may
implement with SIMD approximations).
"""

import hashlib

import numpy as np


def build(seed, recipe):
    """-> tuple of arrays; `recipe` is a list of expressions evaluated in order
    with one and the same RandomState(seed)."""
    rs = np.random.RandomState(seed)
    out = []
    for expr in recipe:
        a = eval(expr, {"np": np, "rs": rs})
        out.append(np.ascontiguousarray(a))
    return tuple(out)


def sha(a):
    """first 16 hex digits of sha256 over dtype name, shape and C-order little-endian bytes"""
    a = np.ascontiguousarray(a)
    a = a.astype(a.dtype.newbyteorder("<"), copy=False)
    h = hashlib.sha256()
    h.update(f"{a.dtype.name}|{'x'.join(map(str, a.shape))}|".encode())
    h.update(a.tobytes(order="C"))
    return h.hexdigest()[:16]
