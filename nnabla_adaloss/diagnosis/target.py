# SPDX-License-Identifier: Apache-2.0
"""The network under examination: its loss, a few batches of its data, and all put back as it was."""

from __future__ import annotations

import ctypes
import random
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

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
from ..updaters.settings import keep_data

Feeder = Callable[[], Any]

# A Mersenne Twister as the C++ library has it: 624 words of 8 bytes and a position.
_TWISTER_BYTES = 625 * 8
_MANAGER = "_ZN4nbla16SingletonManager3getINS_13RandomManagerEEEPT_v"
_GENERATOR = "_ZN4nbla13RandomManager18get_rand_generatorEv"


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


class Preserved:
    """The data and the gradients of a graph's leaves and the random state, all put back at the end.

    The generators of Python, NumPy, nnabla's parameters and its functions on the CPU. Those that a function
    has of its own, because it was given a seed, are out of reach, and so are those of a GPU.
    """

    def __init__(self, plan: GraphPlan, kernels: Kernels) -> None:
        leaves = list({hash(v): v for f in plan.functions for v in f.inputs if v.parent is None}.values())
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # the global one, which feeders use
        self._parameters = nnabla.random.prng.get_state()
        address = _functions_generator()
        self._functions = None if address is None else ctypes.string_at(address, _TWISTER_BYTES)
        self._gradients, self._data = ArraySnapshot(kernels), DataSnapshot(kernels, leaves)
        self._gradients.save([leaf.grad for leaf in leaves])
        self._data.save()

    def __enter__(self) -> Preserved:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.restore()
        self._gradients.restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        nnabla.random.prng.set_state(self._parameters)
        self.draw_again()

    def draw_again(self) -> None:
        """Have the next forward draw the same random numbers as the last one."""
        address = _functions_generator()
        if address is not None and self._functions is not None:
            ctypes.memmove(address, self._functions, _TWISTER_BYTES)

    def begin_again(self) -> None:
        """Undo what forward has written to leaves as well."""
        self._data.restore()
        self.draw_again()


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


class Examined:
    """A network under examination, and what its feeder has fed it each time that it was called.

    A feeder may rebuild the graph for each batch and assign it to its updater. The graph of the first
    batch is the one that is looked at. Batches of graphs that are built alike are run through it; those of
    others, such as sentences of another length, are left out.

    Attributes:
        solver: None for a plain loss.
        on_gradients: the updater's, if it has one and waits for no other process.
        weight_decay: the updater's; 0 for none.
        parameters: the solver's, by its names; empty for a plain loss.
        fed: keys of the leaves that data is fed to: those that do not hold the same in all batches, and all
            that a feeder may fill where there is one batch only.
        note: says that all batches are the same, and why; empty when they are not.
    """

    def __init__(self, source: Any, feeder: Optional[Feeder], batches: int) -> None:
        if not _is_loss(source):
            if not (hasattr(source, "loss") and hasattr(source, "data_feeder")):
                raise TypeError(
                    "loss_or_updater must be a loss Variable, a wrapper of one, or an updater with .loss and "
                    f".data_feeder, got {type(source).__name__}"
                )
            if feeder is None and source.data_feeder is not keep_data:
                feeder = source.data_feeder
        if feeder is not None and not callable(feeder):
            raise TypeError(
                f"data_feeder or feeder must be callable without arguments, got {type(feeder).__name__}"
            )
        if integer("batches", batches) < 1:
            raise ValueError(f"batches={batches!r} must be 1 or more")
        self._source, self._feeder = source, feeder
        self.solver = None if _is_loss(source) else getattr(source, "solver", None)
        alone = getattr(source, "comm", None) is None
        self.on_gradients = getattr(source, "on_gradients", None) if alone else None
        self.weight_decay = float(getattr(source, "weight_decay", None) or 0.0)
        self.parameters: Mapping[str, nn.Variable] = self.solver.get_parameters() if self.solver else {}
        self._names = {**named(self.parameters), **registered_names()}
        self.loss = self._current_loss()
        self.kernels = select_kernels(self.loss.parent.context)
        self._count = 1 if feeder is None else batches
        self._batches: List[Dict[int, NDArray[Any]]] = []

    def __len__(self) -> int:
        return len(self._batches)

    @contextmanager
    def preserved(self) -> Iterator[Examined]:
        """Record the batches; the network, and the loss that its updater has, are as before at the end."""
        with ExitStack() as kept:
            if not _is_loss(self._source):
                kept.callback(self._give_back, self._source.loss)
            kept.enter_context(Preserved(GraphPlan(self.loss, names=self._names), self.kernels))
            self._record()
            self._preserved = kept.enter_context(Preserved(self.plan, self.kernels))
            yield self

    def forward(self, loss: Any, index: int, hook: Optional[Hook] = None) -> None:
        """Run a batch through `self.loss`, or an emulation of it; it draws the same numbers each time."""
        for position, v in self._inputs.items():
            v.d = self._batches[index][position]
        self._preserved.draw_again()
        loss.forward(function_post_hook=hook)

    def _current_loss(self) -> nn.Variable:
        variable = variable_of(self._source if _is_loss(self._source) else self._source.loss)
        if variable.size != 1:
            raise ValueError(
                f"loss has shape {variable.shape}, not one element; reduce it with nnabla.functions.mean"
            )
        refuse_half(variable)
        return variable

    def _give_back(self, loss: Any) -> None:
        if self._source.loss is not loss:
            self._source.loss = loss

    def _record(self) -> None:
        for index in range(self._count):
            if self._feeder is not None:
                self._feeder()
            loss = self._current_loss()
            reading = read_graph(loss)
            if not index:
                self.loss, first = loss, reading.description(self._names)
                self._inputs = self._may_be_fed(reading)
            elif hash(loss) != hash(self.loss) and reading.description(self._names) != first:
                continue
            inputs = self._may_be_fed(reading)
            self._batches.append({position: np.array(v.d) for position, v in inputs.items()})
        self.plan = GraphPlan(self.loss, names={**self._names, **registered_names()})
        self.fed = {hash(v) for position, v in self._inputs.items() if self._is_fed(position)}
        self.note = "" if self.fed and self._feeder is not None else self._note()

    def _note(self) -> str:
        why = "No feeder was given" if self._feeder is None else "The feeder changes no input"
        text = f"{why}: this is about what the inputs hold now."
        names, batch = self.plan.names, self._batches[0]
        blank = [v for p, v in self._inputs.items() if hash(v) not in names and not batch[p].any()]
        if blank:
            others = f" (and {len(blank) - 1} more)" if blank[1:] else ""
            name = input_name(blank[0])
            text += f" {name[0].upper()}{name[1:]}{others} holds only zeros: nothing is said of the data."
        return text

    def _may_be_fed(self, reading: GraphReading) -> Dict[int, nn.Variable]:
        """The leaves that a feeder may fill, by position."""
        return {
            position: v
            for position, v in reading.leaves.items()
            if not v.need_grad or reading.keys[position] not in self._names
        }

    def _is_fed(self, position: int) -> bool:
        first, *others = (batch[position] for batch in self._batches)
        return not others or any(not np.array_equal(first, other, equal_nan=True) for other in others)


def input_name(v: nn.Variable, what: str = "input") -> str:
    """What an input is called: its own name, if it has one, and its shape."""
    return f"the {what} {v.name}" if v.name else f"the {what} of shape {v.shape}"


def _is_loss(source: Any) -> bool:
    return isinstance(source, (nn.Variable, LossWrapper))
