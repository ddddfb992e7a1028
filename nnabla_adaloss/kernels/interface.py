# SPDX-License-Identifier: Apache-2.0
"""Interface of kernel backends to the memory of nnabla arrays, with their common parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from nnabla import Context, NdArray, Variable
from numpy.typing import NDArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics
from .arrays import FLOAT32, Arrays, as_float32, float32_copy, is_readable, require_float32, require_same_size

EXPONENT_BINS = 256
"""Length of an exponent histogram: one bin per value of float32's exponent field."""


class RoundingStatistics(NamedTuple):
    """Counts from rounding an array to a storage format."""

    statistics: ArrayStatistics  # of the rounded values
    underflowed: int  # number of nonzero elements that became zero
    overflowed: int  # number of finite elements too large for the format

    @property
    def nonzero(self) -> int:
        """Number of elements that were nonzero before."""
        return self.statistics.count - self.statistics.zeros + self.underflowed


class ScaledCopies:
    """Arrays to copy in many passes, each with a target and a factor; `half`: targets that become float16."""

    def __init__(
        self, sources: Arrays, targets: Arrays, alphas: Sequence[float], half: Sequence[bool] = ()
    ) -> None:
        self.sources, self.targets, self.alphas = sources, targets, alphas
        self.half: Optional[NDArray[np.bool_]] = np.array(half, np.bool_) if any(half) else None
        # Kept by `CpuKernels`: sizes of the last pass, and tasks without addresses.
        self.sizes: List[int] = []
        self.tasks_on_host: Optional[NDArray[np.int64]] = None


class UnscalingList:
    """Gradients to unscale in many passes, in place or into float32 masters; `accumulate`: added to these."""

    # No two gradients share memory, and a master that one is added to is another array.

    def __init__(
        self,
        sources: Arrays,
        scales: Sequence[float],
        masters: Optional[Arrays] = None,
        accumulate: Sequence[bool] = (),
    ) -> None:
        # Without masters, sources are made float32.
        self.sources, self.masters = sources, masters
        for source, master, adds in zip(sources, masters or (), accumulate):
            require_same_size([source], [master])
            if adds or source is master:
                require_float32(master, "master")
        self.accumulate = np.array(accumulate, np.bool_) if any(accumulate) else None
        self.sizes = np.array([x.size for x in sources], np.int64)
        for scale in scales:
            if not 0.0 < scale < math.inf:
                raise ValueError(f"scale={scale} must be a positive finite number")
        self.factors = 1.0 / np.array(scales, np.float64)
        # Tasks of the kernels, which set addresses and dtypes of sources in each pass.
        self.tasks: Any = None


