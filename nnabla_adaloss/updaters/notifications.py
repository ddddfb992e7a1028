# SPDX-License-Identifier: Apache-2.0
"""Notifications of a training: events of updates for monitors, and warnings, each once."""

from __future__ import annotations

import inspect
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Dict, Sequence, Set

import nnabla as nn

from ..core.precision import LayerPrecisions
from ..core.saved_settings import as_plain, fields_of, plain
from ..engine import AdaptiveLossScaling
from ..errors import warn
from ..graph.graph import Graph
from ..graph.loss import variable_of
from ..graph.plan import GraphPlan
from ..monitor.audience import Audience
from ..monitor.events import TrainingBegan
from .settings import POLICY_FIELDS
from .solvers import has, parameters_of

# After this many updates without any gradient, unlabelled batches no longer explain a loss of zero.
_SILENT = 100
# Number of batches lost in a row that is worth a warning: a jump of the gradients by 2**20 costs only six.
_LOST = 10

ANALYSE = "call `nnabla_adaloss.diagnose(updater)`, or `diagnose(loss)` in a loop of your own"


def installed_version() -> str:
    """Version of the installed package; unknown for a checkout that is only on the path."""
    try:
        return version("nnabla-adaloss")
    except PackageNotFoundError:
        return "not installed"


def notify_training_began(audience: Audience, iteration: int, updater: Any) -> None:
    """Notify monitors of a training's start and its settings: arguments that are in use, by field."""
    audience.training_began = True
    kind, solver = type(updater), updater.solver
    # A duck-typed solver may lack these.
    rate = solver.learning_rate() if has(solver, "learning_rate") else "unknown"
    settings: Dict[str, Any] = {
        "updater": kind.__name__,
        "solver": solver.name if has(solver, "name") else type(solver).__name__,
        "learning_rate": f"{rate:g}" if isinstance(rate, float) else rate,
        "context": "|".join(variable_of(updater.loss).parent.context.backend),
        "ranks": 1 if updater.comm is None else updater.comm.size,
    }
    # Arguments are `Setting`s, which say whether they are reported, except `loss` and `scale`.
    rows = {name: inspect.getattr_static(kind, name) for name in inspect.signature(kind).parameters}
    reported = [name for name, row in rows.items() if getattr(row, "reported", name == "scale")]
    values = {name: getattr(updater, name) for name in reported}
    if "config" in values:
        values["config"] = updater.scaling.config
    if values.get("global_scale", "dynamic") != "dynamic":
        settings["global_scale"], values["global_scale"] = "history", updater.history
        # Its policy determines the start and bounds of the scale, not these arguments.
        values = {name: value for name, value in values.items() if name not in {"scale", *POLICY_FIELDS}}
    for name, value in values.items():
        unused = getattr(value, "unused_by_method", ())  # of an AdaLossConfig
        fields = {f"{name}.{f}": own for f, own in as_plain(fields_of(value)).items() if f not in unused}
        settings.update(fields or {name: plain(value)})
        if name == "storage" and not isinstance(value, (str, type(None))):
            settings[name] = LayerPrecisions(value)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    words = {name: str(value) for name, value in settings.items()}
    audience.tell(TrainingBegan(iteration, now, installed_version(), words))


