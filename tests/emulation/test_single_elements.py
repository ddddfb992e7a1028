# SPDX-License-Identifier: Apache-2.0
"""Single elements, and rounding at random."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation, Precision


def weighted(weight: float) -> Any:
    x = nn.Variable.from_numpy_array(np.linspace(0.4, 0.9, 500, dtype=np.float32), need_grad=True)
    return x, F.sum(F.tanh(x * 1.0)) * weight


@pytest.mark.parametrize(
    "storage", ["float8_e4m3", "float8_e5m2", Precision("float8_e4m3", "float8_e5m2"), "fp8_hybrid"]
)
def test_a_loss_weight_survives_in_the_loss(storage: Any) -> None:
    """8 bits end at 2**-9 or 2**-16."""
    weight = 1e-4
    x, loss = weighted(weight)
    emulation = FormatEmulation(loss, storage)
    emulation.forward()
    total = float(loss.parent.inputs[0].d)
    assert total > 200.0
    assert float(loss.d) == pytest.approx(weight * total, rel=2e-3)
    x.grad.zero()
    AdaptiveLossScaling(emulation).backward(2.0**10)
    assert np.count_nonzero(x.g) == 500


def test_single_elements_are_halves_whatever_else_is_stored() -> None:
    x = nn.Variable.from_numpy_array(np.array([[1.2345]], np.float32), need_grad=True)
    many = nn.Variable.from_numpy_array(np.full((2,), 1.2345, np.float32), need_grad=True)
    one, several = x * 1.0, many * 1.0
    for v in (one, several):
        v.persistent = True
    FormatEmulation(F.sum(one) + F.sum(several), "float8_e4m3").forward()
    assert float(one.d[0, 0]) == float(np.float16(1.2345))
    assert several.d.tolist() == [1.25, 1.25]


def rounded_gradients(precision: Precision, passes: int = 1) -> List[np.ndarray]:
    x = nn.Variable.from_numpy_array(np.ones(4000, np.float32), need_grad=True)
    factors = np.linspace(1.0, 1.25, 4000, dtype=np.float32)
    loss = F.sum(F.tanh(x * nn.Variable.from_numpy_array(factors)) * 1.0)
    emulation = FormatEmulation(loss, precision)
    found = []
    for _ in range(passes):
        emulation.forward()
        x.grad.zero()
        emulation.backward(1.0)
        found.append(x.g.copy())
    return found


def test_a_seed_makes_the_same_program_give_the_same_numbers() -> None:
    precision = Precision("bfloat16", "float8_e5m2", stochastic_seed=3)
    first, second = rounded_gradients(precision, 2)
    again = rounded_gradients(precision, 2)
    np.testing.assert_array_equal(first, again[0])
    np.testing.assert_array_equal(second, again[1])
    assert not np.array_equal(first, second)
    other = rounded_gradients(Precision("bfloat16", "float8_e5m2", stochastic_seed=4))[0]
    assert not np.array_equal(first, other)


def test_the_mean_gradient_is_that_without_rounding() -> None:
    exact = rounded_gradients(Precision("bfloat16", "float32"))[0].mean(dtype=np.float64)
    nearest = rounded_gradients(Precision("bfloat16", "float8_e5m2"))[0].mean(dtype=np.float64)
    at_random = Precision("bfloat16", "float8_e5m2", stochastic_seed=0)
    mean = np.mean(rounded_gradients(at_random, 20), dtype=np.float64)
    assert abs(mean - exact) < 5e-3 * exact
    assert abs(nearest - exact) > 3 * abs(mean - exact)


def test_draws_lead_back_to_where_a_run_was() -> None:
    precision = Precision("float8_e4m3", "float8_e5m2", operands_only=True, stochastic_seed=1)

    def run(draws: int, passes: int) -> Dict[str, Any]:
        rng = np.random.default_rng(0)
        x, w = (
            nn.Variable.from_numpy_array(rng.standard_normal(shape).astype(np.float32), need_grad=True)
            for shape in ((30, 20), (20, 10))
        )
        emulation = FormatEmulation(F.mean(F.affine(x, w) ** 2), precision)
        emulation.emulated_storage.draws = draws
        for _ in range(passes):
            emulation.forward()
            w.grad.zero()
            emulation.backward(8.0)
        return {"draws": emulation.emulated_storage.draws, "gradient": w.g.copy()}

    one, two = run(0, 1), run(0, 2)
    assert one["draws"] == 1  # what a product reads is rounded at random, not what is stored in 16 bits
    assert two["draws"] == 2
    assert not np.array_equal(one["gradient"], two["gradient"])
    np.testing.assert_array_equal(run(one["draws"], 1)["gradient"], two["gradient"])
