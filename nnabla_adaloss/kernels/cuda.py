# SPDX-License-Identifier: Apache-2.0
"""Kernels for the arrays of nnabla's CUDA contexts: `adaloss.cu`, launched beside nnabla's own work."""

from __future__ import annotations

from threading import RLock
from typing import Any, Callable, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from nnabla import NdArray
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics
from ..host_context import is_on_host
from .addresses import Addresses, addresses_of
from .arrays import Arrays, require_same_size, which_are_half
from .cuda_launcher import CupyLauncher, constant, layout
from .device_tasks import Column, DeviceTable, DeviceTasks
from .interface import EXPONENT_BINS, Kernels, RoundingStatistics, ScaledCopies, UnscalingList

# Two reads of 16 bytes for each of 256 threads: enough for small arrays to spread out.
ELEMENTS_PER_BLOCK = 2048
# For kernels whose blocks leave a row each, which the last block reads: fewer blocks.
ELEMENTS_PER_ROW = 4 * ELEMENTS_PER_BLOCK


class CudaKernels(Kernels):
    """`Kernels` for a CUDA context, in one pass over memory each; methods named `launch_` do not wait."""

    # They queue kernels after earlier nnabla functions and write to a `DeviceTable`, so that a whole pass
    # waits once, when it fetches the table. Up to 96 independent arrays share a launch. Sums are reproducible
    # bit for bit on one model of GPU: their order depends on sizes and multiprocessors only.

    asynchronous = True

    def __init__(self, context: nn.Context, launcher: Optional[CupyLauncher] = None) -> None:
        if launcher is None:
            if is_on_host(context):
                raise ValueError(
                    f"context.array_class={context.array_class!r}: those arrays are on the host, which a GPU "
                    "cannot access; give a context of nnabla_ext.cuda or nnabla_ext.cudnn"
                )
            launcher = CupyLauncher(int(context.device_id or 0))
        self.context, self._launcher, self.card = context, launcher, launcher.card
        self._max_tasks = constant("MAX_TASKS")
        # Held while a shared buffer is in use: threads may share these kernels.
        self._lock = RLock()
        # Partial rows of a task's blocks, for the last block; kernels run one after another and share it.
        rows = self._max_tasks * launcher.max_blocks
        self._partial = launcher.allocate(rows * layout("Row").itemsize)
        self._finished = launcher.allocate(self._max_tasks * 4)
        self._workspace = np.uint64(self._partial.ptr), np.uint64(self._finished.ptr)
        self._own_table, self._measured = self.table(1, gradients=1), self.table(1)
        self._exponents = launcher.allocate(EXPONENT_BINS * 8)

    def table(self, rows: int, gradients: int = 0) -> DeviceTable:
        """Make an empty table for the results of `launch_` methods."""
        return DeviceTable(self._launcher, rows, gradients)

    # ---- many arrays, without waiting

    def launch_statistics(self, arrays: Arrays, table: DeviceTable, first_row: int = 0) -> None:
        """Write the statistics of the arrays to the table's rows from `first_row` on."""
        tasks = self._readings(arrays, np.arange(first_row, first_row + len(arrays)))
        self._launch("statistics", tasks, table.rows, *self._workspace, per_block=ELEMENTS_PER_ROW)

    def launch_exponent_histogram(self, x: NdArray, table: DeviceTable) -> None:
        """Write the statistics of `x` to the table's first row, and its histogram to the shared buffer."""
        with self._lock:
            self._launcher.clear(self._exponents, EXPONENT_BINS * 8)
            where = table.rows, *self._workspace, np.uint64(self._exponents.ptr)
            self._launch("exponent_histogram", self._readings([x]), *where, per_block=ELEMENTS_PER_ROW)

    def launch_largest(
        self, arrays: Arrays, table: DeviceTable, places: Sequence[int], tasks: Optional[DeviceTasks] = None
    ) -> DeviceTasks:
        """Raise arrays' places in the table to their largest magnitudes; return tasks for the next call."""
        addresses, flags = self._read(arrays)
        sizes = [x.size for x in arrays]
        if tasks is None or tasks.sizes_and_rows != (sizes, places):
            tasks = DeviceTasks(addresses, 0, sizes, rows=places, flags=flags)
        else:
            tasks.move(addresses, 0, flags)
        self._launch("largest_magnitude", tasks, table.largest)
        return tasks

    def launch_unscale_list(self, gradients: UnscalingList, table: DeviceTable, first: int = 0) -> None:
        """Launch `unscale_add` for a list; largest magnitudes go to the table's places from `first` on."""
        sources, masters, accumulate = gradients.sources, gradients.masters, gradients.accumulate
        flags: Any = 0
        if masters is None:
            addresses = targets = addresses_of(sources, None, self.context)
        else:
            addresses, flags = self._read(sources)
            targets = addresses_of(masters, None, self.context, write_only=accumulate is None)
        if accumulate is not None:
            flags = flags | constant("ACCUMULATE") * accumulate
        # Tasks of the last pass, with their first place.
        first_before, tasks = gradients.tasks or (None, None)
        if tasks is None or first_before != first:
            rows, sizes, factors = range(first, first + len(sources)), gradients.sizes, gradients.factors
            tasks = DeviceTasks(addresses, targets, sizes, rows=rows, factors=factors, flags=flags)
            gradients.tasks = first, tasks
        else:
            tasks.move(addresses, targets, flags)
        self._launch("unscale_add", tasks, table.largest)

    def launch_round_to_format(
        self,
        source: NdArray,
        target: NdArray,
        storage: Format,
        table: DeviceTable,
        fitted: bool = False,
        random_key: Optional[int] = None,
    ) -> None:
        """Launch `round_to_format` for narrower formats than float32; statistics go to the first row."""
        address = self._address(source)
        to_address = address if target is source else self._address(target, True)
        limits = storage.mantissa_bits, storage.smallest_normal, storage.max, storage.beyond_max
        key = random_key or 0
        rounding = np.zeros(1, layout("Format"))
        rounding[0] = (*limits, fitted, random_key is not None, key & 0xFFFFFFFF, key >> 32)
        task = DeviceTasks([address], [to_address], [source.size])
        with self._lock:
            if fitted:
                self.launch_statistics([source], self._measured)
            arguments = rounding, self._measured.rows, table.rows, *self._workspace
            self._launch("round_to_format", task, *arguments, per_block=ELEMENTS_PER_ROW)

    # ---- Kernels

    def statistics(self, x: NdArray) -> ArrayStatistics:
        return self._launch_and_wait(lambda table: self.launch_statistics([x], table))[0].statistics

    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, NDArray[np.int64]]:
        with self._lock:
            self.launch_exponent_histogram(x, self._own_table)
            counts = self._launcher.fetch(self._exponents, EXPONENT_BINS * 8).view(np.int64)
            (row,), _ = self._own_table.fetch(1, 0)
        return row.statistics, counts

    def largest(self, arrays: Arrays) -> float:
        if not arrays:
            return 0.0
        return self._launch_and_wait(lambda table: self.launch_largest(arrays, table, [0] * len(arrays)))[1]

    def mark_nonfinite(self, arrays: Arrays, mark: NdArray) -> None:
        # The kernel raises a float32 to the largest magnitude: infinity or NaN, if an element is.
        last = self._address(mark) + 4 * (mark.size - 1)
        self._launch("largest_magnitude", self._readings(arrays), np.uint64(last))

    def scaled_copy_all(self, copies: ScaledCopies) -> None:
        sizes = require_same_size(copies.sources, copies.targets)
        read, flags = self._read(copies.sources)
        if copies.half is not None:
            flags = flags | constant("TARGET_IS_HALF") * copies.half
        halves = None if isinstance(flags, int) else flags != 0
        written = addresses_of(copies.targets, halves, self.context, write_only=True)
        self._launch("scaled_copy", DeviceTasks(read, written, sizes, factors=copies.alphas, flags=flags))

    def scale_(self, x: NdArray, alpha: float) -> None:
        addresses, flags = self._read([x])
        self._launch("scaled_copy", DeviceTasks(addresses, addresses, [x.size], factors=alpha, flags=flags))

    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        gradients = UnscalingList([source], [scale], [master], [accumulate])
        return self._launch_and_wait(lambda table: self.launch_unscale_list(gradients, table))[1]

    def _round(
        self, source: NdArray, target: NdArray, storage: Format, fitted: bool, random_key: Optional[int]
    ) -> RoundingStatistics:
        return self._launch_and_wait(
            lambda table: self.launch_round_to_format(source, target, storage, table, fitted, random_key)
        )[0]

    # ---- launching

    def _launch_and_wait(self, launch: Callable[[DeviceTable], Any]) -> Tuple[RoundingStatistics, float]:
        """Return the first row and the first largest magnitude of a table; the launch writes one of them."""
        with self._lock:
            self._own_table.clear()
            launch(self._own_table)
            (row,), (largest,) = self._own_table.fetch(1, 1)
        return row, largest

    def _address(self, x: NdArray, write_only: bool = False) -> int:
        return addresses_of([x], None, self.context, write_only=write_only)[0]

    def _read(self, arrays: Arrays) -> Tuple[Addresses, Any]:
        """Addresses of arrays to read, and flags of their dtypes."""
        halves = which_are_half(arrays)
        flags = 0 if halves is None else constant("SOURCE_IS_HALF") * halves
        return addresses_of(arrays, halves, self.context), flags

    def _readings(self, arrays: Arrays, rows: Column = 0) -> DeviceTasks:
        """Make tasks that read arrays, with their results in these rows."""
        addresses, flags = self._read(arrays)
        return DeviceTasks(addresses, 0, [x.size for x in arrays], rows=rows, flags=flags)

    def _launch(
        self, kernel: str, tasks: DeviceTasks, *arguments: Any, per_block: int = ELEMENTS_PER_BLOCK
    ) -> None:
        """Launch a kernel for all tasks, with as many of them at once as fit in its arguments."""
        for start in range(0, tasks.count, self._max_tasks):
            part = slice(start, min(start + self._max_tasks, tasks.count))
            argument, blocks = tasks.argument(part, per_block, self._launcher.max_blocks)
            self._launcher.launch(kernel, blocks, (argument, *arguments))
