# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for training loops of one's own, in PyTorch's words.

scaler.forward(loss);  scaler.backward(loss)      gradients come out unscaled, in fp32
scaler.unscale_(solver);  clip                    where gradients are clipped
scaler.step(solver)                               skipped when they are not finite
scaler.update()                                   the end of the iteration
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Set

import nnabla as nn

from ..core.config import AdaLossConfig
from ..core.keywords import explains_keywords
from ..core.precision import StorageLike
from ..core.scale_history import HistoryPolicy
from ..core.validation import boolean, integer
from ..emulation import FormatEmulation, with_storage
from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..engine.forward_state import ForwardState
from ..engine.kept_gradients import KeptGradients
from ..engine.leaf_arrays import leaf_arrays
from ..errors import warn
from ..graph.loss_like import LossLike
from ..graph.loss_seed import Seed, check_seed
from ..kernels import select_kernels
from ..updaters.reports import Reports
from ..updaters.window import Window, examine
from .scaled_losses import ScaledLosses
from .torch_names import ARGUMENTS, METHODS

_VERSION = 1
# How often the first batch runs, at most, until its scales hold.
_ATTEMPTS = 20


class _Stage(Enum):
    """How far the gradients of a solver are."""

    SCALED = "scaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class GradScaler:
    """Scales of losses and layers for loops of one's own, with the verbs of PyTorch's `GradScaler`.

    Each loss has scales of its own, measured, and adaptive ones per layer; several losses and several
    solvers, as a GAN has, share one scaler. A loss may be built anew in each iteration: one with the same
    functions and names goes on with what was measured. There is nothing to set.

    The first batch of a loss runs again, forward and backward, until its scales hold. Later, a batch that
    overflows is not repeated, as in PyTorch: the step is skipped and what overflowed is lowered.
    (`AdaptiveLossScalingUpdater` repeats it.)

    Args:
        solvers: the solvers, with their parameters set.
        config: how layers are scaled; None for `AdaLossConfig()`.
        storage: emulate this storage format on a float context, for example `"float16"`. None: the context's.
        history: how scales follow from what was measured; None for `HistoryPolicy()`.
        non_homogeneous: as for `AdaptiveLossScaling`.
        float_tail: as for `AdaptiveLossScalingUpdater`: in half precision, functions at the loss compute in
            float. True.
        enabled: False for a loop without scaling: `forward` and `backward` are nnabla's own (in the emulated
            storage, if there is one), `step` updates whatever the gradients are. True.

    Attributes:
        steps: how many steps changed parameters.
        skipped_steps: how many did not, because gradients were not finite.
        cause: why the last one that was skipped was; empty before.

    Raises:
        TypeError: something that is given as a solver is none.
        ValueError: no solver is given, one twice, or one without parameters.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
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

    @explains_keywords(ARGUMENTS)
    def __init__(
        self,
        *solvers: Any,
        config: Optional[AdaLossConfig] = None,
        storage: Optional[StorageLike] = None,
        history: Optional[HistoryPolicy] = None,
        non_homogeneous: Sequence[str] = (),
        float_tail: bool = True,
        enabled: bool = True,
    ) -> None:
        self._enabled = boolean("enabled", enabled)
        self._float_tail = boolean("float_tail", float_tail)
        self._solvers = _checked(solvers)
        self._config, self._storage, self._history = config, storage, history
        self._non_homogeneous = tuple(non_homogeneous)
        self._losses = ScaledLosses(self._make)
        self.steps = self.skipped_steps = 0
        self.cause = ""
        self._iteration = 0
        self._warned: Set[str] = set()
        self._reports = Reports()
        self._begin()

    def _begin(self) -> None:
        """Nothing has happened yet in this iteration."""
        self._stages: List[_Stage] = [_Stage.SCALED for _ in self._solvers]
        self._finite: List[Optional[bool]] = [None for _ in self._solvers]
        # Keys of the losses that `forward` ran on, the last one at the end.
        self._forwarded: Dict[int, None] = {}
        self._used: Dict[int, AdaptiveLossScaling] = {}
        self._blamed: Set[int] = set()
        self._stepped = self._skipped = self._bad_batch = False

    def forward(self, loss: LossLike, clear_buffer: bool = False, clear_no_need_grad: bool = False) -> None:
        """Run forward as `Variable.forward` does, in the storage format if one is emulated.

        Without `storage`, `loss.forward()` does as well, but nobody knows then what it started from: running
        statistics keep what a batch that is skipped has added to them, and the gradients of the first batch,
        which runs again, are those of a forward that starts from what the first one left. That differs where
        forward reads what it writes, as `spectral_norm` does, and a recurrent state that is carried on.

        Raises:
            RuntimeError: an input shares its data with an output, which `clear_buffer` has freed.
        """
        scaling = self._losses.of(loss)
        guard, key = scaling.guard, hash(scaling.variable)
        if not self._enabled:
            scaling.loss.forward(clear_buffer=clear_buffer, clear_no_need_grad=clear_no_need_grad)
            self._forwarded[key] = None
            return
        if not self._forwarded:
            guard.begin()
        guard.before_forward()
        guard.begin_batch(first=not self._forwarded, repeat=self._is_first_batch(scaling))
        self._forwarded.pop(key, None)
        self._forwarded[key] = None
        scaling.forward(clear_buffer=clear_buffer, clear_no_need_grad=clear_no_need_grad)
        scaling.guard.after_forward()

    def backward(self, loss: LossLike, clear_buffer: bool = False, grad: Optional[Seed] = None) -> None:
        """Run backward; every parameter gradient comes out unscaled, in fp32, added to what it held.

        Args:
            loss: what `forward` has run on. It may be another Variable in each iteration.
            clear_buffer: free activations that are no longer needed. False, as `Variable.backward`.
            grad: seed gradient of the loss's shape; None for one.

        Raises:
            RuntimeError: a storage is emulated, and forward did not run in it.
            ValueError: the loss has several elements and `grad` is None, or their shapes differ.
        """
        scaling = self._losses.of(loss)
        key = hash(scaling.variable)
        if self._storage is not None and key not in self._forwarded:
            raise RuntimeError(
                f"forward did not run in storage={self._storage!r} since the last update(): call "
                "scaler.forward(loss) in the place of loss.forward()"
            )
        if not self._enabled:
            _plain_backward(scaling, clear_buffer, grad)
        elif self._is_first_batch(scaling):
            self._find_scales(scaling, grad)
        else:
            scaling.backward(None, clear_buffer=clear_buffer, grad=grad, iteration=self._iteration)
        self._used[key] = scaling

    def unscale_(self, solver: Any) -> None:
        """Say that a solver's gradients are going to be looked at or changed, for example clipped.

        They are unscaled already; this looks whether they are finite, before clipping an infinity makes that
        hard to tell. It is not needed where nothing is done to gradients before `step`.

        Raises:
            RuntimeError: it was called for this solver since the last `update`, or `step` was; or nothing has
                run backward.
            ValueError: the solver is none of those that the scaler was made with.
        """
        index = self._index(solver, "unscale_")
        if self._stages[index] is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this solver since the last update()")
        if self._stages[index] is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step()")
        self._stages[index] = _Stage.UNSCALED
        self._finite[index] = self._usable(solver)

    def step(self, solver: Any) -> bool:
        """Update the parameters of a solver, unless one of its gradients is an infinity or a NaN.

        Returns:
            Whether the parameters were updated.

        Raises:
            RuntimeError: it was called for this solver since the last `update`, or nothing has run backward.
            ValueError: the solver is none of those that the scaler was made with.
        """
        index = self._index(solver, "step")
        if self._stages[index] is _Stage.STEPPED:
            raise RuntimeError("step() has already been called on this solver since the last update()")
        self._stages[index] = _Stage.STEPPED
        finite = self._finite[index]
        if finite is None:
            finite = self._usable(solver)
        if not finite:
            self.skipped_steps += 1
            self._skipped = True
            self._find_cause(solver)
            return False
        solver.update()
        self.steps += 1
        self._stepped = True
        return True

    def update(self) -> None:
        """End the iteration: remember what was measured.

        Call it once, after the steps of all solvers.

        Raises:
            RuntimeError: no `step` since the last `update`.
        """
        if not (self._stepped or self._skipped):
            raise RuntimeError("update() has nothing to do: call step(solver) before it")
        if self._skipped and not self._stepped and self._losses.forward_state is not None:
            # What a batch that changed nothing has added to running statistics.
            self._losses.forward_state.restore()
        if self._stepped and self._enabled:
            self._note_gradients()
        for scaling in self._used.values() if self._enabled else ():
            if self._bad_batch:
                scaling.components.drop_iteration()
            elif not self._skipped:
                scaling.after_update()
        # What overflowed stays lowered for the next batch, as one more try of the same iteration.
        self._iteration += not self._skipped or self._bad_batch
        for scaling in self._used.values():
            scaling.guard.begin()
        self._begin()

    def is_enabled(self) -> bool:
        """Whether anything is scaled: `enabled`."""
        return self._enabled

    def get_scale(self, loss: Optional[LossLike] = None) -> float:
        """The scale that a loss had in its last backward; 1.0 where nothing is scaled.

        Args:
            loss: which one, as each has its own. None: the one that was used last.

        Raises:
            RuntimeError: `loss` is None, and no loss was used yet.
        """
        if not self._enabled:
            return 1.0
        scaling = self._losses.last if loss is None else self._losses.of(loss)
        if scaling is None:
            raise RuntimeError("get_scale() before forward(loss) or backward(loss): no loss is known yet")
        return scaling.loss_scale

    if not TYPE_CHECKING:  # to a type checker, an attribute that is not there is an error

        def __getattr__(self, name: str) -> Any:
            """Say what is here in the place of torch's methods that are not."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{message}: {METHODS[name]}" if name in METHODS else message)

    def scaling(self, loss: LossLike) -> AdaptiveLossScaling:
        """The engine of a loss: `loss_scale`, `layer_scales`, `plan`, ... of its last backward."""
        return self._losses.of(loss)

    def state_dict(self) -> Dict[str, Any]:
        """Everything that decides the next scales, as plain numbers, strings, lists and dicts.

        Call it after `update`.
        """
        return {
            "version": _VERSION,
            "iteration": self._iteration,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "losses": self._losses.states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; load parameters and solver states as well.

        A loss whose graph does not exist yet takes what was learned of it when it is first used.

        Raises:
            ValueError: the state is damaged, or of a newer version.
        """
        try:
            if integer("version", state["version"]) > _VERSION:
                raise ValueError(f"state has version {state['version']}, this package knows {_VERSION}")
            counts = [integer(name, state[name]) for name in ("iteration", "steps", "skipped_steps")]
            losses = [{**loss, "network": list(loss["network"])} for loss in state["losses"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"state is damaged, or none of a GradScaler: {error!r}") from error
        self._losses.load(losses)
        self._iteration, self.steps, self.skipped_steps = counts
        self._begin()

    def _make(self, loss: LossLike, forward_state: Optional[ForwardState]) -> AdaptiveLossScaling:
        return AdaptiveLossScaling(
            with_storage(
                loss,
                self._storage,
                float_tail=self._float_tail,
                parameters=_named_parameters(self._solvers),
            ),
            self._config,
            non_homogeneous=self._non_homogeneous,
            parameters=_named_parameters(self._solvers),
            history=self._history,
            forward_state=forward_state,
            float_tail=self._float_tail,
        )

    def _find_scales(self, scaling: AdaptiveLossScaling, grad: Optional[Seed]) -> None:
        """The first backward of a loss: again, forward and backward, until its scales hold."""
        guard, key = scaling.guard, hash(scaling.variable)
        self._begin_where_forward_ended(scaling)
        # What other losses have written since then stays.
        is_last = key in self._forwarded and key == next(reversed(self._forwarded))
        now = None if is_last else guard.state.now()
        for attempt in range(_ATTEMPTS):
            if attempt:
                guard.undo_batch()
                scaling.forward()
                guard.after_forward()
            scaling.backward(None, grad=grad, iteration=self._iteration, again=attempt > 0)
            if scaling.settled and not scaling.found_inf:
                break
            if scaling.found_inf and not scaling.after_overflow():
                break
        if now is not None:
            guard.state.restore(now)

    def _is_first_batch(self, scaling: AdaptiveLossScaling) -> bool:
        return not scaling.components.amaxes() and hash(scaling.variable) not in self._used

    def _begin_where_forward_ended(self, scaling: AdaptiveLossScaling) -> None:
        """Begin the batch of a loss on which the user's own `loss.forward()` ran: nothing was kept before."""
        if hash(scaling.variable) not in self._forwarded:
            scaling.guard.before_forward()
            scaling.guard.begin_batch(first=False, repeat=self._is_first_batch(scaling))

    def _index(self, solver: Any, verb: str) -> int:
        for index, known in enumerate(self._solvers):
            if known is solver:
                if not self._used:
                    raise RuntimeError(
                        f"{verb}() before backward(): there are no gradients since the last update()"
                    )
                return index
        raise ValueError(
            f"solver is none of the {len(self._solvers)} that this scaler was made with: GradScaler(*solvers)"
        )

    def _usable(self, solver: Any) -> bool:
        return not (self._enabled and solver.check_inf_or_nan_grad())

    def _find_cause(self, solver: Any) -> None:
        """Lower what made gradients overflow, or tell what no scale mends."""
        self.cause = ""
        for key, scaling in self._used.items():
            if not scaling.found_inf or key in self._blamed:
                continue
            self._blamed.add(key)
            found = self._examine(scaling, solver)
            if found.nonfinite_loss or found.fault is not None:
                self._bad_batch = True
                self.cause = "the loss is not finite" if found.fault is None else str(found.fault)
                self._warn("bad", f"{self.cause}: that is no overflow of gradients, and no scale is lowered")
            else:
                self.cause = f"overflow, first in {scaling.found_inf[0]}"
                if not scaling.after_overflow():
                    self._warn("floor", f"gradients are not finite at the smallest scale: {self.cause}")
        if not self.cause:
            self.cause = "gradients are not finite, though no backward has left them so"
            self._warn("other", self.cause)

    def _examine(self, scaling: AdaptiveLossScaling, solver: Any) -> Window:
        """Why gradients are not finite; gradients of other solvers stay as they are."""
        guard, minimum = scaling.guard, scaling.components.policy.min_scale
        self._begin_where_forward_ended(scaling)
        now = guard.state.now()
        others = {hash(v): v for s in self._solvers if s is not solver for v in s.get_parameters().values()}
        kept = KeptGradients(select_kernels(scaling.variable.parent.context))
        kept.save(leaf_arrays(others))
        # Clipping may have hidden what these gradients were; they are of no use any more.
        next(iter(solver.get_parameters().values())).grad.fill(math.inf)
        found = examine(Window(), scaling, solver, minimum)
        guard.state.restore(now)
        kept.restore()
        return found

    def _note_gradients(self) -> None:
        """Look whether a step had any gradient."""
        used, iteration = list(self._used.values()), self._iteration + 1
        if not any(scaling.nonzero_leaves for scaling in used):
            # Another backward of this iteration may have left some.
            parameters = [v for solver in self._solvers for v in solver.get_parameters().values()]
            if used[0].guard.gradients_are_zero(parameters):
                zero = [scaling.guard.loss_is_zero for scaling in used]
                scale = used[0].loss_scale
                self._reports.note_zero_gradients(
                    iteration, scale, loss_is_zero=lambda: all(is_zero() for is_zero in zero)
                )
                return
        self._reports.note_gradients(iteration)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"step skipped in iteration {self._iteration}: {message}")


