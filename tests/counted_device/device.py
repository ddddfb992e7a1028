# SPDX-License-Identifier: Apache-2.0
"""A device that counts what it is asked for: nnabla on the CPU with an array class of its own."""

from __future__ import annotations

import collections
import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Counter, Dict, List, Optional, Tuple, Type

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss.kernels import CudaKernels
from nnabla_adaloss.kernels.cuda_launcher import Bytes
from nnabla_adaloss.kernels.cuda_source import CudaSource
from tests.kernels.host_launcher import COMPILER, HostLauncher, HostMemory

Build = Callable[[nn.Variable], nn.Variable]

SOURCE = Path(__file__).parent / "counted_array.cpp"
HALF = 23  # NumPy's number of float16
# Of a solver, on a GPU: a reduction per parameter, each waited for.
REDUCTIONS = {"check_inf_or_nan_grad", "check_inf_grad", "check_nan_grad"}


def compile_counted_array(directory: Path) -> Path:
    """The shared library with the array class, made once."""
    library = directory / "counted_array.so"
    if not library.exists():
        options = ["-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared"]
        subprocess.run([str(COMPILER), *options, str(SOURCE), "-o", str(library)], check=True)
    return library


@dataclass
class Counts:
    """What happened on the device.

    Attributes:
        launches: of the package's kernels, by name.
        bytes: that those read and wrote.
        clears: of tables, without waiting.
        fetches: of tables, each a wait.
        reads: arrays that went to the host, each a wait.
        writes: arrays that came from the host.
        reductions: gradients that the solver reduced to a number, each a wait.
        made: arrays that nnabla or the package made, by number of the dtype and size.
    """

    launches: Counter[str] = field(default_factory=collections.Counter)
    bytes: int = 0
    clears: int = 0
    fetches: int = 0
    reads: int = 0
    writes: int = 0
    reductions: int = 0
    made: Counter[Tuple[int, int]] = field(default_factory=collections.Counter)

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.fetches + self.reads + self.reductions

    def conversions_to_half(self, sizes: List[int]) -> int:
        """How many arrays of these sizes were made in float16."""
        return sum(self.made[HALF, size] for size in sizes)


class CountingLauncher(HostLauncher):
    """Runs kernels as `HostLauncher` does, and counts."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self._source = CudaSource()
        self.counts = Counts()

    def clear(self, memory: HostMemory, size: int) -> None:
        self.counts.clears += 1
        super().clear(memory, size)

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        self.counts.launches[kernel] += 1
        tasks = arguments[0][0]
        self.counts.bytes += sum(self._bytes_of(kernel, task) for task in tasks["task"][: tasks["count"]])
        super().launch(kernel, blocks, arguments)

    def fetch(self, memory: HostMemory, size: int) -> Bytes:
        self.counts.fetches += 1
        return super().fetch(memory, size)

    def _bytes_of(self, kernel: str, task: Any) -> int:
        def flag(name: str) -> bool:
            return bool(task["flags"] & self._source.constant(name))

        read = 2 if flag("SOURCE_IS_HALF") else 4
        written = {
            "scaled_copy": 2 if flag("SOURCE_IS_HALF") or flag("TARGET_IS_HALF") else 4,
            "unscale_add": 8 if flag("ACCUMULATE") else 4,
            "round_to_format": 4,
        }
        return int(task["size"]) * (read + written.get(kernel, 0))


class CountedDevice:
    """The device. While it is entered, what happens on it goes into `counts`.

    Args:
        kernels: the CUDA kernels as a library for the CPU.
        array: the library with the array class.
    """

    def __init__(self, kernels: Path, array: Path) -> None:
        ctypes.CDLL(str(Path(nn.__file__).parent / "libnnabla.so"), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(array))
        self._library.array_made.restype = ctypes.POINTER(ctypes.c_long)
        self._library.install()
        self.launcher = CountingLauncher(kernels)
        self.kernels = CudaKernels(self.context("float"), self.launcher)
        self._before: Dict[str, int] = {}

    @staticmethod
    def context(type_config: str) -> nn.Context:
        """A context whose arrays are on the device."""
        backend = {"float": ["cpu:float"], "half": ["cpu:half", "cpu:float"]}[type_config]
        return nn.Context(backend, "CountedArray", "0")

    @property
    def counts(self) -> Counts:
        """What was counted since the device was entered."""
        return self.launcher.counts

    def __enter__(self) -> Counts:
        self.launcher.counts = Counts()
        self._before = self._totals()
        return self.counts

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        now = self._totals()
        self.counts.reads += now["copies_to_host"] - self._before["copies_to_host"]
        self.counts.writes += now["copies_to_device"] - self._before["copies_to_device"]
        for index in range(self._before["arrays_made"], now["arrays_made"]):
            dtype, size = self._library.array_made(index)[:2]
            self.counts.made[dtype, size] += 1

    def _totals(self) -> Dict[str, int]:
        names = ("copies_to_host", "copies_to_device", "arrays_made")
        return {name: getattr(self._library, name)() for name in names}


class CountingSolver:
    """A solver; what would wait for the device parameter by parameter is counted."""

    def __init__(self, solver: Any, device: CountedDevice) -> None:
        self._solver = solver
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name in REDUCTIONS:
            self._device.counts.reductions += len(self._solver.get_parameters())
        return getattr(self._solver, name)


def network(
    device: CountedDevice, build: Build, shape: Tuple[int, ...], type_config: str
) -> Tuple[Any, nn.Variable]:
    """A solver, and a loss on the device for the network that `build` makes of images of that shape."""
    nn.seed(0)
    rng = np.random.default_rng(0)
    with nn.context_scope(device.context(type_config)):
        x, t = nn.Variable(shape), nn.Variable((shape[0], 1))
        x.d, t.d = rng.standard_normal(shape), rng.integers(0, 10, t.shape)
        loss = F.mean(F.softmax_cross_entropy(build(x), t))
        solver = S.Momentum(1e-3)
        solver.set_parameters(nn.get_parameters())
    return CountingSolver(solver, device), loss
