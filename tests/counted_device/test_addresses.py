# SPDX-License-Identifier: Apache-2.0
"""Kernels of a device are given addresses of its own arrays, whatever the graph.

The counted device looks at each address before it launches a kernel. Functions that have no implementation in
nnabla's CUDA extension run on the host here as they do there, with the host's array class in their context.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Callable, Dict, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, profile
from nnabla_adaloss.host_context import HOST, is_on_host
from nnabla_adaloss.kernels import CpuKernels, CudaKernels, measurements_by
from nnabla_adaloss.kernels.interface import UnscalingList
from tests.counted_device.device import CountedDevice, ForeignAddress
from tests.worlds.architectures import NETWORKS, RNG, finite_gradients, image
from tests.worlds.random_graphs import STEPS, build
from tests.worlds.trainings import solver_of

# Some of those that nnabla-ext-cuda 1.39 has not.
WITHOUT_CUDA = "constant", "global_average_pooling", "kl_multinomial", "sink"


def sink_of_branches() -> nn.Variable:
    h = F.tanh(PF.affine(image(4, 3), 3, name="a", rng=RNG(0)))
    branches = [F.mean(PF.affine(h, 2, name=name, rng=RNG(1)) ** 2) for name in ("b", "c")]
    return F.sink(*branches, F.mean(h) * 0.5, one_input_grad=True)


def sink_of_large_branches() -> nn.Variable:
    h = F.tanh(PF.affine(image(4, 3), 3, name="a", rng=RNG(0)))
    return F.sink(PF.affine(h, 2, name="b", rng=RNG(1)), h, one_input_grad=True)


def divergence() -> nn.Variable:
    h = F.softmax(PF.affine(image(4, 3), 5, name="a", rng=RNG(0)))
    return F.mean(F.kl_multinomial(h, F.softmax(PF.affine(h, 5, name="b", rng=RNG(1)))))


def divergence_as_the_loss() -> nn.Variable:
    h = F.softmax(PF.affine(image(1, 3), 5, name="a", rng=RNG(0)))
    return F.kl_multinomial(h, F.softmax(PF.affine(h, 5, name="b", rng=RNG(1))))


def pooled() -> nn.Variable:
    h = F.relu(PF.convolution(image(2, 3, 6, 6), 4, (3, 3), name="conv", rng=RNG(0)))
    return F.mean(PF.affine(F.global_average_pooling(h), 2, name="fc", rng=RNG(1)) ** 2)


def lstm() -> nn.Variable:
    h, c = (nn.Variable.from_numpy_array(np.zeros((1, 1, 2, 5), np.float32)) for _ in range(2))
    y, _, _ = PF.lstm(image(3, 2, 4), h, c, training=True)
    return F.mean(PF.affine(F.reshape(y, (6, 5)), 2, name="b", rng=RNG(0)) ** 2)


def clipped() -> nn.Variable:
    h = F.tanh(PF.affine(image(4, 3), 3, name="a", rng=RNG(0)))
    low, high = (nn.Variable.from_numpy_array(np.full(h.shape, v, np.float32)) for v in (-0.01, 0.01))
    h = F.clip_grad_by_norm(F.clip_grad_by_value(h, low, high), 0.02)
    return F.sum(PF.affine(h, 2, name="b", rng=RNG(1)) ** 2)


OWN = (sink_of_branches, sink_of_large_branches, divergence, divergence_as_the_loss, pooled, lstm, clipped)
ALL: Dict[str, Callable[[], nn.Variable]] = {**NETWORKS, **{f.__name__: f for f in OWN}}


@pytest.fixture
def on_gpu(on_device: CountedDevice, monkeypatch: pytest.MonkeyPatch) -> CountedDevice:
    """The device, of which some of nnabla's functions know nothing."""
    on_host = on_device.context("float", HOST.array_class)

    def without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with nn.context_scope(on_host):
                return function(*arguments, **options)

        return run

    for name in WITHOUT_CUDA:
        monkeypatch.setattr(F, name, without_cuda(getattr(F, name)))
    return on_device


def loss_on(
    device: CountedDevice, network: Callable[[], nn.Variable], type_config: str = "float"
) -> nn.Variable:
    nn.clear_parameters()
    with nn.context_scope(device.context(type_config)):
        return network()


def check_gradients(loss: nn.Variable, config: Optional[AdaLossConfig] = None) -> AdaptiveLossScaling:
    """See that gradients are nnabla's own, in four iterations."""
    expected = finite_gradients(loss, 1.0, True)
    scaling = AdaptiveLossScaling(loss, config)
    for _ in range(4):
        found = finite_gradients(scaling, 8.0, True)
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)
    return scaling


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("network", sorted(ALL))
def test_architectures(on_gpu: CountedDevice, network: str) -> None:
    """With a method that reads weights and gradients of all layers."""
    config = AdaLossConfig(loss_scale_method="approx_range", u_min=0.7, u_max=1e30, use_bound=False)
    scaling = check_gradients(loss_on(on_gpu, ALL[network]), config)
    assert isinstance(scaling.kernels, CudaKernels)


