# SPDX-License-Identifier: Apache-2.0
"""Two losses of very different sizes on one network: what one scale loses, components keep, natively too."""

from __future__ import annotations

import warnings
from typing import Dict, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
EMULATED_AND_NATIVE = pytest.mark.parametrize("storage", ["float16", None], ids=["emulated", "native"])
RATIOS = pytest.mark.parametrize("ratio", [1e-10, 1e-20])


def two_losses(ratio: float) -> nn.Variable:
    rng = np.random.RandomState(0)
    x, *targets = (nn.Variable.from_numpy_array(rng.randn(8, n).astype(np.float32)) for n in (5, 2, 2))
    h = F.tanh(PF.affine(x, 8, name="trunk", rng=rng))
    terms = []
    for name, target in zip(("large", "small"), targets):
        hidden = F.tanh(PF.affine(h, 8, name=f"{name}/hidden", rng=rng))
        terms.append(F.mean(F.squared_error(PF.affine(hidden, 2, name=f"{name}/out", rng=rng), target)))
    return terms[0] + ratio * terms[1]


def gradients(ratio: float, method: Optional[str], storage: Optional[str]) -> Dict[str, NDArray[np.float32]]:
    """Those of the weights, once scales have settled; without `storage` in native half."""
    nn.clear_parameters()
    nn.seed(0)
    with nn.context_scope(HALF if storage is None else FLOAT):
        loss = two_losses(ratio)
    solver = S.Sgd(0.0)
    solver.set_parameters(nn.get_parameters())
    config = AdaLossConfig(loss_scale_method=method)
    updater = AdaptiveLossScalingUpdater(solver, loss, storage=storage, config=config)
    for _ in range(10):
        assert updater.update().updated
    if method == "fixed":
        assert set(updater.scaling.layer_scales.values()) == {1.0}
    return {name: p.g.copy() for name, p in nn.get_parameters().items() if name.endswith("W")}


def errors(ratio: float, method: Optional[str], storage: Optional[str]) -> Dict[str, float]:
    exact = gradients(ratio, "fixed", "float32")
    found = gradients(ratio, method, storage)
    # Of numbers below 1e-19 squares are not in float32.
    norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in exact.items()}
    return {n: float(np.linalg.norm(found[n].astype(np.float64) - exact[n])) / norms[n] for n in norms}


@RATIOS
@EMULATED_AND_NATIVE
def test_by_default_the_gradients_of_both_are_kept(ratio: float, storage: Optional[str]) -> None:
    found = errors(ratio, None, storage)
    assert len(found) == 5
    assert max(found.values()) < 0.01, found


@RATIOS
@EMULATED_AND_NATIVE
def test_one_measured_scale_keeps_those_of_the_large_one_alone(ratio: float, storage: Optional[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = errors(ratio, "fixed", storage)
    small = {name: error for name, error in found.items() if name.startswith("small")}
    assert max(found[name] for name in found.keys() - small.keys()) < 0.01, found
    assert min(small.values()) > 0.02, found
    if ratio < 1e-15:
        assert set(small.values()) == {1.0}
