# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from nnabla_adaloss.functions.kernels.cpu_loops import compiled


def test_kernels_compile_where_nothing_can_be_kept_on_disk() -> None:
    namespace: dict = {}
    exec(
        compile("def double(x):\n    return 2 * x", "<no file>", "exec"), namespace
    )  # numba finds no cache for it
    double = compiled(namespace["double"])
    assert double(21) == 42
    assert double.signatures  # compiled, not interpreted
