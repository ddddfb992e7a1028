# SPDX-License-Identifier: Apache-2.0
"""Float tail: functions of a half-precision graph that must compute in float.

In half precision, nnabla's functions cast their constants to half: `loss * 1e-8` is `loss * 0`. So scalar
functions at the loss compute in float, as losses do under PyTorch's autocast, and so do functions with a
constant beyond half's range or precision. They are replaced by the same functions in a float context.
"""

from __future__ import annotations

import logging
import math
from typing import AbstractSet, Any, FrozenSet, List, Optional, Sequence, Set, Tuple

import nnabla as nn
import nnabla.function

from ..core.formats import FLOAT16, Format
from ..core.validation import boolean
from ..errors import warn
from .description import HALF, GraphDescription, Uses
from .functions import is_matrix_product, properties_of, written_inputs
from .graph import Graph
from .names import function_names, registered_names

logger = logging.getLogger("nnabla_adaloss")

# Arguments that nnabla's functions cast to the type of their arrays (`(T)a0` in its sources).
_CONSTANTS = frozenset({"val", "alpha", "beta", "delta", "epsilon"})


def float_tail(
    graph: Graph, candidates: Sequence[int], storage: Format = FLOAT16
) -> Tuple[FrozenSet[int], List[int]]:
    """Find functions of `candidates`, which compute in `storage`, that must compute in float; and those that
    cannot be moved there although `storage` changes their constants.
    """
    if not candidates:
        return frozenset(), []
    described = graph.described
    changed = {i for i in candidates if _changed_constants(described, i, storage)}
    in_float = changed | _at_the_loss(described).intersection(candidates)
    before_python = _before_python([graph.functions[i] for i in in_float])
    movable = (i for i in in_float if graph.functions[i] not in before_python)
    replaced = frozenset(i for i in movable if _can_be_replaced(described, i))
    return replaced, sorted(changed - replaced)


def _warning(graph: Graph, not_replaced: List[int]) -> str:
    """Warning of the constants that half precision changes, and how to keep them."""
    described = graph.description(registered_names())
    labels = function_names(described)
    changes = [
        f"{labels[index]} ({described.type_names[index]}): {c:g} is {FLOAT16.nearest(c):g} in half precision"
        for index in not_replaced
        for c in sorted({*_changed_constants(described, index, FLOAT16)})
    ]
    context = float_context(graph.functions[not_replaced[0]].context)
    written = f"nn.Context({context.backend}, {context.array_class!r}, {context.device_id!r})"
    return (
        f"half precision rounds constants: {', '.join(changes)}. Functions that draw random numbers, or that "
        "a function in Python follows, such as nn.grad makes of layers, cannot be moved to float here: build "
        f"them in a float context, as in `with nn.context_scope({written}): ...`"
    )


class TailReader:
    """Reads the graph of a loss after its float tail was moved to float, unless `float_tail` is False."""

    def __init__(self, loss: nn.Variable, *, float_tail: bool) -> None:
        self._loss, self._moves = loss, boolean("float_tail", float_tail)
        # Numbers of the functions last moved to float, and the warning about constants of others.
        self.functions: FrozenSet[int] = frozenset()
        self.warning = ""
        # True if the last reading moved functions or has a warning, until `before_backward`.
        self.moved = False
        self._reported = False  # True after the first report
        # Outputs of moved functions that have no data until forward runs, since inputs were freed.
        self._missing: List[nn.Variable] = []

    def read(self) -> Graph:
        """Read the present graph, with its float tail moved."""
        return self.move(*self.find())

    def find(self, other: Optional[Graph] = None) -> Tuple[Graph, FrozenSet[int], List[int]]:
        """Read the present graph, or `other` if it is that one, and find its `float_tail`."""
        graph = other if other is not None and other.is_current and not other.reshaped else Graph(self._loss)
        return graph, *float_tail(graph, graph.described.in_half if self._moves else ())

    def move(self, graph: Graph, functions: FrozenSet[int], not_replaced: List[int]) -> Graph:
        """Move a result of `find` to float; return the graph as it is then."""
        if functions or not_replaced:
            self.functions, self.moved = functions, True
            self.warning = _warning(graph, not_replaced) if not_replaced else ""
        if functions:
            self._missing = _compute_in_float(graph, functions)
            graph = Graph(self._loss)
        return graph

    def go_on_from(self, before: TailReader) -> None:
        """Take over from the previous graph which messages were reported."""
        self._reported = before._reported

    def before_backward(self) -> None:
        """Report the moved functions once; RuntimeError if forward must run again first."""
        if not all(map(_is_written, self._missing)):
            raise RuntimeError(
                "forward has to run again before backward: functions at the loss compute in float now, and "
                "their inputs were cleared. Call forward of this object instead of loss.forward()"
            )
        if self.moved and not self._reported:
            self._reported = True
            if self.functions:
                logger.info(
                    "%d functions compute in float: scalar ones at the loss, and those with a "
                    "constant that half precision cannot hold. float_tail=False leaves the graph as it is",
                    len(self.functions),
                )
            if self.warning:
                warn(self.warning)
        self.moved, self._missing = False, []


