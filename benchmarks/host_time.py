# SPDX-License-Identifier: Apache-2.0
"""What adaptive scaling takes of the host's time per iteration where a device does the work (delay=1).

    OMP_NUM_THREADS=1 python benchmarks/host_time.py

No GPU is needed: the package's kernels are launched on a device that does nothing and has results at hand, so
that what is left is Python: hooks, decisions, preparing launches, reading the table. What CuPy takes for a
launch, some microseconds, is not in it. It is CPU time: nnabla's own loop and the adaptive one take turns on
the same tiny network, and the difference is told. Wanted for ResNet-50: at most 1.5 ms.

  nnabla ms       nnabla's own loop, and
  ours ms         what adaptive scaling adds: means over blocks of 16 iterations, which are whole cycles of
                  those that measure, that choose and that do neither (`blocks.py`), and of blocks the median
  share           the second of the first
  cheapest ms     what it adds in the cheapest iteration of a block, the median over the blocks
  dearest/median  the dearest iteration of a block by the median one, nnabla's part included: 1 if all do
                  the same
  address us      how fast the machine is: what nnabla takes to tell an address, of which ResNet-50 asks for
                  373, or 459

With what the device tells, "approx_range" swaps no weight and "amax_history" most of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple
from unittest import mock

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from blocks import BLOCK, Times, bare_loop, means, positions, take_turns

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.host_context import HOST
from nnabla_adaloss.kernels import CudaKernels
from nnabla_adaloss.kernels.cuda_launcher import Bytes, CudaSource

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))

Build = Callable[[nn.Variable], nn.Variable]


class IdleMemory:
    """Host memory in place of a device's."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self.ptr = int(self._bytes.ctypes.data)

    def part(self, address: int, dtype: Any) -> Any:
        """What begins at an address, as numbers; None where that is not in here."""
        start = address - self.ptr
        if not 0 <= start < self._bytes.size:
            return None
        count = (self._bytes.size - start) // np.dtype(dtype).itemsize
        return self._bytes[start : start + count * np.dtype(dtype).itemsize].view(dtype)


class IdleDevice:
    """A `Launcher` that launches nothing; statistics are at hand, and differ from array to array."""

    max_blocks = 792

    def __init__(self) -> None:
        self.launches = 0
        self.fetches = 0
        row = np.zeros(8, CudaSource().layout("Row"))
        row["count"], row["sum_of_squares"] = 100, 1.0
        row["largest"] = (2.0 ** -np.arange(8.0)).astype(np.float32).view(np.uint32)
        row["negated_smallest"] = np.negative(np.full(8, 2.0**-12, np.float32).view(np.uint32))
        # All gradients of zero would be looked at more closely.
        self._at_hand = {"statistics": row, "unscale_add": (2.0 ** -np.arange(8.0)).astype(np.float32)}
        self._memories: List[IdleMemory] = []

    def allocate(self, size: int) -> IdleMemory:
        """Memory, all zero."""
        self._memories.append(IdleMemory(size))
        return self._memories[-1]

    def clear(self, memory: IdleMemory, size: int) -> None:
        """Do nothing: all there is stays as it is at hand."""

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        """Do nothing but write rows."""
        self.launches += 1
        found = self._at_hand.get(kernel)
        if found is None:
            return
        tasks, address = arguments[0][0], int(arguments[1])
        rows = tasks["task"]["row"][: tasks["count"]]
        for memory in self._memories:
            written = memory.part(address, found.dtype)
            if written is not None:
                written[rows] = found[rows % 8]

    def fetch(self, memory: IdleMemory, size: int) -> Bytes:
        """What was written."""
        self.fetches += 1
        return np.frombuffer(ctypes.string_at(memory.ptr, size), np.uint8)


def chain(layers: int) -> Build:
    """That many affine layers of two maps."""

    def build(x: nn.Variable) -> nn.Variable:
        h = x
        for i in range(layers):
            h = F.tanh(PF.affine(h, 2, name=f"layer{i}"))
        return h

    return build


def address_time() -> float:
    """Seconds that nnabla takes to tell where an array is."""
    arrays = [nn.NdArray((8,)) for _ in range(1000)]
    taken = []
    for _ in range(9):
        start = time.thread_time()
        for array in arrays:
            array.data_ptr(np.dtype(np.float32), HOST)
        taken.append((time.thread_time() - start) / len(arrays))
    return median(taken)


class Case(NamedTuple):
    """A network and how it is scaled."""

    name: str
    build: Build
    shape: Tuple[int, ...]
    method: str = "approx_range"


