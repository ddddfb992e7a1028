# SPDX-License-Identifier: Apache-2.0
"""Arrays that functions read and write in one batch, and the effect of storage on them."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Set, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from ..graph.functions import is_matrix_product, written_inputs
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from ..kernels.interface import RoundingStatistics
from .network import Network

_FLAT = 2.0**-10  # an activation is flat where its derivative is at most this share of the largest one
_FLAT_ERF = -np.log(_FLAT)  # square of a number from which the derivative of erf, exp(-x ** 2), is as flat
REPEATED = 1e-4  # a larger difference between two passes over a batch is not due to the order of sums
_MASKED = 5e3  # distance below the largest score of a row, from which a score is masked
_ABSORBED = 0.9  # share that "most" means
_ON_PIXEL = 2.0**-7  # distance in pixels that is due to rounding errors
# By function, how many of its inputs, from the first on, are probabilities.
PROBABILITIES = {"BinaryCrossEntropy": 1, "CategoricalCrossEntropy": 1, "KLMultinomial": 2}
_ROUNDED = 1e-3  # how far rounding may bring a probability above 1 or below 0
# By function, which of its inputs has indices.
INDICES = {"Embed": 0, "OneHot": 0, "SoftmaxCrossEntropy": 1, "CategoricalCrossEntropy": 1}
INDICES |= {"Gather": 1, "ScatterAdd": 1}


class Sight:
    """Observations of one batch: arrays by key, and functions; as stored, compared with those `in_fp32`."""

    def __init__(
        self,
        network: Network,
        in_fp32: Optional[Sight] = None,
        rounded: Mapping[int, RoundingStatistics] = MappingProxyType({}),
    ) -> None:
        self.data: Dict[int, ArrayStatistics] = {}
        self.gradients: Dict[int, ArrayStatistics] = {}
        # Numbers of NaNs and of positive infinities in each nonfinite array.
        self.nans: Dict[int, int] = {}
        self.infinities: Dict[int, int] = {}
        self.undefined: Dict[Any, int] = {}  # number of inputs that a function cannot take, such as log(-1)
        self.largest_index: Dict[Any, float] = {}  # largest index that a function reads
        self.jumping: List[Any] = []  # functions that sample places on pixels, where their derivative jumps
        self.breaks: Any = None  # first function in backward that makes a gradient nonfinite
        self._last: Any = None  # function whose backward runs
        # In fp32 only.
        self.improbable: Dict[int, int] = {}  # number of probabilities that are below 0 or above 1
        self.flat: Dict[Any, float] = {}  # share of outputs (of a softmax, rows) with next to no derivative
        self.variation: Dict[Any, float] = {}  # deviation of the rows that a product reads, by their size
        self._kept: Dict[int, NDArray[Any]] = {}  # copies of arrays, to compare stored ones with
        # As stored only.
        self.wrong_indices: Dict[Any, int] = {}  # number of indices that storage changes
        self.absorbing: Set[Any] = set()  # functions whose sums mostly equal one of two nonzero numbers
        self._errors: Dict[int, float] = {}
        self._lost: Dict[int, Tuple[float, float]] = {}
        self.in_fp32, self._network, self._rounded = in_fp32, network, rounded

    def error(self, v: nn.Variable) -> float:
        """Error of a variable as stored, relative to fp32; infinite if it is not finite."""
        return self._errors.get(hash(v), 0.0)

    def origins_of_errors(self, before: float, after: float) -> List[Any]:
        """Functions whose errors exceed `after`, although those of their inputs are at most `before`."""
        changed = [f for f in self._network.graph.functions if any(self.error(v) > after for v in f.outputs)]
        return [f for f in changed if all(self.error(v) <= before for v in f.inputs)]

    def lost(self, v: nn.Variable) -> Tuple[float, float]:
        """Share of the nonzero elements in fp32 that storage makes 0, and their median magnitude."""
        return self._lost.get(hash(v), (0.0, 0.0))

    def not_finite(self, v: nn.Variable) -> str:
        """Numbers of NaNs and infinities in a variable, in words."""
        nans = self.nans[hash(v)]
        counted = (nans, "NaN", "NaNs"), (self.data[hash(v)].nonfinite - nans, "infinity", "infinities")
        return " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in counted if n)

    def after_forward(self, f: Any) -> None:
        """Post hook of forward: note a function's outputs, the leaves that it reads, and their faults."""
        type_name, args = f.info.type_name, f.info.args
        written = written_inputs(type_name, args)
        read = [v for index, v in enumerate(f.inputs) if v.parent is None and index not in written]
        for v in (*(v for v in read if hash(v) not in self.data), *f.outputs):
            self._note(v)
        # An output that stays in fp32 is rounded for its readers: then the rounded numbers are noted.
        read_keys = [hash(v) for v in f.inputs if hash(v) in self._rounded]
        self.data.update((key, self._rounded[key].statistics) for key in read_keys)
        if type_name in ("Log", "PowScalar", "Pow2"):
            self.undefined[f] = int(np.count_nonzero(f.inputs[0].data.data < 0))
        if type_name in INDICES:
            index = f.inputs[INDICES[type_name]]
            self.undefined[f] = int(np.count_nonzero(index.data.data % 1.0))
            # A loss may read labels below 0: it leaves their samples out.
            numbers = index.data.data if type_name.endswith("Entropy") else np.abs(index.data.data)
            self.largest_index[f] = float(np.max(numbers, initial=0.0))
            if self.in_fp32 is not None and (exact := self.in_fp32._kept.get(hash(index))) is not None:
                changed = index.data.data.astype(int) != exact.astype(int)
                self.wrong_indices[f] = int(np.count_nonzero(changed))
        if type_name == "WarpByGrid" and _is_on_pixels(f):
            self.jumping.append(f)
        if self.in_fp32 is None:
            for v in f.inputs[: PROBABILITIES.get(type_name, 0)]:
                is_outside = (v.data.data < -_ROUNDED) | (v.data.data > 1.0 + _ROUNDED)
                self.improbable[hash(v)] = int(np.count_nonzero(is_outside))
            if type_name in _FLATNESS:
                flat = _FLATNESS[type_name](f)
                self.flat[f] = float(np.mean(flat)) if flat.size else 0.0
            if is_matrix_product(type_name) and f.inputs[1].parent is None and len(f.inputs[0].data.data) > 1:
                rows = f.inputs[0].data.data
                size = float(np.linalg.norm(rows))
                difference = float(np.linalg.norm(rows - rows.mean(axis=0)))
                self.variation[f] = difference / size if size else math.inf
        elif type_name in ("Add2", "Sub2") and _absorbs(f):
            self.absorbing.add(f)

    def before_backward(self, f: Any) -> None:
        """Pre hook of backward: note the gradients of a function's outputs, which are complete now."""
        self._note_gradients(f.outputs)
        self._last = f

    def end(self) -> None:
        """Note the gradients of leaves after backward; arrays in fp32 are no longer needed."""
        self._note_gradients(self._network.leaves.values())
        if self.in_fp32 is not None:
            self.in_fp32._kept.clear()

    def _note(self, v: nn.Variable) -> None:
        """Note the numbers of a variable, and how storage has changed them."""
        key, statistics = hash(v), self.statistics(v.data)
        if statistics is None:
            return
        self.data[key] = statistics
        if statistics.nonfinite:
            self.nans[key] = int(np.count_nonzero(np.isnan(v.data.data)))
            self.infinities[key] = int(np.count_nonzero(v.data.data == np.inf))
        if self.in_fp32 is None:
            self._kept[key] = np.array(v.data.data, np.float32)
        elif key in self.in_fp32._kept:
            self._errors[key], self._lost[key] = _deviation(np.asarray(v.data.data), self.in_fp32._kept[key])

    def _note_gradients(self, variables: Iterable[nn.Variable]) -> None:
        """Note gradients, and the last function if it is the first to make one nonfinite."""
        if self._last is not None and self.breaks is None:
            computed = [self.statistics(v.grad) for v in self._last.inputs if v.need_grad]
            if not all(one is None or one.finite for one in computed):
                self.breaks = self._last
        known = {hash(v): self.statistics(v.grad) for v in variables}
        self.gradients.update({key: found for key, found in known.items() if found is not None})

    def statistics(self, array: nn.NdArray) -> Optional[ArrayStatistics]:
        """Statistics of an array; None if it was cleared."""
        if array.clear_called:
            return None
        if (stored := stored_dtype(array)) is None:
            return ArrayStatistics.of_zeros(array.size)
        if stored not in (FLOAT32, FLOAT16):
            array = nn.NdArray.from_numpy_array(np.asarray(array.data, FLOAT32))
        return self._network.examined.kernels.statistics(array)


