# SPDX-License-Identifier: Apache-2.0
"""Host time of adaptive scaling per iteration where a device does the work.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py

No GPU is needed: the package's kernels are launched on a device that does nothing and returns prepared
results, which leaves Python's work: choosing, preparing launches, reading the table, hooks if any. CuPy's
time for a launch, some microseconds, is not included. It is CPU time of the thread, on tiny networks, in a
float and in a half context: a GPU runs half.

  nnabla ms  zero_grad, forward, backward and update of nnabla in an adaptive update, which a GPU does itself
  ours ms    all the rest of that update: of blocks of 16 iterations the median of their means
  calls      of Python functions, and of C functions by them, in most updates
  addresses  of arrays that nnabla is asked for, one by one as on a GPU
  kind       of the last pass: "hookless", or why there were hooks around single functions

Of each network there are as many functions as of the real one, but one map or two. The last two are those of
published_shapes.py.

For another checkout of the package, whose kernels are built, give its folder:

    cd /tmp && PYTHONPATH=FOLDER OMP_NUM_THREADS=1 PYTHON CHECKOUT/benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple
from unittest import mock

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from blocks import BLOCK
from published_models import MODELS, constant

import nnabla_adaloss
from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.graph.loss import LossSeed
from nnabla_adaloss.host_context import HOST
from nnabla_adaloss.kernels import CudaKernels, cuda, select_kernels
from nnabla_adaloss.kernels.addresses import addresses_of
from nnabla_adaloss.kernels.cuda_launcher import Bytes, layout

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))


# Within a factor of two of the limit that headroom leaves below the largest float16.
_LARGE = 2.0**13.5


class IdleMemory:
    """Host memory that replaces a device's."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self.ptr = int(self._bytes.ctypes.data)

    def part(self, address: int, dtype: Any) -> Any:
        """View the memory from an address on as numbers; None if the address is outside."""
        start = address - self.ptr
        if not 0 <= start < self._bytes.size:
            return None
        count = (self._bytes.size - start) // np.dtype(dtype).itemsize
        return self._bytes[start : start + count * np.dtype(dtype).itemsize].view(dtype)


class IdleDevice:
    """`Launcher` that launches nothing and returns prepared statistics. In the first pass they differ from
    array to array; later all arrays are as large as their scales allow, so that the scales do not change.
    """

    max_blocks, card = 792, "no card"

    def __init__(self) -> None:
        self.launches = 0
        self.fetches = 0
        self.addresses = 0
        row = np.zeros(8, layout("Row"))
        row["count"], row["sum_of_squares"] = 100, 1.0
        row["negated_smallest"] = np.negative(np.full(8, 2.0**-12, np.float32).view(np.uint32))
        # Gradients of zero would be examined further.
        self._at_hand = {"statistics": row, "unscale_add": np.zeros(8, np.float32)}
        self._make(_LARGE * 2.0 ** -np.arange(8.0))
        self._memories: List[IdleMemory] = []

    def allocate(self, size: int) -> IdleMemory:
        """Allocate zeros."""
        self._memories.append(IdleMemory(size))
        return self._memories[-1]

    def clear(self, memory: IdleMemory, size: int) -> None:
        """Do nothing: prepared results stay."""

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        """Do nothing but write rows."""
        self.launches += 1
        found = self._at_hand.get(kernel)
        if found is None:
            return
        tasks, address = arguments[0][0], int(arguments[1])
        rows = tasks["task"]["row"][: tasks["count"]]
        for memory in self._memories:
            written = memory.part(address, found.dtype)
            if written is not None:
                written[rows] = found[rows % 8]

    def fetch(self, memory: IdleMemory, size: int) -> Bytes:
        """Return the written bytes."""
        self.fetches += 1
        found = np.frombuffer(ctypes.string_at(memory.ptr, size), np.uint8)
        self._make(np.full(8, _LARGE))
        return found

    def _make(self, largest: np.ndarray) -> None:
        self._at_hand["statistics"]["largest"] = largest.astype(np.float32).view(np.uint32)
        self._at_hand["unscale_add"][:] = largest