def measure(device: IdleDevice, case: Case, blocks: int) -> Dict[str, Any]:
    """Prints and returns what an iteration takes besides nnabla."""
    actions: Dict[str, Callable[[], Any]] = {}
    for adaptive in (False, True):
        with nn.parameter_scope("", OrderedDict()):
            x, t = nn.Variable(case.shape), nn.Variable((case.shape[0], 1))
            x.d, t.d = 0.1, 0
            loss = F.mean(F.softmax_cross_entropy(case.build(x), t))
            solver = S.Sgd(0.0)
            solver.set_parameters(nn.get_parameters())
            if adaptive:
                config = AdaLossConfig(case.method, dtype="float16")
                updater = AdaptiveLossScalingUpdater(solver, loss, config=config)
                actions["adaptive"] = updater.update
            else:
                actions["nnabla"] = bare_loop(solver, loss, 8.0)
    assert updater.scaling.delay == 1
    for action in actions.values():
        action()
    launches, fetches, began = device.launches, device.fetches, updater.iteration
    taken = take_turns(actions, blocks)
    iterations = updater.iteration - began
    found: Dict[str, Any] = {
        "network": case.name,
        "method": case.method,
        "layers": len(updater.scaling.layers),
        "swapped": sum(alpha != 1.0 for alpha in updater.scaling.layer_scales.values()),
        **times_of(taken),
        "launches": (device.launches - launches) / iterations,
        "waits": (device.fetches - fetches) / iterations,
    }
    found["us_per_layer"] = 1e3 * found["host_ms"] / found["layers"]
    found["address_us"] = 1e6 * address_time()
    print(
        f"{case.name:20}{case.method:>14}{found['layers']:8}{found['swapped']:9}"
        f"{found['nnabla_ms']:11.2f}{found['host_ms']:9.2f}{found['share']:8.0%} "
        f"{found['cheapest_ms']:13.2f}{found['dearest_over_median']:16.2f}{found['us_per_layer']:14.1f}"
        f"{found['launches']:10.0f}{found['waits']:7.1f}{found['address_us']:12.2f}",
        flush=True,
    )
    return found


def times_of(taken: Dict[str, List[Times]]) -> Dict[str, Any]:
    """What blocks of iterations took, in ms, by nnabla's loop and by ours."""
    native, ours = means(taken["nnabla"], "cpu"), means(taken["adaptive"], "cpu")
    nnabla_ms = 1e3 * median(native)
    at = [[1e3 * spent for spent in one] for one in positions(taken["adaptive"], "cpu")]
    medians = [one[1] for one in at]
    return {
        "nnabla_ms": nnabla_ms,
        "host_ms": 1e3 * median(a - b for a, b in zip(ours, native)),
        "share": median((a - b) / b for a, b in zip(ours, native)),
        "cheapest_ms": min(medians) - nnabla_ms,
        "dearest_over_median": max(medians) / median(medians),
        "positions_ms": at,
    }


def resnet50(x: nn.Variable) -> nn.Variable:
    """All its layers, with one map in the stem."""
    from common.resnet import resnet

    return resnet(x, "resnet50", width=1, classes=2, training=True, last_gamma=1.0)


@contextmanager
def idle_device() -> Iterator[IdleDevice]:
    """Inside, scaling chooses the kernels of a device that does nothing."""
    device = IdleDevice()
    kernels = CudaKernels(HOST, device)
    with mock.patch("nnabla_adaloss.engine.adaptive_loss_scaling.select_kernels", return_value=kernels):
        yield device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=4, help=f"blocks of {BLOCK} iterations that are timed (default: 4)"
    )
    parser.add_argument("--json", type=Path, help="write what was measured here, too")
    options = parser.parse_args()
    if options.blocks < 1:
        parser.error("--blocks must be 1 or more")
    print(
        f"{'network':20}{'method':>14}{'layers':>8}{'swapped':>9}{'nnabla ms':>11}{'ours ms':>9}{'share':>9}"
        f"{'cheapest ms':>13}{'dearest/median':>16}{'us per layer':>14}"
        f"{'launches':>10}{'waits':>7}{'address us':>12}"
    )
    with idle_device() as device:
        methods = "approx_range", "amax_history"
        cases = [Case("ResNet-50, one map", resnet50, (1, 3, 32, 32), method) for method in methods]
        cases += [Case(f"{n} affine layers", chain(n), (1, 2)) for n in (10, 100, 1000)]
        rows = [measure(device, case, options.blocks) for case in cases]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
