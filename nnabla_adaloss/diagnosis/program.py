# SPDX-License-Identifier: Apache-2.0
"""Command `python -m nnabla_adaloss analyse FILE.py:function`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import sys
import traceback
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator, Optional, Tuple

import nnabla as nn

from ..core.precision import PrecisionName
from ..graph.loss import LossWrapper
from ..state.whole_file import check_page
from .examination import diagnose
from .target import Feeder

# Printed below the report on a loss.
_NO_SOLVER = (
    "A loss does not say which solver trains it. Return the updater, and its learning rate and epsilon are\n"
    "compared with the gradients, too."
)


class ProgramError(ValueError):
    """A file or function does not provide a network; the message names the fault and the remedy."""


def analyse(place: str, storage: PrecisionName, batches: int, page: Optional[str], *, as_json: bool) -> int:
    """Diagnose the network that the function `FILE.py:function` returns, and print the report.

    Returns:
        The exit code: 0 if a way of scaling, or none, keeps all gradients, without other faults; 1 for a
            fault that no loss scale can fix; 2 if the network could not be examined.
    """
    try:
        if page is not None and not Path(page).resolve().parent.is_dir():
            raise ProgramError(f"there is no folder {Path(page).parent} to write {Path(page).name} to")
        if page is not None:
            check_page(page)
        # Standard output is for the JSON object, not for output of a program or a feeder.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            loss, feeder = load_program(place)
            diagnosis = diagnose(loss, storage, feeder, batches)
        if page is not None:
            diagnosis.write_html(page, place)
    # The user's network and feeder may raise anything, and call sys.exit().
    except (Exception, SystemExit) as error:
        is_ours = isinstance(error, ProgramError)
        message = str(error) if is_ours else f"{place}: {_described(error, place.rpartition(':')[0])}"
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2
    notes = [_NO_SOLVER] if isinstance(loss, (nn.Variable, LossWrapper)) else []
    if as_json:
        found = diagnosis.as_dict()
        found["notes"] += notes
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print("\n".join([str(diagnosis), *notes]))
    return 0 if diagnosis.verdict.needs is not None and not diagnosis.verdict.causes else 1


def load_program(place: str) -> Tuple[Any, Optional[Feeder]]:
    """Call the function `FILE.py:function`, and return its loss (or updater) and its feeder, if any.

    The file is run as a module, with its own folder first on the path, so that it imports its neighbours.
    Code below `if __name__ == "__main__":` does not run. `sys.argv` is that of `python FILE.py`.
    """
    file, _, name = place.rpartition(":") if ":" in place else (place, "", "")
    path = Path(file)
    if not path.is_file():
        similar = difflib.get_close_matches(path.stem, [near.stem for near in path.parent.glob("*.py")], 1)
        hint = "".join(f"; did you mean {stem}.py?" for stem in similar)
        raise ProgramError(f"the file {file} is missing{hint}")
    if not name:
        raise ProgramError(f"{place!r} does not say which function: write FILE.py:function")
    module = _run(path)
    function = getattr(module, name, None)
    if not callable(function):
        functions = filter(inspect.isfunction, vars(module).values())
        own = [f.__name__ for f in functions if f.__module__ == module.__name__]
        raise ProgramError(f"{file} has no function {name!r}; it has {', '.join(own) or 'none'}")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in optional]:
        names = ", ".join(needed)
        raise ProgramError(f"{place} needs arguments ({names}): write a function without any that calls it")
    with _users_code(path, f"{place} raised"):
        returned = function()
    loss, feeder, *_ = returned if isinstance(returned, tuple) and returned[1:] else (returned, None)
    fault = f"returned a value of type {type(loss).__name__}"
    if isinstance(returned, tuple) and len(returned) != 2:
        fault = f"returned a tuple of {len(returned)}"
    elif feeder is not None and not callable(feeder):
        fault = f"returned a feeder of type {type(feeder).__name__}, not a function without arguments"
    elif loss is None:
        fault = "returned nothing (a return is missing?)"
    elif isinstance(loss, (nn.Variable, LossWrapper)) or hasattr(loss, "data_feeder"):
        return loss, feeder
    raise ProgramError(f"{place} {fault}: return the loss Variable, or (loss, feeder)")


@contextmanager
def _users_code(path: Path, fault: str) -> Iterator[None]:
    """Run the user's code: its errors are described, and it does not see this command's arguments."""
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ProgramError(f"{fault} {_described(error, str(path))}") from error
    finally:
        sys.argv = arguments


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ProgramError(f"{path} must be a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module  # where dataclasses and pickles of the file look for it
    with _users_code(path, f"{path} cannot be imported:"):
        spec.loader.exec_module(module)
    return module


def _described(error: BaseException, file: str) -> str:
    """Describe an error, with the last line of the user's file that led to it."""
    frames, own = traceback.extract_tb(error.__traceback__), str(Path(file).resolve())
    lines = [frame.lineno for frame in frames if frame.filename == own]
    if not lines and isinstance(error, (TypeError, ValueError, OSError)):
        return str(error)  # this package has raised it, with a complete message
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
