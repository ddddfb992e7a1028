# SPDX-License-Identifier: Apache-2.0
"""Device of a benchmark: context, synchronization, memory."""

from __future__ import annotations

import platform
import sys
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional
from unittest import mock

import nnabla as nn
import numpy as np

import nnabla_adaloss
from nnabla_adaloss.kernels.cuda_launcher import CupyLauncher


class Device:
    """Context by its name, such as `cudnn:half`; if it is unusable, the program ends with the reason."""

    def __init__(self, name: str, number: str = "0") -> None:
        self._extension, _, self.type_config = name.partition(":")
        self._number = number
        self.context = self._context(self.type_config or "float")
        self.is_gpu = "Cuda" in self.context.array_class

    def single(self) -> nn.Context:
        """Float context of the same device."""
        return self._context("float")

    def _context(self, type_config: str) -> nn.Context:
        from nnabla.ext_utils import get_extension_context

        try:
            return get_extension_context(self._extension, type_config=type_config, device_id=self._number)
        except Exception as error:  # the extension's errors for a missing library, driver or device
            sys.exit(
                f"{self._extension}:{type_config} cannot be used here: {error}\n"
                "`python -m nnabla_adaloss doctor --gpu` says what is missing"
            )

    def wait(self) -> None:
        """Wait until all launched kernels have finished."""
        if self.is_gpu:
            import nnabla_ext.cuda

            nnabla_ext.cuda.device_synchronize(self._number)

    def used_mib(self) -> Optional[float]:
        """Memory in use, in MiB, after freeing nnabla's caches; None on a CPU."""
        if not self.is_gpu:
            return None
        import nnabla_ext.cuda

        nnabla_ext.cuda.clear_memory_cache()
        return self.held_mib()

    def held_mib(self) -> Optional[float]:
        """Memory in use, in MiB, with nnabla's caches; None on a CPU."""
        if not self.is_gpu:
            return None
        import cupy

        self.wait()
        with cupy.cuda.Device(int(self._number)):
            free, total = cupy.cuda.runtime.memGetInfo()
        return (total - free) / 2**20

    def versions(self) -> Dict[str, str]:
        """Versions that a measurement depends on."""
        found = {
            "context": self.context.backend[0],
            "nnabla_adaloss": nnabla_adaloss.__version__,
            "nnabla": nn.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        if self.is_gpu:
            import cupy

            found["gpu"] = cupy.cuda.runtime.getDeviceProperties(int(self._number))["name"].decode()
            found["driver"] = str(cupy.cuda.runtime.driverGetVersion())
            found["cupy"] = cupy.__version__
        return found


@contextmanager
def counted() -> Iterator[Dict[str, float]]:
    """Count the package's launches, fetches (which wait for the device), and seconds of waiting."""
    counts: Dict[str, float] = {"launch": 0, "fetch": 0, "waiting": 0.0}

    def counting(name: str) -> Any:
        method = getattr(CupyLauncher, name)

        def count(*arguments: Any) -> Any:
            counts[name] += 1
            start = time.perf_counter()
            result = method(*arguments)
            if name == "fetch":
                counts["waiting"] += time.perf_counter() - start
            return result

        return mock.patch.object(CupyLauncher, name, count)

    with counting("launch"), counting("fetch"):
        yield counts
