# SPDX-License-Identifier: Apache-2.0
"""Events of updates for monitors."""

from __future__ import annotations

import inspect
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Dict

import nnabla as nn

from ..core.saved_settings import as_plain, fields_of, plain
from ..graph.loss import variable_of
from ..monitor.audience import Audience
from ..monitor.events import TrainingBegan, UpdateEnded
from .retries import UpdateResult
from .settings import POLICY_FIELDS
from .solvers import has

# With `global_scale="history"` its policy determines the start and bounds of the scale.
_OF_SEARCHED_SCALES = {"scale"} | POLICY_FIELDS


def installed_version() -> str:
    """Version of the installed package; unknown for a checkout that is only on the path."""
    try:
        return version("nnabla-adaloss")
    except PackageNotFoundError:
        return "not installed"


def notify_beginning(audience: Audience, iteration: int, updater: Any) -> None:
    """Notify monitors of a training's start and its settings: the updater's arguments that are in use, field
    by field where they have fields, and the solver's learning rate.
    """
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
        values = {name: value for name, value in values.items() if name not in _OF_SEARCHED_SCALES}
    for name, value in values.items():
        ignored = getattr(value, "ignored", ())
        fields = {f"{name}.{f}": own for f, own in as_plain(fields_of(value)).items() if f not in ignored}
        settings.update(fields or {name: plain(value)})
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    words = {name: str(value) for name, value in settings.items()}
    audience.tell(TrainingBegan(iteration, now, installed_version(), words))


def notify_update(audience: Audience, iteration: int, result: UpdateResult, loss: nn.Variable) -> None:
    """Notify monitors of the end of an update."""
    # Reading the loss waits for a GPU.
    if audience.wants(UpdateEnded, iteration):
        event = UpdateEnded(
            iteration=iteration,
            updated=result.updated,
            reason=result.reason,
            scale=result.scale,
            retries=result.retries,
            loss=float(loss.d.flat[0]),
        )
        audience.tell(event)
