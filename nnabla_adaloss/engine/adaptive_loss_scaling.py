# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling of one loss, on which the updater is built."""

from __future__ import annotations

import sys
from dataclasses import replace
from traceback import walk_stack
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import nnabla as nn
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from ..core.config import AdaLossConfig
from ..core.memory import Memory, Observations
from ..core.power_of_two import within_float32
from ..core.precision import Precision
from ..core.scale_history import HistoryPolicy
from ..core.validation import instance_or_none, integer, strings
from ..emulation.format_emulation import FormatEmulation
from ..emulation.rounded_storage import NativeStorage
from ..errors import GraphChangedError, warn
from ..graph.float_tail import TailReader
from ..graph.functions import properties_of
from ..graph.graph import Graph
from ..graph.hooks import Hook
from ..graph.loss import NEEDS_NO_GRADIENT, LossLike, LossSeed, Seed, check_scale, check_seed, variable_of
from ..graph.names import Parameters, check_parameters
from ..graph.plan import GraphPlan
from ..kernels import select_kernels
from ..kernels.arrays import is_zeroing
from ..monitor.audience import Audience, audience_of
from ..monitor.events import LayerScaled
from ..undo.batch_guard import BatchGuard, ForwardState
from .chooser import Chooser, Decision, Request
from .forward_fault import find_fault
from .graph_cache import GraphCache
from .layer_watch import LayerWatch
from .leaf_gradients import NonfiniteGradients
from .passes.backward_pass import run_pass
from .passes.hooked import PassInputs
from .report import PassReport
from .saved_state import load_state, state_of

# nnabla's update(), which divides gradients by the scale; that of a derived updater may not divide.
_CODE_THAT_DIVIDES = DynamicLossScalingUpdater.update.__code__

# Key of a flag in messages between ranks.
_CHOOSES_AGAIN = "chooses again"


