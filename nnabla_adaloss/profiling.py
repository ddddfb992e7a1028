# SPDX-License-Identifier: Apache-2.0
"""Profile of an update's time: per layer, and per part of loss scaling."""

from __future__ import annotations

import inspect
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, Callable, DefaultDict, Dict, List, NamedTuple, Optional, Tuple

from .core.validation import positive_integer
from .engine import AdaptiveLossScaling
from .graph.graph import Graph
from .graph.hooks import Hook
from .graph.plan import GraphPlan

# Field of `LayerTimes` of kernels' times; that of all others is `statistics`.
_FIELDS: Dict[str, str] = {
    **dict.fromkeys(("scaled_copy", "scaled_copy_all", "scaled_float32", "scale_"), "scaling"),
    **dict.fromkeys(("unscale_add", "unscale_list"), "unscaling"),
    "round_to_format": "rounding",
}
_INPUTS, _BETWEEN = "(at the inputs)", "(between passes)"


class LayerTimes(NamedTuple):
    """Milliseconds per update of one layer and of the functions after it, up to the next layers."""

    statistics: float = 0.0  # measuring gradients and weights
    scaling: float = 0.0  # scaled copies of weights, rescaled gradients
    unscaling: float = 0.0  # dividing the gradients of parameters
    rounding: float = 0.0  # emulating the storage
    rest: float = 0.0  # nnabla's own functions, and Python around them

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return sum(self)


class Profile(NamedTuple):
    """Times measured by `profile`; `print` it.

    Attributes:
        layers: times of each layer, by name, in forward order; `(at the inputs)`: functions before the first
            layer, if any; `(between passes)`: feeder, solver, checks.
        milliseconds: total time of an update.
    """

    layers: Dict[str, LayerTimes]
    milliseconds: float

    @property
    def sum(self) -> LayerTimes:
        """Sum over all layers."""
        return LayerTimes(*(sum(column) for column in zip(*self.layers.values())))

    def as_dict(self) -> Dict[str, Any]:
        """Milliseconds per update, in total and by layer."""
        layers = {name: times._asdict() for name, times in self.layers.items()}
        return {"milliseconds": self.milliseconds, "layers": layers}

    def __str__(self) -> str:
        width = max(map(len, [*self.layers, "layer"]))
        head = [f"{'layer':{width}}", *(f"{name:>11}" for name in (*LayerTimes._fields, "total"))]
        lines = [f"{self.milliseconds:.3f} ms per update", "", " ".join(head)]
        for name, times in {**self.layers, "sum": self.sum}.items():
            cells = [f"{value:11.3f}" for value in (*times, times.total)]
            lines.append(" ".join([f"{name:{width}}", *cells]))
        return "\n".join(lines)


def profile(updater: Any, iterations: int = 20) -> Profile:
    """Time updates layer by layer, while training goes on.

    Every pass of loss scaling over memory is timed by itself, on a CPU. Hooks read the clock, which takes
    time, and with them every backward scales function by function: compare parts with each other, not with
    an update without profiling.

    Args:
        updater: an `AdaptiveLossScalingUpdater`.
        iterations: number of timed updates, after one that is not timed. Default 20.

    Raises:
        TypeError: `updater` has no `scaling`.
        ValueError: `iterations` is less than 1; or the feeder assigns another loss; or the network is on a
            GPU, for which there are NVIDIA's profilers; functions that run on the host anyway are named.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater, profile
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> times = profile(AdaptiveLossScalingUpdater(solver, loss, storage="float16"), iterations=2)
        >>> list(times.layers)
        ['a/affine', 'b/affine', '(between passes)']
        >>> times.layers["b/affine"].rounding > 0.0
        True
    """
    scaling = getattr(updater, "scaling", None)
    if not isinstance(scaling, AdaptiveLossScaling):
        raise TypeError(f"updater must be an AdaptiveLossScalingUpdater, got {type(updater).__name__}")
    iterations = positive_integer("iterations", iterations)
    if scaling.kernels.asynchronous:
        on_host = scaling.plan.on_host or "no function"
        raise ValueError(
            "the network is on a GPU, which goes on while Python does: use NVIDIA's profilers. "
            f"On the host, for lack of a CUDA implementation, runs {on_host}"
        )
    updater.update()
    clock = _Clock(scaling.graph, scaling.plan)
    # An emulation has the same kernels.
    timed: List[Tuple[Any, str, Callable[..., Any]]] = [
        (scaling.kernels, name, clock.timed(_FIELDS.get(name, "statistics"), kernel))
        for name, kernel in inspect.getmembers(scaling.kernels, inspect.ismethod)
        if not name.startswith("_")
    ]
    timed += [(scaling, name, clock.with_hooks(getattr(scaling, name))) for name in ("forward", "backward")]
    with ExitStack() as stack:
        for owner, name, method in timed:
            setattr(owner, name, method)
            stack.callback(delattr, owner, name)
        for _ in range(iterations):
            updater.update()
            if updater.scaling is not scaling:
                raise ValueError("the feeder assigns updater.loss: profile an updater of one loss")
        return clock.profile(iterations)


class _Clock:
    """Sums times by layer; the time since the last reading belongs to the function just run."""

    def __init__(self, graph: Graph, plan: GraphPlan) -> None:
        # Layer that each function is or follows, by function key.
        self._layers: Dict[int, str] = {}
        for number, f in enumerate(graph.functions):
            node = plan.by_number.get(number)
            if node is not None and (node.layer_inputs or node.leaves):
                layer = node.label
            else:
                before = (self._layers[hash(v.parent)] for v in f.inputs if v.parent is not None)
                layer = next((layer for layer in before if layer != _INPUTS), _INPUTS)
            self._layers[hash(f)] = layer
        names = (*self._layers.values(), _BETWEEN)
        self._sums = {name: dict.fromkeys(LayerTimes._fields, 0.0) for name in names}
        self._pending: DefaultDict[str, float] = defaultdict(float)
        self._start = self._last = perf_counter()

    def timed(self, field: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel to record its time, including kernels that it calls."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            pending, start = self._pending.copy(), perf_counter()
            try:
                return kernel(*arguments, **keywords)
            finally:
                # The time of a kernel that this one calls is part of this one's.
                self._pending = pending
                pending[field] += perf_counter() - start

        return run

    def with_hooks(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward` or `backward` to read the clock before and after each function."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            self._record(_BETWEEN)
            for name in ("function_pre_hook", "function_post_hook"):
                keywords[name] = partial(self._record_before, keywords.get(name))
            return method(*arguments, **keywords)

        return run

    def _record_before(self, hook: Optional[Hook], f: Any) -> None:
        self._record(self._layers[hash(f)])
        if hook is not None:
            hook(f)

    def _record(self, name: str) -> None:
        """Add the time since the last reading, of kernels and the rest, to the function or part `name`."""
        now = perf_counter()
        rest = now - self._last - sum(self._pending.values())
        for field, seconds in [*self._pending.items(), ("rest", rest)]:
            self._sums[name][field] += seconds
        self._pending.clear()
        self._last = now

    def profile(self, iterations: int) -> Profile:
        """Times per iteration so far."""
        self._record(_BETWEEN)
        layers = {
            name: LayerTimes(**{field: 1e3 * seconds / iterations for field, seconds in sums.items()})
            for name, sums in self._sums.items()
        }
        return Profile(layers, 1e3 * (self._last - self._start) / iterations)
