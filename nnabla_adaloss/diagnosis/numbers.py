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


class StoredIn(NamedTuple):
    """A format.

    Attributes:
        name: what it is called.
        u_max: its largest number.
    """

    name: str
    u_max: float


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
        stored: the format of its output gradient, where layers differ; None: that of the network.
    """

    name: str
    type_name: str
    amax: float
    nonzero: int
    floor: float
    kept: Mapping[Way, Kept]
    stored: Optional[StoredIn] = None


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


class Targets(NamedTuple):
    """What a function takes for labels or for indices, over all batches.

    Attributes:
        name: what they are called: `"the labels of shape (32, 1)"`.
        limit: how many classes or rows there are; 0 where any number from 0 to 1 will do.
        least: the smallest of them.
        largest: the largest of them.
        nans: how many are NaN.
        whole: whether all are whole numbers.
    """

    name: str
    limit: int
    least: float
    largest: float
    nans: int
    whole: bool

    def merged(self, other: Optional[Targets]) -> Targets:
        """Both together."""
        if other is None:
            return self
        return self._replace(
            least=min(self.least, other.least),
            largest=max(self.largest, other.largest),
            nans=max(self.nans, other.nans),
            whole=self.whole and other.whole,
        )


class Values(NamedTuple):
    """What the numbers that a function reads and writes say of it, in fp32, over all batches.

    Attributes:
        saturated: share of an activation's outputs where its derivative is next to nothing; the smallest.
        constant: whether a normalization reads the same in all that it normalises together.
        together: of how many numbers a normalization takes one mean; 0 for other functions.
        dropped: the share that dropout drops.
        zeros: how many zeros a logarithm, a root or a divisor reads; the most.
        negatives: likewise for numbers below 0 that a logarithm or a root reads.
        targets: what it takes for labels or indices.
    """

    saturated: float = 0.0
    constant: bool = False
    together: int = 0
    dropped: float = 0.0
    zeros: int = 0
    negatives: int = 0
    targets: Optional[Targets] = None

    def merged(self, other: Values) -> Values:
        """Both together."""
        return Values(
            min(self.saturated, other.saturated),
            self.constant and other.constant,
            self.together,
            self.dropped,
            max(self.zeros, other.zeros),
            max(self.negatives, other.negatives),
            None if self.targets is None else self.targets.merged(other.targets),
        )


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
        inputs: which functions compute what it reads, by position in the network.
        values: what its numbers say of it.
        stored_zeros: as `values.zeros`, with activations as stored.
        constant_inputs: its inputs that are the same for every sample of each batch.
        stuck_weights: its weights that are all zero and whose gradients are, too.
        stored: the format of its outputs, where layers differ; None: that of the network.
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
    inputs: Tuple[int, ...] = ()
    values: Values = Values()
    stored_zeros: int = 0
    constant_inputs: Tuple[str, ...] = ()
    stuck_weights: Tuple[str, ...] = ()
    stored: Optional[StoredIn] = None


class WeightStep(NamedTuple):
    """The weight of a layer beside what an update does to it. All are roots of mean squares.

    Attributes:
        layer: the layer.
        weight: of the weight.
        usual: of what initialisations give it, which goes by its fan-in.
        update: of an update of the solver, with such gradients as there are; 0 where that is not known.
    """

    layer: str
    weight: float
    usual: float
    update: float


class Training(NamedTuple):
    """What a solver is about to do.

    Attributes:
        learning_rate: its learning rate.
        updates: how many updates it has made.
        steps: of the weights of layers, in forward order.
    """

    learning_rate: float
    updates: int
    steps: Sequence[WeightStep]


class Untrained(NamedTuple):
    """Parameters that need a gradient, and that the loss does not depend on.

    Attributes:
        names: what they are called.
        by_solver: whether a solver is to train them; else they are registered only.
    """

    names: Tuple[str, ...]
    by_solver: bool


class NetworkNumbers(NamedTuple):
    """Everything that was measured.

    Attributes:
        storage: what the storage is called.
        u_max: its largest number; of its narrowest format, where layers differ.
        batches: how many batches were looked at.
        loss: mean loss in fp32.
        stored_loss: mean loss with activations and weights as stored.
        scales: the loss scale of each way that has one.
        layers: the layers in forward order.
        functions: all functions in forward order.
        tiny: the smallest number that keeps a logarithm or a divisor away from 0 as stored.
        training: what a solver is about to do; None without one.
        untrained: parameters that the loss does not depend on; None when there is none.
    """

    storage: str
    u_max: float
    batches: int
    loss: float
    stored_loss: float
    scales: Mapping[Way, float]
    layers: Sequence[LayerNumbers]
    functions: Sequence[FunctionNumbers]
    tiny: float = 2.0**-14
    training: Optional[Training] = None
    untrained: Optional[Untrained] = None