class AdaptiveLossScaling:
    """Runs backward with one loss scale per layer (Zhao et al. 2019, arXiv 1910.12385, algorithm 1).

    Apart from `float_tail` the graph stays unchanged. After backward every parameter gradient is unscaled, in
    fp32, and added to its former contents; gradients of inputs and of variables that stay readable
    (persistent, or `clear_buffer=False`) are unscaled too.

    Args:
        loss: the loss Variable, or a wrapper such as `FormatEmulation`.
        config: how scales are computed; None for `AdaLossConfig()`.
        non_homogeneous: type names of further functions whose input gradient is not proportional to their
            output gradient. They see unscaled gradients.
        parameters: parameters by name, for layers whose parameters nnabla does not know by name; or a
            function that returns them, such as `solver.get_parameters`.
        history: the policy that derives scales from measurements; None for `HistoryPolicy()`.
        forward_state: undoes writes of forward to leaves; losses of a network share one. None for a new one.
        monitors: objects with some of the methods of `Monitor`.
        float_tail: in a half context, move scalar functions at the loss, and functions with a constant that
            half cannot hold (`loss * 1e-8` is 0), to float. Default True; False leaves the graph unchanged.

    Attributes:
        audience: the monitors; None for none.
        config: the configuration, with `loss_scale_method` and `dtype` filled in.
        components: the memory of the network and measurements of this iteration, such as `unit_amaxes()`.
        delay: 0 when scales come from the statistics of the same iteration, 1 when from the one before.
        guard: undoing of single batches for a training loop.
        in_half: True if any function of the graph computes in half precision.
        iteration: number of the next iteration.
        kernels: the kernels that read and scale arrays.
        loss: the object that runs forward and backward: the Variable, or its emulation.
        variable: the wrapped loss Variable.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `loss` needs no gradient or scales itself, or `config.dtype` is not that of its gradients.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import AdaptiveLossScaling
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> scaling = AdaptiveLossScaling(loss)
        >>> scaling.forward(clear_no_need_grad=True)
        >>> scaling.backward(clear_buffer=True)
        >>> sorted(scaling.layer_scales)
        ['b/affine']
    """

    undone = "iteration", "components"  # restored from a `savepoint`

    def __init__(
        self,
        loss: LossLike,
        config: Optional[AdaLossConfig] = None,
        *,
        non_homogeneous: Sequence[str] = (),
        parameters: Parameters = None,
        history: Optional[HistoryPolicy] = None,
        forward_state: Optional[ForwardState] = None,
        monitors: Union[Sequence[Any], Audience] = (),
        float_tail: bool = True,
    ) -> None:
        if isinstance(loss, AdaptiveLossScaling):
            raise TypeError(
                "loss is scaled already: it is an AdaptiveLossScaling; give the loss that was wrapped in it, "
                "or its FormatEmulation"
            )
        instance_or_none("config", config, AdaLossConfig)
        instance_or_none("history", history, HistoryPolicy)
        instance_or_none("forward_state", forward_state, ForwardState)
        check_parameters("parameters", parameters)
        self.audience: Optional[Audience] = audience_of(monitors)
        non_homogeneous = strings("non_homogeneous", non_homogeneous, "type names of functions")
        emulation = loss if isinstance(loss, FormatEmulation) else None
        self._storage = NativeStorage() if emulation is None else emulation.emulated_storage
        self.loss, self.variable = loss, variable_of(loss)
        # Only a Sink keeps gradients. It writes no output: what that memory holds is not checked as a loss.
        self._is_sink = properties_of(self.variable.parent.info.type_name).keeps_gradients
        self._reader = TailReader(self.variable, float_tail=float_tail)
        # An emulation has read the graph already. Of the functions in half, those in `in_float` will move to
        # float; those in `not_replaced` need float, too, but cannot move.
        graph, in_float, not_replaced = self._reader.find(None if emulation is None else emulation.graph)
        if any(properties_of(type_name).scales for type_name in {*graph.described.type_names}):
            raise ValueError(
                "loss scales itself already, by nnabla_adaloss.loss_scaling with a tracker: "
                "train on it as it is, or wrap the loss that was given to loss_scaling"
            )
        self.in_half = not in_float.issuperset(graph.described.in_half)
        if config is not None and config.changed_without_effect:
            warn(
                f"the default method does not use {' and '.join(config.changed_without_effect)}; "
                'give loss_scale_method="approx_range", too'
            )
        stored = self._storage.narrowest or (Precision() if self.in_half else None)
        self.config = (config or AdaLossConfig()).for_network().for_storage(stored)
        self.kernels = select_kernels(self.variable.parent.context)
        self._chooser = Chooser(self.config)
        self.delay = self._chooser.method_alphas.delay
        self._seed = LossSeed(self.variable, self.kernels.scaled_float32)
        policy = self.config.method.policy(HistoryPolicy() if history is None else history)
        # A window is given in iterations, but stored as measurements, each of which takes several iterations.
        self.components = Observations(Memory(policy.measured_every(self.config.iterations_per_measurement)))
        self._graph = GraphCache(
            self._reader,
            # After all checks: an error leaves the graph unchanged.
            self._reader.move(graph, in_float, not_replaced),
            self.config,
            parameters,
            non_homogeneous,
            kernels=self.kernels,
            storage=self._storage,
            delayed=bool(self.delay),
            watched=self.audience is not None,
        )
        self.guard = BatchGuard(self._graph.graph_and_plan, self.kernels, forward_state)
        self.iteration = 0
        self._result: Optional[PassReport] = None
        self._nonfinite = NonfiniteGradients(self.kernels)

    @property
    def undoable(self) -> List[Any]:
        """Objects whose attributes in `undone` a rollback restores, before it calls `go_back_to`."""
        return [self, self._chooser.method_alphas, *self._graph.undoable, self._storage.random_draws]

    def go_on_from(self, before: AdaptiveLossScaling) -> None:
        """Take over the state of the engine of the network's previous graph, if graphs are rebuilt.

        Raises:
            ValueError: `before` scales layers, or stores gradients, in another way.
        """
        if before.config != self.config:
            raise ValueError(
                f"before scales layers in another way: {before.config}, and here {self.config}; "
                "make both with the same config"
            )
        if before._storage.by_layer != self._storage.by_layer:
            raise ValueError(
                "loss has another storage than the loss before: wrap each in a FormatEmulation of the same "
                "format, or none; an updater with storage= wraps each by itself"
            )
        self._chooser, self.guard.state = before._chooser, before.guard.state
        self._reader.go_on_from(before._reader)
        self.share_with(before)
        self.go_back_to(before)

    def go_back_to(self, before: AdaptiveLossScaling) -> None:
        """Take over the measurements of `before`: of the previous graph, or the same engine rolled back."""
        self.iteration = before.iteration
        self._graph.go_on_from(before._graph)
        self.components = before.components

    def share_with(self, other: AdaptiveLossScaling) -> None:
        """Share random numbers, and the record of nonfinite gradients, with another loss of the training."""
        self._storage.random_draws, self._nonfinite = other._storage.random_draws, other._nonfinite

    @property
    def plan(self) -> GraphPlan:
        """All functions in backward order with their roles, in the present graph; `print` it."""
        return self._graph.current().plan

    @property
    def graph(self) -> Graph:
        """Functions and variables that the plan refers to."""
        return self._graph.current().graph

    @property
    def state_descriptions(self) -> Dict[int, str]:
        """Descriptions of leaves that forward writes in graphs of this loss, by the key of their data."""
        return self._graph.state_descriptions

    @property
    def layers(self) -> List[str]:
        """Names of the scaled layers, in backward order."""
        return self.plan.layers

    @property
    def result(self) -> PassReport:
        """Report of the last backward.

        Raises:
            RuntimeError: backward has not run.
        """
        if self._result is None:
            raise RuntimeError("backward() has not run yet: there is no report of it")
        return self._result

    @property
    def layer_scales(self) -> Dict[str, float]:
        """Alpha of each layer in the last backward, by layer name."""
        layers = {} if self._result is None else self._result.schedule.layers
        return {layer: alpha for layer, (_, alpha) in layers.items()}

    @property
    def accumulated_scales(self) -> Dict[str, float]:
        """Scale of each layer's input gradient in the last backward: its output gradient's, times alpha."""
        layers = {} if self._result is None else self._result.schedule.layers
        return {layer: scale * alpha for layer, (scale, alpha) in layers.items()}

    @property
    def found_inf(self) -> List[str]:
        """Functions, by name, whose gradients the last backward left infinite or NaN, in backward order."""
        return [] if self._result is None else list(self._result.found_inf)

    @property
    def loss_scale(self) -> float:
        """S0 of the last backward: as given, or the scale of the first array after the loss's scalars."""
        if self._result is None:
            return self.components.policy.start_scale
        return self._result.schedule.loss_scale

    @property
    def calibrated(self) -> bool:
        """False if the last backward found its scales far too low: run the batch again."""
        return self.components.calibrated

    @property
    def can_measure_more(self) -> bool:
        """True if repeating the last batch would measure more gradients than its last pass did."""
        return not (self.result.measurements.measured_all or self._measures_nothing)

    @property
    def _measures_nothing(self) -> bool:
        """True if all scales of the last backward were a given S0, which no measurement changes."""
        return self._graph.current().schedules.measures_nothing(self.result.schedule.given_scale)

    @property
    def is_good(self) -> bool:
        """True if the last pass was finite and its scales suffice, so that its gradients can be used."""
        return self.calibrated and not (self.result.found_inf or self.result.loss_is_nan)

    def overflowed(self, parameters: Callable[[], Iterable[nn.Variable]]) -> bool:
        """True if the last backward left the loss NaN, or gradients of these parameters not finite."""
        if self.result.loss_is_nan or not self.result.found_inf:
            return self.result.loss_is_nan
        # Other infinities do no harm: those of other parameters, or those that a later ReLU set to 0.
        return not self.kernels.gradients_are_finite(parameters())

    def has_nothing_to_learn(self) -> bool:
        """True if the loss of the last batch, or every loss weight, is zero."""
        schedule = self.result.schedule
        # Only arrays can learn: in `0 * loss` they have the loss weight 0, but the loss itself always has 1.
        scalars = schedule.components.scalar_components
        if not any(weight for index, weight in enumerate(schedule.loss_weights) if index not in scalars):
            return True
        # A tiny loss, such as 1e-9, that an emulated storage has rounded to zero still has gradients.
        rounded = self._storage.data.get(hash(self.variable))
        was_rounded_to_zero = rounded is not None and bool(rounded.underflowed)
        return not (self.variable.d.any() or was_rounded_to_zero)

    @property
    def forward_is_suspect(self) -> bool:
        """True if running statistics, or data rounded by an emulated storage, are not finite."""
        stored = self._storage.data.values()
        return not self.result.state_finite or any(seen.statistics.nonfinite for seen in stored)

    def find_fault(self) -> str:
        """Run forward again; describe its first function with a nonfinite array, else ""."""
        return find_fault(self.loss, self._graph.current(check_wiring=True), self.guard.rewind)

    def scale_of(self, variable: nn.Variable) -> float:
        """Scale S that the gradient of `variable` carried in the last backward.

        Raises:
            KeyError: the last backward did not reach `variable`, or has not run.
        """
        if self._result is not None:
            # Positions are those of the graph of that backward: it may have been rewired since.
            position = self._result.graph.positions.get(hash(variable), -1)
            if position in self._result.schedule.scales:
                return self._result.schedule.scales[position]
        raise KeyError(f"no gradient of {variable} was computed by the last backward")

    def after_overflow(self) -> bool:
        """Lower the scale that made gradients overflow (see `overflowed`); False if none can be lowered."""
        # Schedules of all topologies were chosen before this overflow, and might repeat it.
        self._graph.drop_schedules()
        if self._result is None or self._measures_nothing:
            return False
        self.components, lowered = self.components.after_overflow(self._result.measurements)
        return lowered

    def shared_statistics(self) -> Optional[Dict[str, Sequence[float]]]:
        """Measurements for `adopt_statistics` of all ranks; None: all scales are a constant S0."""
        if self._measures_nothing:
            return None
        prepared = self._graph.current()
        # After an overflow, or for a new topology, this rank has no schedules.
        flag = {_CHOOSES_AGAIN: [float(not prepared.schedules.entries)]}
        return {**flag, **self.components.message(), **prepared.statistics.message()}

    def adopt_statistics(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Replace the measurements by the `shared_statistics` of all ranks, in the ranks' order."""
        prepared = self._graph.current()
        if any(one[_CHOOSES_AGAIN][0] for one in messages):
            # Otherwise this rank would keep old scales while another one chooses new ones.
            prepared.schedules = prepared.schedules.drop()
        self.components = self.components.after_exchange(messages)
        prepared.statistics.adopt(messages)

    def after_update(self, step: Optional[Callable[[], Any]] = None) -> None:
        """End a good iteration: remember its measurements, and run the solver's `step`."""
        # Before `step`: a Ctrl-C right after it must not leave new weights with the old memory.
        self.components = self.components.after_iteration(good=True)
        if step is not None:
            step()

    def end_iteration(self) -> None:
        """End an iteration without an update."""
        self.components = self.components.after_iteration()

    def drop_iteration(self) -> None:
        """Drop the measurements of this iteration."""
        self.components = self.components.without_iteration()

    def forget(self) -> None:
        """Drop all measurements of gradients and weights: call it after loading other weights."""
        self._chooser.method_alphas.load({})
        self.components = Observations(Memory(self.components.policy))
        self._graph.forget()

    def restart(self, start_scale: float) -> None:
        """Drop the measurements of the network's components, and start with another scale."""
        self.components = Observations(Memory(replace(self.components.policy, start_scale=start_scale)))
        self._graph.drop_schedules()

    def state_dict(self) -> Dict[str, Any]:
        """State that determines the next scales, as plain numbers, strings, lists and dicts."""
        prepared, method_alphas = self._graph.current(), self._chooser.method_alphas
        others, draws = self._graph.states_of_other_topologies, self._storage.random_draws.count
        return state_of(prepared, others, self.components, method_alphas, self.iteration, draws)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; ValueError, without any change, if that fails."""
        prepared, method_alphas = self._graph.current(), self._chooser.method_alphas
        loaded = load_state(state, prepared, self.components.memory, method_alphas)
        self.components, self.iteration = Observations(loaded.memory), loaded.iteration
        self._storage.random_draws.count = loaded.random_draws
        self._graph.load_other_topologies(loaded.other_topologies)

    def forward(
        self,
        clear_buffer: bool = False,
        clear_no_need_grad: bool = False,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
    ) -> None:
        """Run forward as `Variable.forward` does."""
        if self.kernels.asynchronous:  # reading loss weights afterwards would wait for the GPU
            self._graph.current().before_forward(self.variable.parent.context)
        hooks = {"function_pre_hook": function_pre_hook, "function_post_hook": function_post_hook}
        self.loss.forward(clear_buffer=clear_buffer, clear_no_need_grad=clear_no_need_grad, **hooks)

    def backward(
        self,
        scale: Optional[float] = None,
        clear_buffer: bool = False,
        communicator_callbacks: Optional[Any] = None,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
        *,
        grad: Optional[Seed] = None,
        iteration: Optional[int] = None,
        rerun: bool = False,
        graph_unchanged: bool = False,
    ) -> None:
        """Run backward; all parameter gradients are unscaled afterwards, in fp32; `result` is its report.

        With `delay=0` the first pass over a batch measures it, and leaves `calibrated` False: run forward and
        backward again, with `rerun=True`. An updater and `GradScaler` do that by themselves.

        Args:
            scale: S0, the factor of the loss gradient. None: chosen from earlier measurements, without
                tuning; see `calibrated` and `after_overflow`.
            clear_buffer: free arrays that backward no longer needs.
            communicator_callbacks: nnabla's; called after each function, with unscaled gradients.
            function_pre_hook: called before each function's backward, after the engine's own hook.
            function_post_hook: called after each function's backward, after the engine's own hook.
            grad: seed gradient of the loss's shape; None for one.
            iteration: number of the iteration, which its batches and retries share. None counts calls.
            rerun: the batch is that of the last backward: use its measurements.
            graph_unchanged: no graph can have been rewired since `guard.begin_batch`; False checks that.

        Raises:
            RuntimeError: forward did not run since functions were moved to float (see `float_tail`).
            TypeError: nnabla's `DynamicLossScalingUpdater` called it, which divides by the scale itself.
            ValueError: `scale` is not finite or less than 2**-126, or a loss of several elements has no
                `grad`, or `grad` has another shape, or the loss no longer needs a gradient.
            GraphChangedError: the graph was rewired while backward ran.
        """
        if iteration is None and scale is not None:
            # Loops of this package number their iterations: this may be nnabla's loop, which divides, too.
            _refuse_a_second_division(self)
        iteration = self.iteration if iteration is None else integer("iteration", iteration)
        if scale is not None:
            self._chooser.start_scale(scale)  # only checks it
        check_seed(self.variable, grad)
        # nnabla applies a changed `need_grad` of an inner variable in the next forward.
        prepared = self._graph.current(check_wiring=not graph_unchanged, after_forward=True)
        if not prepared.plan.nodes:
            raise ValueError(NEEDS_NO_GRADIENT)
        if self._reader.moved:
            self._reader.before_backward()  # raises if functions were moved to float since forward
        leaves = prepared.leaves
        # Listed once, as nnabla makes a new object in each access to `grad`.
        masters = [leaf.grad for leaf in leaves.values()]
        all_zero = all(map(is_zeroing, masters))
        self.guard.before_backward(masters, all_zero=all_zero)
        loss_weights = prepared.loss_weights(scale, grad)
        self.components = self.components.before_pass(iteration)
        report: Optional[PassReport] = None
        # Nonfinite gradients of an earlier batch, which nobody zeroed, would hide whether those of this batch
        # are finite. Setting them aside zeroes the masters; after the pass they are put back.
        if self._nonfinite.keys and self._nonfinite.set_aside(leaves):
            all_zero = all(map(is_zeroing, masters))
        hooks = function_pre_hook, function_post_hook
        inputs = PassInputs(clear_buffer, communicator_callbacks, *hooks, grad, masters, all_zero)
        try:
            request = Request(iteration, scale, loss_weights, rerun=rerun, seeded=grad is not None)
            decision = self._chooser.decide(prepared, self.components, request)
            prepared.schedules = decision.schedules
            watch = None
            if self.audience is not None and self.audience.wants(LayerScaled, iteration):
                watch = LayerWatch(self.audience, prepared, decision, iteration, self.components.attempt)
            # The loss and running statistics are checked with the gradients: a GPU is waited for only once.
            arrays = self.guard.state.arrays if self.guard.state.written else ()
            prepared.measurements.watch(arrays, None if self._is_sink else self.variable.data)
            report = self._result = run_pass(
                self.loss,
                self._seed,
                prepared,
                decision,
                inputs,
                # If no monitor reads arrays, layers are reported after the pass, which then needs no hooks.
                watch if watch is not None and watch.reads_arrays else None,
            )
            if watch is not None:
                watch.finish()
            if decision.slice is not None:
                self.components = self.components.after_pass(
                    report.measurements,
                    completes_entry=decision.slice.last,  # of the windows
                    # Gradients that are zero because the loss is zero say nothing about their usual size.
                    informative=report.measurements.has_gradients or not self.has_nothing_to_learn(),
                    # With delay=0 the batch runs again, with scales that follow from these statistics.
                    rerun=decision.measure_all and not (self.delay or rerun),
                )
        except GraphChangedError:
            self._graph.drop()
            raise
        finally:
            if self._nonfinite.keys or (report is not None and report.found_inf):
                self._nonfinite.put_back(leaves, frozenset() if report is None else report.nonfinite)
        self.iteration = iteration + 1

    def probe(self, scale: float) -> None:
        """Run backward again with all scales at `scale`, to see if it fits; drop the measurements."""
        prepared = self._graph.current()
        check_scale(scale)
        loss_weights = prepared.loss_weights(scale)
        # A loss weight above 1, as of `4096 * loss`, enlarges gradients, as a larger scale would.
        scales = [within_float32(scale / max(weight, 1.0)) for weight in loss_weights]
        decision = Decision(prepared.schedule(scales, scale, loss_weights), prepared.schedules)
        run_pass(self.loss, self._seed, prepared, decision, PassInputs(clear_buffer=True))


def _refuse_a_second_division(loss: Any) -> None:
    """Raise TypeError if an update of nnabla's `DynamicLossScalingUpdater`, which divides, calls `loss`."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is _CODE_THAT_DIVIDES and frame.f_locals["self"].loss is loss:
            updater = type(frame.f_locals["self"]).__name__
            raise TypeError(
                f"{updater} divides gradients by the scale, but its loss is an {type(loss).__name__}, which "
                "unscales them by itself: give the loss that was wrapped in it to "
                "nnabla_adaloss.AdaptiveLossScalingUpdater"
            )