def largest(known: Iterable[Optional[ArrayStatistics]]) -> float:
    """Largest magnitude in arrays; infinite if one is not finite."""
    return max((math.inf if one.nonfinite else one.abs_max for one in known if one is not None), default=0.0)


def _absorbs(f: Any) -> bool:
    """True if most sums of two nonzero numbers are equal to one of them."""
    total, (a, b) = f.outputs[0].data.data, (v.data.data for v in f.inputs)
    both = (a != 0.0) & (b != 0.0)
    unchanged = both & (np.abs(total) == np.maximum(np.abs(a), np.abs(b)))
    return bool(np.count_nonzero(unchanged) > _ABSORBED * max(np.count_nonzero(both), 1))


def _is_on_pixels(f: Any) -> bool:
    """True if most sampled places are pixels, as those of the identity are."""
    x, grid, args = f.inputs[0], f.inputs[1].data.data, f.info.args
    sizes = np.array(x.shape[1:-1] if args["channel_last"] else x.shape[2:])[::-1]
    shift = 1.0 - args["align_corners"]
    places = ((grid + 1.0) * (sizes - 1.0 + shift) - shift) / 2.0
    return bool(np.mean(np.abs(places - np.round(places)) < _ON_PIXEL) > _ABSORBED)


def _deviation(stored: NDArray[Any], exact: NDArray[Any]) -> Tuple[float, Tuple[float, float]]:
    """Relative error; share of the nonzero elements that become 0, and their median magnitude."""
    finite = np.isfinite(exact)
    wide, narrow = exact[finite].astype(np.float64), stored.reshape(exact.shape)[finite].astype(np.float64)
    nonzero = wide != 0.0
    gone = np.abs(wide[nonzero & (narrow == 0.0)])
    lost = gone.size / max(int(np.count_nonzero(nonzero)), 1), float(np.median(gone)) if gone.size else 0.0
    if not np.isfinite(narrow).all():
        return np.inf, lost
    size, difference = np.linalg.norm(wide), np.linalg.norm(narrow - wide)
    return float(difference / size) if size else float(difference and np.inf), lost


