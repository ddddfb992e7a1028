# SPDX-License-Identifier: Apache-2.0
"""The examined training: its network, a few batches of its data, and its restoration."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import nnabla as nn
import numpy as np
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater
from numpy.typing import NDArray

from ..core.precision import StorageLike
from ..core.validation import positive_integer
from ..emulation.format_emulation import FormatEmulation
from ..graph.functions import is_matrix_product
from ..graph.graph import Graph
from ..graph.hooks import Hook
from ..graph.loss import REDUCE, LossWrapper, variable_of
from ..graph.memory_uses import state_leaves
from ..graph.names import names_of
from ..graph.plan import GraphPlan
from ..kernels import select_kernels
from ..updaters.settings import keep_data
from ..updaters.solvers import check_solver, has
from . import remedies
from .causes import Cause, Note, listed
from .preserved import preserved

Feeder = Callable[[], Any]


def refuse_half(loss: nn.Variable) -> None:
    """Raise ValueError if nnabla computes anything in half precision, with the first such function."""
    plan = GraphPlan(loss)
    if plan.described.in_half:
        first = plan.described.in_half[0]
        raise ValueError(
            f"{plan.labels[first]} is computed in {plan.described.backends[first][0]}, so there is no fp32 "
            "to compare with: build the network in a float context (nnabla.Context(['cpu:float'])) and say "
            "storage='float16'"
        )


class Subject:
    """Network, and the batches that its feeder has fed.

    A feeder may rebuild the graph for each batch and assign it to its updater. The first batch's graph is
    examined; batches of equal graphs run through it, others are left out.
    """

    def __init__(self, source: Any, feeder: Optional[Feeder], batches: int) -> None:
        updater: Any = None if isinstance(source, (nn.Variable, LossWrapper)) else source
        if updater is not None and not (hasattr(updater, "loss") and hasattr(updater, "data_feeder")):
            raise TypeError(
                "loss_or_updater must be a loss Variable, a wrapper of one, or an updater with .loss and "
                f".data_feeder, got {type(source).__name__}; of a loop with a GradScaler, give an "
                "AdaptiveLossScalingUpdater with its solver, loss, data_feeder and storage"
            )
        if feeder is None:
            feeder = getattr(updater, "data_feeder", None) or keep_data
        if not callable(feeder):
            raise TypeError(
                f"data_feeder or feeder must be callable without arguments, got {type(feeder).__name__}"
            )
        positive_integer("batches", batches)
        self._source, self._updater, self._feeder = source, updater, feeder
        self._counters: Any = getattr(updater, "counters", None)
        self.solver: Any = getattr(updater, "solver", None)
        # With a communicator it might wait for other processes, which do not call it.
        is_alone = getattr(updater, "comm", None) is None
        self.on_gradients = getattr(updater, "on_gradients", None) if is_alone else None
        self.weight_decay = float(getattr(updater, "weight_decay", 0.0) or 0.0)
        self.parameters: Mapping[str, nn.Variable] = {}  # the solver's parameters, by its names
        if self.solver:
            self.parameters = check_solver("solver", self.solver, ["get_parameters"]).get_parameters()
        # NNabla's updater has no float tail, nor has an emulation, unless told so.
        default = not isinstance(updater, DynamicLossScalingUpdater)
        self.has_tail = getattr(source if updater is None else updater.loss, "float_tail", default)
        self.loss = self._current_loss()
        self.kernels = select_kernels(self.loss.parent.context)
        self._count = 1 if feeder is keep_data else batches
        self._batches: List[Dict[int, NDArray[Any]]] = []  # arrays of inputs, by position
        self.rates: List[float] = []  # learning rate after each batch was fed
        self.flushed: Dict[int, float] = {}  # magnitude below which forward reads an input as 0, by key
        self.written: Set[str] = set()  # parameters that the feeder writes, such as a moving average's
        self.beyond: Optional[Cause] = None  # an index beyond the table of an embedding: nothing can be run

    def __len__(self) -> int:
        return len(self._batches)

    @contextmanager
    def preserved(self) -> Iterator[Subject]:
        """Record the batches, and restore the network, the loss and the count of fed batches at the end."""
        with ExitStack() as kept:
            if hasattr(self._counters, "fed"):
                kept.callback(setattr, self._counters, "fed", self._counters.fed)
            if self._updater is not None:
                kept.callback(setattr, self._updater, "loss", self._updater.loss)
            # The feeder may change data of this graph and random numbers, or build another graph.
            kept.enter_context(preserved(Graph(self.loss), self.kernels))
            self._record()
            self._draw_again = kept.enter_context(preserved(self.graph, self.kernels))
            yield self

    def forward(self, loss: Any, index: int, hook: Optional[Hook] = None) -> None:
        """Run a batch through `self.loss`, or an emulation of it, with the same random numbers each time."""
        for position, v in self._inputs.items():
            x = self._batches[index][position]
            v.d = np.where(np.abs(x) < self.flushed[hash(v)], 0.0, x) if hash(v) in self.flushed else x
        self._draw_again()
        loss.forward(function_post_hook=hook)

    def emulated(self, storage: StorageLike) -> FormatEmulation:
        """Emulate a storage of the loss."""
        return FormatEmulation(self.loss, storage, float_tail=True, parameters=self.parameters)

    def plain(self, emulation: FormatEmulation) -> FormatEmulation:
        """The emulation without its float tail if the examined training has none."""
        storage = emulation.precisions.common or emulation.precisions.storage
        return emulation if self.has_tail else FormatEmulation(self.loss, storage, parameters=self.parameters)

    def values(self, v: nn.Variable) -> Optional[NDArray[Any]]:
        """Numbers of an input in all batches, along a new first axis; None if it cannot be fed."""
        position = next((p for p, w in self._inputs.items() if hash(w) == hash(v)), None)
        return None if position is None else np.stack([batch[position] for batch in self._batches])

    def _current_loss(self) -> nn.Variable:
        variable = variable_of(self._source if self._updater is None else self._updater.loss)
        if variable.size != 1:
            raise ValueError(f"loss has shape {variable.shape}, not one element; {REDUCE}")
        refuse_half(variable)
        return variable

    def _feed(self) -> None:
        """Feed a batch; note the learning rate then, and the parameters that the feeder has written."""
        before = {name: v.d.copy() for name, v in self.parameters.items()}
        self._feeder()
        if hasattr(self._counters, "fed"):
            self._counters.fed += 1
        has_rate = has(self.solver, "learning_rate")  # not without a solver
        self.rates.append(float(self.solver.learning_rate()) if has_rate else 0.0)
        changed = (n for n, v in self.parameters.items() if not np.array_equal(v.d, before[n], True))
        self.written.update(changed)

    def _record(self) -> None:
        """Feed the batches and keep their data; then describe the first one's graph and its inputs."""
        fillable: Dict[int, nn.Variable] = {}  # inputs that no function writes, by position
        beyond: Optional[Tuple[int, str]] = None
        for index in range(self._count):
            try:
                self._feed()
            except StopIteration:
                if not index:
                    raise ValueError("the feeder ends before its first batch") from None
                break
            loss = self._current_loss()
            graph = Graph(loss)
            names = graph.completed_names(names_of(self.parameters))
            # All leaves except parameters with a gradient, by position.
            inputs = {p: v for p, v in graph.leaves.items() if not v.need_grad or graph.keys[p] not in names}
            if not index:
                self.loss, self._inputs, description = loss, inputs, graph.description(names)
                written = {p for p, f in state_leaves(graph.described).items() if f is not None}
                fillable = {p: inputs[p] for p in sorted(inputs.keys() - written - carried(graph))}
                never = [v for v in fillable.values() if not (v.data.zeroing or v.data.modification_count)]
            elif hash(loss) != hash(self.loss) and graph.description(names) != description:
                continue
            beyond = beyond or _beyond_its_table(graph)
            self._batches.append({p: np.array(v.data.get_data("r")) for p, v in inputs.items()})
        self.graph = Graph(self.loss)
        # Parameters have the solver's names, or nnabla's: no solver has those without a gradient.
        registered = {hash(v.data): name for name, v in nn.get_parameters(grad_only=False).items()}
        leaves_by_data = ((hash(v.data), v) for v in self.graph.leaves.values())
        others = {hash(v): registered[data] for data, v in leaves_by_data if data in registered}
        self.plan = GraphPlan(self.graph, names={**others, **names_of(self.parameters)})
        if beyond is not None:
            self.beyond = Cause("index_beyond", self.plan.labels[beyond[0]], beyond[1], remedies.INDICES)
        first, *later = self._batches
        changing = {p for batch in later for p, x in batch.items() if not np.array_equal(first[p], x, True)}
        # Keys of inputs that differ between batches; of a single batch, of all inputs.
        self.fed = {hash(self._inputs[p]) for p in (changing if later else self._inputs)}
        # Inputs that are all 0 in all batches; a scalar may be 0 on purpose.
        arrays = {p: v for p, v in fillable.items() if v.size > 1}
        zero = {hash(v) for p, v in arrays.items() if not any(batch[p].any() for batch in self._batches)}
        self.never_filled = set(map(hash, never))
        # An unfilled or all-zero input, with its reader, if no layer reads other data.
        self.unfed = self._unfed(self.never_filled | zero)
        self.warms_up = self.rates[-1] > self.rates[0]
        self.notes = [*map(Note, self._notes([] if self.unfed else never))]

    def _notes(self, never: Sequence[nn.Variable]) -> Iterator[str]:
        """Notes about the feeder, and about inputs that nobody has filled."""
        if self._feeder is keep_data or not self.fed:
            unchanged = f"The feeder has changed no input in {len(self._batches)} batches"
            why = "No feeder was given" if self._feeder is keep_data else unchanged
            yield f"{why}: this is about what the inputs hold now."
        rates = self.rates
        if 0.0 < 1.25 * rates[-1] <= rates[0]:
            fallen = f"from {rates[0]:g} to {rates[-1]:g} in {len(rates)} batches"
            yield f"The feeder lowers the learning rate {fallen}: {remedies.SCHEDULE}."
        if self.written:
            writes = f"The feeder writes to {listed(sorted(self.written))}"
            yield f"{writes}, which the solver trains: leave out those of a moving average."
        if never:
            labels = zip(self.plan.labels, self.graph.functions)
            readers = {hash(v): label for label, f in labels for v in f.inputs}
            unfilled = [f"{input_name(v)}, read by {readers[hash(v)]}" for v in never]
            yield f"Nobody has filled {', or '.join(unfilled)}: {remedies.FILL_TARGET}."

    def _unfed(self, blank: Set[int]) -> Optional[Tuple[nn.Variable, Any]]:
        """First blank leaf that a layer depends on, with its reader; None if a layer reads other data."""
        leaves = [(v, f) for f in self.graph.functions for v in f.inputs if v.parent is None]
        # Keys of variables that depend on other data.
        filled = {hash(v) for v, _ in leaves} - self.plan.names.keys() - blank
        # By key of a variable that depends on a blank leaf: the leaf, and its first reader.
        origins = {hash(v): (v, f) for v, f in reversed(leaves) if hash(v) in blank}
        found: Optional[Tuple[nn.Variable, Any]] = None
        for f in self.graph.functions:
            inputs = [*map(hash, f.inputs)]
            is_layer = not self.plan.names.keys().isdisjoint(inputs) or is_matrix_product(f.info.type_name)
            if not filled.isdisjoint(inputs):
                if is_layer:
                    return None
                filled.update(map(hash, f.outputs))
            if (origin := next((origins[key] for key in inputs if key in origins), None)) is not None:
                origins.update(dict.fromkeys(map(hash, f.outputs), origin))
                found = found or (origin if is_layer else None)
        return found


def _beyond_its_table(graph: Graph) -> Optional[Tuple[int, str]]:
    """Number of the first embedding that is fed an index beyond its table, and a description."""
    for number, f in enumerate(graph.functions):
        if f.info.type_name == "Embed" and f.inputs[0].parent is None:
            index, rows = np.asarray(f.inputs[0].data.get_data("r")), f.inputs[1].shape[0]
            if not ((index > -1.0) & (index < rows)).all():
                read = f"from {np.min(index):g} to {np.max(index):g} from {input_name(f.inputs[0])}"
                what = f"it reads indices {read}, but its table has rows 0 to {rows - 1}"
                return number, f"{what}: nnabla reads other memory there, and may crash"
    return None


def carried(graph: Graph) -> Set[int]:
    """Positions of leaves that share memory with outputs, such as the state of a recurrence, fed back."""
    computed = {hash(v.data) for f in graph.functions for v in f.outputs}
    return {p for p, v in graph.leaves.items() if hash(v.data) in computed}


def input_name(v: nn.Variable) -> str:
    """Name of an input, or its shape if it has none."""
    return f"the input {v.name}" if v.name else f"the input of shape {v.shape}"
