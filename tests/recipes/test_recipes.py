# SPDX-License-Identifier: Apache-2.0
"""Steps of CONTRIBUTING.md for adding things, tried out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.function import PythonFunction

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, Format, Reason
from nnabla_adaloss.graph import functions
from nnabla_adaloss.graph.functions import Function, Product
from nnabla_adaloss.kernels import CpuKernels, CudaKernels, Kernels
from tests.worlds.monitors import Records
from tests.worlds.networks import mlp


def updater_with(
    config: AdaLossConfig, storage: Any = "float16", **options: Any
) -> AdaptiveLossScalingUpdater:
    loss = mlp(1e-6, batch=8)
    solver = S.Sgd(1e5)
    solver.set_parameters(nn.get_parameters())
    return AdaptiveLossScalingUpdater(solver, loss, config=config, storage=storage, **options)


def test_add_a_method(tmp_path: Path) -> None:
    lines = Path(__file__).with_name("a_method.py").read_text("utf-8").splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 15
    config = AdaLossConfig(loss_scale_method="tests.recipes.a_method:Headroom", delay=1, use_bound=False)
    updater = updater_with(config, global_scale="dynamic", on_overflow="next")
    scales = []
    for _ in range(4):
        assert updater.update().updated
        scales.append(updater.scaling.layer_scales["c/affine"])
    # The first batch runs again with what it has shown.
    assert all(scale > 1.0 for scale in scales)
    updater.save_states(tmp_path / "state")
    updater.load_states(tmp_path / "state")
    assert updater.update().updated


def test_add_a_format() -> None:
    updater = updater_with(AdaLossConfig(), storage=Format.ieee("float12", exponent_bits=5, mantissa_bits=6))
    assert all(updater.update().updated for _ in range(4))
    assert updater.scaling.config.range.u_min == 2.0**-20


def test_add_a_monitor() -> None:
    monitor = Records()
    updater = updater_with(AdaLossConfig(), monitors=[monitor])
    for _ in range(3):
        assert updater.update().updated
    records = monitor.records
    # The first batch is run again, with what it has shown.
    seen = {(record.layer, record.iteration) for record in records}
    assert Counter(layer for layer, _ in seen) == {"c/affine": 3, "b/affine": 3}
    assert {record.reason for record in records} <= set(Reason)
    assert {r.layer: r.alpha for r in records[-2:]} == updater.scaling.layer_scales


class Linear(PythonFunction):  # type: ignore[misc]  # nnabla has no type hints
    """x times w, as a function of a user."""

    @property
    def name(self) -> str:
        return "MyLinear"

    def min_outputs(self) -> int:
        return 1

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return i != j

    def setup_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].reset_shape((inputs[0].shape[0], inputs[1].shape[1]), True)

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].d = inputs[0].d @ inputs[1].d

    def backward_impl(self, inputs: Any, outputs: Any, propagate_down: Any, accum: Any) -> None:
        g = outputs[0].g
        for i, gradient in enumerate((g @ inputs[1].d.T, inputs[0].d.T @ g)):
            if propagate_down[i]:
                inputs[i].g = gradient + (inputs[i].g if accum[i] else 0.0)


@pytest.mark.parametrize("method", ["approx_range", "element_wise_range"])
def test_add_a_matrix_product(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    rng = np.random.RandomState(0)
    weights = [nn.Variable.from_numpy_array(rng.randn(5, 5).astype(np.float32), need_grad=True) for _ in "ab"]
    h = nn.Variable.from_numpy_array(rng.randn(8, 5).astype(np.float32))
    for w in weights:
        h = F.tanh(Linear()(h, w))
    loss = F.mean(h**2)

    def gradients(differentiable: Any, **options: Any) -> List[np.ndarray]:
        for w in weights:
            w.grad.zero()
        differentiable.forward()
        differentiable.backward(8.0, **options)
        return [w.g.copy() for w in weights]

    native = [g / 8.0 for g in gradients(loss)]
    assert AdaptiveLossScaling(loss).layers == []
    # Weight (in, out).
    linear = Function(Product(gradient=lambda g, *_: g, weight=lambda w, *_: w.T))
    monkeypatch.setitem(functions.FUNCTIONS, "MyLinear", linear)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(u_min=0.1, loss_scale_method=method, delay=0))
    for again in (False, True):
        for found, expected in zip(gradients(scaling, rerun=again), native):
            np.testing.assert_array_equal(found, expected)
    assert scaling.layer_scales["MyLinear#2"] > 1.0


@pytest.mark.parametrize("backend", [CpuKernels, CudaKernels])
def test_every_backend_has_every_kernel(backend: Any) -> None:
    wanted = {name for name in vars(Kernels) if not name.startswith("_")}
    assert {"statistics", "scaled_copy", "round_to_format"} <= wanted <= set(dir(backend))
