# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis measures, as plain numbers; verdicts are made from these and from nothing else."""

from __future__ import annotations

from enum import Enum
from typing import Mapping, NamedTuple, Optional, Sequence, Tuple


class Way(str, Enum):
    """A way to scale the loss that is tried."""

    NONE = "none"
    START = "start"
    ONE = "one"
    END = "end"
    ADAPTIVE = "adaptive"
    BY_PART = "amax_history"


class Kept(NamedTuple):
    """What storing a layer's gradients with one way of scaling does to them.

    Attributes:
        underflow: share of the elements that are not zero in fp32 and are zero as stored; whatever was lost
            on the way to the layer counts, too.
        overflow: share of the elements that are finite in fp32 and are not as stored.
        error: relative error of the weight gradient against fp32 (of the output gradient where there is no
            weight), as the ratio of Euclidean norms; infinite when something is not finite.
    """

    underflow: float
    overflow: float
    error: float


class LayerNumbers(NamedTuple):
    """One layer: a function with weights, or a product of activations.

    Attributes:
        name: as everywhere in this package.
        type_name: nnabla's type name of the function.
        amax: largest magnitude in fp32 of its weights' gradients, and of the gradients between it and the
            next layers.
        nonzero: how many elements of its output gradient and its weights' are not zero in fp32.
        floor: the error that is there when gradients are kept in fp32, and activations and weights are
            stored.
        kept: what each way leaves.
    """

    name: str
    type_name: str
    amax: float
    nonzero: int
    floor: float
    kept: Mapping[Way, Kept]


class ReadLeaf(NamedTuple):
    """An input or a parameter that holds something that is not finite.

    Attributes:
        name: name of the parameter, or what is known of the input.
        is_parameter: whether it is one.
        nans: how many NaNs it holds.
        infinities: how many infinities.
    """

    name: str
    is_parameter: bool
    nans: int
    infinities: int


class FunctionNumbers(NamedTuple):
    """One function of the graph; the worst of all batches.

    Attributes:
        name: as everywhere in this package.
        type_name: nnabla's type name.
        layer: the layer that it is, or the nearest one on the way to it; empty when there is none.
        is_layer: whether it is a layer itself.
        loss_section: whether it stands between the last layers and the loss.
        scores: whether it computes the scores of an attention: a product that goes into a softmax.
        leaves: inputs and parameters that it reads and that are not finite.
        amax: largest magnitude of its outputs in fp32.
        nonfinite: elements of its outputs that are not finite in fp32, while everything that it reads is.
        overflowed: elements of its outputs that are finite in fp32 and not as stored, while everything that
            it reads is finite as stored.
        beyond: the input or parameter of it that is finite in fp32 and not as stored; empty when none is.
        gradient: root of the mean square of its output gradients in fp32; None when it gets none, or one
            that is not finite.
        growth: how many times larger those of its first input are; None when that is not known.
        stops_gradient: whether its output gradients are not all zero, and those that it hands on are, in
            every batch.
        breaks_gradient: whether its output gradients are finite, and those that it hands on are not.
    """

    name: str
    type_name: str
    layer: str
    is_layer: bool
    loss_section: bool
    scores: bool
    leaves: Tuple[ReadLeaf, ...]
    amax: float
    nonfinite: int
    overflowed: int
    beyond: str
    gradient: Optional[float]
    growth: Optional[float]
    stops_gradient: bool
    breaks_gradient: bool


class NetworkNumbers(NamedTuple):
    """Everything that was measured.

    Attributes:
        storage: what the storage is called.
        u_max: its largest number.
        batches: how many batches were looked at.
        loss: mean loss in fp32.
        stored_loss: mean loss with activations and weights as stored.
        scales: the loss scale of each way that has one.
        layers: the layers in forward order.
        functions: all functions in forward order.
    """

    storage: str
    u_max: float
    batches: int
    loss: float
    stored_loss: float
    scales: Mapping[Way, float]
    layers: Sequence[LayerNumbers]
    functions: Sequence[FunctionNumbers]