class Notifier:
    """Warns once of each kind; detects batches lost in a row, and no gradients."""

    undone: ClassVar = ("_last_gradient",)

    def __init__(self) -> None:
        self._warned: Set[str] = set()
        self._lost_in_a_row = 0
        self._trained: Set[int] = set()  # keys of the solvers' parameters at the last query
        self._last_gradient = 0  # last iteration with a nonzero gradient; 0: none yet
        self._untrained: Dict[str, nn.Variable] = {}  # parameters without a nonzero gradient so far, by name

    def warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    def note_update(
        self, iteration: int, scale: float, engines: Sequence[AdaptiveLossScaling], solvers: Sequence[Any]
    ) -> bool:
        """Note an update after the passes of engines; False, with a warning, if all gradients are zero."""
        self._lost_in_a_row = 0
        if True in [engine.result.loss_is_infinite for engine in engines]:
            self.warn(
                "infinite loss",
                f"the loss is infinite in iteration {iteration}, its gradients are not: training goes on, "
                f"but the value of the loss is lost. To name the function that overflows, {ANALYSE}",
            )
        if self._untrained:
            self._note_untrained(iteration, engines)
        if not self._gradients_are_zero(engines, solvers):
            self._last_gradient = iteration
            return True
        in_a_row = iteration - self._last_gradient
        # One batch may have had no signal (no reward, say); if none had any, something is wrong.
        may_be_silent = self._last_gradient or in_a_row < _SILENT
        if not (may_be_silent and all(engine.has_nothing_to_learn() for engine in engines)):
            since = f"in {in_a_row} updates up to" if in_a_row > 1 else "in"
            self.warn(
                "zero_gradients",
                f"every gradient is exactly zero {since} iteration {iteration}, at loss scale {scale:g}: the "
                f"network has converged, or everything underflows. Check the loss weight, and {ANALYSE}",
            )
        return False

    def _gradients_are_zero(self, engines: Sequence[AdaptiveLossScaling], solvers: Sequence[Any]) -> bool:
        """True if the gradients of all parameters of the solvers are zero."""
        # First with the parameters of the last query: reading a solver's takes as long as all the rest.
        if not self._passes_left_zeros(engines):
            return False
        parameters = parameters_of(solvers)
        self._trained = {hash(v) for v in parameters}
        # Other batches, ranks and hooks may have added to gradients that these passes left at zero.
        return self._passes_left_zeros(engines) and engines[0].kernels.gradients_are_zero(parameters)

    def _passes_left_zeros(self, engines: Sequence[AdaptiveLossScaling]) -> bool:
        """True if the last passes have given no trained parameter a nonzero gradient."""
        return all(self._trained.isdisjoint(engine.result.nonzero) for engine in engines)

    def _note_untrained(self, iteration: int, engines: Sequence[AdaptiveLossScaling]) -> None:
        """Note parameters with a gradient; after a while, warn of those that never had one."""
        nonzero = {key for engine in engines for key in engine.result.nonzero}
        self._untrained = {name: v for name, v in self._untrained.items() if hash(v) not in nonzero}
        if not self._untrained or iteration < _SILENT:
            return
        # Once: from now on none is noted.
        left, self._untrained = self._untrained, {}
        # nnabla has written to none of their gradients.
        missing = [name for name, v in left.items() if v.grad.zeroing]
        if missing:
            self.warn(
                "untrained",
                f"{len(missing)} of the solver's parameters had no gradient in {iteration} updates "
                f"(the first is {missing[0]!r}): the loss does not depend on them. Give the "
                f"solver only those that it trains; to list the others, {ANALYSE}",
            )
        # Other ranks may have had gradients, and an inactive loss may become active.
        inactive = any(0.0 in engine.result.schedule.loss_weights for engine in engines)
        zero = [] if inactive else [name for name in left if name not in missing]
        if zero and engines[0].kernels.gradients_are_zero([left[name] for name in zero]):
            self.warn(
                "zero gradients of some",
                f"the gradients of {len(zero)} of the solver's parameters were exactly zero in {iteration} "
                f"updates (the first is {zero[0]!r}): they underflow, or a function stops them: {ANALYSE}",
            )

    def note_lost_batch(self, iteration: int, cause: str, advice: str = "") -> None:
        """Note a lost batch; warn of many in a row, with the `cause` of the last as a clause."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row == _LOST:
            self.warn(
                f"lost because {cause.split()[0]}",
                f"{_LOST} batches in a row were lost up to iteration {iteration}, the last because {cause}. "
                f"Check the data, the parameters and the learning rate, and {ANALYSE}{advice}",
            )

    def note_overflow(self, iteration: int, where: str) -> None:
        """Note a batch lost to overflow, after which scales are lower."""
        cause = f"gradients overflowed, though each such batch has lowered scales; first bad layer: {where}"
        advice = '; on_overflow="repeat" of the updater, with enough max_retries, loses none'
        self.note_lost_batch(iteration, cause, advice)

    def check_parameters(self, solver: Any, graph: Graph, plan: GraphPlan) -> None:
        """Raise ValueError if the solver has no parameters; warn if they are not the network's."""
        parameters = solver.get_parameters()
        if not parameters:
            raise ValueError(
                "solver has no parameters, so nothing would be trained: call "
                "solver.set_parameters(nnabla.get_parameters()) first"
            )
        reached = {graph.keys[leaf] for node in plan.nodes for leaf in node.leaves}
        if not any(hash(v) in reached for v in parameters.values()):
            self.warn(
                "foreign_parameters",
                f"the loss does not depend on any of the solver's {len(parameters)} parameters (the first is "
                f"{next(iter(parameters))!r}): they are of another network, or none of them needs a gradient",
            )
            return
        # Running statistics, or intentionally frozen ones: a solver's Variables do not show it.
        fixed = {graph.keys[position] for position in graph.leaves.keys() - graph.needed}
        self._untrained = {name: v for name, v in parameters.items() if hash(v) not in fixed}