def _plain_backward(scaling: AdaptiveLossScaling, clear_buffer: bool, grad: Optional[Seed]) -> None:
    """Run backward as nnabla does, from `grad`, or from one."""
    loss = scaling.loss
    check_seed(scaling.variable, grad)
    if isinstance(loss, FormatEmulation):
        loss.backward(1.0, clear_buffer, grad=grad)
    else:
        scaling.variable.backward(1.0 if grad is None else grad, clear_buffer=clear_buffer)


def _checked(solvers: Sequence[Any]) -> List[Any]:
    if not solvers:
        raise ValueError("GradScaler needs a solver, or several: GradScaler(solver)")
    for index, solver in enumerate(solvers):
        for method in ("update", "get_parameters", "check_inf_or_nan_grad"):
            if not callable(getattr(solver, method, None)):
                raise TypeError(
                    f"solvers[{index}] must be an nnabla solver; {type(solver).__name__} has no {method}()"
                )
        if not solver.get_parameters():
            raise ValueError(
                f"solvers[{index}] has no parameters: call solver.set_parameters(nnabla.get_parameters())"
            )
        if any(solver is other for other in solvers[:index]):
            raise ValueError(f"solvers[{index}] is given twice")
    return list(solvers)


def _named_parameters(solvers: Sequence[Any]) -> Dict[str, nn.Variable]:
    """The parameters of all solvers; names that several have tell the solvers apart."""
    found: Dict[str, nn.Variable] = {}
    for index, solver in enumerate(solvers):
        for name, v in solver.get_parameters().items():
            found[name if found.get(name, v) == v else f"{index}/{name}"] = v
    return found
