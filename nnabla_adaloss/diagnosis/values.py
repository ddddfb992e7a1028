# SPDX-License-Identifier: Apache-2.0
"""What the numbers that a function reads and writes in one batch say of it."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from .numbers import Targets, Values

Array = NDArray[Any]

# A derivative below this share of the largest one is next to nothing.
_FLAT = 2.0**-10
# Numbers that differ by less than this share of the largest are taken for equal: sums are rounded.
_EQUAL = 1e-5


def values_of(f: Any) -> Values:
    """What is known of `f` after its forward has run."""
    look = _LOOKS.get(f.info.type_name)
    return Values() if look is None else look(f)


def zeros_of(f: Any) -> int:
    """How many zeros a logarithm, a root or a divisor reads."""
    return values_of(f).zeros


def same_for_all_samples(v: nn.Variable) -> bool:
    """Whether all rows of `v` are the same."""
    values = _read(v)
    return values is not None and v.ndim > 1 and v.shape[0] > 1 and bool((values == values[:1]).all())


def input_name(v: nn.Variable, what: str = "input") -> str:
    """What an input is called: its own name, if it has one, and its shape."""
    return f"the {what} {v.name}" if v.name else f"the {what} of shape {v.shape}"


def _read(v: nn.Variable) -> Optional[Array]:
    return None if v.data.clear_called else np.asarray(v.data.data)


def _activation(f: Any) -> Values:
    y = _read(f.outputs[0])
    if y is None or not y.size:
        return Values()
    type_name = f.info.type_name
    if type_name == "Tanh":
        flat = 1.0 - y * y <= _FLAT
    elif type_name == "Sigmoid":
        flat = 4.0 * y * (1.0 - y) <= _FLAT
    elif type_name == "HardTanh":
        flat = np.abs(y) >= 1.0
    elif type_name == "HardSigmoid":
        flat = (y <= 0.0) | (y >= 1.0)
    else:
        # A softmax: one of a row has it all.
        flat = np.max(y, axis=f.info.args["axis"]) >= 1.0 - _FLAT / 2.0
    return Values(saturated=float(np.mean(flat)))


def _normalization(f: Any) -> Values:
    type_name, args, x = f.info.type_name, f.info.args, _read(f.inputs[0])
    if x is None or not args.get("batch_stat", True):
        return Values()
    if type_name == "GroupNormalization":
        x = x.reshape(x.shape[0], args["num_groups"], -1) if args["channel_axis"] == 1 else x
        kept = {0, 1}
    elif "axes" in args:
        kept = set(args["axes"])
    else:
        kept = {*args["batch_axis"], *([args["channel_axis"]] if "channel_axis" in args else [])}
    axes = tuple(axis for axis in range(x.ndim) if axis not in {k % x.ndim for k in kept})
    together = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    if not x.size or not np.isfinite(x).all():
        return Values(together=together)
    spread = np.max(x, axis=axes) - np.min(x, axis=axes)
    constant = bool((spread <= _EQUAL * np.max(np.abs(x), axis=axes)).all())
    return Values(constant=constant, together=together)


def _reads_zeros(index: int, *, below: bool) -> Callable[[Any], Values]:
    def look(f: Any) -> Values:
        x = _read(f.inputs[index])
        power = f.info.args.get("val", 0.0) if f.info.type_name == "PowScalar" else 0.0
        if x is None or power >= 1.0:
            return Values()
        return Values(zeros=int(np.count_nonzero(x == 0)), negatives=int(np.count_nonzero(x < 0)) * below)

    return look


def _dropout(f: Any) -> Values:
    return Values(dropped=float(f.info.args["p"]))


def _labels(f: Any) -> Values:
    logits, args = f.inputs[0], f.info.args
    limit = {"SigmoidCrossEntropy": 2, "BinaryCrossEntropy": 0}.get(f.info.type_name)
    if limit is None:
        limit = logits.shape[args["axis"]]
    return Values(targets=_targets(f.inputs[1], "labels", limit))


def _rows(f: Any) -> Values:
    return Values(targets=_targets(f.inputs[0], "indices", f.inputs[1].shape[0]))


def _one_hot(f: Any) -> Values:
    shape: Tuple[int, ...] = tuple(f.info.args["shape"])
    return Values(targets=_targets(f.inputs[0], "indices", shape[0])) if len(shape) == 1 else Values()


def _targets(v: nn.Variable, what: str, limit: int) -> Optional[Targets]:
    values = _read(v)
    if values is None or not values.size:
        return None
    while v.parent is not None and v.parent.inputs:
        v = v.parent.inputs[0]
    nans = np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    known = values[~nans]
    least, largest = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    whole = bool((known == np.floor(known)).all())
    return Targets(input_name(v, what), limit, least, largest, int(nans.sum()), whole)


_LOOKS: Dict[str, Callable[[Any], Values]] = {
    **dict.fromkeys(("Tanh", "Sigmoid", "HardTanh", "HardSigmoid", "Softmax"), _activation),
    **dict.fromkeys(
        (
            "BatchNormalization",
            "FusedBatchNormalization",
            "SyncBatchNormalization",
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
        ),
        _normalization,
    ),
    **dict.fromkeys(
        ("SoftmaxCrossEntropy", "CategoricalCrossEntropy", "SigmoidCrossEntropy", "BinaryCrossEntropy"),
        _labels,
    ),
    "Log": _reads_zeros(0, below=True),
    "PowScalar": _reads_zeros(0, below=True),
    "Div2": _reads_zeros(1, below=False),
    "RDivScalar": _reads_zeros(0, below=False),
    "Dropout": _dropout,
    "Embed": _rows,
    "OneHot": _one_hot,
}
