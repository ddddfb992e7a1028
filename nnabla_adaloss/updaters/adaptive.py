# SPDX-License-Identifier: Apache-2.0
"""Adaptive updater: nnabla's loop of dynamic loss scaling, with a measured scale for each component."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Union
from zlib import crc32

import nnabla as nn
import numpy as np

from ..core import saved_settings
from ..core import validation as check
from ..core.config import AdaLossConfig
from ..core.precision import StorageLike
from ..core.saved_settings import SettingValue, plain
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScaleState
from ..errors import is_out_of_memory, missing_code, warn
from ..graph.loss import LossLike
from ..state.state_file import read_state, write_state
from ..state.whole_file import PathLike
from .loop import TrainingLoop
from .retries import Counters, UpdateResult
from .settings import GlobalScaleName, HookLike, OnOverflow, Policy, Setting, keep_data, policy
from .solvers import check_solver

# Arguments of torch's `GradScaler`, and those that take their place.
_SEARCHED = 'with global_scale="dynamic"'
_TORCH_ARGUMENTS = {
    "init_scale": "use scale=",
    "growth_factor": f"use scaling_factor= {_SEARCHED}",
    "backoff_factor": f"use scaling_factor= {_SEARCHED}, by which the scale is divided",
    "growth_interval": f"use N= {_SEARCHED}",
    "enabled": "use nnabla's solver by itself, or FixedLossScalingUpdater(scale=1.0)",
}
_VERSION = 6  # of a saved state


class AdaptiveLossScalingUpdater(TrainingLoop):
    """Trains with measured loss scales: one for each part of the network (component), and nothing to tune.

    A drop-in replacement for nnabla's `DynamicLossScalingUpdater`: same positional arguments and defaults.

    Args:
        solver: the solver, with its parameters set.
        loss: the loss Variable of one element (or a wrapper of one, such as `FormatEmulation`).
        data_feeder: called without arguments before each forward to fill the input variables.
        scale: S0, the initial global loss scale. 8.0.
        scaling_factor: factor of S0's growth and backoff, with `global_scale="dynamic"`. 2.0.
        N: S0 grows after more than this many updates without overflow, with `"dynamic"`. 2000.
        clear_buffer: free activations and gradients that are no longer needed. True.
        accum_grad: batches summed in an update; with `on_overflow="next"`, one overflow drops all of them. 1.
        weight_decay: decay constant; None for no decay.
        comm: a communicator for data-parallel training; None for one process.
        grads: gradients to exchange; None (or empty) means those of all the solver's parameters.
        global_scale: `"history"` (default): the largest scale that the gradients of the last iterations
            allow, from the first batch on; a `HistoryPolicy`: likewise, with its settings; `"dynamic"`: grows
            and backs off as the baseline's, and limits scale times loss weight, at the loss, to S0.
        on_overflow: `"repeat"` (default): the same batch again, with lower scales where it overflowed; or
            `"next"`: throw the batch away and take the next one, as the baseline does.
        config: how layers are scaled; None for `AdaLossConfig()`.
        storage: emulate this storage format on a float context: `"float16"`, another name, `np.float16`, a
            `Format` or a `Precision`; None for the context's own types.
        max_retries: repeats of a batch by one call because of overflow before `on_scale_floor` applies; with
            `"next"`, number of batches (or windows of `accum_grad`) it may throw away before it returns
            without an update. 100, as the baseline; 0 skips the iteration instead.
        on_nonfinite_loss: a nonfinite loss is not an overflow and lowers no scale: `"raise"` (default) a
            LossScaleError, `"skip"` the update, or `"warn"` once and skip.
        on_nonfinite_forward: likewise, if the loss is finite but another value of forward is not, at any
            scale: NaN in the data before a ReLU, or activations beyond the storage format.
        on_scale_floor: likewise, for an overflow at `min_scale`, or 25 batches in a row that overflow at any
            scale (fewer are thrown away, with one warning). The error names the first bad layer.
        min_scale: S0 is never lowered below this. 2**-24, the smallest positive fp16 number.
        max_scale: S0 never grows above this, with `"dynamic"`. 2**64.
        hysteresis: overflowing batches in a row that lower S0, with `"dynamic"`. 1, as the baseline.
        on_gradients: called with the solver when the gradients are complete and unscaled, before weight
            decay and update: the place for clipping.
        average: average gradients over micro-batches and ranks; False (default) adds them, as the baseline.
        check_every: with a communicator: number of iterations after which checksums of parameters and scales
            are compared between ranks, with an error on every rank if they differ. 1000; 0: never.
        monitors: objects with some of the methods of `Monitor`, such as `Recorder`, `LogMonitor` and
            `NanDump`. Without monitors there is no overhead.
        function_pre_hook: called with each function before it runs, or a pair of hooks for forward and for
            backward. With one for backward, scales are applied around each function. None.
        function_post_hook: likewise, after each function. Gradients of parameters are unscaled by then, those
            of activations still scaled. For `NanInfTracer`:
            `(tracer.forward_post_hook, tracer.backward_post_hook)`. None.
        float_tail: in half precision, native or emulated, compute scalar functions at the loss in float, and
            functions with a constant that half cannot hold: in half, `loss * 1e-8` is `loss * 0`. In a half
            context it replaces these functions in the graph. True; False leaves the graph unchanged.

    All of these are attributes as well. A value assigned between updates is checked and used from then on;
    those with which other objects were made (`comm`, `grads`, `config`, `storage`, `on_overflow`, the hooks,
    ...) raise AttributeError instead.

    Attributes:
        counters: see `Counters`; `counters.fed` is the number of the batch that the feeder must fill in.
        iteration: the number of the running update, from 1; between two updates, of the last one.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Nothing was changed.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
        >>> updater.update().updated
        True
    """

    # Table of arguments: checks, values refused later, and reports to monitors. `loss` and `scale`, whose
    # assignment changes the engine, are properties.
    solver: Any = Setting(check_solver, fixed="comm", reported=False)  # its gradients are exchanged
    data_feeder: Any = Setting(
        check.callable_with(what="callable without arguments", instead="feed, not feed(), or a lambda"),
        reported=False,
    )
    scaling_factor: Any = Setting(saved=True)
    N: Any = Setting(saved=True)
    clear_buffer: Any = Setting(check.boolean)
    accum_grad: Any = Setting(check.positive_integer, saved=True)
    weight_decay: Any = Setting(check.optional(check.nonnegative_number))
    comm: Any = Setting(fixed=True, reported=False)
    grads: Any = Setting(fixed=True, reported=False)
    global_scale: Any = Setting(fixed=True, saved=True)
    history: Any = Setting(fixed=True)  # the policy that `global_scale` names
    on_overflow: Any = Setting(partial(check.choice, words=OnOverflow), fixed=True, saved=True)
    config: Any = Setting(fixed=True, saved=True)
    storage: Any = Setting(fixed=True)
    max_retries: Any = Setting(check.nonnegative_integer)
    on_nonfinite_loss: Policy = policy()
    on_nonfinite_forward: Policy = policy()
    on_scale_floor: Policy = policy()
    min_scale: Any = Setting(fixed="history", saved=True)  # measured scales keep their floor
    max_scale: Any = Setting(saved=True)
    hysteresis: Any = Setting(saved=True)
    on_gradients: Any = Setting(
        check.optional(check.callable_with(None, what="callable with the solver", instead="lambda s: ..."))
    )
    average: Any = Setting(check.boolean, saved=True)
    check_every: Any = Setting(check.nonnegative_integer)
    monitors: Any = Setting(fixed=True, reported=False)
    function_pre_hook: Any = Setting(fixed=True)
    function_post_hook: Any = Setting(fixed=True)
    float_tail: Any = Setting(check.boolean, fixed=True)

    @check.explains_keywords(_TORCH_ARGUMENTS)
    def __init__(
        self,
        solver: Any,
        loss: LossLike,
        data_feeder: Callable[[], Any] = keep_data,
        scale: float = 8.0,
        scaling_factor: float = 2.0,
        N: int = 2000,
        clear_buffer: bool = True,
        accum_grad: int = 1,
        weight_decay: Optional[float] = None,
        comm: Optional[Any] = None,
        grads: Optional[Sequence[nn.NdArray]] = None,
        *,
        global_scale: Union[GlobalScaleName, HistoryPolicy] = "history",
        on_overflow: OnOverflow = "repeat",
        config: Optional[AdaLossConfig] = None,
        storage: Optional[StorageLike] = None,
        max_retries: int = 100,
        on_nonfinite_loss: Policy = "raise",
        on_nonfinite_forward: Policy = "raise",
        on_scale_floor: Policy = "raise",
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**64,
        hysteresis: int = 1,
        on_gradients: Optional[Callable[[Any], Any]] = None,
        average: bool = False,
        check_every: int = 1000,
        monitors: Sequence[Any] = (),
        function_pre_hook: HookLike = None,
        function_post_hook: HookLike = None,
        float_tail: bool = True,
    ) -> None:
        TrainingLoop.__init__(self, locals())
        in_float = self.scaling.loss is self.scaling.variable and not self.scaling.in_half
        # Whoever gives a config may scale in fp32 on purpose.
        if in_float and storage is None and config is None:
            warn(
                "nothing is stored in half precision: the network is in a float context and storage is None. "
                'Pass storage="float16" to emulate it, or build the network in a half context'
            )

    def update(self) -> UpdateResult:
        """Train on one batch, or on `accum_grad` of them.

        Zeroes the gradients, feeds, runs forward and scaled backward, exchanges gradients, repeats the batch
        (or, with `on_overflow="next"`, takes the next one) while they are not finite, applies `on_gradients`
        and weight decay, and updates the parameters. Afterwards `loss.d` is the loss of the last batch.

        Raises:
            LossScaleError: the loss is not finite, or gradients overflow at the smallest scale, and the
                policy for that is `"raise"`. The parameters are unchanged.
            RuntimeError, MemoryError: there was no memory left, or a library has no code for the GPU. The
                update is undone, at the latest by the next call.
        """
        try:
            with self._idle.exclusive, self._idle.running():
                return self._update()
        except (MemoryError, RuntimeError) as error:
            message = missing_code(error, self.scaling.kernels.card)
            if is_out_of_memory(error):
                message = (
                    "no memory is left for an update, which is undone: take smaller batches (accum_grad adds "
                    "up several), or a larger measure_every, with which fewer gradients are kept"
                )
            if message is None:
                raise
            raise (MemoryError if isinstance(error, MemoryError) else RuntimeError)(message) from error
        finally:
            self._idle.drain()

    @property
    def parameters_lock(self) -> Any:
        """Lock that updates of all updaters with common parameters hold while these are swapped or changed.

        `with updater.parameters_lock: copy = parameter.d.copy()`. Two threads must not read an array at once
        (nnabla casts without Python's lock): hold it wherever you read, in the training thread, too. In a
        signal handler use `when_idle`.
        """
        return self._idle.lock

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` between two updates: now if none is running, else at its end, in its thread.
        Updates of other updaters that share a solver or parameters count, too.

        Use it for checkpoints on a signal: in a handler parameters may be replaced by copies, which
        `nnabla.save_parameters` would save.

        Raises:
            TypeError: `callback` is not callable.
        """
        self._idle.when_idle(callback)

    def state_dict(self) -> Dict[str, Any]:
        """State that determines the next step, except parameters, solver states and data.

        Raises:
            RuntimeError: an update is running: use `when_idle`.
        """
        with self._between_updates("state_dict()"):
            settings = self._deciding_settings()
            return {
                "version": _VERSION,
                "settings": saved_settings.as_plain(settings),
                "chosen": saved_settings.not_default(settings),
                "scale_state": {name: plain(value) for name, value in self.scale_state._asdict().items()},
                "counters": dataclasses.asdict(self.counters),
                "last_good_scale": self._s0.last_good,
                "iteration": self.iteration,
                "parameters": self._parameter_checksum(),
                "scaling": self.scaling.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`. Load the parameters before.

        Raises:
            ValueError: the state is damaged, of a newer version, of another network, or of an updater with
                other settings. Nothing changes then.
        """
        settings = self._deciding_settings()
        try:
            saved_settings.check_version(state["version"], _VERSION)
            saved, foreign = saved_settings.with_known_names(state["settings"], settings, state.get("chosen"))
            for name, value in saved_settings.as_plain(settings).items():
                # `dtype` may differ: scales are chosen again for another format. Old states name none.
                if saved[name] != value and not (name == "dtype" and "dtype" in state["scaling"]):
                    raise ValueError(
                        f"state was saved with {name}={saved[name]!r}, this updater has {value!r}: "
                        "make the updater with the same settings"
                    )
            scale_state = self._s0.policy.checked(ScaleState(**state["scale_state"]))
            counters = Counters.from_dict(state["counters"])
            last_good = check.number("last_good_scale", state["last_good_scale"])
            iteration, checksum = (check.integer(name, state[name]) for name in ("iteration", "parameters"))
            scaling = state["scaling"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state is damaged, or not an updater's: {error!r}") from error
        if foreign:
            warn(saved_settings.foreign_settings_warning(foreign))
        self._idle.when_idle(self._undo_iteration)  # a rollback that was interrupted would undo this, too
        self.scaling.load_state_dict(scaling)
        self._s0.state, self._s0.last_good = scale_state, last_good
        self.iteration, self.counters, self._interrupted = iteration, counters, None
        if checksum != self._parameter_checksum():
            self.scaling.forget()
            warn(
                "the parameters are not those that the state was saved with: the scales of layers are "
                "measured again, the loss scale is kept. Load the parameters before the state"
            )

    def save_states(self, path: PathLike) -> None:
        """Write the state to `path`, besides the solver's own `save_states`; completely or not at all.

        Raises:
            RuntimeError: an update is running: use `when_idle`.
            ValueError: the state is larger than `load_states` accepts.
            OSError: the file cannot be written; an older one stays unchanged.
        """
        write_state(path, self.state_dict())

    def load_states(self, path: PathLike) -> None:
        """Resume from a file of `save_states`. Load parameters and solver states before.

        Raises:
            ValueError: the file is truncated or damaged, or its state cannot be loaded here. Nothing changes.
            OSError: the file cannot be read.
        """
        self.load_state_dict(read_state(path))

    def _deciding_settings(self) -> Dict[str, SettingValue]:
        """Settings that determine the next step, with their defaults."""
        arguments = inspect.signature(AdaptiveLossScalingUpdater).parameters
        rows = vars(AdaptiveLossScalingUpdater).items()
        saved = [name for name, row in rows if isinstance(row, Setting) and row.saved]
        settings = {name: SettingValue(getattr(self, name), arguments[name].default) for name in saved}
        del settings["config"]  # its fields instead, as the engine has completed them
        settings.update(saved_settings.fields_of(self.scaling.config))
        settings["global_scale"] = SettingValue(self.history or "dynamic", HistoryPolicy())
        return settings

    def _parameter_checksum(self) -> int:
        """CRC-32 of the solver's parameters."""
        parameters = sorted(self.solver.get_parameters().items())
        return crc32(np.array([crc32(v.data.get_data("r")) for _, v in parameters], np.uint32).tobytes())
