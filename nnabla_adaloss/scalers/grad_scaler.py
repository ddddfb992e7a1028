# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for custom training loops, with the methods of PyTorch's `GradScaler`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.config import AdaLossConfig
from ..core.precision import LayerPrecisions, StorageLike
from ..core.saved_settings import check_version
from ..core.scale_history import HistoryPolicy
from ..core.validation import boolean, explains_keywords, instance_or_none, integer, strings
from ..core.verdict import PassVerdict, Rules
from ..emulation.format_emulation import with_storage
from ..engine import AdaptiveLossScaling, BatchLoop, Outcome
from ..engine.saved_state import select_state, topologies_of
from ..graph.loss import LossLike, LossSeed, LossWrapper, Seed, check_seed, run_backward, variable_of
from ..monitor.audience import audience_of
from ..undo.shared_memory import SharedMemory
from ..undo.snapshot import ArraySnapshot
from ..updaters.notifications import Notifier
from ..updaters.solvers import check_solver, named_parameters, parameters_of

_VERSION = 3
_REPEATS = 19  # limit of repeats of the first batch until its scales fit
# Number of remembered losses of different networks, each with its last graph: nnabla has no weak references.
_REMEMBERED = 8

# Keywords and methods, most of them of torch's `GradScaler`, that this one lacks, and their replacements.
_MEASURED = "scales follow from measurements, without growth and backoff (LossScaler has growth and back-off)"
_GROWTH = ("growth_factor", "backoff_factor", "growth_interval")
_ARGUMENTS = {
    "init_scale": "use history=HistoryPolicy(start_scale=...)",
    **dict.fromkeys(_GROWTH, _MEASURED),
    **dict.fromkeys(("solver", "solvers"), "give the solvers by position"),
}
_METHODS = {
    "scale": "call scaler.forward(loss) and scaler.backward(loss) instead of scaler.scale(loss).backward()",
    **{f"{verb}_{name}": _MEASURED for verb in ("get", "set") for name in _GROWTH},
}

# Objects given as a solver by mistake, and the right call.
_NO_SOLVERS = (
    ((nn.Variable, LossWrapper), "give a loss to forward(loss)"),
    ((list, tuple), "write GradScaler(*solvers)"),
    (AdaLossConfig, "write config="),
)


