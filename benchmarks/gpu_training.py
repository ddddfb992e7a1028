# SPDX-License-Identifier: Apache-2.0
"""Cost of loss scaling on a GPU, in its native half precision.

    python benchmarks/gpu_training.py                                    ResNet-50, batch 64
    python benchmarks/gpu_training.py --batch 256
    python benchmarks/gpu_training.py --network transformer
    python benchmarks/gpu_training.py --context cpu:float --quick        does the script work? no GPU needed

Methods, each with a network of its own: fp32; an unchecked fixed scale, which is the floor; nnabla's dynamic
scaling; adaptive scaling with its defaults, and with scales by the published method (approx_range).

They take turns by blocks of 16 iterations, two whole cycles of measurement. Only the method itself waits for
the device within a block; the block's end waits for all. Printed are medians over blocks: of the mean
iteration, and of the ratios to the floor and to dynamic (wanted: at most 1.03 and 1.0).

Then, for each method by itself: - memory: growth of the device's used memory in its first block, nnabla's
caches included; that of the first method includes libraries; - the host's time: before forward, in it, after
it, before backward, in it, and after it (with the solver's update), and the part spent waiting for the
device. The work of nnabla's dynamic scaling between forward and backward counts as "before backward"; -
launches and waits of the package.

Needs nnabla-ext-cuda and CuPy: pip install nnabla-adaloss[cuda120].
"""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, Callable, Dict, Iterator, List, Optional
from unittest import mock

import nnabla as nn
import nnabla.solvers as S
from gpu_device import Device, counted
from gpu_networks import QUICK, SIZES, build

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
)
from nnabla_adaloss.graph.loss import LossSeed
from nnabla_adaloss.kernels import select_kernels

BLOCK = 16
FLOOR = "fixed, unchecked"
METHODS = ("fp32", FLOOR, "dynamic", "adaptive", "approx_range")
PHASES = ("before forward", "forward", "after forward", "before backward", "backward", "after backward")


