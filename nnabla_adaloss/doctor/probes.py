# SPDX-License-Identifier: Apache-2.0
"""Attempts to use installed parts; each returns a description, and raises if it fails.

Each attempt has a process of its own, as incompatible native libraries crash it, and a loaded one stays
loaded. It imports this package, which loads the CUDA libraries of NVIDIA's wheels first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List, Sequence, Tuple

from ..cuda_libraries import find_extension_library

# Largest accepted difference from nnabla's own gradients, relative to the largest; float16 has 11 bits.
_TOLERANCE = {"float": 1e-5, "half": 1e-2}
# Open MPI refuses root and more processes than cores without these; other libraries ignore them.
MPI_PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
Answer = Tuple[Any, str]
"""Value of a call, and its error: empty, an exception, or the way the process ended."""

# Seconds; leaves room for compilers.
_TIME_LIMIT = 120.0

_CHILD = """
import importlib, json, os, sys

answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries is not taken for an answer
module, name, *calls = sys.argv[1:]
for arguments in calls:
    try:
        answer = getattr(importlib.import_module(module), name)(*json.loads(arguments)), ""
    except BaseException as error:
        answer = None, f"{type(error).__name__}: {error}"
    os.write(answers, json.dumps(answer).encode() + b"\\n")
    if answer[1]:
        break
"""


def call_isolated(
    function: Callable[..., Any], *calls: Sequence[Any], time_limit: float = _TIME_LIMIT
) -> List[Answer]:
    """Call a function in new processes, once per list of arguments; errors and crashes are answers, too."""
    # A new process continues after a failure: a GPU's context is unreliable after an error.
    results: List[Answer] = []
    while len(results) < len(calls):
        waiting = [json.dumps(arguments) for arguments in calls[len(results) :]]
        command = [sys.executable, "-c", _CHILD, function.__module__, function.__name__, *waiting]
        try:
            process = subprocess.run(command, capture_output=True, timeout=time_limit)
            output, ended = process.stdout, _how_it_ended(process)
        except subprocess.TimeoutExpired as expired:
            output, ended = expired.stdout or b"", f"TimeoutExpired: no answer within {time_limit:g} s"
        answers: List[Answer] = [tuple(json.loads(line)) for line in output.splitlines()]
        if len(answers) < len(waiting) and not any(error for _, error in answers):
            answers.append((None, ended))
        results += answers
    return results


def _how_it_ended(process: subprocess.CompletedProcess[bytes]) -> str:
    """Describe the end of a process that gave no answer: the signal or the exit code, and its last line."""
    last, code = process.stderr.decode(errors="replace").strip().rpartition("\n")[2], process.returncode
    how = f"Crash: the process ended by {signal.Signals(-code).name}" if code < 0 else ""
    return f"{how or f'Exit: the process ended with code {code}'} {last}".rstrip()


def package_versions() -> str:
    """Import the packages that all uses need."""
    modules = map(importlib.import_module, ("nnabla", "numpy"))
    return ", ".join(f"{module.__name__} {module.__version__}" for module in modules)


def adaptive_backward(extension: str, type_config: str) -> str:
    """Compare backward passes with per-layer scales to nnabla's own, in the context "cpu" or "cudnn"."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF
    import numpy as np
    from nnabla.ext_utils import get_extension_context

    from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling

    def gradients(differentiable: Any, *scale: float) -> Any:
        for parameter in parameters:
            parameter.grad.zero()
        differentiable.forward()
        differentiable.backward(*scale)
        return np.concatenate([parameter.g.ravel() for parameter in parameters], dtype=np.float64)

    with nn.context_scope(get_extension_context(extension, type_config=type_config)):
        x = nn.Variable.from_numpy_array(np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8))
        loss = F.mean(F.tanh(PF.affine(F.tanh(PF.affine(x, 16, name="first")), 16, name="second")))
        parameters = list(nn.get_parameters().values())
        native = gradients(loss)
        # delay=0 scales weights in hooks; delay=1 all of them before backward, as most iterations do.
        for delay in (0, 1):
            scaling = AdaptiveLossScaling(loss, AdaLossConfig(delay=delay))
            for _ in range(2):  # the first pass has no measurements, so it scales no weight
                # 8 at the loss: gradients behind the layer leave room for far more, so alpha is not 1.
                error = np.abs(gradients(scaling, 8.0) - native).max() / np.abs(native).max()
                if not error <= _TOLERANCE[type_config]:
                    raise ArithmeticError(f"gradients differ from nnabla's by {error:.1e} of the largest")
            (alpha,) = scaling.layer_scales.values()
            if alpha == 1.0:
                raise ArithmeticError("the layer between both activations was not scaled")
    return f"gradients agree with nnabla's, a layer scaled by {alpha:g} among them"


