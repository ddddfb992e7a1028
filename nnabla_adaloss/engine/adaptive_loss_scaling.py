# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling around one loss: what the updater is made of."""

from __future__ import annotations

from collections import abc
from functools import partial
from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Sequence, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.layer_limits import LayerLimit, LayerLimitPolicy
from ..core.scale_history import HistoryPolicy
from ..core.validation import instance, instance_or_none, integer, strings
from ..emulation.rounded_storage import RoundedStorage
from ..errors import GraphChangedError
from ..graph.float_tail import TailReader
from ..graph.hooks import Hook
from ..graph.loss import LossLike, Seed, check_seed, refuse_a_loss_that_scales_itself, variable_of
from ..graph.names import Parameters, check_parameters, names_of, registered_names
from ..graph.plan import GraphPlan
from ..graph.structure import PlanOptions
from ..kernels import Kernels, NNablaAdaLoss, select_kernels
from ..monitor import Audience, audience_of
from ..undo import BatchGuard, ForwardState, Undoable
from .backward_runner import BackwardRunner, config_for
from .component_scales import ComponentScales
from .layer_watch import watch_for
from .passes.backward_pass import NO_HOOKS, BackwardPass, PassRequest, UserHooks, leaf_arrays
from .passes.hookless_steps import FallbackReason
from .prepared_graph import GraphPreparation
from .saved_state import read_state, state_of
from .schedule import ScheduleCache
from .second_division import refuse_a_second_division
from .spoilt_gradients import SpoiltGradients

# The largest gradient of a layer is too small where the format has fewer than eight bits below it.
_FAINT = 2.0**8


