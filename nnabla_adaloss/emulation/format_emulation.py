# SPDX-License-Identifier: Apache-2.0
"""Half-precision storage in a float context: arrays that a GPU would store as fp16 are rounded to fp16."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain, starmap
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import nnabla as nn

from ..core.formats import Format
from ..core.precision import LayerPrecisions, StorageLike
from ..core.validation import boolean
from ..graph.graph import Graph
from ..graph.hooks import Hook, HookGuard
from ..graph.loss import LossLike, LossSeed, Seed, check_scale, check_seed, run_backward, variable_of
from ..graph.names import Parameters, check_parameters, names_of, registered_names
from ..kernels import select_kernels
from ..kernels.arrays import ScratchPool
from .rounded_storage import RoundedStorage
from .rounding_plan import Operand, Rounding, RoundingPlan


class GradientRounding(NamedTuple):
    """Counts from rounding one variable's gradient in the last backward.

    Attributes:
        elements: number of elements.
        nonzero: number of nonzero elements before rounding.
        underflowed: number of those that became zero.
        overflowed: number of finite elements that became infinite.
    """

    elements: int
    nonzero: int
    underflowed: int
    overflowed: int


class FormatEmulation:
    """Loss whose activations, gradients and weights are stored in a low-precision format.

    nnabla computes in float, as tensor cores accumulate in fp32. Arrays that a half-precision GPU would store
    are rounded half to even, with overflow to infinity and gradual underflow: outputs after each function's
    forward, gradients after its backward, weights at use (the fp32 masters do not change). Softmax, cross
    entropy, batch normalization's statistics, beta and gamma, labels and indices stay fp32, except for
    functions that read them in half, and so do the results of `recompute`. Scalars have 16 bits or more.

    Args:
        loss: the loss Variable.
        storage: `"float16"` (default), `"bfloat16"`, `"float8_e5m2"`, `"float8_e4m3"`, or a `Format` of your
            own; a `Precision`, where gradients have another format or numbers saturate; `"fp8_hybrid"`, where
            only matrix products read 8 bits and the rest is stored in float16; or a mapping by layer, such as
            `{"head/*": "float16", "*": "fp8_hybrid"}`: the first pattern that matches the layer's name
            decides, and layers without a match are computed in fp32.
        float_tail: compute scalar functions at the loss, and functions with a constant beyond the format, in
            fp32, as this package's updaters do in a half context. False: as nnabla does by itself, apart from
            constants, which are never rounded here.
        parameters: parameters by name, as `AdaptiveLossScaling` takes them, where nnabla does not know their
            names; only a mapping asks for names.

    Attributes:
        variable: the wrapped loss Variable.
        precisions: the emulated formats; `precisions.common` is the one that all layers have, if any.
        float_tail: as given.

    Raises:
        TypeError: `loss` is not a Variable; wrap the Variable first, then scale the emulation.
        ValueError: `loss` needs no gradient, the format is unknown, a function computes in half already, or a
            pattern of `storage` decides about no layer.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import FormatEmulation
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = FormatEmulation(F.mean(PF.affine(x, 5) ** 2), "float16")
        >>> loss.forward(clear_no_need_grad=True)
        >>> loss.backward(8.0, clear_buffer=True)
    """

    def __init__(
        self,
        loss: nn.Variable,
        storage: StorageLike = "float16",
        *,
        float_tail: bool = False,
        parameters: Parameters = None,
    ) -> None:
        self.variable = variable_of(loss)
        if loss is not self.variable:
            raise TypeError(
                f"storage emulates a format around a Variable, but loss is a {type(loss).__name__}: wrap the "
                "emulation, as AdaptiveLossScaling(FormatEmulation(loss)), or leave storage out"
            )
        self.precisions = precisions = LayerPrecisions(storage)
        kernels = select_kernels(self.variable.parent.context)
        self._seed, self._pool = LossSeed(self.variable, kernels.scaled_float32), ScratchPool()
        self.float_tail = boolean("float_tail", float_tail)
        self._parameters = check_parameters("parameters", parameters)
        # Names come from the parameter scope in which the loss is wrapped.
        self._registered = registered_names() if precisions.common is None else {}
        self.emulated_storage = RoundedStorage(precisions, kernels)
        self._plan = self._make_plan()
        # Arrays that rounded copies replace while a function runs, to be restored, as arguments of `setattr`.
        self._swapped: List[Tuple[nn.Variable, str, nn.NdArray]] = []
        # Rounded leaves, with their arrays: backward reads those of forward, unless the arrays were replaced.
        self._rounded_leaves: Dict[Tuple[int, Format], Tuple[nn.NdArray, nn.NdArray]] = {}

    @property
    def graph(self) -> Graph:
        """The graph of the loss as it was read last; it may have changed since."""
        return self._plan.graph

    def go_on_from(self, before: FormatEmulation) -> None:
        """Share the stream of random numbers with `before`, the emulation of the graph used until now."""
        self.emulated_storage.random_draws = before.emulated_storage.random_draws

    def gradient_rounding(self, variable: nn.Variable) -> Optional[GradientRounding]:
        """Counts from rounding the gradient of `variable` in the last backward, or None."""
        counts = self.emulated_storage.gradients.get(hash(variable))
        if counts is None:
            return None
        return GradientRounding(
            counts.statistics.count, counts.nonzero, counts.underflowed, counts.overflowed
        )

    def forward(
        self,
        clear_buffer: bool = False,
        clear_no_need_grad: bool = False,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
    ) -> None:
        """Run forward as `Variable.forward` does, in the emulated format.

        Hooks see arrays as stored, not their copies for matrix products.
        """
        if not self._plan.graph.is_current:
            self._plan = self._make_plan()
        self._round_weights()
        # Data may have been written into the same arrays since the last forward.
        self._rounded_leaves.clear()
        guard, reads = HookGuard(), self._plan.reads
        pre = guard.chain(function_pre_hook, self._swap_operands if reads else None)
        post = guard.chain(self._put_back if reads else None, self._round_outputs, function_post_hook)
        self._run(guard, partial(self.variable.forward, clear_buffer, clear_no_need_grad, pre, post))

    def backward(
        self,
        scale: float = 1.0,
        clear_buffer: bool = False,
        communicator_callbacks: Optional[Any] = None,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
        *,
        grad: Optional[Seed] = None,
        round_gradients: bool = True,
    ) -> None:
        """Run backward as `Variable.backward` does, in the emulated format.

        Args:
            scale: factor of the loss gradient; all gradients carry it.
            clear_buffer: free arrays that backward no longer needs.
            communicator_callbacks: nnabla's.
            function_pre_hook: called before each function's backward.
            function_post_hook: called after each function's backward, when its gradients are rounded.
            grad: seed gradient of the loss's shape; None for one.
            round_gradients: False: gradients stay in fp32; only arrays stored by forward are rounded.

        Raises:
            ValueError: `scale` is not finite or less than 2**-126, or a loss of several elements has no
                `grad`, or `grad` has another shape.
        """
        try:
            check_scale(scale)
        except ValueError as error:
            raise ValueError(
                f"{error}. If DynamicLossScalingUpdater has lowered it so far, gradients are not finite at "
                "any scale, as with NaN in the data: call `nnabla_adaloss.diagnose(updater)`, or train with "
                "AdaptiveLossScalingUpdater, which names the cause"
            ) from None
        check_seed(self.variable, grad)
        if not self._plan.graph.is_current:
            self._plan = self._make_plan()
        if self.emulated_storage.weights.keys() != self._plan.leaves.keys():
            self._round_weights()
        self.emulated_storage.gradients.clear()
        guard, reads = HookGuard(), self._plan.backward_reads
        # After the user's hook, as products read a rounded copy of arrays that the engine has swapped, too.
        swap = partial(self._swap_operands, backward=True, fitted=round_gradients)
        pre = guard.chain(function_pre_hook, swap if reads else None)
        rounds = self._round_gradients if round_gradients else None
        post = guard.chain(self._put_back if reads else None, rounds, function_post_hook)
        arguments = self.variable, scale, grad, clear_buffer, communicator_callbacks, pre, post, self._seed
        self._run(guard, partial(run_backward, *arguments))

    def _make_plan(self) -> RoundingPlan:
        """Plan the roundings of the present graph, and tell the storage the precision of its variables."""
        names = {**names_of(self._parameters), **self._registered} if self.precisions.common is None else {}
        plan = RoundingPlan(self.variable, self.precisions, names, float_tail=self.float_tail)
        self.emulated_storage.of_variables = plan.of_variables
        self.emulated_storage.rounded_gradients = plan.rounded_gradients
        return plan

    def _round_weights(self) -> None:
        """Round weights to copies, which replace them while the graph runs."""
        self.emulated_storage.weights = {
            key: self.emulated_storage.round_data(key, leaf.data, self._pool.get(leaf.shape, "weight", index))
            for index, (key, leaf) in enumerate(self._plan.leaves.items())
        }

    def _run(self, guard: HookGuard, call: Callable[[], None]) -> None:
        """Call `call` while rounded weights replace the fp32 ones."""
        weights = [(leaf, "data", leaf.data) for leaf in self._plan.leaves.values()]
        # One call into C without a line of Python: no signal can interrupt it halfway.
        put_back: Callable[[], Any] = partial(deque, starmap(setattr, chain(self._swapped, weights)), 0)
        try:
            for key, leaf in self._plan.leaves.items():
                leaf.data = self.emulated_storage.weights[key]
            guard.run(call)
        finally:
            put_back()
            self._swapped.clear()

    def _swap_operands(self, f: Any, *, backward: bool = False, fitted: bool = True) -> None:
        """Replace arrays that a function reads by rounded copies, `fitted` ones included."""
        for operand in (self._plan.backward_reads if backward else self._plan.reads).get(hash(f), ()):
            if operand.fitted and not fitted:
                continue
            source = getattr(operand.variable, operand.attribute)
            rounded = self._rounded(operand, source, remember=not backward)
            if rounded is not None:
                # Noted before the swap: a signal may interrupt between any two lines.
                self._swapped.append((operand.variable, operand.attribute, source))
                setattr(operand.variable, operand.attribute, rounded)

    def _put_back(self, f: Any) -> None:
        """Restore the arrays that copies replaced while `f` ran."""
        # One call into C without a line of Python: no signal can interrupt it halfway.
        deque(starmap(setattr, self._swapped), 0)
        self._swapped.clear()

    def _rounded(self, operand: Operand, source: nn.NdArray, *, remember: bool) -> Optional[nn.NdArray]:
        """Rounded copy of an operand's array; None if it must not be rounded. `remember`: for later reads."""
        if source.clear_called:
            return None
        name, index, format = f"operand {operand.attribute}", operand.position, operand.format
        if operand.lasting:
            before, rounded = self._rounded_leaves.get((operand.key, format), (None, None))
            if before is not None and before == source:
                return rounded
            if remember:
                name, index = f"operand of all functions in {format.name}", operand.key
        target = self._pool.get(source.shape, name, index)
        rounding = self.emulated_storage.round_operand(source, target, operand)
        if rounding is None:
            return None
        if remember and (operand.lasting or not operand.fitted):
            self.emulated_storage.data[operand.key] = rounding
        if remember and operand.lasting:
            self._rounded_leaves[operand.key, format] = source, target
        return target

    def _round_outputs(self, f: Any) -> None:
        """Round the outputs of a function after its forward."""
        for variable in self._rounding(f).outputs:
            array = variable.data
            self.emulated_storage.round_data(hash(variable), array, array)

    def _round_gradients(self, f: Any) -> None:
        """Round the gradients of a function's inputs after its backward."""
        for variable in self._rounding(f).gradients:
            self.emulated_storage.round_gradient(hash(variable), variable.grad)

    def _rounding(self, f: Any) -> Rounding:
        """Rounding of a function, also of one that a hook has brought into the graph."""
        return self._plan.roundings.get(hash(f)) or self._plan.rounding_of(f)


def with_storage(
    loss: LossLike, storage: Optional[StorageLike], *, float_tail: bool = False, parameters: Parameters = None
) -> LossLike:
    """Wrap `loss` to emulate `storage` unless that is None."""
    if storage is None:
        return loss
    return FormatEmulation(loss, storage, float_tail=float_tail, parameters=parameters)
