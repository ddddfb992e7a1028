# SPDX-License-Identifier: Apache-2.0
"""The examination of a training in one call, and what it returns."""

from __future__ import annotations

import math
import os
from typing import Any, Dict, Optional, Sequence, Union, overload

from ..core.precision import LayerPrecisions, PrecisionLike, StorageLike
from ..state.whole_file import replace_page
from .advice import PrecisionAdvice, advise, candidates_of
from .measurement import measure
from .numbers import NetworkNumbers, Way
from .report import as_page, as_text
from .target import Examined, Feeder
from .verdicts import Verdict, judge


class Diagnosis:
    """What storing a network's numbers in a narrow format does to its gradients; `print` it.

    Args:
        numbers: what was measured.

    Attributes:
        numbers: everything that was measured, per layer and per function.
        verdict: what that means: one line, what is needed at least, what else is wrong, a line per layer.
    """

    def __init__(self, numbers: NetworkNumbers) -> None:
        self.numbers: NetworkNumbers = numbers
        self.verdict: Verdict = judge(numbers)

    def __str__(self) -> str:
        return as_text(self.numbers, self.verdict)

    def as_dict(self) -> Dict[str, Any]:
        """Numbers and verdicts as plain dicts, lists, strings and numbers; what is not finite is None."""
        numbers, verdict = self.numbers, self.verdict
        return {
            "verdict": verdict.line,
            "needs": verdict.needs.value if verdict.needs is not None else None,
            "causes": [cause._asdict() for cause in verdict.causes],
            "storage": numbers.storage,
            "batches": numbers.batches,
            "note": numbers.note,
            "loss": _plain(numbers.loss),
            "stored_loss": _plain(numbers.stored_loss),
            "scales": {way.value: numbers.scales[way] for way in Way if way in numbers.scales},
            "layers": [
                {
                    "name": layer.name,
                    "type": layer.type_name,
                    "largest_gradient": _plain(layer.amax),
                    "nonzero_elements": layer.nonzero,
                    "error_with_gradients_in_fp32": _plain(layer.floor),
                    "right_scale": judged.right_scale,
                    "verdict": judged.line,
                    "ways": {
                        way.value: {name: _plain(value) for name, value in kept._asdict().items()}
                        for way, kept in layer.kept.items()
                    },
                }
                for layer, judged in zip(numbers.layers, verdict.layers)
            ],
        }

    def write_html(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write a page that needs nothing else, no network either.

        Raises:
            ValueError: there is a file that is no page. It is left as it is.
            OSError: it cannot be written.
        """
        replace_page(path, as_page(self.numbers, self.verdict))


@overload
def diagnose(
    loss_or_updater: Any,
    storage: StorageLike = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
) -> Diagnosis: ...


@overload
def diagnose(
    loss_or_updater: Any,
    storage: Sequence[PrecisionLike],
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
) -> PrecisionAdvice: ...


def diagnose(
    loss_or_updater: Any,
    storage: Union[StorageLike, Sequence[PrecisionLike]] = "float16",
    feeder: Optional[Feeder] = None,
    batches: int = 4,
    *,
    data_feeder: Optional[Feeder] = None,
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
            of this package, whose loss and data feeder are taken, and whose `on_gradients` is called once
            per batch, unless it has a communicator.
        storage: the format that is tried, as everywhere: `"float16"`, `"bfloat16"`, `"fp8_hybrid"`, a
            `Format`, a `Precision`, or a mapping from patterns of layers; or a list of formats, of which each
            layer gets the one with the fewest bits that does no harm, and of equally wide ones the first.
        feeder: called without arguments before each batch. None: the updater's, or the data that is there.
        data_feeder: the same as `feeder`, by the name that updaters have for it.
        batches: how many batches are looked at; 1 where there is no feeder. 4: enough to tell a rule from an
            accident.

    Raises:
        TypeError: `loss_or_updater` is neither, `feeder` cannot be called, or `data_feeder` is given as well.
        ValueError: the loss needs no gradient, has several elements, scales itself, or is computed in half
            precision; or `storage` is unknown, or `batches` less than 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import diagnose
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
    if feeder is not None and data_feeder is not None:
        raise TypeError("feeder and data_feeder are the same argument: give one of them")
    network = Examined(loss_or_updater, data_feeder if feeder is None else feeder, batches)
    if isinstance(storage, Sequence) and not isinstance(storage, str):
        return advise(network, candidates_of(storage))
    return Diagnosis(measure(network, LayerPrecisions(storage)))


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else None
