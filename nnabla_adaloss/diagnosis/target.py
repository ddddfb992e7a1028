# SPDX-License-Identifier: Apache-2.0
"""The network under examination: its loss, a few batches of its data, and all put back as it was."""

from __future__ import annotations

import ctypes
import random
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional

import nnabla as nn
import nnabla.random
import numpy as np
from numpy.typing import NDArray

from ..core.validation import integer
from ..graph.loss import Hook, LossWrapper, variable_of
from ..graph.names import named, registered_names
from ..graph.plan import GraphPlan
from ..graph.reading import GraphReading, read_graph
from ..kernels import Kernels, select_kernels
from ..undo import ArraySnapshot, DataSnapshot

Feeder = Callable[[], Any]

# A Mersenne Twister as the C++ library has it: 624 words of 8 bytes and a position.
_TWISTER_BYTES = 625 * 8
_MANAGER = "_ZN4nbla16SingletonManager3getINS_13RandomManagerEEEPT_v"
_GENERATOR = "_ZN4nbla13RandomManager18get_rand_generatorEv"


class Target(NamedTuple):
    """A loss and its data."""

    source: Any  # the loss, or the updater whose `loss` it is
    feeder: Optional[Feeder]  # None: the data that is there; it may assign another loss to an updater
    batches: int
    solver: Optional[Any]  # None for a plain loss

    @property
    def parameters(self) -> Mapping[str, nn.Variable]:
        """The solver's names of its parameters; empty for a plain loss."""
        return {} if self.solver is None else self.solver.get_parameters()

    def loss(self) -> nn.Variable:
        """The current loss; TypeError or ValueError unless it has one element, in fp32, with a gradient."""
        variable = variable_of(self.source if _is_loss(self.source) else self.source.loss)
        if variable.size != 1:
            raise ValueError(
                f"loss has shape {variable.shape}, not one element; reduce it with nnabla.functions.mean"
            )
        refuse_half(variable)
        return variable

    def feed(self) -> None:
        """Put the next batch where it belongs."""
        if self.feeder is not None:
            self.feeder()

    @contextmanager
    def loss_kept(self) -> Iterator[None]:
        """Give an updater back the loss that it has now, whatever a feeder assigns."""
        before = None if _is_loss(self.source) else self.source.loss
        try:
            yield
        finally:
            if before is not None and self.source.loss is not before:
                self.source.loss = before


def target_of(loss_or_updater: Any, feeder: Optional[Feeder], batches: int) -> Target:
    """The loss of an updater with its feeder, or a plain loss; TypeError or ValueError: see `diagnose`."""
    solver = None
    if not _is_loss(loss_or_updater):
        if not (hasattr(loss_or_updater, "loss") and hasattr(loss_or_updater, "data_feeder")):
            raise TypeError(
                "loss_or_updater must be a loss Variable, a wrapper of one, or an updater with .loss and "
                f".data_feeder, got {type(loss_or_updater).__name__}"
            )
        feeder = loss_or_updater.data_feeder if feeder is None else feeder
        solver = getattr(loss_or_updater, "solver", None)
    if feeder is not None and not callable(feeder):
        raise TypeError(f"feeder must be callable without arguments, got {type(feeder).__name__}")
    if integer("batches", batches) < 1:
        raise ValueError(f"batches={batches!r} must be 1 or more")
    target = Target(loss_or_updater, feeder, 1 if feeder is None else batches, solver)
    target.loss()
    return target


def refuse_half(loss: nn.Variable) -> None:
    """ValueError if nnabla computes anything in half precision: names the first function that it does so."""
    structure = GraphPlan(loss).structure
    described = structure.described
    if described.in_half:
        first = described.in_half[0]
        raise ValueError(
            f"{structure.labels[first]} is computed in {described.backends[first][0]}, so there is no fp32 "
            "to compare with: build the network in a float context (nnabla.Context(['cpu:float'])) and say "
            "storage='float16'"
        )


def _is_loss(source: Any) -> bool:
    return isinstance(source, (nn.Variable, LossWrapper))


class RandomState:
    """The present state of the generators of Python, NumPy, nnabla's parameters and its functions on the CPU.

    Generators that a function has of its own, because it was given a seed, are out of reach, and so are those
    of a GPU.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # the global one, which feeders use
        self._parameters = nnabla.random.prng.get_state()
        address = _functions_generator()
        self._functions = None if address is None else ctypes.string_at(address, _TWISTER_BYTES)

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        nnabla.random.prng.set_state(self._parameters)
        self.restore_functions()

    def restore_functions(self) -> None:
        """Put that of nnabla's functions back alone: the next pass draws what the last one did."""
        address = _functions_generator()
        if address is not None and self._functions is not None:
            ctypes.memmove(address, self._functions, _TWISTER_BYTES)


