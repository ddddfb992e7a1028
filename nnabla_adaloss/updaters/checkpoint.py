# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a whole training in one file: parameters, solvers, updaters and scalers."""

from __future__ import annotations

import gc
import io
import json
import os
import zipfile
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, cast

import nnabla as nn
import numpy as np
from nnabla.experimental.parametric_function_class.module import Module as ClassModule
from nnabla.solver import Solver

from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..errors import warn
from ..graph.names import parameters_in
from ..state.state_file import StateFileError
from ..state.whole_file import PathLike, replace_file, special_kind
from ..undo.shared_memory import SharedMemory
from .loop import TrainingLoop
from .solvers import check_solver

Variables = Dict[str, nn.Variable]

_VERSION = 1
_HEAD = "nnabla_adaloss checkpoint"
# Methods of a solver that a checkpoint calls.
_OF_SOLVERS = ("get_parameters", "get_states", "set_states", "learning_rate", "set_learning_rate", "name")


def save_checkpoint(path: PathLike, *parts: Any, extra: Optional[Mapping[str, Any]] = None) -> None:
    """Save all that a training needs to resume bit for bit into one file, completely or not at all.

    That is: the parameters of the current scope (running statistics included), of the solvers and of the
    Modules; the states of solvers, their learning rates included; those of updaters and scalers. Data and
    random generators are yours: derive them from `updater.counters.fed`, or give `extra`. One rank saves;
    if loss weights differ between ranks, each saves to a file of its own.

    Args:
        path: the file; its folder must exist. An older one is replaced when the new one is complete.
        *parts: updaters, which bring their solver along; scalers and solvers of a loop of your own; and each
            `nn.Module`, whose running statistics and frozen parameters no scope and no solver has.
        extra: further values to resume from, by name, as JSON holds them, or numbers of NumPy;
            `load_checkpoint` returns it. None: `{}`.

    Raises:
        TypeError: there is no part, one is of another kind, or JSON cannot hold `extra`.
        ValueError: the parts lack something that the training needs, such as running statistics of a Module
            that is not given; or two parameters have one name.
        RuntimeError: an update of one of the parts is running, as in a signal handler, in `on_gradients` or
            beside another thread: use `updater.when_idle`; or a `GradScaler` ran `forward` but not `update`.
        OSError: the file cannot be written. After any error, an older file stays unchanged.

    Example:
        >>> import os, tempfile, nnabla as nn
        >>> import nnabla.functions as F, nnabla.parametric_functions as PF, nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint
        >>> loss, solver = F.mean(PF.affine(nn.Variable((2, 3)), 1) ** 2), S.Adam()
        >>> solver.set_parameters(nn.get_parameters())
        >>> updater = AdaptiveLossScalingUpdater(solver, loss)
        >>> path = os.path.join(tempfile.mkdtemp(), "last.checkpoint")
        >>> save_checkpoint(path, updater, extra={"epoch": 3})
        >>> load_checkpoint(path, updater)
        {'epoch': 3}
    """
    if hasattr(path, "state_dict"):
        raise TypeError("path comes first: save_checkpoint(path, updater)")
    saved, modules = _objects_and_modules(parts)
    kept = _plain(extra)
    if any(getattr(part, "has_begun", False) for part in saved):
        raise RuntimeError(
            "save_checkpoint() between forward() and update() of a GradScaler, whose state does not have "
            "the iteration yet: call it after update()"
        )
    written = io.BytesIO()
    with _between_updates(saved, "save_checkpoint()"):
        variables = _variables(saved, modules)
        arrays = {key: v.data.get_data("r") for key, v in variables.items()}
        head = {"kind": _HEAD, "version": _VERSION, "extra": kept, "parts": [*map(_state_of, saved)]}
        np.savez(written, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    replace_file(path, written.getvalue())


def load_checkpoint(path: PathLike, *parts: Any) -> Dict[str, Any]:
    """Resume from a file of `save_checkpoint`, and return its `extra`; `{}` if none was given.

    Build network, solvers and updaters first. Call each Module once: that makes its parameters. A learning
    rate that differs from the solver's is set, with a LossScaleWarning.

    Args:
        path: the file.
        *parts: the saved parts, in the same order: updaters, scalers, solvers and Modules.

    Raises:
        TypeError: there is no part, or one is of another kind.
        ValueError: the file is damaged or not a checkpoint, or of another network, other solvers, or updaters
            with other settings: the message names the difference. After any error, nothing has changed.
        RuntimeError: an update of one of the parts is running.
        OSError: the file cannot be read.

    Example:
        >>> import os, tempfile, nnabla as nn
        >>> import nnabla.functions as F, nnabla.parametric_functions as PF, nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint
        >>> class Net(nn.Module):
        ...     def call(self, x):
        ...         return PF.affine(PF.batch_normalization(x), 1)
        >>> net, solver = Net(), S.Adam()
        >>> loss = F.mean(net(nn.Variable((2, 3))) ** 2)
        >>> solver.set_parameters(net.get_parameters())
        >>> updater = AdaptiveLossScalingUpdater(solver, loss)
        >>> path, step = os.path.join(tempfile.mkdtemp(), "last.checkpoint"), 0
        >>> if os.path.exists(path):
        ...     step = load_checkpoint(path, updater, net)["step"]
        >>> result = updater.update()
        >>> save_checkpoint(path, updater, net, extra={"step": step + 1})
        >>> load_checkpoint(path, updater, net)
        {'step': 1}
    """
    loaded, modules = _objects_and_modules(parts)
    head, arrays = _read(os.fsdecode(path))
    with _between_updates(loaded, "load_checkpoint()"), ExitStack() as changing:
        variables = _variables(loaded, modules)
        _check(head["parts"], arrays, loaded, variables)
        own_arrays = {key: v.data.get_data("r").copy() for key, v in variables.items()}
        own_states = [*map(_state_of, loaded)]
        # A signal handler that saves is refused, or waits, as during an update.
        for part in loaded:
            if isinstance(part, TrainingLoop):
                changing.enter_context(part._idle.running())
        try:
            _set(variables, arrays, loaded, head["parts"])
        except BaseException:
            _set(variables, own_arrays, loaded, own_states)
            raise
    for own, saved in zip(own_states, head["parts"]):
        rate = saved.get("learning_rate", own.get("learning_rate"))
        if rate != own.get("learning_rate"):
            warn(
                f"the learning rate of {own['solver']} is {rate:g} again, as it was saved, instead of "
                f"{own['learning_rate']:g}: set another after load_checkpoint"
            )
    return cast(Dict[str, Any], head["extra"])


def _plain(extra: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """Convert `extra` as JSON does; TypeError if it cannot."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra={extra!r} must be a dict, such as {{'epoch': 3}}")
    plain: Dict[str, Any] = {}
    for key, value in (extra or {}).items():
        plain[key] = value.item() if isinstance(value, np.generic) else value
        try:
            json.dumps({key: plain[key]})
        except (TypeError, ValueError) as error:
            raise TypeError(f"extra[{key!r}] is not JSON: {error}; give numbers, strings or lists") from None
    return plain


def _objects_and_modules(parts: Any) -> Tuple[List[Any], List[Any]]:
    """Split parts into Modules and other objects, where an updater's solver comes before the updater."""
    objects: List[Any] = []
    modules: List[Any] = []
    for part in parts:
        if isinstance(part, (nn.Module, ClassModule)):
            modules.append(part)
        elif isinstance(part, Solver) or hasattr(part, "load_state_dict"):
            solver = getattr(part, "solver", None)
            objects += [solver, part] if isinstance(solver, Solver) else [part]
        else:
            instead = "give it as extra=" if isinstance(part, Mapping) else "leave it out"
            if hasattr(part, "solver"):
                instead = "give its solver, and its scale as extra="
            raise TypeError(f"{part!r} must be a solver, a Module, an updater or a scaler: {instead}")
    if not objects:
        raise TypeError("no updater, scaler or solver is given: give all that the training has")
    for part in objects:
        for solver in getattr(part, "_solvers", ()):  # of a GradScaler
            if not any(solver is own for own in objects):
                raise ValueError(f"the scaler steps a solver ({solver.name}) that is not given: give it, too")
        if isinstance(part, Solver):
            check_solver("solver", part, _OF_SOLVERS)
    return objects, modules


@contextmanager
def _between_updates(parts: List[Any], caller: str) -> Iterator[None]:
    """Keep the updates of all parts out; RuntimeError, which names `caller`, within an update of one."""
    with ExitStack() as kept_out:
        for part in parts:
            if isinstance(part, TrainingLoop):
                kept_out.enter_context(part._between_updates(caller))
        yield


def _variables(parts: List[Any], modules: List[Any]) -> Variables:
    """Parameters of the scope and of all parts, and solvers' states, by unique name in the file."""
    parameters = dict(nn.get_parameters(grad_only=False))
    # Arrays, as a parameter of the scope may be a solver's or a Module's, too: each is saved once.
    saved = {variable.data for variable in parameters.values()}
    owners = [(f"{n}:", part.get_parameters()) for n, part in enumerate(parts) if isinstance(part, Solver)]
    owners += [(f"module{n}:", _of_module(module)) for n, module in enumerate(modules)]
    for prefix, own in owners:
        others = {prefix + name: variable for name, variable in own.items() if variable.data not in saved}
        for name in others:
            if name in parameters:
                raise ValueError(f"two parameters would be saved as {name!r}: rename the one of the scope")
        parameters.update(others)
        saved.update(variable.data for variable in others.values())
    # An archive ends a name at a NUL character.
    for name in parameters:
        if zipfile.ZipInfo(name).filename != name:
            raise ValueError(f"the parameter {name!r} has a name that an archive cuts off: rename it")
    engines: List[AdaptiveLossScaling] = []
    for part in parts:
        scaling = getattr(part, "scaling", None)
        engines += [scaling] if isinstance(scaling, AdaptiveLossScaling) else getattr(part, "engines", ())
    missing = next(_unsaved(engines, saved), None)
    if missing is not None:
        raise ValueError(
            f"{missing}, which the checkpoint would miss: give its Module, too, as in save_checkpoint(path, "
            "updater, net), or have nn.get_parameters() list it, as get_parameter_or_create does"
        )
    variables = {f"parameters/{name}": v for name, v in parameters.items()}
    for index, part in enumerate(parts):
        for name, state in part.get_states().items() if isinstance(part, Solver) else ():
            variables.update({f"{index}/{name}/{key}": v for key, v in sorted(state.pstate.items())})
    return variables


def _state_of(part: Any) -> Dict[str, Any]:
    """State of a part besides its arrays."""
    if isinstance(part, Solver):
        steps = {name: state.t for name, state in part.get_states().items()}
        return {"solver": part.name, "learning_rate": part.learning_rate(), "steps": steps}
    return cast(Dict[str, Any], part.state_dict())


def _set(variables: Variables, arrays: Dict[str, Any], parts: List[Any], saved: List[Any]) -> None:
    """Set the saved values of all parts."""
    for key, variable in variables.items():
        variable.d = arrays[key]
    # After the parameters, against which updaters check their states.
    for part, own in zip(parts, saved):
        if isinstance(part, Solver):
            states = part.get_states()
            for name, state in states.items():
                state.t = own["steps"][name]
            part.set_states(states)
            # Files of earlier versions have none.
            if "learning_rate" in own:
                part.set_learning_rate(own["learning_rate"])
        else:
            part.load_state_dict(own)


def _unsaved(engines: Sequence[AdaptiveLossScaling], saved: Set[nn.NdArray]) -> Iterator[str]:
    """Describe the arrays that a training needs, but that are not among the `saved` ones."""
    keys = {*map(hash, saved)}
    read: Set[nn.NdArray] = set()
    for engine in engines:
        yield from [one for key, one in engine.state_descriptions.items() if key not in keys]
        for leaf in SharedMemory(engine.graph, engine.plan).find()[1]:
            if leaf.data not in saved:
                yield f"an input of shape {leaf.shape} whose data an output has written"
        read.update(leaf.data for leaf in engine.graph.leaves.values())
    # All classes of Modules: the list grows while it is read.
    kinds = [nn.Module]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # nnabla has no list of Modules: searched for among all objects, perhaps millions, by C code alone.
    objects = gc.get_objects() if kinds[1:] else []
    for module in compress(objects, map(set(map(id, kinds)).__contains__, map(id, map(type, objects)))):
        own = _of_module(module) if module.is_root() else {}
        unsaved = {name: variable.data for name, variable in own.items() if variable.data not in saved}
        # A Module with none of its parameters saved belongs to another training. If graphs are known, only
        # their leaves count, frozen parameters among them.
        for name, data in unsaved.items() if len(unsaved) < len(own) else ():
            if not engines or data in read:
                yield f"the Module {type(module).__name__} has {name}"


def _of_module(module: Any) -> Variables:
    """Parameters of a Module; its `get_parameters` would change the current scope, also of other threads."""
    if not isinstance(module, nn.Module):
        return cast(Variables, module.get_parameters(grad_only=False))
    variables = dict(parameters_in(module.parameter_scope))
    for name, below in module.submodules.items():
        variables.update({f"@{name}/{key}": variable for key, variable in _of_module(below).items()})
    return variables


def _read(name: str) -> Any:
    """Read the head of a checkpoint and its arrays."""
    kind = special_kind(os.stat(name))
    if kind:
        raise StateFileError(f"{name} is {kind}, not a checkpoint: give the path of a file")
    with open(name, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                # By their names in the file: a parameter's own may end in .npy.
                arrays = {key: archive[f"{key}.npy"] for key in archive.files}
            head = json.loads(arrays.pop("head").tobytes())
            kind, version = head["kind"], head["version"]
        # A damaged archive may demand a password, another version, an offset before its start, much memory.
        except Exception as error:
            raise StateFileError(f"{name} is damaged, or not a checkpoint ({error})") from None
    if kind != _HEAD or not isinstance(version, int) or version > _VERSION:
        raise StateFileError(
            f"{name} holds {kind!r} of version {version!r}; this package reads {_HEAD!r} up to {_VERSION}"
        )
    odd = [key for key, array in arrays.items() if array.dtype.kind not in "biuf"]
    parts = head.get("parts")
    if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
        odd.append("parts")
    if not isinstance(head.get("extra"), dict):
        odd.append("extra")
    if odd:
        raise StateFileError(f"{name} is damaged: {odd[0]} is not of the type that save_checkpoint writes")
    return head, arrays


def _check(saved: List[Any], arrays: Dict[str, Any], parts: List[Any], variables: Variables) -> None:
    """Raise ValueError unless a checkpoint is of these parts, with these Variables."""
    kinds = [str(part.get("solver", "a state")) for part in saved]
    present = [part.name if isinstance(part, Solver) else "a state" for part in parts]
    if kinds != present:
        raise ValueError(
            f"the checkpoint holds {', '.join(kinds)}; given are {', '.join(present)}: give the same "
            "solvers, updaters and scalers in the order in which they were saved"
        )
    shapes = {key: array.shape for key, array in arrays.items()}
    expected = {key: variable.shape for key, variable in variables.items()}
    for index, (part, own) in enumerate(zip(parts, saved)):
        if isinstance(part, Solver):
            steps, rate = own.get("steps"), own.get("learning_rate", 0.0)
            # nnabla counts steps in 32 bits.
            valid = isinstance(steps, dict) and all(type(n) is int and 0 <= n < 2**32 for n in steps.values())
            if not valid or type(rate) is not float:
                raise StateFileError(f"the checkpoint is damaged: steps={steps!r}, learning_rate={rate!r}")
            # Numbers of steps, compared like arrays without a shape.
            shapes.update({f"{index}/{name}": () for name in steps})
            expected.update({f"{index}/{name}": () for name in part.get_states()})
    odd = [key for key in sorted({*shapes, *expected}) if shapes.get(key) != expected.get(key)]
    if odd:
        names = [f"{k} ({shapes.get(k, 'not saved')}, here {expected.get(k, 'not there')})" for k in odd[:3]]
        raise ValueError(
            f"the checkpoint is of another network: {len(odd)} of its arrays differ, such as "
            f"{', '.join(names)}. Build the network that was saved"
        )