class TimedLoss:
    """Loss that records when its forward and backward begin and end."""

    def __init__(self, variable: nn.Variable, seed: Optional[LossSeed]) -> None:
        self.variable, self._seed = variable, seed
        self.marks: List[float] = []

    def forward(self, *arguments: Any, **options: Any) -> None:
        self._run(self.variable.forward, *arguments, **options)

    def backward(self, scale: float = 1.0, *arguments: Any, grad: Any = None, **options: Any) -> None:
        start = scale if self._seed is None else self._seed.gradient(scale, grad)
        self._run(self.variable.backward, start, *arguments, **options)

    def _run(self, native: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self.marks.append(time.perf_counter())
        native(*arguments, **options)
        self.marks.append(time.perf_counter())


class Training:
    """Training of one network with one method."""

    def __init__(
        self, method: str, variable: Callable[[], nn.Variable], device: Device, timed: bool = False
    ) -> None:
        context = device.single() if method == "fp32" else device.context
        nn.seed(0)
        with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
            self.loss: Any = variable()
            self._solver = S.Momentum(1e-3)
            self._solver.set_parameters(nn.get_parameters())
        if timed:
            adaptive = method in ("adaptive", "approx_range")
            seed = LossSeed(self.loss, select_kernels(context).scaled_float32) if adaptive else None
            self.loss = TimedLoss(self.loss, seed)
        self.update: Callable[[], Any] = self._by(method)

    def _by(self, method: str) -> Callable[[], Any]:
        if method in ("fp32", FLOOR):
            return lambda: self._unchecked(1.0 if method == "fp32" else 128.0)
        if method == "dynamic":
            return DynamicLossScalingUpdater(self._solver, self.loss, lambda: None).update
        config = None if method == "adaptive" else AdaLossConfig(method)
        return AdaptiveLossScalingUpdater(self._solver, self.loss, lambda: None, config=config).update

    def _unchecked(self, scale: float) -> None:
        self._solver.zero_grad()
        self.loss.forward(clear_no_need_grad=True)
        self.loss.backward(scale, clear_buffer=True)
        if scale != 1.0:
            self._solver.scale_grad(1.0 / scale)
        self._solver.update()

    def block(self, device: Device, iterations: int = BLOCK) -> float:
        """Mean milliseconds of an iteration over a block, whose end waits for the device."""
        device.wait()
        start = time.perf_counter()
        for _ in range(iterations):
            self.update()
        device.wait()
        return 1e3 * (time.perf_counter() - start) / iterations

    def phases(self, device: Device) -> Dict[str, float]:
        """Mean milliseconds of the host by phase, launches and waits of an iteration, over a block.

        The loss has to be `timed`.
        """
        taken: Dict[str, List[float]] = {phase: [] for phase in PHASES}
        device.wait()
        with counted() as counts, ends_of_forward() as ends:
            for _ in range(BLOCK):
                ends.clear()
                self.loss.marks.clear()
                start = time.perf_counter()
                self.update()
                end = time.perf_counter()
                marks = self.loss.marks
                if len(marks) != 4:  # a batch that ran again
                    continue
                forward_end = ends[-1] if ends else marks[1]
                times = [start, marks[0], marks[1], forward_end, marks[2], marks[3], end]
                for phase, before, after in zip(PHASES, times, times[1:]):
                    taken[phase].append(1e3 * (after - before))
        found = {phase: mean(times) for phase, times in taken.items() if times}
        found["waiting"] = 1e3 * counts["waiting"] / BLOCK
        return {**found, "launches": counts["launch"] / BLOCK, "waits": counts["fetch"] / BLOCK}


@contextmanager
def ends_of_forward() -> Iterator[List[float]]:
    """Record the end of the package's forward, which is later than nnabla's."""
    ends: List[float] = []
    forward = AdaptiveLossScaling.forward

    def timed(self: AdaptiveLossScaling, *arguments: Any, **options: Any) -> None:
        forward(self, *arguments, **options)
        ends.append(time.perf_counter())

    with mock.patch.object(AdaptiveLossScaling, "forward", timed):
        yield ends


def measure(
    device: Device, methods: List[str], blocks: int, variable: Callable[[], nn.Variable]
) -> List[Dict[str, Any]]:
    """Measure a row for each method."""
    trainings, memory = {}, {}
    for method in methods:
        before = device.used_mib()
        trainings[method] = Training(method, variable, device)
        trainings[method].block(device)
        after = device.held_mib()
        memory[method] = None if before is None or after is None else after - before
    taken: Dict[str, List[float]] = {method: [] for method in methods}
    for number in range(blocks):
        for method in methods if number % 2 else methods[::-1]:
            taken[method].append(trainings[method].block(device))
    rows = []
    for method in methods:
        row: Dict[str, Any] = {"method": method, "ms": median(taken[method]), "blocks_ms": taken[method]}
        for other in {FLOOR, "dynamic"} & set(methods):
            row[f"over {other}"] = median(a / b for a, b in zip(taken[method], taken[other]))
        row["memory_mib"] = memory[method]
        timed = Training(method, variable, device, timed=True)
        timed.block(device)
        rows.append({**row, **timed.phases(device)})
    return rows


def table(rows: List[Dict[str, Any]]) -> str:
    """Write the rows as columns."""
    lines = [("", [row["method"] for row in rows])]
    names = ("ms", f"over {FLOOR}", "over dynamic", "memory_mib", *PHASES)
    for name in (*names, "waiting", "launches", "waits"):
        values = [row.get(name) for row in rows]
        digits = 3 if name.startswith("over") else 0 if name == "memory_mib" else 2
        lines.append((name, ["-" if value is None else f"{value:.{digits}f}" for value in values]))
    return "\n".join(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells) for name, cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--network", choices=tuple(SIZES), default="resnet50", help="(default: resnet50)")
    add("--context", default="cudnn:half", metavar="EXT:TYPE", help="(default: cudnn:half)")
    add("--device", default="0", metavar="N", help="which GPU (default: 0)")
    add("--batch", type=int, metavar="N", help="(default: 64 images, 16 sequences)")
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help="some of: %(choices)s",
    )
    add("--blocks", type=int, default=6, metavar="N", help="of each method (default: 6)")
    add("--quick", action="store_true", help="a tiny network and one block: to see that it works")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    device = Device(options.context, options.device)
    size = (QUICK if options.quick else SIZES)[options.network]
    if options.batch is not None:
        size = size._replace(batch=options.batch)

    def variable() -> nn.Variable:
        return build(options.network, size)

    head = {**device.versions(), "network": options.network, **size._asdict()}
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    rows = measure(device, options.methods, 1 if options.quick else options.blocks, variable)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
