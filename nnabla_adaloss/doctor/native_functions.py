# SPDX-License-Identifier: Apache-2.0
"""Which of nnabla's own functions work here, and who is at fault if something does not."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from itertools import groupby
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence

from .findings import Area, Finding, Status
from .isolation import Outcome, call_isolated
from .trial_run import run_trials
from .trials import TRIALS

# Longer than all trials of a process take on a GPU whose libraries load slowly.
_TIME_LIMIT = 60.0

# What nnabla's functions compute with.
_PACKAGES = {
    Area.CPU: re.compile("nnabla|numpy"),
    Area.GPU: re.compile("nnabla-ext-cuda.*|nvidia-(cublas|cudnn)-.*"),
}


Progress = Callable[[str], Any]
"""Takes reports of progress, a line at a time."""


def silent(line: str) -> None:
    """A `Progress` that reports nothing."""


class Tried(NamedTuple):
    """What became of a trial.

    Attributes:
        name: the function.
        error: what was wrong, or how its process ended; empty where nothing was.
        on_host: types of functions that ran on the host though the context was a GPU's.
    """

    name: str
    error: str = ""
    on_host: Sequence[str] = ()


def try_functions(
    extension: str,
    type_config: str,
    names: Sequence[str] = tuple(TRIALS),
    *,
    processes: int = 1,
    time_limit: float = _TIME_LIMIT,
    on_progress: Progress = silent,
) -> List[Tried]:
    """Try functions of nnabla's in processes of their own.

    One process tries many, up to the first that fails: what a GPU's context does after an error says nothing.
    The next process goes on behind it.

    Args:
        extension: "cpu" or "cudnn".
        type_config: "float" or "half".
        names: keys of `TRIALS`.
        processes: how many of them at once.
        time_limit: seconds after which a process is ended.
        on_progress: called with a line for each process that has ended.
    """
    found: Dict[str, Tried] = {}

    def try_part(waiting: Sequence[str]) -> None:
        while waiting:
            outcome = call_isolated(run_trials, extension, type_config, waiting, time_limit=time_limit)
            found.update(_tried(outcome, waiting))
            waiting = [name for name in waiting if name not in found]
            on_progress(f"{extension}:{type_config}: {len(found)} of {len(names)} functions tried")

    with ThreadPoolExecutor() as pool:  # they wait for processes
        list(pool.map(try_part, [names[first::processes] for first in range(processes)]))
    return [found[name] for name in names]


def _tried(outcome: Outcome, names: Sequence[str]) -> Dict[str, Tried]:
    """What one process tried, that at which it ended included; all, if it ended before the first."""
    found: Dict[str, Tried] = {}
    error, at = outcome.error or "no answer", ""
    for message in _messages(outcome.said):
        at = message.get("begun", at)
        if "ended" in message:
            found[message["ended"]] = Tried(message["ended"], message["error"], message["on_host"])
    if at and at not in found:
        found[at] = Tried(at, error)
    return found or {name: Tried(name, error) for name in names}


def _messages(said: str) -> Iterable[Dict[str, Any]]:
    for line in said.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:  # cut off
                return


def versions_of(area: Area) -> str:
    """The packages that nnabla's functions of an area are made of, with their versions."""
    named = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions()}
    return ", ".join(f"{name} {named[name]}" for name in sorted(named) if _PACKAGES[area].fullmatch(name))


def findings_of(area: Area, type_config: str, tried: Sequence[Tried], machine: str) -> List[Finding]:
    """What trials say: a line for what works, and one for all functions that fail in the same way.

    Args:
        area: the GPU, or the CPU.
        type_config: "float" or "half".
        tried: what became of each trial.
        machine: GPU and versions, to report with a failure.
    """
    subject = f"nnabla's functions, {type_config}"
    works = [t for t in tried if not t.error]
    found = []
    if works:
        detail = f"{len(works)} of {len(tried)} give the right numbers"
        on_host = sorted({name for t in works for name in t.on_host})
        if on_host:
            detail += f"; on the host, for lack of a CUDA implementation: {', '.join(on_host)}"
        found.append(Finding(area, Status.WORKS, subject, detail))
    failed = sorted((t for t in tried if t.error), key=lambda t: _kind(t.error))
    for kind, of_kind in groupby(failed, key=lambda t: _kind(t.error)):
        names = ", ".join(t.name for t in of_kind)
        detail = f"{names}: {kind}. This is nnabla without this package ({machine})"
        found.append(Finding(area, Status.BROKEN, subject, detail, _cure(area, kind)))
    return found


def _kind(error: str) -> str:
    """What errors of different functions have in common."""
    reported = re.search(r"an? (illegal instruction|illegal memory access|misaligned address)", error)
    if reported:
        return f"the GPU reports {reported[0]}"
    ended = re.match(r"Crash: (the process ended by \w+)", error)
    if ended:
        return ended[1]
    return "wrong numbers" if error.startswith("wrong numbers") else " ".join(error.split())[:200]


def _cure(area: Area, kind: str) -> str:
    if area is Area.CPU:
        return "install into a fresh virtual environment: pip install nnabla-adaloss"
    if "illegal instruction" in kind:
        return (
            "not tested yet, but cuBLAS 12.0 may not suit this GPU: "
            "pip install 'nvidia-cublas-cu12>=12.1,<13'; until then avoid these functions"
        )
    return "avoid these functions, or report this to nnabla"


def blamed(finding: Finding, tried: Sequence[Tried]) -> Finding:
    """A finding about this package; one that it is broken says whose fault that is.

    Args:
        finding: about adaptive loss scaling.
        tried: nnabla's functions, in the same context.
    """
    if finding.status is not Status.BROKEN:
        return finding
    broken = ", ".join(t.name for t in tried if t.error)
    if broken:
        cause = f"nnabla's own functions fail here ({broken}): see above, and fix that first"
        return finding._replace(detail=f"{finding.detail}. {cause}", cure="")
    cause = "nnabla's own functions work here, so the fault is in this package"
    cure = finding.cure or "please report it with the doctor's output"
    return finding._replace(detail=f"{finding.detail}. {cause}", cure=cure)