def chain(x: nn.Variable, layers: int = 100) -> nn.Variable:
    """Build affine layers of two maps."""
    h = x
    for i in range(layers):
        h = F.tanh(PF.affine(h, 2, name=f"layer{i}"))
    return h


def resnet50(x: nn.Variable) -> nn.Variable:
    """Build all layers of ResNet-50, with one map in the stem."""
    from common.resnet import resnet

    return resnet(x, "resnet50", width=1, classes=2, training=True, last_gamma=1.0)


def transformer(x: nn.Variable, blocks: int) -> nn.Variable:
    """Build pre-norm blocks with two heads and width 4, on two positions."""
    width, heads = 4, 2
    h = PF.affine(x, width, base_axis=2, name="in")

    def split(v: nn.Variable) -> nn.Variable:
        return F.transpose(F.reshape(v, (*v.shape[:2], heads, width // heads)), (0, 2, 1, 3))

    for i in range(blocks):
        with nn.parameter_scope(f"block{i}"):
            y = PF.layer_normalization(h, batch_axis=(0, 1), name="first")
            q, k, v = (split(PF.affine(y, width, base_axis=2, name=name)) for name in "qkv")
            weights = F.softmax(F.batch_matmul(q, k, transpose_b=True) * (width // heads) ** -0.5)
            y = F.reshape(F.transpose(F.batch_matmul(weights, v), (0, 2, 1, 3)), h.shape)
            h = h + PF.affine(y, width, base_axis=2, name="out")
            y = PF.layer_normalization(h, batch_axis=(0, 1), name="second")
            y = F.gelu(PF.affine(y, 2 * width, base_axis=2, name="up"))
            h = h + PF.affine(y, width, base_axis=2, name="down")
    return PF.affine(F.mean(h, axis=1), 2, name="classes")


def classified(network: Callable[[nn.Variable], nn.Variable], shape: Tuple[int, ...]) -> nn.Variable:
    """Make a builder of a network's cross entropy on inputs of a shape."""
    x, t = nn.Variable(shape), nn.Variable((shape[0], 1))
    x.d, t.d = 0.1, 0
    return F.mean(F.softmax_cross_entropy(network(x), t))


def published(name: str) -> nn.Variable:
    """Make a builder of the loss of a model of published_models.py."""
    model = MODELS[name]
    found: Any = model.build(*map(constant, model.batch(np.random.default_rng(0))))
    return found


CASES: Dict[str, Callable[[], nn.Variable]] = {
    "ResNet-50": partial(classified, resnet50, (1, 3, 32, 32)),
    "transformer, 6 blocks": partial(classified, partial(transformer, blocks=6), (1, 2, 4)),
    "transformer, 12 blocks": partial(classified, partial(transformer, blocks=12), (1, 2, 4)),
    "100 affine layers": partial(classified, chain, (1, 2)),
    "LSTM, 16 steps": partial(published, "lstm"),
    "U-Net": partial(published, "unet"),
}
CONTEXTS = {"float": ["cpu:float"], "half": ["cpu:half", "cpu:float"]}


class Native:
    """Time of nnabla's own calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its time counts as nnabla's."""

        def run(*arguments: Any, **options: Any) -> Any:
            began = thread_time()
            found = call(*arguments, **options)
            self.seconds += thread_time() - began
            return found

        return run


class TimedLoss:
    """Loss whose forward and backward are timed."""

    def __init__(self, loss: nn.Variable, native: Native) -> None:
        self.variable = loss
        self._seed = LossSeed(loss, select_kernels(loss.parent.context).scaled_float32)
        self.forward, self._backward = native.timed(loss.forward), native.timed(loss.backward)

    def backward(self, scale: float = 1.0, *arguments: Any, grad: Any = None) -> None:
        """Run backward with a seed whose preparation is not timed."""
        self._backward(self._seed.gradient(scale, grad), *arguments)


class TimedSolver:
    """Solver whose calls on all parameters are timed."""

    def __init__(self, solver: Any, native: Native) -> None:
        self._solver = solver
        self.zero_grad, self.update = native.timed(solver.zero_grad), native.timed(solver.update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._solver, name)


@contextmanager
def training(
    build: Callable[[], nn.Variable], kind: str, measure_every: int = 8
) -> Iterator[Tuple[AdaptiveLossScalingUpdater, IdleDevice, Native]]:
    """Provide an updater that has chosen its scales, its device, and the time of nnabla's own calls."""
    context, native = nn.Context(CONTEXTS[kind], HOST.array_class, HOST.device_id), Native()
    with idle_device() as device, nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
        loss = build()
        solver = S.Sgd(0.0)
        solver.set_parameters(nn.get_parameters())
        config = AdaLossConfig(dtype="float16", measure_every=measure_every)
        updater = AdaptiveLossScalingUpdater(
            TimedSolver(solver, native), TimedLoss(loss, native), config=config
        )
        for _ in range(BLOCK):
            updater.update()
        yield updater, device, native


def measure(name: str, kind: str, blocks: int, measure_every: int) -> str:
    """Measure a line of the table: an iteration's cost besides nnabla."""
    with training(CASES[name], kind, measure_every) as (updater, device, native):
        before = device.launches, device.fetches, device.addresses
        ours: List[float] = []
        theirs: List[float] = []
        for _ in range(blocks):
            native.seconds, began = 0.0, thread_time()
            for _ in range(BLOCK):
                updater.update()
            ours.append((thread_time() - began - native.seconds) / BLOCK)
            theirs.append(native.seconds / BLOCK)
        after = device.launches, device.fetches, device.addresses
        result, calls = updater.scaling.result.kind, steady_calls(updater)
    launches, fetches, asked = [(end - start) / (BLOCK * blocks) for start, end in zip(before, after)]
    return (
        f"{name:24}{kind:6}{1e3 * median(theirs):11.2f}{1e3 * median(ours):9.2f}{calls:7.0f}"
        f"{asked:11.0f}{launches:10.1f}{fetches:7.1f}  {result}"
    )


def steady_calls(updater: AdaptiveLossScalingUpdater) -> float:
    """Count the calls of functions in most updates."""
    return median(count_calls(updater.update) for _ in range(BLOCK))


def count_calls(call: Callable[[], Any]) -> int:
    """Count the function calls that a call makes."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def idle_device() -> Iterator[IdleDevice]:
    """Make scaling choose the kernels of a device that does nothing."""
    device = IdleDevice()
    # Not `HOST` itself, so that addresses are read one by one, as on a GPU.
    kernels = CudaKernels(nn.Context([], HOST.array_class, HOST.device_id), device)

    def counted(arrays: Sequence[nn.NdArray], *arguments: Any, **options: Any) -> Any:
        device.addresses += len(arrays)
        return addresses_of(arrays, *arguments, **options)

    select = "nnabla_adaloss.engine.adaptive_loss_scaling.select_kernels"
    with ExitStack() as patches:
        patches.enter_context(mock.patch(select, return_value=kernels))
        patches.enter_context(mock.patch.object(cuda, "addresses_of", counted))
        yield device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=8, help=f"blocks of {BLOCK} iterations that are timed (default: 8)"
    )
    parser.add_argument(
        "--measure-every", type=int, default=8, choices=(1, 2, 4, 8, 16), help="of AdaLossConfig (default: 8)"
    )
    options = parser.parse_args()
    if options.blocks < 1:
        parser.error("--blocks must be 1 or more")
    print(f"nnabla_adaloss of {Path(nnabla_adaloss.__file__).parent}")
    columns = f"{'nnabla ms':>11}{'ours ms':>9}{'calls':>7}{'addresses':>11}{'launches':>10}{'waits':>7}"
    print(f"{'network':30}{columns}  kind")
    for name in CASES:
        for kind in CONTEXTS:
            print(measure(name, kind, options.blocks, options.measure_every), flush=True)


if __name__ == "__main__":
    main()