def _flat_rows(f: Any) -> NDArray[Any]:
    """Mask of the rows of a softmax that are 1 in one place, among rows with several unmasked places."""
    axis, x = f.info.args["axis"], f.inputs[0].data.data
    with np.errstate(invalid="ignore"):
        has_choice = np.count_nonzero(x > np.max(x, axis=axis, keepdims=True) - _MASKED, axis=axis) > 1
    flat: NDArray[Any] = np.max(f.outputs[0].data.data, axis=axis)[has_choice] >= 1.0 - _FLAT / 2.0
    return flat


# By activation: mask of the outputs, or rows, with next to no derivative.
_FLATNESS: Dict[str, Callable[[Any], NDArray[Any]]] = {
    "Tanh": lambda f: 1.0 - f.outputs[0].data.data ** 2 <= _FLAT,
    "Sigmoid": lambda f: 4.0 * f.outputs[0].data.data * (1.0 - f.outputs[0].data.data) <= _FLAT,
    "Softmax": _flat_rows,
    # A step of time of 1e-3 is a softplus of -7, which is no fault.
    "SoftPlus": lambda f: f.inputs[0].data.data < -16.0,
    "Erf": lambda f: f.inputs[0].data.data ** 2 >= _FLAT_ERF,
    **dict.fromkeys(
        ("BinarySigmoid", "BinaryTanh", "HardTanh"), lambda f: np.abs(f.inputs[0].data.data) > 1.0
    ),
    "HardSigmoid": lambda f: np.abs(f.inputs[0].data.data) > 2.5,
}