def float_context(context: nn.Context) -> nn.Context:
    """Convert a context's half-precision backends to float."""
    names = [f"{name.partition(':')[0]}:float" if name.endswith(HALF) else name for name in context.backend]
    return nn.Context(list(dict.fromkeys(names)), context.array_class, context.device_id)


def _changed_constants(described: GraphDescription, index: int, storage: Format) -> List[float]:
    """Constants of a function, also the 1/N of a mean, that `storage` changes by more than its precision."""
    args = described.args[index]
    numbers = [float(args[name]) for name in _CONSTANTS & args.keys()]
    if properties_of(described.type_names[index]).averages:
        size = _sizes(described, described.inputs, index)[0]
        numbers.append(_sizes(described, described.outputs, index)[0] / max(size, 1))
    return [c for c in numbers if abs(storage.nearest(c) - c) > abs(c) * 2.0**-storage.mantissa_bits]


def _compute_in_float(graph: Graph, functions: AbstractSet[int]) -> List[nn.Variable]:
    """Replace functions by float ones, and compute those whose outputs exist; return the outputs for which
    this fails, because inputs were freed.
    """
    described = graph.described
    missing: List[nn.Variable] = []
    for index in sorted(functions):
        f = graph.functions[index]
        make = getattr(nnabla.function, described.type_names[index])
        inputs, outputs = f.inputs, f.outputs
        computed = all(map(_is_written, outputs))
        present = (_is_written(v) and not v.data.clear_called for v in inputs if v.parent is not None)
        recompute = computed and all(present)
        function = make(float_context(f.context), **described.args[index])
        made = function(*inputs, n_outputs=len(outputs), auto_forward=recompute)
        for old, new in zip(outputs, made if isinstance(made, (list, tuple)) else [made]):
            need_grad = old.need_grad
            old.rewire_on(new)
            # Rewiring takes over the new one's; a user may have set it.
            if old.need_grad != need_grad:
                old.need_grad = need_grad
        missing += outputs if computed and not recompute else []
    return missing


def _before_python(functions: List[Any]) -> Set[Any]:
    """Functions, among these and their readers in any graph, that are or lead to a Python function."""
    # Rewiring a variable sets up all its readers again, where nnabla crashes at Python functions.
    found: Set[Any] = set()
    seen: Set[Any] = set()
    waiting = list(functions)
    # A function waits as a tuple until its readers have been examined.
    while waiting:
        f = waiting.pop()
        if type(f) is tuple:
            f, readers = f
            if f.name == "Callback" or not found.isdisjoint(readers):  # nnabla's name for Python functions
                found.add(f)
        elif f not in seen:
            seen.add(f)
            readers = [reader for v in f.outputs for reader in v.function_references]
            waiting += [(f, readers), *readers]
    return found


def _at_the_loss(described: GraphDescription) -> Set[int]:
    """Functions with a scalar output or only scalar inputs, from the loss back to the first others."""
    at_loss: Set[int] = set()
    waiting = [len(described.type_names) - 1]
    while waiting:
        index = waiting.pop()
        if index in at_loss or is_matrix_product(described.type_names[index]):
            continue
        read, written = ({*_sizes(described, uses, index)} for uses in (described.inputs, described.outputs))
        if written == {1} or read == {1}:
            at_loss.add(index)
            waiting += [p for p in described.producers[described.inputs.part(index)] if p is not None]
    return at_loss


def _is_written(variable: nn.Variable) -> bool:
    """True if an array was written, also if it was cleared since."""
    try:
        return variable.data.dtype is not None
    except RuntimeError:
        return False  # nnabla raises it for an array that was never written


def _can_be_replaced(described: GraphDescription, index: int) -> bool:
    """True if a function is nnabla's own, without weight, statistics or random numbers to lose."""
    type_name, args = described.type_names[index], described.args[index]
    has_weight = is_matrix_product(type_name) or properties_of(type_name).own_references
    has_state = written_inputs(type_name, args) or "seed" in args
    return not (has_weight or has_state) and hasattr(nnabla.function, type_name)


def _sizes(described: GraphDescription, uses: Uses, index: int) -> List[int]:
    """Sizes of the inputs, or of the outputs, of a function."""
    return [math.prod(described.shapes[p]) for p in uses.positions[uses.part(index)]]