class GradScaler:
    """Adaptive loss scaling for custom training loops, with the methods of PyTorch's `GradScaler`.

    Each loss has its own measured scales, one for each part of the network (component). Several losses and
    several solvers, as a GAN has, share one scaler. A loss may be rebuilt in each iteration: one with the
    same functions and names keeps the scales. There is nothing to tune.

    The first batch of a loss runs again, forward and backward, until its scales fit. Later, a batch that
    overflows is not repeated, as in PyTorch (and unlike in `AdaptiveLossScalingUpdater`): the step is skipped
    and the scale that overflowed is lowered.

    Args:
        solvers: the solvers, with their parameters set.
        config: how layers are scaled; None for `AdaLossConfig()`.
        storage: emulate this storage format on a float context, for example `"float16"`. None: the context's.
        history: the policy that derives scales from measurements; None for `HistoryPolicy()`.
        non_homogeneous: as for `AdaptiveLossScaling`.
        float_tail: as for `AdaptiveLossScalingUpdater`. Default True.
        monitors: `on_layer_scaled` receives each scale of a layer. Other events come from updaters only.
        enabled: False for a loop without scaling: `forward` and `backward` are nnabla's own (in the emulated
            storage, if there is one), `step` updates with any gradients. Default True.

    Attributes:
        steps: number of steps that changed parameters.
        skipped_steps: number of steps skipped because gradients were not finite, or the loss was NaN.
        cause: reason of the last skipped step; empty if there was none.

    Raises:
        TypeError, ValueError: no solver is given, one twice, one without parameters, or another object; or
            another argument is not as described.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import GradScaler
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> scaler = GradScaler(solver, storage="float16")
        >>> for _ in range(3):
        ...     solver.zero_grad()
        ...     scaler.forward(loss)
        ...     scaler.backward(loss)
        ...     scaler.unscale_(solver)
        ...     solver.clip_grad_by_norm(1.0)
        ...     updated = scaler.step(solver)
        ...     scaler.update()
        >>> updated, scaler.skipped_steps
        (True, 0)
    """

    @explains_keywords(_ARGUMENTS)
    def __init__(
        self,
        *solvers: Any,
        config: Optional[AdaLossConfig] = None,
        storage: Optional[StorageLike] = None,
        history: Optional[HistoryPolicy] = None,
        non_homogeneous: Sequence[str] = (),
        float_tail: bool = True,
        monitors: Sequence[Any] = (),
        enabled: bool = True,
    ) -> None:
        self._enabled = boolean("enabled", enabled)
        self._float_tail = boolean("float_tail", float_tail)
        if not solvers:
            raise ValueError("GradScaler needs a solver, or several: GradScaler(solver)")
        for index, solver in enumerate(solvers):
            name = f"solvers[{index}]"
            check_solver(name, solver, ("update", "get_parameters"), _NO_SOLVERS)
            if not solver.get_parameters():
                raise ValueError(
                    f"{name} has no parameters: call solver.set_parameters(nnabla.get_parameters())"
                )
            if any(solver is other for other in solvers[:index]):
                raise ValueError(f"{name} is given twice")
        self._solvers = solvers
        self._parameters = partial(parameters_of, self._solvers)
        self._config = instance_or_none("config", config, AdaLossConfig)
        self._history = instance_or_none("history", history, HistoryPolicy)
        self._storage = storage
        if storage is not None:
            # Patterns are checked per loss, formats here.
            LayerPrecisions(storage)
        self._non_homogeneous = strings("non_homogeneous", non_homogeneous, "type names of functions")
        self._audience = audience_of(monitors)
        # Engine of each loss, by labels of its functions, in the order of use.
        self._engines: Dict[Tuple[str, ...], AdaptiveLossScaling] = {}
        self._saved: List[Mapping[str, Any]] = []  # loaded states whose networks have not been seen yet
        self.steps = self.skipped_steps = 0
        self.cause = ""
        self._iteration = 1  # number of this iteration, or of the next one between two
        self._notifier = Notifier()
        self._begin()

    def _begin(self) -> None:
        """Begin an iteration."""
        # By identity of a solver: True if its gradients were finite at `unscale_`, None after another
        # backward; and True if its step was made, False if it was skipped.
        self._finite: Dict[int, Optional[bool]] = {}
        self._stepped: Dict[int, bool] = {}
        # By keys of losses: of those that ran forward, the latest last, True if backward is due; the engines
        # that ran backward; and the first batch of each that overflowed.
        self._forwarded: Dict[int, bool] = {}
        self._used: Dict[int, AdaptiveLossScaling] = {}
        self._overflows: Dict[int, Outcome] = {}
        self._blamed: Set[int] = set()  # keys of the losses that made steps skip
        self._unexplained = False  # True if the cause of a skipped step is still unknown

    def forward(self, loss: LossLike, clear_buffer: bool = False, clear_no_need_grad: bool = False) -> None:
        """Run forward as `Variable.forward` does, in the storage format if one is emulated.

        Without `storage`, `loss.forward()` works as well, but cannot be undone: a skipped batch stays in
        running statistics, and the first batch runs again from the state that it has written, which matters
        to `spectral_norm` and to a recurrent state.

        Raises:
            RuntimeError: an input shares its data with an output, which `clear_buffer` has freed.
        """
        boolean("clear_buffer", clear_buffer)
        boolean("clear_no_need_grad", clear_no_need_grad)
        scaling = self.scaling(loss)
        guard, key = scaling.guard, hash(scaling.variable)
        if self._enabled:
            # Losses share the state that forward writes: the first one's guard begins the iteration for all.
            if not self._forwarded:
                guard.begin()
            guard.begin_batch(first=not self._forwarded, repeat=self._may_run_again(scaling))
        # Removed first, so that it is the latest.
        self._forwarded.pop(key, None)
        self._forwarded[key] = True
        scaling.forward(clear_buffer=clear_buffer, clear_no_need_grad=clear_no_need_grad)
        if self._enabled:
            # Before another loss writes the same running statistics.
            guard.state.note_changes()

    def backward(self, loss: LossLike, clear_buffer: bool = False, grad: Optional[Seed] = None) -> None:
        """Run backward; parameter gradients are unscaled, in fp32, and added to their former contents.

        Args:
            loss: the loss that `forward` has run on. It may be another Variable in each iteration.
            clear_buffer: free activations that are no longer needed. False, as in `Variable.backward`.
            grad: seed gradient of the loss's shape; None for one.

        Raises:
            RuntimeError: a storage is emulated, and forward did not run in it.
            ValueError: the loss has several elements and `grad` is None, or their shapes differ.
        """
        boolean("clear_buffer", clear_buffer)
        scaling = self.scaling(loss)
        key = hash(scaling.variable)
        if self._storage is not None and key not in self._forwarded:
            raise RuntimeError(
                f"forward did not run in storage={self._storage!r} since the last update(): call "
                "scaler.forward(loss) instead of loss.forward()"
            )
        # `step` must check again gradients that were finite at `unscale_`: this backward adds to them.
        self._finite = {solver: None if finite else finite for solver, finite in self._finite.items()}
        if not self._enabled:
            check_seed(scaling.variable, grad)
            seed = LossSeed(scaling.variable, scaling.kernels.scaled_float32)
            run_backward(scaling.loss, 1.0, grad, clear_buffer, None, None, None, seed)
        elif self._may_run_again(scaling):
            self._find_scales(scaling, grad, clear_buffer=clear_buffer)
        else:
            scaling.backward(None, clear_buffer=clear_buffer, grad=grad, iteration=self._iteration)
        self._used[key] = scaling
        if key in self._forwarded:
            self._forwarded[key] = False
        # Examine an overflow now, as the next batch, which may be added to this one, replaces the data; but
        # not while another loss waits for its backward: forward runs again, and may free arrays that it
        # needs. Without `scaler.forward` that is unknown, unless there is no other loss.
        knows_forward = key in self._forwarded or len(self._engines) == 1
        if self._enabled and knows_forward and not any(self._forwarded.values()):
            for used_key, used in self._used.items():
                if used_key not in self._overflows and used.overflowed(self._parameters):
                    self._overflows[used_key] = self._examine(used)

    def unscale_(self, solver: Any) -> None:
        """Call this before a solver's gradients are read or changed, for example clipped.

        They are unscaled already; this checks that they are finite, before clipping hides an infinity. After
        another `backward`, `step` checks again.

        Raises:
            RuntimeError: it was called since the last `update`, or `step` was; or nothing has run backward.
            ValueError: the scaler was not made with this solver.
        """
        if id(solver) in self._stepped:
            raise RuntimeError("unscale_() is being called after step()")
        self._check_call("unscale_", solver, self._finite)
        self._finite[id(solver)] = self._is_finite(solver)

    def step(self, solver: Any) -> bool:
        """Update a solver's parameters, unless a gradient is not finite or the loss that it comes from is
        NaN; return True if they were updated.

        Raises:
            RuntimeError: it was called since the last `update`, or nothing has run backward.
            ValueError: the scaler was not made with this solver.
        """
        self._check_call("step", solver, self._stepped)
        finite = self._stepped[id(solver)] = self._is_finite(solver)
        if finite:
            solver.update()
            self.steps += 1
        else:
            self._skip()
        return finite

    def update(self) -> None:
        """End the iteration: learn from its measurements. Call it once, after the steps of all solvers.

        A step may be omitted after `unscale_`, for example if the norm of the gradients is too large.

        Raises:
            RuntimeError: no `step`, and no `unscale_`, since the last `update`.
        """
        if not (self._stepped or self._finite):
            raise RuntimeError("update() has nothing to do: call step(solver) before it")
        for solver in self._solvers:
            left_out = id(solver) in self._finite and id(solver) not in self._stepped
            if left_out and not self._is_finite(solver):
                self._skip()
        if self._unexplained:
            self._explain()
        engines = list(self._used.values())
        if not any(self._stepped.values()):
            # A batch without a step must not stay in running statistics.
            engines[0].guard.state.restore()
        elif self._enabled:
            self._notifier.note_update(self._iteration, engines[0].loss_scale, engines, self._solvers)
        # Measurements of a good loss are remembered, those of an overflow as of a lost batch. Losses add to
        # the same gradients: if no scale helps one, the batch is bad, and measurements of all are dropped.
        is_bad = any(self._overflows[key].verdict.lowers_nothing for key in self._blamed)
        for key, scaling in self._used.items():
            if is_bad:
                scaling.drop_iteration()
            elif key in self._blamed:
                scaling.end_iteration()
            elif self._enabled:
                scaling.after_update()
            scaling.guard.begin()  # drops the saved state: after `loss.forward()` by hand nothing else does
        self._iteration += 1
        self._begin()

    def is_enabled(self) -> bool:
        """The argument `enabled`."""
        return self._enabled

    def get_scale(self, loss: Optional[LossLike] = None) -> float:
        """Scale of a loss, or of the one used last, in its last backward; before the first, the start scale.

        It is 1.0 with `enabled=False`.

        Raises:
            RuntimeError: `loss` is None, and no loss was used yet.
        """
        if not self._enabled:
            return 1.0
        if loss is not None:
            # `scaling` would make it the loss used last, which decides which losses are forgotten first.
            key = hash(variable_of(loss))
            known = [scaling for scaling in self.engines if hash(scaling.variable) == key]
            return (known[0] if known else self.scaling(loss)).loss_scale
        if not self.engines:
            raise RuntimeError("get_scale() before forward(loss) or backward(loss): no loss is known yet")
        return self.engines[-1].loss_scale

    if not TYPE_CHECKING:  # for a type checker, a missing attribute is an error

        def __getattr__(self, name: str) -> Any:
            """Name the replacement of torch's methods that are missing here."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{message}: {_METHODS[name]}" if name in _METHODS else message)

    @property
    def has_begun(self) -> bool:
        """True after a `backward`, or a `forward` that writes state, until `update`: no checkpoint then."""
        for scaling in self.engines:
            if hash(scaling.variable) in self._forwarded:
                writers = {*scaling.plan.state_leaves.values()} - {None}
                _, carried = SharedMemory(scaling.graph, scaling.plan).find()
                if writers or carried:
                    return True
        return bool(self._used)

    def scaling(self, loss: LossLike) -> AdaptiveLossScaling:
        """Engine of a loss: `loss_scale`, `layer_scales`, `plan`, ... of its last backward."""
        # At its first use it takes the measurements of the last loss with the same functions, or loaded ones.
        key = hash(variable_of(loss))
        for structure, scaling in self._engines.items():
            if hash(scaling.variable) == key:
                self._engines[structure] = self._engines.pop(structure)
                return scaling
        common: Any = {"parameters": named_parameters(self._solvers), "float_tail": self._float_tail}
        scaling = AdaptiveLossScaling(
            with_storage(loss, self._storage, **common),
            self._config,
            non_homogeneous=self._non_homogeneous,
            history=self._history,
            # State that forward writes; all losses share it.
            forward_state=next((one.guard.state for one in self._engines.values()), None),
            monitors=self._audience or (),
            **common,
        )
        structure = tuple(node.label for node in scaling.plan.nodes)
        before = self._engines.pop(structure, None)
        if before is not None:
            scaling.go_on_from(before)
        else:
            self._saved = [state for state in self._saved if not _loaded(scaling, state)]
        # After loading, which sets the count of random streams: a loss that comes late shares the others'.
        for other in self._engines.values():
            scaling.share_with(other)
        self._engines[structure] = scaling
        if len(self._saved) + len(self._engines) > _REMEMBERED:
            # Forget the oldest: a saved state, if there is one.
            if self._saved:
                del self._saved[0]
            else:
                del self._engines[next(iter(self._engines))]
        return scaling

    @property
    def engines(self) -> List[AdaptiveLossScaling]:
        """Engines of the used losses, the latest last."""
        return list(self._engines.values())

    def state_dict(self) -> Dict[str, Any]:
        """State that determines the next scales, as plain values; call it after `update`."""
        return {
            "version": _VERSION,
            "iteration": self._iteration,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "losses": [*self._saved, *(scaling.state_dict() for scaling in self.engines)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`; load parameters and solver states as well.

        A loss whose graph does not exist yet takes its state when it is first used.

        Raises:
            ValueError: the state is damaged, or of another version.
        """
        try:
            check_version(state["version"], _VERSION)
            counts = [integer(name, state[name]) for name in ("iteration", "steps", "skipped_steps")]
            # `topologies_of` checks all; the last one is that of `loss` itself.
            saved: List[Any] = [{**loss, "topologies": topologies_of(loss)[:-1]} for loss in state["losses"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is damaged, or not a GradScaler's: {error!r}") from error
        # If one state is damaged, engines that have loaded others go back.
        before = [(scaling, scaling.state_dict()) for scaling in self.engines]
        try:
            for scaling in self.engines:
                saved = [loss for loss in saved if not _loaded(scaling, loss)]
        except ValueError as error:
            for scaling, own in before:
                scaling.load_state_dict(own)
            raise ValueError(f"state is damaged: {error}") from error
        self._saved = saved
        self._iteration, self.steps, self.skipped_steps = counts
        self._begin()

    def _find_scales(self, scaling: AdaptiveLossScaling, grad: Optional[Seed], *, clear_buffer: bool) -> None:
        """Run a batch until its scales fit: the first one of a loss, or one that is measured by itself."""
        guard, key = scaling.guard, hash(scaling.variable)

        def run_pass(rerun: bool) -> None:
            # The caller has run forward for the first pass. Later ones free nothing: another may follow.
            if rerun:
                scaling.forward()
            clear = clear_buffer and not rerun
            scaling.backward(None, clear_buffer=clear, grad=grad, iteration=self._iteration, rerun=rerun)

        self._begin_where_forward_ended(scaling)
        # Repeats rewind the state that all losses share: keep what forward of other losses has written since.
        now = None if key == next(reversed(self._forwarded), None) else guard.state.now()
        # With accumulation, an earlier batch may have lost the step; another solver may make its own.
        rules = Rules(repeat=True, max_repeats=_REPEATS, update_lost=key in self._overflows)
        loop = BatchLoop(scaling, run_pass, self._parameters, scaling.components.policy.min_scale)
        outcome = loop.run(rules)
        if outcome.facts.overflowed:
            self._overflows.setdefault(key, outcome)
        if now is not None:
            guard.state.restore(now)

    def _may_run_again(self, scaling: AdaptiveLossScaling) -> bool:
        """True for the first batch of a loss, which nothing has measured, and for each one with delay=0."""
        is_first_batch = not scaling.components.unit_amaxes() and hash(scaling.variable) not in self._used
        return is_first_batch or not scaling.delay

    def _begin_where_forward_ended(self, scaling: AdaptiveLossScaling) -> None:
        """Begin the batch of a loss after `loss.forward()`, before which no state was saved."""
        if hash(scaling.variable) not in self._forwarded:
            scaling.guard.begin_batch(first=False, repeat=self._may_run_again(scaling))

    def _check_call(self, verb: str, solver: Any, called: Collection[int]) -> None:
        """Raise ValueError for an unknown solver; RuntimeError before any backward, and in a second call."""
        if not any(solver is own for own in self._solvers):
            raise ValueError(f"solver is not among the {len(self._solvers)} given to GradScaler(*solvers)")
        if not self._used:
            raise RuntimeError(f"{verb}() before backward(): there are no gradients since the last update()")
        if id(solver) in called:
            raise RuntimeError(f"{verb}() has already been called on this solver since the last update()")

    def _is_finite(self, solver: Any) -> bool:
        """True if a solver's gradients are finite, and no NaN loss depends on its parameters."""
        # `unscale_` has answered it; without scaling any gradient is used.
        finite = self._finite.get(id(solver))
        if finite is not None or not self._enabled:
            return finite is not False
        parameters = parameters_of([solver])
        # Gradients of a NaN loss may be finite.
        of_nan = {
            leaf
            for key, scaling in self._used.items()
            if scaling.result.loss_is_nan
            or (key in self._overflows and self._overflows[key].verdict is PassVerdict.NONFINITE_LOSS)
            for leaf in scaling.graph.by_key(scaling.plan.leaves)
        }
        # A solver's own check waits for the GPU once per parameter.
        kernels = next(iter(self._used.values())).kernels
        return of_nan.isdisjoint(map(hash, parameters)) and kernels.gradients_are_finite(parameters)

    def _skip(self) -> None:
        """Skip a step and find the cause, unless another loss waits for its backward: then `update` does."""
        self.skipped_steps += 1
        self._unexplained = any(self._forwarded.values())
        if self._unexplained:
            self.cause = "gradients or a loss are not finite: update() finds out why"
        else:
            self._explain()

    def _explain(self) -> None:
        """Lower the scale that made gradients of a skipped step overflow, or warn of another cause."""
        self.cause = ""
        for key, scaling in self._used.items():
            if key not in self._overflows:
                if not (scaling.found_inf or scaling.result.loss_is_nan):
                    continue
                self._overflows[key] = self._examine(scaling)
            outcome = self._overflows[key]
            of_forward = outcome.verdict.of_forward
            fault = outcome.fault or "the loss is not finite"
            self.cause = fault if of_forward else f"overflow, first in {outcome.layers[0]}"
            if key in self._blamed:
                continue
            self._blamed.add(key)
            if of_forward:
                self._notifier.note_lost_batch(self._iteration, f"forward is not finite: {fault}")
                self._warn("bad", f"{fault}: this is not a gradient overflow; no scale is lowered")
            else:
                self._notifier.note_overflow(self._iteration, outcome.where)
                if not outcome.lowered:
                    self._warn("floor", f"gradients are not finite at the smallest scale: {self.cause}")
        if not self.cause:
            self.cause = "gradients are not finite, though no backward has left them so"
            self._warn("other", self.cause)

    def _examine(self, scaling: AdaptiveLossScaling) -> Outcome:
        """Find the cause of nonfinite gradients, without changing any."""
        guard = scaling.guard
        self._begin_where_forward_ended(scaling)
        # The examination runs forward, and perhaps backward at the smallest scale.
        now, snapshot = guard.state.now(), ArraySnapshot(scaling.kernels)
        snapshot.save([v.grad for v in self._parameters()])
        loop = BatchLoop(scaling, lambda rerun: None, self._parameters, scaling.components.policy.min_scale)
        # It is an overflow in any case: clipping may have made the gradients finite. No pass measures more.
        facts = loop.overflow_facts()._replace(can_measure_more=False)
        outcome = loop.conclude(facts, Rules(repeat=False, max_repeats=0))
        guard.state.restore(now)
        snapshot.restore()
        return outcome

    def _warn(self, kind: str, message: str) -> None:
        self._notifier.warn(kind, f"step skipped in iteration {self._iteration}: {message}")


def _loaded(scaling: AdaptiveLossScaling, state: Mapping[str, Any]) -> bool:
    """Load a state if it is of this engine's network; return True if so."""
    own = select_state(scaling.plan, topologies_of(state)) is not None
    if own:
        scaling.load_state_dict(state)
    return own
