# SPDX-License-Identifier: Apache-2.0
"""A device that counts what it is asked for: nnabla on the CPU with an array class of its own."""

from __future__ import annotations

import collections
import ctypes
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Counter, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss.kernels import CudaKernels
from nnabla_adaloss.kernels.arrays import FLOAT16, FLOAT32
from nnabla_adaloss.kernels.cuda_launcher import Bytes, constant
from tests.kernels.host_launcher import HostLauncher, HostMemory
from tests.worlds.trainings import solver_of

Build = Callable[[nn.Variable], nn.Variable]
Addresses = Callable[..., List[int]]

ARRAY_CLASS = "CountedArray"
HALF = 23  # NumPy's number of float16
# Of a solver, on a GPU: a reduction per parameter, each waited for.
REDUCTIONS = {"check_inf_or_nan_grad", "check_inf_grad", "check_nan_grad"}


@dataclass
class Counts:
    """What happened on the device."""

    launches: Counter[str] = field(default_factory=collections.Counter)
    bytes: int = 0  # that kernels read and wrote
    fetches: int = 0  # of tables, each a wait
    reads: int = 0  # arrays that went to the host, each a wait
    writes: int = 0  # arrays that came from the host
    reductions: int = 0  # gradients that the solver reduced to a number, each a wait
    made: Counter[Tuple[int, int]] = field(default_factory=collections.Counter)  # arrays, by dtype and size

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.fetches + self.reads + self.reductions


class ForeignAddress(Exception):
    """A kernel was about to be launched with an address that is none of a device's arrays."""


class Known(NamedTuple):
    """An address that kernels asked for, what is there, and whether it was asked for as float16."""

    address: int
    array: nn.NdArray
    half: bool


class CountingLauncher(HostLauncher):
    """Runs kernels as `HostLauncher` does, and counts.

    Each address that a kernel is given is looked at first: a GPU knows its own arrays, as long as they live.
    `copies` says how many arrays have gone to the device so far.
    """

    def __init__(self, library: Path, device: nn.Context, copies: Callable[[], int]) -> None:
        super().__init__(library)
        self._copies = copies
        self._device = device
        self._known: List[Known] = []
        self._launched = False
        self.counts = Counts()

    def noting(self, addresses: Addresses) -> Addresses:
        """`addresses_of`, whose answers are known at the next launch."""

        def noted(
            arrays: Sequence[nn.NdArray], halves: Any, context: nn.Context, **options: Any
        ) -> List[int]:
            found = addresses(arrays, halves, context, **options)
            if self._launched:
                self._known, self._launched = [], False
            are_half = [False] * len(arrays) if halves is None else list(map(bool, halves))
            self._known += map(Known, found, arrays, are_half)
            return found

        return noted

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        self.counts.launches[kernel] += 1
        tasks = arguments[0][0]["task"][: arguments[0][0]["count"]]
        self.counts.bytes += sum(self._bytes_of(kernel, task) for task in tasks)
        self._launched = True
        self._check(kernel, tasks)
        super().launch(kernel, blocks, arguments)

    def fetch(self, memory: HostMemory, size: int) -> Bytes:
        self.counts.fetches += 1
        return super().fetch(memory, size)

    def _check(self, kernel: str, tasks: Any) -> None:
        for number, task in enumerate(tasks):
            size, what = int(task["size"]), f"{number} of {kernel}"
            self._require_known(int(task["source"]), size * self._source_width(task), f"source {what}")
            if width := self._target_width(kernel, task):
                self._require_known(int(task["target"]), size * width, f"target {what}")

    def _require_known(self, address: int, size: int, role: str) -> None:
        for known in reversed(self._known):
            offset = address - known.address
            if offset >= 0 and offset + size <= known.array.size * (2 if known.half else 4):
                break
        else:
            raise ForeignAddress(f"{role}: {size} bytes that nobody asked nnabla for")
        # Of an array that is where kernels took it to be, nnabla gives the same address without a copy.
        copies, dtype = self._copies(), FLOAT16 if known.half else FLOAT32
        moved = known.array.dtype != dtype or known.array.data_ptr(dtype, self._device) != known.address
        if moved or self._copies() != copies:
            name = f"{role}, an array of shape {known.array.shape} as {dtype}"
            raise ForeignAddress(f"{name}: not in the device's memory, or not any more")

    def _source_width(self, task: Any) -> int:
        return 2 if self._flag(task, "SOURCE_IS_HALF") else 4

    def _target_width(self, kernel: str, task: Any) -> int:
        if kernel == "scaled_copy":
            return 2 if self._flag(task, "SOURCE_IS_HALF") or self._flag(task, "TARGET_IS_HALF") else 4
        return 4 if kernel in {"unscale_add", "round_to_format"} else 0

    def _flag(self, task: Any, name: str) -> bool:
        return bool(task["flags"] & constant(name))

    def _bytes_of(self, kernel: str, task: Any) -> int:
        times = 2 if self._flag(task, "ACCUMULATE") else 1
        return int(task["size"]) * (self._source_width(task) + times * self._target_width(kernel, task))


class CountedDevice:
    """The device, of a library of kernels and one with its array class. While it is entered, what happens on
    it goes into `counts`.
    """

    def __init__(self, kernels: Path, array: Path) -> None:
        ctypes.CDLL(str(Path(nn.__file__).parent / "libnnabla.so"), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(array))
        self._library.array_made.restype = ctypes.POINTER(ctypes.c_long)
        self._library.install()
        self.launcher = CountingLauncher(kernels, self.context("float"), self._library.copies_to_device)
        self.kernels = CudaKernels(self.context("float"), self.launcher)
        self.counts = self.launcher.counts  # since the device was entered
        self._before: Dict[str, int] = {}

    @staticmethod
    def context(type_config: str, array_class: str = ARRAY_CLASS) -> nn.Context:
        """A context whose arrays are on the device; nnabla, which has no `cuda` here, computes on the CPU.

        Args:
            type_config: "float" or "half".
            array_class: that of a CPU makes functions as nnabla makes those that have no implementation for a
                GPU: they read and write arrays on the host.
        """
        kinds = {"float": ["float"], "half": ["half", "float"]}[type_config]
        backend = [f"{name}:{kind}" for name in ("cuda", "cpu") for kind in kinds]
        return nn.Context(backend, array_class, "0")

    @contextmanager
    def room_for(self, arrays: int) -> Iterator[None]:
        """Memory for so many arrays more, and no other."""
        self._library.leave_room_for(ctypes.c_long(arrays))
        try:
            yield
        finally:
            self._library.leave_room_for(ctypes.c_long(-1))

    def __enter__(self) -> Counts:
        self.counts = self.launcher.counts = Counts()
        self._before = self._totals()
        return self.counts

    def __exit__(self, *_: Any) -> None:
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
        solver = solver_of(S.Momentum(1e-3))
    return CountingSolver(solver, device), loss
