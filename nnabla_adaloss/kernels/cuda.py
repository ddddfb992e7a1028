# SPDX-License-Identifier: Apache-2.0
"""Kernels for the arrays of nnabla's CUDA contexts: `adaloss.cu`, launched beside nnabla's own work."""

from __future__ import annotations

import math
from threading import RLock
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from nnabla import NdArray
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics
from ..host_context import is_on_host
from .arrays import (
    addresses_of,
    require_float32,
    require_same_size,
    require_same_sizes,
    require_sizes,
    unscaling_factor,
    which_are_half,
)
from .cuda_launcher import CudaSource, CupyLauncher, Launcher
from .device_table import DeviceTable
from .device_tasks import Column, DeviceTasks
from .interface import (
    ExponentHistogram,
    GradientsInPlace,
    GradientToUnscale,
    PackedArrays,
    RoundingStatistics,
    ScaledCopies,
    ScaledCopy,
)

# Two reads of 16 bytes for each of 256 threads: enough for small arrays to spread out.
ELEMENTS_PER_BLOCK = 2048
# Of a kernel whose blocks leave a row each, which the last of them reads in the end: not so many of those.
ELEMENTS_PER_ROW = 4 * ELEMENTS_PER_BLOCK


class CudaKernels:
    """`Kernels` for a CUDA context, in one pass over memory each.

    Each method of `Kernels` waits here for its result. The methods whose names begin with `launch_` do not:
    they start their kernels behind the nnabla functions called before and write what they find into a
    `DeviceTable`, so that a whole backward pass costs the host one wait, when it fetches the table. They take
    many arrays at once; up to 96 that do not depend on each other share a launch.

    Sums are reproducible bit for bit on one model of GPU: the order of addition depends on nothing else than
    the sizes and the number of multiprocessors.

    Args:
        context: an nnabla context whose array class is one of the CUDA extension's.
        launcher: the device; default: CuPy's, for the context's device.

    Example:
        >>> kernels = CudaKernels(get_extension_context("cudnn"))              # doctest: +SKIP
        >>> table = kernels.table(rows=len(gradients))                         # doctest: +SKIP
        >>> kernels.launch_statistics(gradients, table)                        # doctest: +SKIP
        >>> [row.statistics.abs_max for row in table.fetch().rows]             # doctest: +SKIP
    """

    asynchronous = True

    def __init__(self, context: nn.Context, launcher: Optional[Launcher] = None) -> None:
        if launcher is None:
            if is_on_host(context):
                raise ValueError(
                    f"context.array_class={context.array_class!r}: those arrays are on the host, where a GPU "
                    "cannot reach them; give a context of nnabla_ext.cuda or nnabla_ext.cudnn"
                )
            launcher = CupyLauncher(int(context.device_id or 0))
        self._source = source = CudaSource()
        self._context, self._launcher = context, launcher
        self._source_is_half, self._target_is_half, self._accumulate = (
            source.constant(flag) for flag in ("SOURCE_IS_HALF", "TARGET_IS_HALF", "ACCUMULATE")
        )
        self._max_tasks = source.constant("MAX_TASKS")
        # Held while a buffer is in use that calls share: threads may share these kernels.
        self._lock = RLock()
        self._tasks = np.zeros(1, source.layout("Tasks"))
        self._format = source.layout("Format")
        # What blocks of one task leave for the last of them; kernels run one after another, so one is enough.
        rows = self._max_tasks * self._launcher.max_blocks
        self._partial = self._launcher.allocate(rows * source.layout("Row").itemsize)
        self._finished = self._launcher.allocate(self._max_tasks * 4)
        self._workspace = np.uint64(self._partial.ptr), np.uint64(self._finished.ptr)
        self._own_table, self._measured = self.table(1, gradients=self._max_tasks), self.table(1)

    def table(self, rows: int, histograms: bool = False, gradients: int = 0) -> DeviceTable:
        """A table for the results of `launch_` methods, empty."""
        return DeviceTable(self._launcher, self._source, rows, histograms, gradients)

    # ---- many arrays, without waiting

    def launch_statistics(self, arrays: Sequence[NdArray], table: DeviceTable, first_row: int = 0) -> None:
        """Write the statistics of the arrays to the table's rows from `first_row` on.

        A table with histograms gets those too; they add to what it holds, so clear it between uses.
        """
        tasks = self._readings(arrays, np.arange(first_row, first_row + len(arrays)))
        if table.histograms:
            rows = table.rows, *self._workspace, table.exponents
            self._launch("exponent_histogram", tasks, *rows, per_block=ELEMENTS_PER_ROW)
        else:
            self._launch("statistics", tasks, table.rows, *self._workspace, per_block=ELEMENTS_PER_ROW)

    def launch_largest(self, arrays: Sequence[NdArray], table: DeviceTable) -> None:
        """Write the largest magnitude of all the arrays to the table's first place, if it is larger than what
        is there: infinity, or a NaN, if one is not finite.
        """
        self._launch("largest_magnitude", self._readings(arrays), table.largest)

    def launch_scaled_copies(self, copies: Iterable[ScaledCopy]) -> None:
        """`scaled_copy` for many arrays."""
        columns = list(zip(*copies))
        if not columns:
            return
        sources, targets, alphas, half = columns
        sizes, to_half = require_same_sizes(sources, targets), np.array(half, np.bool_)
        read, flags = self._read(sources)
        flags |= self._target_is_half * to_half
        written = addresses_of(targets, flags != 0, self._context, write_only=True)
        self._launch("scaled_copy", DeviceTasks(read, written, sizes, factors=alphas, flags=flags))

    def launch_unscale_add(
        self, gradients: Sequence[GradientToUnscale], table: DeviceTable, first: int = 0
    ) -> None:
        """`unscale_add` for many gradients; the table's places from `first` on keep the largest magnitudes
        that they were given.
        """
        places = table.places(first, len(gradients))
        factors = [unscaling_factor(g.scale) for g in gradients]
        addresses, flags = self._read([g.source for g in gradients])
        targets, sizes = [], []
        for index, (source, master, _, accumulate) in enumerate(gradients):
            sizes.append(require_same_size(source, master))
            if accumulate or source is master:
                require_float32(master, "master")
            if accumulate:
                flags[index] |= self._accumulate
            in_place = master is source
            targets.append(addresses[index] if in_place else self._address(master, not accumulate))
        tasks = DeviceTasks(addresses, targets, sizes, rows=places, factors=factors, flags=flags)
        self._launch("unscale_add", tasks, table.largest)

    def launch_unscale_in_place(
        self, gradients: GradientsInPlace, table: DeviceTable, part: slice, first: int = 0
    ) -> None:
        """`unscale_in_place` for some of many gradients; largest magnitudes as of `launch_unscale_add`."""
        arrays = gradients.arrays[part]
        places = table.places(first, len(arrays))
        addresses = addresses_of(arrays, None, self._context)
        sizes, factors = gradients.sizes[part], gradients.factors[part]
        tasks = DeviceTasks(addresses, addresses, sizes, rows=places, factors=factors, independent=True)
        self._launch("unscale_add", tasks, table.largest)

    def launch_round_to_format(
        self,
        source: NdArray,
        target: NdArray,
        storage: Format,
        table: DeviceTable,
        *,
        fitted: bool = False,
        random_key: Optional[int] = None,
    ) -> None:
        """`round_to_format` with its statistics in the table's first row."""
        require_float32(source, "source")
        require_same_size(source, target)
        if storage.mantissa_bits >= 23:
            if target is not source:
                self.launch_scaled_copies([ScaledCopy(source, target, 1.0)])
            self.launch_statistics([source], table)
            return
        address = self._address(source)
        to_address = address if target is source else self._address(target, True)
        limits = storage.mantissa_bits, storage.smallest_normal, storage.max, storage.beyond_max
        key = random_key or 0
        layout = np.zeros(1, self._format)
        layout[0] = (*limits, fitted, random_key is not None, key & 0xFFFFFFFF, key >> 32)
        task = DeviceTasks([address], [to_address], [source.size])
        with self._lock:
            if fitted:
                self.launch_statistics([source], self._measured)
            arguments = layout, self._measured.rows, table.rows, *self._workspace
            self._launch("round_to_format", task, *arguments, per_block=ELEMENTS_PER_ROW)

    # ---- Kernels

    @property
    def context(self) -> nn.Context:
        return self._context

    def statistics(self, x: NdArray) -> ArrayStatistics:
        with self._lock:
            self.launch_statistics([x], self._own_table)
            return self._own_table.fetch(1, 0).rows[0].statistics

    def statistics_all(self, arrays: Sequence[NdArray]) -> List[ArrayStatistics]:
        if not arrays:
            return []
        table = self.table(len(arrays))
        self.launch_statistics(arrays, table)
        return [row.statistics for row in table.fetch().rows]

    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, ExponentHistogram]:
        table = self.table(1, histograms=True)
        self.launch_statistics([x], table)
        contents = table.fetch()
        return contents.rows[0].statistics, contents.exponents[0]

    def all_finite(self, arrays: Sequence[NdArray]) -> bool:
        with self._lock:
            self._own_table.clear()
            self.launch_largest(arrays, self._own_table)
            return math.isfinite(self._own_table.fetch(0, 1).largest[0])

    def scaled_copy(self, source: NdArray, target: NdArray, alpha: float, *, half: bool = False) -> None:
        self.launch_scaled_copies([ScaledCopy(source, target, alpha, half)])

    def scaled_copy_all(self, copies: ScaledCopies) -> None:
        self.launch_scaled_copies(copies.each)

    def pack(self, arrays: Sequence[NdArray], packed: PackedArrays) -> None:
        require_sizes(arrays, packed.sizes)
        packed.halves = which_are_half(arrays)
        sources = addresses_of(arrays, packed.halves, self._context)
        self._move(packed, sources, self._places(packed, write_only=True))

    def unpack(self, packed: PackedArrays, arrays: Sequence[NdArray]) -> None:
        require_sizes(arrays, packed.sizes)
        targets = addresses_of(arrays, packed.halves, self._context, write_only=True)
        self._move(packed, self._places(packed), targets)

    def scale_(self, x: NdArray, alpha: float) -> None:
        addresses, flags = self._read([x])
        self._launch("scaled_copy", DeviceTasks(addresses, addresses, [x.size], factors=alpha, flags=flags))

    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        return self.unscale_add_all([GradientToUnscale(source, master, scale, accumulate)])[0]

    def unscale_add_all(self, gradients: Iterable[GradientToUnscale]) -> List[float]:
        tasks = list(gradients)
        return self._largest_of(
            len(tasks), lambda part: self.launch_unscale_add(tasks[part], self._own_table)
        )

    def unscale_in_place(self, gradients: GradientsInPlace) -> List[float]:
        count, table = len(gradients.arrays), self._own_table
        return self._largest_of(count, lambda part: self.launch_unscale_in_place(gradients, table, part))

    def _largest_of(self, count: int, launch: Callable[[slice], None]) -> List[float]:
        found: List[float] = []
        for start in range(0, count, self._max_tasks):
            part = slice(start, min(start + self._max_tasks, count))
            with self._lock:
                self._own_table.clear()
                launch(part)
                found += self._own_table.fetch(0, part.stop - part.start).largest
        return found

    def round_to_format(
        self,
        source: NdArray,
        target: NdArray,
        storage: Format,
        *,
        fitted: bool = False,
        random_key: Optional[int] = None,
    ) -> RoundingStatistics:
        with self._lock:
            self._own_table.clear()
            self.launch_round_to_format(
                source, target, storage, self._own_table, fitted=fitted, random_key=random_key
            )
            return self._own_table.fetch(1, 0).rows[0]

    # ---- launching

    def _address(self, x: NdArray, write_only: bool = False) -> int:
        return addresses_of([x], None, self._context, write_only=write_only)[0]

    def _places(self, packed: PackedArrays, *, write_only: bool = False) -> List[int]:
        places = self._address(packed.array, write_only) + packed.offsets
        return places.tolist()  # type: ignore[no-any-return]

    def _move(self, packed: PackedArrays, sources: List[int], targets: List[int]) -> None:
        flags = self._source_is_half * packed.halves
        tasks = DeviceTasks(sources, targets, packed.sizes, flags=flags, independent=True)
        self._launch("scaled_copy", tasks)

    def _read(self, arrays: Sequence[NdArray]) -> Tuple[List[int], NDArray[np.int64]]:
        """The addresses of what is read, and the flags that say how."""
        halves = which_are_half(arrays)
        return addresses_of(arrays, halves, self._context), self._source_is_half * halves

    def _readings(self, arrays: Sequence[NdArray], rows: Column = 0) -> DeviceTasks:
        """Tasks that read, with their results in these rows."""
        addresses, flags = self._read(arrays)
        return DeviceTasks(addresses, 0, [x.size for x in arrays], rows=rows, flags=flags)

    def _launch(
        self, kernel: str, tasks: DeviceTasks, *arguments: Any, per_block: int = ELEMENTS_PER_BLOCK
    ) -> None:
        with self._lock:
            for part in tasks.launches(self._max_tasks):
                blocks = tasks.write(part, self._tasks, per_block, self._launcher.max_blocks)
                self._launcher.launch(kernel, blocks, (self._tasks, *arguments))