class Kernels(ABC):
    """Elementwise passes over float32 and float16 nnabla arrays, each reading its input once.

    An array's own dtype is used and never changed: asking nnabla for a float16 view of a float32 parameter
    would turn the master weights into float16 for good. Shapes do not matter, only sizes do; empty arrays are
    allowed. Arithmetic is float32 whatever the storage. Sums are good to 4e-6 of the sum of magnitudes at
    worst (1e-7 ordinarily), everything else is exact.

    nnabla marks an array on which `zero()` was called as lazily zero (`NdArray.zeroing`), and a solver skips
    parameters whose gradient is so marked. Access to an array's memory removes the mark, so callers check
    `zeroing` first.

    Raises:
        TypeError: an array is neither float32 nor float16.
        ValueError: the sizes of two corresponding arrays differ.
    """

    asynchronous: bool
    """True if reading a result waits for an asynchronous device."""

    context: Context
    """Context in which the kernels access arrays; it leaves arrays on their device."""

    card: str = "this GPU"
    """Name of the GPU, for messages."""

    @abstractmethod
    def statistics(self, x: NdArray) -> ArrayStatistics:
        """Sums, extremes and counts of `x`."""

    @abstractmethod
    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, NDArray[np.int64]]:
        """Statistics of `x`, and the number of elements with each binary exponent, from one pass.

        Bin e counts the x with 2^(e-127) <= |x| < 2^(e-126), bin 0 the zeros and whatever is below 2^-126,
        bin 255 the infinities and NaNs.
        """

    @abstractmethod
    def largest(self, arrays: Arrays) -> float:
        """Largest magnitude in the arrays; infinity or NaN if an element is. It waits for a GPU once."""

    @abstractmethod
    def mark_nonfinite(self, arrays: Arrays, mark: NdArray) -> None:
        """Without waiting, make the last element of `mark`, a float32 zero, not finite if any element is."""

    def gradients_are_finite(self, variables: Iterable[Variable]) -> bool:
        """True if gradients, of any dtype, are finite. It waits for a GPU once."""
        return math.isfinite(self.largest(self._written(variables)))

    def gradients_are_zero(self, variables: Iterable[Variable]) -> bool:
        """True if gradients, of any dtype, are all zero. It waits for a GPU once."""
        return self.largest(self._written(variables)) == 0.0

    def mark_nonfinite_gradients(self, variables: Iterable[Variable], mark: NdArray) -> None:
        """Apply `mark_nonfinite` to gradients of any dtype."""
        self.mark_nonfinite(self._written(variables), mark)

    def _written(self, variables: Iterable[Variable]) -> List[NdArray]:
        """Gradients that were written, readable by the kernels."""
        # A lazily zero gradient stays so: a solver skips its parameter.
        written = [v.grad for v in variables if not v.grad.zeroing]
        return [as_float32(g, NdArray(g.shape)) for g in written]

    def scaled_copy(self, source: NdArray, target: NdArray, alpha: float) -> None:
        """Write alpha * source, rounded once, to another array in the source's dtype."""
        self.scaled_copy_all(ScaledCopies([source], [target], [alpha]))

    def scaled_float32(self, source: NdArray, target: NdArray, alpha: float) -> None:
        """Write alpha * source, of any dtype, to `target` as float32."""
        if is_readable(source):
            self.scaled_copy(source, target, 1.0)
            target.data_ptr(FLOAT32, self.context)
        else:
            float32_copy(source, target)
        self.scale_(target, alpha)

    @abstractmethod
    def scaled_copy_all(self, copies: ScaledCopies) -> None:
        """Apply `scaled_copy` to many arrays."""

    @abstractmethod
    def scale_(self, x: NdArray, alpha: float) -> None:
        """Multiply `x` by alpha in place."""

    @abstractmethod
    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        """Write source / scale to `master`, or add it with `accumulate`, in float32. Return the largest
        magnitude of source / scale as float32; infinity if `source` or the result is not finite.

        The scale must be positive and finite. The source is multiplied by `float32(1 / scale)`: exact for
        powers of two. Without `accumulate` it may be `master` itself, whose old content is not read.
        """

    def round_to_format(
        self,
        source: NdArray,
        target: NdArray,
        storage: Format,
        *,
        fitted: bool = False,
        random_key: Optional[int] = None,
    ) -> RoundingStatistics:
        """Write float32 `source`, rounded half to even to the numbers of `storage`, to `target` as float32.

        As IEEE 754 rounds: results below the normal range become subnormals or zero, results beyond the range
        infinity (NaN in a format without infinities, the largest number in one that saturates), NaN stays NaN
        and -0.0 stays -0.0.

        Args:
            target: float32 or uninitialized; may be `source` itself.
            fitted: round to the numbers of `storage` times the power of two that brings its largest to the
                largest finite magnitude or just above it, and keep infinities; reads the source twice.
            random_key: round to one of the two neighbours at random, so that the expected value is the number
                itself, to within 2^-32 of the distance between them. The 64 bits of the key and the index of
                an element determine the choice, on every backend. Zeros, numbers of the format, infinities,
                NaN and magnitudes beyond the largest number are rounded as without it.
        """
        require_float32(source, "source")
        if target is not source:
            require_same_size([source], [target])
        if storage.mantissa_bits < 23:
            return self._round(source, target, storage, fitted, random_key)
        if target is not source:
            self.scaled_copy(source, target, 1.0)
        return RoundingStatistics(self.statistics(source), 0, 0)

    @abstractmethod
    def _round(
        self, source: NdArray, target: NdArray, storage: Format, fitted: bool, random_key: Optional[int]
    ) -> RoundingStatistics:
        """Apply `round_to_format` to a format narrower than float32."""
