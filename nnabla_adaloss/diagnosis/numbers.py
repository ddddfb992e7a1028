# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis measures, as plain numbers; verdicts are made from these and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..core.formats import Format


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


class LayerNumbers(NamedTuple):
    """One layer: a function with weights, or a product of activations.

    Attributes:
        amax: largest magnitude in fp32 of its weights' gradients, and of the gradients between it and the
            next layers.
        nonzero: how many elements of its output gradient and its weights' are not zero in fp32.
        floor: the error that is there when gradients are kept in fp32, and activations and weights are
            stored.
        kept: what each way leaves.
        stored: the format of its output gradient.
    """

    name: str
    type_name: str
    amax: float
    nonzero: int
    floor: float
    kept: Mapping[Way, Kept]
    stored: Format


class ReadLeaf(NamedTuple):
    """An input or a parameter that holds something that is not finite."""

    name: str
    is_parameter: bool
    nans: int
    infinities: int


class Targets(NamedTuple):
    """What a function takes for labels or for indices, over all batches.

    Attributes:
        name: what they are called: `"the labels of shape (32, 1)"`.
        limit: how many classes or rows there are; 0 where any number from 0 to 1 will do.
        nans: how many are NaN.
        whole: whether all are whole numbers.
    """

    name: str
    limit: int
    least: float
    largest: float
    nans: int
    whole: bool

    def merged(self, other: Targets) -> Targets:
        """Both together."""
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
        targets = self.targets
        if targets is not None and other.targets is not None:
            targets = targets.merged(other.targets)
        return self._replace(
            saturated=min(self.saturated, other.saturated),
            constant=self.constant and other.constant,
            zeros=max(self.zeros, other.zeros),
            negatives=max(self.negatives, other.negatives),
            targets=targets,
        )


@dataclass
class FunctionNumbers:
    """One function of the graph; the worst of all batches.

    Attributes:
        layer: the layer that it is, or the nearest one on the way to it; empty when there is none.
        loss_section: whether it stands between the last layers and the loss.
        scores: whether it computes the scores of an attention: a product that goes into a softmax.
        inputs: which functions compute what it reads, by position in the network.
        stored: the format of its outputs.
        leaves: inputs and parameters that it reads and that are not finite, by name.
        amax: largest magnitude of its outputs in fp32.
        nonfinite: elements of its outputs that are not finite in fp32, while everything that it reads is.
        overflowed: elements of its outputs that are finite in fp32 and not as stored, while everything that
            it reads is finite as stored.
        beyond: the input or parameter of it that is finite in fp32 and not as stored; empty when none is.
        gets_gradient: whether a finite gradient arrives at it.
        stops_gradient: whether its output gradients are not all zero, and those that it hands on are, in
            every batch; None: not known.
        breaks_gradient: whether its output gradients are finite, and those that it hands on are not.
        arriving: sum over batches of the root of the mean square of its output gradient, where it is known
            what it makes of it.
        leaving: the same of the gradient of its first input.
        values: what its numbers say of it.
        stored_zeros: as `values.zeros`, with activations as stored.
        same_inputs: its inputs, and whether they are the same for every sample of each batch.
        stuck_weights: its weights, and whether they are all zero and their gradients are, too.
    """

    name: str
    type_name: str
    layer: str
    stored: Format
    loss_section: bool = False
    scores: bool = False
    inputs: Tuple[int, ...] = ()
    leaves: Dict[str, ReadLeaf] = field(default_factory=dict)
    amax: float = 0.0
    nonfinite: int = 0
    overflowed: int = 0
    beyond: str = ""
    gets_gradient: bool = False
    stops_gradient: Optional[bool] = None
    breaks_gradient: bool = False
    arriving: float = 0.0
    leaving: float = 0.0
    values: Values = field(default_factory=Values)
    stored_zeros: int = 0
    same_inputs: Dict[str, bool] = field(default_factory=dict)
    stuck_weights: Dict[str, bool] = field(default_factory=dict)

    @property
    def growth(self) -> Optional[float]:
        """How many times larger gradients leave than arrive; None when that is not known."""
        return self.leaving / self.arriving if self.arriving and self.leaving else None

    @property
    def place(self) -> str:
        """The layer that it is or comes after; its own name where there is none."""
        return self.layer or self.name

    @property
    def subject(self) -> str:
        """What it is called in a sentence about its layer: `its Log`; `it` if it is the layer itself."""
        return "it" if self.name == self.place else f"its {self.type_name}"


class WeightStep(NamedTuple):
    """The weight of a layer beside what an update does to it. All are roots of mean squares.

    Attributes:
        weight: of the weight.
        usual: of what initialisations give it, which goes by its fan-in.
        update: of an update of the solver, with such gradients as there are; 0 where that is not known.
    """

    layer: str
    weight: float
    usual: float
    update: float


class Training(NamedTuple):
    """What a solver is about to do to the weights of layers, after so many updates."""

    learning_rate: float
    updates: int
    steps: Sequence[WeightStep]


class Untrained(NamedTuple):
    """Parameters that need a gradient, and that the loss does not depend on.

    Attributes:
        by_solver: whether a solver is to train them; else they are registered only.
    """

    names: Tuple[str, ...]
    by_solver: bool


class NetworkNumbers(NamedTuple):
    """Everything that was measured; layers and functions in forward order.

    Attributes:
        storage: what the storage is called.
        u_max: its largest number; of its narrowest format, where layers differ.
        batches: how many batches were looked at.
        loss: mean loss in fp32.
        stored_loss: mean loss with activations and weights as stored.
        scales: the loss scale of each way that has one.
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