def test_arrays_go_to_the_kernels_of_the_cpu_without_cupy(
    on_gpu: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    config = AdaLossConfig(loss_scale_method="approx_range", u_min=0.7, u_max=1e30, use_bound=False)
    for network in (pooled, sink_of_branches, ALL["squeeze_and_excite"]):
        with pytest.warns(RuntimeWarning, match="CuPy is not installed"):
            scaling = check_gradients(loss_on(on_gpu, network), config)
        assert isinstance(scaling.kernels, CpuKernels)


def test_cpu_kernels_find_arrays_on_the_device(on_device: CountedDevice) -> None:
    x, master = (nn.NdArray.from_numpy_array(np.full((4, 3), v, np.float32)) for v in (6.0, 1.0))
    for accumulate, expected in ((True, 4.0), (False, 3.0)):
        for array in (x, master):
            array.data_ptr(np.float32, on_device.context("float"))
        assert CpuKernels().unscale_add(x, master, 2.0, accumulate=accumulate) == 3.0
        assert (master.data == expected).all()


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("step", sorted(STEPS))
def test_parts_of_random_graphs(on_gpu: CountedDevice, step: str) -> None:
    def network() -> nn.Variable:
        made = build(0, ["tanh", step, "add"], input_gradient=True)
        for name, leaf in made.leaves.items():
            nn.parameter.set_parameter(name, leaf)
        return made.loss

    check_gradients(loss_on(on_gpu, network))


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("network", sorted({*ALL} - {"lstm", "spectral_normalization"}))
def test_architectures_in_half(on_gpu: CountedDevice, network: str) -> None:
    loss = loss_on(on_gpu, ALL[network], "half")
    # By parts, attention overflows in half at first: an updater runs such batches again.
    scaling = AdaptiveLossScaling(loss, AdaLossConfig("amax_history"))
    for _ in range(3):
        assert finite_gradients(scaling, 8.0, True)


def test_functions_without_cuda_are_on_the_host(on_gpu: CountedDevice) -> None:
    contexts: Dict[str, nn.Context] = {}
    loss_on(on_gpu, sink_of_branches).visit(lambda f: contexts.update({f.info.type_name: f.context}))
    found = [name for name, context in contexts.items() if is_on_host(context)]
    assert found == ["Sink"]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (pooled, "conv/conv/GlobalAveragePooling (0.00109 MB per iteration)"),
        (divergence, "a/affine/KLMultinomial (0.000352 MB per iteration)"),
        (sink_of_branches, None),
    ],
)
def test_a_plan_and_a_profile_name_functions_that_run_on_the_host(
    on_gpu: CountedDevice, network: Callable[[], nn.Variable], said: Optional[str]
) -> None:
    loss = loss_on(on_gpu, network)
    solver = solver_of(S.Sgd(0.1))
    updater = AdaptiveLossScalingUpdater(solver, loss)
    note = str(updater.scaling.plan).splitlines()[-1]
    assert said is None or note == f"on the host, for lack of a CUDA implementation: {said}"
    assert said is not None or "CUDA" not in note
    with pytest.raises(ValueError, match=re.escape(f"runs {said or 'no function'}")):
        profile(updater)


def test_functions_reported_for_the_host_are_those_that_move_arrays(on_gpu: CountedDevice) -> None:
    loss = loss_on(on_gpu, pooled)
    for _ in range(2):
        with on_gpu as counts:
            loss.forward(clear_no_need_grad=True)
            loss.backward(1.0, clear_buffer=True)
    # Input and output in forward, their gradients in backward.
    assert (counts.reads, counts.writes) == (2, 2)


def test_addresses_of_the_host_and_beyond_an_array_are_refused(on_device: CountedDevice) -> None:
    kernels = CudaKernels(HOST, on_device.launcher)
    array = nn.NdArray.from_numpy_array(np.ones((4, 3), np.float32))
    with pytest.raises(ForeignAddress, match=r"source 0 of statistics, .* shape \(4, 3\) as float32"):
        kernels.statistics(array)
    with pytest.raises(ForeignAddress, match="source 0 of unscale_add"):
        measurements_by(kernels, 1).unscale(UnscalingList([array], [2.0]))
    longer = UnscalingList([array], [2.0])
    longer.sizes[:] = 13
    with pytest.raises(ForeignAddress, match="52 bytes that nobody asked nnabla for"):
        measurements_by(on_device.kernels, 1).unscale(longer)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_address_that_an_array_had_before_is_refused(on_device: CountedDevice, dtype: Any) -> None:
    array = nn.NdArray.from_numpy_array(np.ones((4, 3), np.float32))
    launch = on_device.launcher.launch

    def late(kernel: str, blocks: int, arguments: Any) -> None:
        array.data_ptr(dtype, on_device.context("float") if dtype == np.float16 else HOST)
        launch(kernel, blocks, arguments)

    kernels = CudaKernels(on_device.context("float"), on_device.launcher)
    kernels._launcher = type("Late", (), {"launch": staticmethod(late), "max_blocks": 3})()
    with pytest.raises(ForeignAddress, match="or not any more"):
        kernels.scale_(array, 2.0)
