# SPDX-License-Identifier: Apache-2.0
"""The examination of a training in one call."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence, Union, overload

from ..core.formats import Format
from ..core.precision import LayerPrecisions, Precision, PrecisionLike, StorageLike
from .advice import PrecisionAdvice, candidates_of
from .layer_trials import advise
from .measurement import measure
from .result import Diagnosis
from .target import Feeder, target_of


@overload
def diagnose(
    loss_or_updater: Any,
    storage: StorageLike = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
) -> Diagnosis: ...


@overload
def diagnose(
    loss_or_updater: Any,
    storage: Sequence[PrecisionLike],
    feeder: Optional[Feeder] = None,
    batches: int = 4,
) -> PrecisionAdvice: ...


def diagnose(
    loss_or_updater: Any,
    storage: Union[StorageLike, Sequence[PrecisionLike]] = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
) -> Union[Diagnosis, PrecisionAdvice]:
    """What a narrow storage does to the gradients of a network: which layer loses how much, and the remedy.

    Runs each batch forward and backward in fp32, and beside it as it would be stored, emulated: without
    scaling, with the scale that nnabla's updater starts with, with the one that it would end at, and with
    adaptive scaling at its defaults. Takes ten passes or more per batch, and the memory of three more copies
    of the gradients. Parameters, gradients, running statistics, data and the random state are put back
    afterwards; what other arrays of the graph hold (`loss.d`) is of the last pass. Functions with a seed of
    their own, and those of a GPU, go on from where the passes have left them.

    Given a list of formats, it tells instead which of them each layer can have: see `PrecisionAdvice`. Each
    layer is tried alone with each format, a pass or two per batch, and then all of them together.

    Args:
        loss_or_updater: the loss Variable of one element, or a wrapper of one; or an updater, nnabla's or one
            of this package, whose loss and data feeder are taken.
        storage: the format that is tried, as everywhere: `"float16"`, `"bfloat16"`, `"fp8_hybrid"`, a
            `Format`, a `Precision`, or a mapping from patterns of layers; or a list of formats, of which each
            layer gets the one with the fewest bits that does no harm, and of equally wide ones the first.
        feeder: called without arguments before each batch. None: the updater's, or the data that is there.
        batches: how many batches are looked at; 1 where there is no feeder. 4: enough to tell a rule from an
            accident.

    Raises:
        TypeError: `loss_or_updater` is neither, or `feeder` cannot be called.
        ValueError: the loss needs no gradient, has several elements, scales itself, or is computed in half
            precision; or `storage` is unknown, or `batches` less than 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> diagnosis = diagnose(loss * 1e-8)
        >>> print(diagnosis.verdict.needs.value)
        one
        >>> diagnose(loss).verdict.line
        'float16 needs no scaling here.'
        >>> advised = diagnose(loss, ["fp8_hybrid", "float16"]).storage
        >>> "*" in advised, set(advised.values()) <= {"fp8_hybrid", "float16"}
        (True, True)
    """
    target = target_of(loss_or_updater, feeder, batches)
    if isinstance(storage, (str, Format, Precision, Mapping)):
        return Diagnosis(measure(target, LayerPrecisions(storage)))
    return advise(target, candidates_of(storage))
