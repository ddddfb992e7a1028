# SPDX-License-Identifier: Apache-2.0
"""Contexts, what Variables hold, and comparisons."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional

import nnabla as nn
import numpy as np

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
Values = Dict[str, np.ndarray]


def constant(values: Any) -> nn.Variable:
    """A Variable that holds these values in float32."""
    return nn.Variable.from_numpy_array(np.asarray(values, np.float32))


def data(*shape: int, seed: int = 0) -> nn.Variable:
    """A Variable of random numbers."""
    return constant(np.random.RandomState(seed).randn(*shape))


def zero_grads(leaves: Optional[Iterable[nn.Variable]] = None) -> None:
    for v in nn.get_parameters().values() if leaves is None else leaves:
        v.grad.zero()


def snapshot(parameters: Optional[Mapping[str, nn.Variable]] = None) -> Values:
    """Return copies of parameters, or of all that there are, running statistics among them."""
    if parameters is None:
        parameters = nn.get_parameters(grad_only=False)
    return {name: v.d.copy() for name, v in parameters.items()}


def solver_states(solver: Any) -> Dict[str, Any]:
    """Of each parameter, the number of updates and copies of the solver's arrays."""
    states = solver.get_states()
    return {name: (one.t, {key: v.d.copy() for key, v in one.pstate.items()}) for name, one in states.items()}


def gradients() -> Values:
    """Return copies of the gradients of all parameters."""
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that no bit of the arrays that are expected is another."""
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_close(found: Values, expected: Values, rtol: float, atol: float = 0.0) -> None:
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=rtol, atol=atol, err_msg=name)
