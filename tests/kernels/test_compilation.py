# SPDX-License-Identifier: Apache-2.0
"""What numba compiles is kept on disk, and what cannot be read back from there is compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnabla_adaloss.kernels.compilation import compiled


def test_kernels_compile_where_nothing_can_be_kept_on_disk() -> None:
    namespace: dict = {}
    exec(
        compile("def double(x):\n    return 2 * x", "<no file>", "exec"), namespace
    )  # numba finds no cache for it
    double = compiled(namespace["double"])
    assert double(21) == 42
    assert double.signatures  # compiled, not interpreted


STATISTICS = """
import numpy as np, nnabla as nn
from nnabla_adaloss.kernels import CpuKernels
print(CpuKernels().statistics(nn.NdArray.from_numpy_array(np.array([3.0, -4.0], np.float32))).abs_max)
"""


@pytest.mark.slow
def test_kernels_that_cannot_be_read_back_are_compiled_again(tmp_path: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", STATISTICS]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    first = run()
    assert first.stdout.endswith("4.0\n")
    assert first.stderr.count("compiling CPU kernels for this processor") == 1
    kept = [path for path in tmp_path.rglob("*") if path.suffix in {".nbc", ".nbi"}]
    assert {path.suffix for path in kept} == {".nbc", ".nbi"}
    assert "compil" not in run().stderr
    for suffix in (".nbc", ".nbi"):
        for path in kept:
            if path.suffix == suffix:
                path.write_bytes(path.read_bytes()[:-20])
        damaged = run()
        assert damaged.stdout.endswith("4.0\n")
        assert "is compiled again" in damaged.stderr
        assert "compil" not in run().stderr