class AdaptiveLossScaling:
    """Runs backward with one loss scale per layer (Zhao et al. 2019, arXiv 1910.12385, algorithm 1).

    The graph stays as it is. After backward every parameter gradient is unscaled, in fp32, and added to what
    it held before; gradients of inputs and of variables that stay readable (persistent, or
    `clear_buffer=False`) are unscaled too.

    Args:
        loss: the loss Variable, or a wrapper such as `FormatEmulation`.
        config: how scales are computed; None for `AdaLossConfig()`.
        non_homogeneous: type names of further functions whose input gradient is not proportional to their
            output gradient. They see unscaled gradients.
        parameters: parameters by name, for layers whose parameters nnabla does not know by name; or a
            function that returns them, such as `solver.get_parameters`.
        limit_policy: how a layer whose scale overflowed backs off and recovers.
        history: how scales follow from what was measured; None for `HistoryPolicy()`.
        forward_state: what is known of parameters that forward writes, from other graphs.
        monitors: objects with some of the methods of `Monitor`.
        float_tail: in a half context, replace functions of one element at the loss, and functions with a
            constant that half precision cannot hold, by the same in float: in half `loss * 1e-8` is 0. True;
            False leaves the graph as it is.

    Attributes:
        audience: these monitors; None for none.
        config: the configuration, with `loss_scale_method` and `dtype` filled in.
        guard: what a training loop asks about single batches.
        in_half: whether any function of the graph computes in half precision.
        iteration: number of the next iteration.

    Raises:
        TypeError: `loss` or `config` is of another type.
        ValueError: `loss` needs no gradient or scales itself, or `config.dtype` is not that of its gradients.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> scaling = AdaptiveLossScaling(loss)
        >>> scaling.forward(clear_no_need_grad=True)
        >>> scaling.backward(clear_buffer=True)
        >>> sorted(scaling.layer_scales)
        ['b/affine']
    """

    undone = ("iteration",)

    def __init__(
        self,
        loss: LossLike,
        config: Optional[AdaLossConfig] = None,
        *,
        non_homogeneous: Sequence[str] = (),
        parameters: Parameters = None,
        limit_policy: Optional[LayerLimitPolicy] = None,
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
        # Before the graph is read, which may move functions of it to float.
        instance_or_none("config", config, AdaLossConfig)
        instance_or_none("limit_policy", limit_policy, LayerLimitPolicy)
        instance_or_none("history", history, HistoryPolicy)
        instance_or_none("forward_state", forward_state, ForwardState)
        check_parameters("parameters", parameters)
        self.audience: Optional[Audience] = audience_of(monitors)
        further = strings("non_homogeneous", non_homogeneous, "type names of functions")
        self._storage: Optional[RoundedStorage] = getattr(loss, "emulated_storage", None)
        self._variable = variable_of(loss)
        self._reader = TailReader(self._variable, float_tail=float_tail)
        reading = self._reader.read()
        refuse_a_loss_that_scales_itself(reading.described)
        context, self.in_half = self._variable.parent.context, bool(reading.described.in_half)
        self.config = config_for(config, self._storage, in_half=self.in_half)
        self._loss = loss
        self._kernels = select_kernels(context)
        self._ada_loss = NNablaAdaLoss(self.config, self._kernels, limit_policy)
        # Statistics of earlier iterations need no hook, and no wait for a device.
        asked = self.config.delay
        self._delay = int(self._ada_loss.takes_statistics) if asked is None else asked
        if self._delay and not self._ada_loss.takes_statistics:
            raise ValueError(
                "delay=1 keeps statistics, not arrays, and "
                f"loss_scale_method={self.config.loss_scale_method!r} looks at arrays; "
                "choose delay=0 or another method"
            )
        self._runner = BackwardRunner(
            loss,
            self.config,
            self._ada_loss,
            self._kernels,
            self._storage,
            HistoryPolicy() if history is None else history,
            delay=self._delay,
        )
        self.iteration = 0
        self._faint = _FAINT * self.config.range.u_min
        self._graph = GraphPreparation(
            self._reader.read,
            reading,
            PlanOptions.of(self.config.selection, adaptive=self._ada_loss.adaptive, non_homogeneous=further),
            # Names are those that the scope shows in which the loss is wrapped.
            registered_names(),
            lambda: names_of(parameters),
            kernels=self._kernels,
            storage=self._storage,
            delayed=bool(self._delay),
            by_layer=self._runner.by_layer,
            new_cache=partial(ScheduleCache.configured, self.config, delayed=bool(self._delay)),
        )
        self.guard = BatchGuard(
            loss,
            self._graph.plan,
            self._kernels,
            self._storage,
            forward_state,
        )
        self._last: Optional[BackwardPass] = None
        self._spoilt = SpoiltGradients(self._kernels)

    @property
    def undoable(self) -> List[Undoable]:
        """What a `Savepoint` keeps of the engine: what is known between two iterations. See `go_back_to`."""
        found: List[Undoable] = [self, self.components, self._ada_loss, *self._graph.undoable]
        if self._storage is not None:
            found.append(self._storage.drawn)
        return found

    def go_on_from(self, before: AdaptiveLossScaling) -> None:
        """Take over what was learned with another graph of the network, for one rebuilt in each iteration. A
        graph of a known topology goes on with its schedule, too, and is not planned again.

        Args:
            before: the engine of the graph before.

        Raises:
            ValueError: it scales layers in another way.
        """
        if before.config is not self.config and before.config != self.config:
            raise ValueError(
                f"before scales layers in another way: {before.config}, and here {self.config}; "
                "make both with the same config"
            )
        self._runner.components = before.components
        self.guard.go_on_from(before.guard)
        self.iteration = self.components.began[0] + 1
        self._ada_loss.go_on_from(before._ada_loss)
        self._graph.go_on_from(before._graph)
        self._spoilt = before._spoilt
        self._reader.go_on_from(before._reader)
        self.share_draws(before)

    def go_back_to(self, before: AdaptiveLossScaling) -> None:
        """Forget the present iteration, after a `Savepoint` has been restored.

        Args:
            before: the engine when that was made: this one, or that of the network's graph before.
        """
        self.iteration = before.iteration
        self._ada_loss.go_on_from(before._ada_loss)
        self._graph.go_on_from(before._graph)
        self.components.drop_iteration()

    def share_draws(self, other: AdaptiveLossScaling) -> None:
        """Draw the random numbers of an emulated storage from the stream of another loss of the training."""
        if self._storage is not None and other._storage is not None:
            self._storage.drawn = other._storage.drawn

    @property
    def components(self) -> ComponentScales:
        """What was measured of the network, and the scales that follow from it."""
        return self._runner.components

    @property
    def variable(self) -> nn.Variable:
        """The wrapped loss Variable."""
        return self._variable

    @property
    def loss(self) -> LossLike:
        """What forward and backward are called on: the Variable, or its emulation."""
        return self._loss

    @property
    def kernels(self) -> Kernels:
        """What reads and scales arrays."""
        return self._kernels

    @property
    def delay(self) -> int:
        """0 when scales come from the statistics of the same iteration, 1 when from the one before."""
        return self._delay

    @property
    def plan(self) -> GraphPlan:
        """Every function in backward order with its role, as the graph is at the first use; `print` it."""
        return self._graph.prepared().plan

    @property
    def layer_scales(self) -> Dict[str, float]:
        """Alpha of each layer in the last backward, by layer name."""
        return dict(self._last.schedule.layer_scales) if self._last else {}

    @property
    def accumulated_scales(self) -> Dict[str, float]:
        """The scale S on each layer's input gradient in the last backward, by layer name."""
        return dict(self._last.schedule.accumulated_scales) if self._last else {}

    @property
    def found_inf(self) -> List[str]:
        """Layers where the last backward met infinities or NaNs, first in backward order first."""
        return self._last.found_inf if self._last else []

    @property
    def nonzero_leaves(self) -> AbstractSet[int]:
        """Keys of the leaves to which the last backward has added more than zeros."""
        return self._last.nonzero if self._last else set()

    @property
    def matched(self) -> int:
        """How many gradients the last backward brought to the scale of another branch that they meet."""
        return self._last.schedule.matched if self._last else 0

    @property
    def layers(self) -> List[str]:
        """Names of the layers that are scaled, in backward order."""
        return list(self.plan.layers)

    @property
    def held(self) -> bool:
        """Whether the scales of the last backward were chosen before it began, from what was measured."""
        last, cache = self._last, self._graph.prepared().cache
        return last is not None and not last.chose and not cache.for_good(measured=last.measures_loss)

    @property
    def last_pass(self) -> str:
        """`"hookless"`: the last backward ran without hooks; `"choosing"`: with hooks, as it chose its scales
        while it ran; else why it had hooks all the same. It changes no result.
        """
        if self._last is None or self._last.chose:
            return "choosing"
        if self._last.hookless:
            return "hookless"
        steps = None if self._graph.present is None else self._graph.present.steps
        return str(steps) if isinstance(steps, FallbackReason) else "single functions are watched"

    @property
    def loss_scale(self) -> float:
        """Loss scale after the scalar functions at the loss in the last backward: S0, or as measured."""
        return self._last.schedule.loss_scale if self._last else self.components.policy.start_scale

    def state_is_finite(self) -> bool:
        """Whether running statistics, and whatever else the last forward has written, are finite."""
        known = self._last.state_finite if self._last else None
        return not self.guard.state.has_nonfinite() if known is None else known

    @property
    def settled(self) -> bool:
        """False when the last backward has found its scales far too low: run the batch again."""
        return self.components.settled

    def layer_to_blame(self) -> Optional[str]:
        """The layer whose own scale made the last backward overflow; None: another scale did."""
        return None if self._last is None else self._runner.layer_to_blame(self._last)

    def after_overflow(self) -> bool:
        """Lower what made the last backward overflow; False: only a lower S0 can help, or nothing can.

        Call it when gradients that matter are not finite: behind a mask they do no harm.
        """
        self._graph.drop_schedules()
        return self._last is not None and self._runner.lower(self._last)

    def shared_statistics(self) -> Optional[NDArray[np.float64]]:
        """What the next scales will be computed from, for other ranks; None when that is nothing."""
        return self._runner.shared_statistics(self._graph.prepared(), self._last)

    def adopt_statistics(self, tables: NDArray[np.float64]) -> None:
        """Compute the next scales from `shared_statistics` of all ranks, stacked in the order of ranks."""
        self._runner.adopt_statistics(self._graph.prepared(), self._last, tables)

    @property
    def limits(self) -> Mapping[str, LayerLimit]:
        """Limits of single layers' scales, lowered by overflows, by layer name; may be assigned."""
        return self._ada_loss.limits

    @limits.setter
    def limits(self, limits: Mapping[str, LayerLimit]) -> None:
        for layer, limit in instance("limits", limits, abc.Mapping).items():
            instance(f"limits[{layer!r}]", limit, LayerLimit).checked()
        if dict(limits) != self._ada_loss.limits:
            self._ada_loss.limits = dict(limits)
            self._graph.drop_schedules()

    @property
    def limit_policy(self) -> LayerLimitPolicy:
        """How a layer whose scale overflowed backs off and recovers; may be assigned."""
        return self._ada_loss.limit_policy

    @limit_policy.setter
    def limit_policy(self, policy: LayerLimitPolicy) -> None:
        self._ada_loss.limit_policy = instance("limit_policy", policy, LayerLimitPolicy)

    def back_off(self, layer: str, alpha: float) -> bool:
        """Halve the scale that `layer` may have after `alpha` overflowed; False: not to blame."""
        self._graph.drop_schedules()
        return self._ada_loss.back_off(layer, alpha)

    def after_update(self) -> None:
        """Count a good update: the limits of layers recover, and what was measured is remembered."""
        self.end_iteration()
        self.measure_weights()

    def end_iteration(self) -> None:
        """The part of `after_update` that does not look at parameters."""
        if self._ada_loss.limits:
            self._ada_loss.after_update()
        if self.components.limited:
            self.components.keep_batch()
        self.components.end_iteration()

    def measure_weights(self) -> None:
        """The part of `after_update` that looks at the new parameters."""
        present = self._graph.present
        # Forward of a half context converts weights.
        if present is not None and self.in_half:
            present.measure_weights(self.iteration)

    def forget(self) -> None:
        """Drop what was learned of gradients and weights: call it after loading other weights."""
        self._ada_loss.forget()
        self.components.forget()
        self._graph.forget()

    def restart(self, start_scale: float) -> None:
        """Forget what was measured of the network's components, and start with another scale."""
        self.components.restart(start_scale)
        self._graph.drop_schedules()

    def state_dict(self) -> Dict[str, Any]:
        """Everything that decides the next scales, as plain numbers, strings, lists and dicts."""
        draws = 0 if self._storage is None else self._storage.drawn.count
        own = state_of(self._graph.prepared(), self.components, self.iteration, draws)
        return {**own, **self._ada_loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; ValueError, and no change, if that cannot be."""
        planned = self._graph.prepared()
        try:
            read = read_state(state, self._graph)
            self._ada_loss.load_state_dict(state)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"state is damaged, or none of an AdaptiveLossScaling: {error!r}") from error
        self.components.load(read.measured)
        self._graph.forget()
        if self._storage is not None:
            self._storage.drawn.count = read.draws
        self.iteration, planned.statistics, planned.cache = read.iteration, read.statistics, read.cache

    def scale_of(self, variable: nn.Variable) -> float:
        """The scale S that the gradient of `variable` carried in the last backward.

        Raises:
            KeyError: the last backward did not reach `variable`, or there was none.
        """
        scales = self._last.scales_by_key if self._last else {}
        if hash(variable) not in scales:
            raise KeyError(f"no gradient of {variable} was computed by the last backward")
        return scales[hash(variable)]

    def forward(
        self,
        clear_buffer: bool = False,
        clear_no_need_grad: bool = False,
        function_pre_hook: Optional[Hook] = None,
        function_post_hook: Optional[Hook] = None,
    ) -> None:
        """Run forward as `Variable.forward` does."""
        self._loss.forward(
            clear_buffer=clear_buffer,
            clear_no_need_grad=clear_no_need_grad,
            function_pre_hook=function_pre_hook,
            function_post_hook=function_post_hook,
        )

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
        again: bool = False,
        wired: bool = False,
    ) -> None:
        """Run backward; every parameter gradient comes out unscaled, in fp32.

        Args:
            scale: S0, what the loss gradient is multiplied by. None: chosen from what was measured before, so
                that nothing has to be tuned; see `settled` and `after_overflow`.
            clear_buffer: free what backward no longer needs.
            communicator_callbacks: nnabla's; called after each function, when its gradients are unscaled.
            function_pre_hook: called before each function's backward, after the engine's own hook.
            function_post_hook: called after each function's backward, after the engine's own hook.
            grad: seed gradient of the loss's shape; None for one.
            iteration: number of the iteration, which its batches and retries share. None counts calls.
            again: this is the batch of the last backward once more: use what that has found.
            wired: no graph can have been rewired since `guard.before_forward`; False checks that.

        Raises:
            RuntimeError: forward did not run since functions were moved to float (see `float_tail`).
            TypeError: nnabla's `DynamicLossScalingUpdater` called it, which divides by the scale itself.
            ValueError: `scale` is not finite or less than 2**-126, or a loss of several elements came without
                `grad`, or `grad` has another shape.
            GraphChangedError: the graph was rewired while backward ran.
        """
        # Loops of this package number their iterations.
        if scale is not None and iteration is None:
            refuse_a_second_division(self)
        iteration = self.iteration if iteration is None else integer("iteration", iteration)
        self._runner.start_scale(scale)
        check_seed(self._variable, grad)
        # Also after the guard has looked before forward: that is when nnabla finds out who needs a gradient.
        planned = self._graph.current(wired=wired)
        if self._reader.moved:
            self._reader.before_backward()
        leaves = planned.plan.leaves
        found = leaf_arrays(leaves.values())
        self.guard.before_backward(found.arrays, all_zero=found.all_zero)
        if self._spoilt.keys and self._spoilt.set_apart(leaves):
            found = leaf_arrays(leaves.values())
        self.components.begin_pass(iteration)
        planned.statistics.watch(self.guard.state.arrays)
        hooks = UserHooks(communicator_callbacks, function_pre_hook, function_post_hook)
        stored = self._kernels, self._storage, self.config.dtype
        watch = None
        if self.audience is not None:
            watch = watch_for(self.audience, stored, iteration, self.components.began[1])
        self._ada_loss.watcher = None if watch is None else watch.decided
        request = PassRequest(clear_buffer, NO_HOOKS if hooks == NO_HOOKS else hooks, watch, grad)
        try:
            self._last = self._runner.run(planned, iteration, scale, request, found, again=again)
        except GraphChangedError:
            self._graph.drop()
            raise
        finally:
            last = self._last
            if last is not None and (last.found_inf or self._spoilt.keys):
                self._spoilt.put_back(last.nonfinite)
        self.iteration = iteration + 1
        faint = () if scale is not None else self._last.faint(self._faint)
        if faint and self.guard.can_undo_batch and not self.guard.loss_is_zero():
            self.components.search(faint)

    def probe(self, scale: float) -> None:
        """Run backward once more with S0 = `scale` and no layer scales, and learn nothing from it."""
        self._runner.probe(self._graph.prepared(), self.iteration - 1, scale)
