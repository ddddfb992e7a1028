# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis measures, as plain numbers; verdicts are made from these and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

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
    """One layer: a function with weights, or a product of activations."""

    name: str
    type_name: str
    amax: float  # in fp32, of its weights' gradients and of those between it and the next layers
    nonzero: int  # elements of its output gradient and its weights' that are not zero in fp32
    floor: float  # the error with gradients in fp32, and activations and weights as stored
    kept: Mapping[Way, Kept]  # what each way leaves
    stored: Format  # of its output gradient
    is_noise: bool = False  # whether it is 0 but for rounding errors, in fp32 too


class ReadLeaf(NamedTuple):
    """An input or a parameter that holds something that is not finite."""

    name: str
    is_parameter: bool
    nans: int
    infinities: int


class Targets(NamedTuple):
    """What a function takes for labels or for indices, over all batches."""

    name: str  # "the labels of shape (32, 1)"
    limit: int  # how many classes or rows there are; 0 where any number from 0 to 1 will do
    least: float
    largest: float
    nans: int
    whole: bool  # whether all are whole numbers


class Values(NamedTuple):
    """What the numbers that a function reads and writes say of it, in fp32, over all batches."""

    saturated: float = 0.0  # least share of an activation's outputs where its derivative is next to nothing
    constant: bool = False  # whether a normalization reads the same in all that it normalises together
    together: int = 0  # of how many numbers a normalization takes one mean, or a softmax one sum
    closed: int = 0  # rows of minus infinity alone that a softmax reads, at most
    dropped: float = 0.0  # the share that dropout drops
    zeros: int = 0  # that a logarithm, a root or a divisor reads, at most
    negatives: int = 0  # numbers below 0 that a logarithm or a root reads, at most
    targets: Optional[Targets] = None


def merged(a: Any, b: Any) -> Any:
    """What two batches say together: of two `Values`, or of two `Targets`."""
    if a is None or b is None:
        return a
    return type(a)(*(_MERGED.get(name, lambda x, _: x)(x, y) for name, x, y in zip(a._fields, a, b)))


# Whether all of something counts, or any of it.
_MERGED: Dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("least", "whole", "saturated", "constant"), min),
    **dict.fromkeys(("largest", "nans", "zeros", "negatives", "closed"), max),
    "targets": merged,
}


@dataclass
class FunctionNumbers:
    """One function of the graph; the worst of all batches."""

    name: str
    type_name: str
    layer: str  # that it is, or the nearest one on the way to it; empty when there is none
    stored: Format  # of its outputs
    loss_section: bool = False  # whether it stands between the last layers and the loss
    scores: bool = False  # whether it computes the scores of an attention
    inputs: Tuple[int, ...] = ()  # the functions that compute what it reads, by position in the network
    leaves: Dict[str, ReadLeaf] = field(default_factory=dict)  # what it reads that is not finite, by name
    amax: float = 0.0  # largest magnitude of its outputs in fp32
    nonfinite: int = 0  # elements of its outputs in fp32, while all that it reads is finite
    overflowed: int = 0  # the same as stored, where there is none in fp32
    beyond: str = ""  # the leaf that it reads and that is finite in fp32 and not as stored
    gets_gradient: bool = False  # whether a finite gradient arrives at it
    stops_gradient: Optional[bool] = None  # whether zeros alone leave it in every batch; None: not known
    breaks_gradient: bool = False  # whether finite gradients arrive, and others leave
    breaks_own_gradient: bool = False  # likewise of a variable that no other function reads
    no_backward: bool = False  # whether nnabla has none, though a gradient is needed
    arriving: float = 0.0  # sum of the root mean squares of its output gradients, where the next is known
    leaving: float = 0.0  # the same of its first input
    values: Values = field(default_factory=Values)
    stored_zeros: int = 0  # as values.zeros, with activations as stored
    same_inputs: Dict[str, bool] = field(default_factory=dict)  # whether all samples of a batch are the same
    reads_blank: bool = False  # whether an input that it reads holds nothing but zeros
    reads_data: bool = False  # whether the samples of one differ
    stuck_weights: Dict[str, bool] = field(default_factory=dict)  # whether they and their gradients are 0

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
    """The weight of a layer beside what an update does to it, as roots of mean squares."""

    layer: str
    weight: float
    usual: float  # what initialisations give it, which goes by its fan-in
    update: float  # of the solver, with such gradients as there are; 0 where that is not known
    before_hook: float = 0.0  # what it would be without `on_gradients`


class Training(NamedTuple):
    """What a solver is about to do to the weights of layers, after so many updates."""

    learning_rate: float
    updates: int
    steps: Sequence[WeightStep]
    decay: float = 0.0  # the share of weights that `weight_decay` takes away in each update


class Untrained(NamedTuple):
    """Parameters that need a gradient, and that the loss does not depend on."""

    names: Sequence[str]
    by_solver: bool  # whether a solver is to train them; else they are registered only
    cut: str = ""  # where the gradient stops on its way to them, if that is in the graph


class NetworkNumbers(NamedTuple):
    """Everything that was measured; layers and functions in forward order."""

    storage: str  # what it is called
    batches: int
    loss: float  # the mean, in fp32
    stored_loss: float  # with activations and weights as stored
    scales: Mapping[Way, float]  # of each way that has one
    layers: Sequence[LayerNumbers]  # empty where a function without a backward ends the examination
    functions: Sequence[FunctionNumbers]
    tiny: float = 2.0**-14  # the least that keeps a logarithm or a divisor away from 0 as stored
    training: Optional[Training] = None  # None without a solver
    untrained: Optional[Untrained] = None  # None when there is none
    forgotten: Sequence[str] = ()  # parameters that get a gradient, and that no solver has
    note: str = ""  # says that all batches are the same, and why; empty when they are not