@cache
def _functions_generator() -> Optional[int]:
    """Where nnabla keeps the generator of its functions, which has no name in Python; None: not found."""
    try:
        library = ctypes.CDLL(str(Path(nn.__file__).parent / "libnnabla.so"))
        manager, generator = library[_MANAGER], library[_GENERATOR]
    except (OSError, AttributeError):
        return None
    manager.restype = generator.restype = ctypes.c_void_p
    generator.argtypes = [ctypes.c_void_p]
    address: Optional[int] = generator(manager())
    return address


class Preserved:
    """The data and the gradients of a graph's leaves and the random state, all put back at the end."""

    def __init__(self, plan: GraphPlan, kernels: Kernels) -> None:
        leaves = list({hash(v): v for f in plan.functions for v in f.inputs if v.parent is None}.values())
        self.random = RandomState()
        self._gradients, self._data = ArraySnapshot(kernels), DataSnapshot(kernels, leaves)
        self._gradients.save([leaf.grad for leaf in leaves])
        self._data.save()

    def __enter__(self) -> Preserved:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.restore()
        self._gradients.restore()
        self.random.restore()

    def begin_again(self) -> None:
        """Undo what forward has written to leaves, and have it draw the same random numbers."""
        self._data.restore()
        self.random.restore_functions()


class Examined:
    """A network under examination, and what a feeder has fed it each time that it was called.

    A feeder may rebuild the graph for each batch and assign it to its updater. The graph of the first
    batch is the one that is looked at. Batches of graphs that are built alike are run through it; those of
    others, such as sentences of another length, are left out.

    Attributes:
        fed: keys of the leaves that data is fed to: those that do not hold the same in all batches, and all
            that a feeder may fill where there is one batch only.
    """

    def __init__(self, target: Target, names: Mapping[int, str], kernels: Kernels) -> None:
        self.target, self.kernels = target, kernels
        self._batches: List[Dict[int, NDArray[Any]]] = []
        target.feed()
        self.loss = target.loss()
        first = read_graph(self.loss)
        self._inputs = inputs = _may_be_fed(first, names)
        for index in range(target.batches):
            if index:
                target.feed()
                loss = target.loss()
                rebuilt = hash(loss) != hash(self.loss)
                reading = read_graph(loss) if rebuilt else first
                if rebuilt and reading.description(names) != first.description(names):
                    continue
                inputs = _may_be_fed(reading, names)
            self._batches.append({position: np.array(v.d) for position, v in inputs.items()})
        self.fed = {hash(v) for position, v in self._inputs.items() if self._is_fed(position)}
        self.plan = GraphPlan(self.loss, names={**names, **registered_names()})

    def __len__(self) -> int:
        return len(self._batches)

    @contextmanager
    def preserved(self) -> Iterator[Examined]:
        """Put the network back at the end; `forward` can be called until then."""
        with Preserved(self.plan, self.kernels) as before:
            self._random = before.random
            yield self

    def forward(self, loss: Any, index: int, hook: Optional[Hook] = None) -> None:
        """Run a batch through `self.loss`, or an emulation of it; it draws the same numbers each time."""
        for position, v in self._inputs.items():
            v.d = self._batches[index][position]
        self._random.restore_functions()
        loss.forward(function_post_hook=hook)

    def _is_fed(self, position: int) -> bool:
        first, *others = (batch[position] for batch in self._batches)
        return not others or any(not np.array_equal(first, other, equal_nan=True) for other in others)


@contextmanager
def examined(target: Target) -> Iterator[Examined]:
    """Record the batches of a target; the network is as before afterwards."""
    loss = target.loss()
    kernels = select_kernels(loss.parent.context)
    names = {**named(target.parameters), **registered_names()}
    with ExitStack() as kept:
        kept.enter_context(target.loss_kept())
        kept.enter_context(Preserved(GraphPlan(loss, names=names), kernels))
        yield kept.enter_context(Examined(target, names, kernels).preserved())


def _may_be_fed(reading: GraphReading, names: Mapping[int, str]) -> Dict[int, nn.Variable]:
    """The leaves that a feeder may fill, by position."""
    return {
        position: v
        for position, v in reading.leaves.items()
        if not v.need_grad or reading.keys[position] not in names
    }