def array_addresses() -> str:
    """Find out whether one call returns the addresses of many arrays; without it, all works but slower."""
    from nnabla_adaloss.kernels.addresses import DirectAddresses

    try:
        DirectAddresses()
    except ImportError as error:
        return f"one by one through Python, which takes longer: {error}"
    return "many in one call"


def driver(needed_by: str = "") -> str:
    """Ask the NVIDIA driver for its GPUs; `needed_by` is the CUDA version of an extension, such as "120"."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: Any) -> None:
        status = getattr(cuda, function)(*arguments)
        if status:
            reason = "no CUDA-capable device" if status == 100 else f"CUDA error {status}"
            raise RuntimeError(f"{function}: {reason}")

    def integer(function: str, *arguments: int) -> int:
        value = ctypes.c_int()
        call(function, ctypes.byref(value), *arguments)
        return value.value

    call("cuInit", 0)
    served = integer("cuDriverGetVersion")
    detail = f"serves CUDA {served // 1000}.{served % 1000 // 10}"
    # Newer libraries run on older drivers within a major version of CUDA.
    if served // 1000 < int(needed_by[:2] or 0):
        raise RuntimeError(f"driver version is insufficient: {detail}")
    for device in range(integer("cuDeviceGetCount")):
        name = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", name, len(name), device)
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        major, minor = (integer("cuDeviceGetAttribute", attribute, device) for attribute in (75, 76))
        detail += f", {name.value.decode()} (sm_{major}{minor})"
    return detail


def loaded_from(soname: str, path: str) -> str:
    """Load a library and return the name of its file."""
    ctypes.CDLL(path)
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines())
    # File names may be longer than sonames: libcublas.so.12.0.2.224.
    return next(file for file in mapped if Path(file).name.startswith(soname))


def cuda_extension() -> str:
    """Import nnabla's CUDA extension and get its context."""
    import nnabla
    from nnabla.ext_utils import get_extension_context

    # Loaded alone first: the extension's retries turn the loader's message into a RecursionError.
    ctypes.CDLL(str(find_extension_library()))
    context = get_extension_context("cudnn", type_config="half")
    return f"version {nnabla.__version__}, context {context.backend[0]}"


def cupy_version() -> str:
    """Import CuPy and count the GPUs that it can use."""
    import cupy

    return f"version {cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU(s)"


def compile_kernels() -> str:
    """Compile the package's CUDA kernels for the first GPU."""
    from nnabla_adaloss.kernels.cuda_launcher import CupyLauncher

    CupyLauncher(0)
    return "compiled for the first GPU"


def mpi_library() -> str:
    """Load the MPI library by mpi4py, without starting MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"version {mpi4py.__version__} with {name} {'.'.join(map(str, version))}"


def mpi_sum() -> str:
    """Let two processes that mpirun starts add up a number."""
    on_path = shutil.which("mpirun")
    mpirun = on_path or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        raise FileNotFoundError("mpirun was not found")
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)"
    command = [mpirun, "-n", "2", sys.executable, "-c", program]
    environment = {**os.environ, **MPI_PERMISSIONS}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if process.returncode:
        raise RuntimeError(process.stderr.strip())
    if process.stdout.split() != ["2", "2"]:
        raise RuntimeError(f"{mpirun} starts processes that do not see each other")
    place = mpirun if on_path else f"{mpirun}, which is not on the PATH"
    return f"{place}: two processes exchanged numbers"
