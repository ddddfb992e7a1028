# SPDX-License-Identifier: Apache-2.0
"""Parity with the scales of the published implementation, to 1e-6 relative.

Where it differs on purpose, `deviations` counts how often and says why.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    get_loss_scale,
    get_loss_scale_by_abs_range,
    get_loss_scale_by_approx_range,
    get_loss_scale_by_element_wise_range,
)
from nnabla_adaloss.core.methods import ApproxRange, overflow_limit
from nnabla_adaloss.core.statistics import statistics_of
from tests.reference.rebuild import build, sha

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "scale_cases.json").read_text("utf-8"))
RANGES = {r["name"]: {k: v for k, v in r.items() if k != "name"} for r in REFERENCE["ranges"]}
SETTINGS = {"n_uf": "n_uf_threshold", "rescue": "max_rescue_ratio"}
CASES = [pytest.param(c, id=f"{c['tag']}-{c['seed']}") for c in REFERENCE["cases"]]


def arrays(case: Dict[str, Any]) -> Tuple[np.ndarray, np.ndarray]:
    g, W = build(case["seed"], [case["g"], case["W"]])
    assert (sha(g), sha(W)) == (case["g_sha"], case["W_sha"])
    return g, W


def configs(kind: str) -> List[Tuple[int, Dict[str, Any]]]:
    return list(enumerate(REFERENCE[f"{kind}_configs"]))


def expected(case: Dict[str, Any], kind: str, i: int) -> Any:
    """A number, None where the reference was not run, "raises" where it raised."""
    values = case[kind]
    value = values[i] if isinstance(values, list) else values
    if isinstance(value, dict):
        return "raises"
    return float(value) if isinstance(value, str) else value


def close(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, rel_tol=1e-6)


def is_constant(case: Dict[str, Any]) -> bool:
    """The deviation of a constant gradient is zero, and the reference's its rounding noise."""
    return case["tag"].endswith(("const_g", "const_both"))


def is_tiny(case: Dict[str, Any]) -> bool:
    return case["tag"] == "linear/tiny_fp32"


def plain_approx(g: np.ndarray, W: np.ndarray, config: AdaLossConfig, fan_in: float) -> float:
    """The formula word by word in float64."""
    g, W = g.astype(np.float64), W.astype(np.float64)
    u_max, sigma_min = config.range[1], ApproxRange(config.n_uf_threshold).sigma_min(config.range)
    sigma = np.sqrt((g.std() ** 2 + g.mean() ** 2) * (W.std() ** 2 + W.mean() ** 2) * fan_in / 2)
    return min(max(sigma_min / sigma, 1.0), u_max / (fan_in * np.abs(g).max() * np.abs(W).max()))


def both(case: Dict[str, Any], kind: str, function: Any) -> Iterator[Tuple[int, AdaLossConfig, float, Any]]:
    """Of each configuration our scale and theirs."""
    g, W = arrays(case)
    for i, c in configs(kind):
        settings = {name: c[key] for key, name in SETTINGS.items() if key in c}
        config = AdaLossConfig(**settings, **RANGES[c["range"]])
        fan_in = case["K"] if c["fan_in"] else None
        yield i, config, float(function(g, W, config=config, fan_in=fan_in)), expected(case, kind, i)


@pytest.mark.parametrize("case", CASES)
def test_approx_range(case: Dict[str, Any]) -> None:
    for i, config, ours, theirs in both(case, "approx", get_loss_scale_by_approx_range):
        if theirs == "raises" or math.isnan(theirs):  # an empty gradient, or a NaN: the step is skipped
            assert ours == 1.0
        elif is_tiny(case):  # the squares of 1e-30 underflow in the reference's float32
            assert not close(ours, theirs)
            assert close(ours, plain_approx(*arrays(case), config, case["K"]))
        else:
            assert close(ours, theirs), (i, ours, theirs)


@pytest.mark.parametrize("case", [c for c in CASES if not is_constant(c.values[0])])
def test_cast(case: Dict[str, Any]) -> None:
    g, _ = arrays(case)
    for i, c in configs("cast"):
        config = AdaLossConfig(n_uf_threshold=c["n_uf"], **RANGES[c["range"]])
        ours = float(get_loss_scale_by_approx_range(g, config=config, lognormal=c["lognormal"]))
        theirs = expected(case, "cast", i)
        if theirs == "raises" or math.isnan(theirs):
            assert ours == 1.0
        elif is_tiny(case) and not c["lognormal"]:
            assert theirs == 1.0  # the deviation underflowed to zero
            sigma_min = ApproxRange(config.n_uf_threshold).sigma_min(config.range)
            assert close(ours, sigma_min / g.astype(np.float64).std())
        else:
            assert close(ours, theirs), (i, ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_abs_range(case: Dict[str, Any]) -> None:
    for i, _, ours, theirs in both(case, "abs", get_loss_scale_by_abs_range):
        if theirs in ("raises", 0.0):  # an infinity or a NaN
            assert ours == 1.0
        else:
            assert close(ours, theirs), (i, ours, theirs)


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0]["elem"] is not None])
def test_element_wise_range(case: Dict[str, Any]) -> None:
    for i, config, ours, theirs in both(case, "elem", get_loss_scale_by_element_wise_range):
        if theirs == "raises" and config.max_rescue_ratio and case["g_nnz"] * case["W_nnz"] == 1:
            # int(1 * ratio) leaves nothing to the reference; one product is kept at least.
            assert close(ours, expected(case, "elem", 1))
        elif theirs in ("raises", 0.0):  # no non-zero product, or an infinity or a NaN
            assert ours == 1.0
        else:
            assert close(ours, theirs), (i, ours, theirs)


def final_scale(
    case: Dict[str, Any], c: Dict[str, Any], g: np.ndarray, W: np.ndarray
) -> Tuple[AdaLossConfig, float]:
    method = c["method"]
    if c["lognormal"]:

        def method(
            g: np.ndarray, W: Optional[np.ndarray], *, config: AdaLossConfig, fan_in: float
        ) -> np.ndarray:
            return get_loss_scale_by_approx_range(g, config=config, lognormal=True)

    config = AdaLossConfig(
        loss_scale_method=method,
        n_uf_threshold=c["n_uf"],
        power_of_two=c["pot"],
        # The reference bounds one method only.
        use_bound=c["use_bound"] and c["method"] == "approx_range",
        scale_upper_bound=c["scale_ub"],
        accum_upper_bound=c["accum_ub"],
        **RANGES[c["range"]],
    )
    W = W if c["W"] else None
    return config, float(get_loss_scale(g, W, config=config, fan_in=case["K"], prev_scale=c["prev"]))


def deviation(
    case: Dict[str, Any], c: Dict[str, Any], theirs: Any, g: np.ndarray, W: np.ndarray, config: AdaLossConfig
) -> Optional[Tuple[str, float]]:
    """(why, our value) where we differ from the reference on purpose; None where we agree."""
    if theirs == "raises" and case["g_nnz"] * case["W_nnz"] == 0:
        return "1 instead of an error for an all-zero or empty array", 1.0
    finite = np.isfinite(g).all() and (not c["W"] or np.isfinite(W).all())
    if theirs == "raises" or math.isnan(theirs) or not finite:
        return "1 instead of NaN, 0 or an error for an infinity or a NaN", 1.0
    if c["method"] == "approx_range" and theirs == c["accum_ub"] / c["prev"] < 1.0:
        demanded = min(1.0, expected(case, "approx", 1))
        if not c["pot"] or demanded == 1.0:
            return "a bound does not turn a scale of 1 into one below what overflow demands", demanded
    if is_tiny(case) and not c["W"] and not c["lognormal"]:
        return "the deviation of a tiny gradient does not underflow", 16.0
    if c["method"] == "element_wise_range" and math.isfinite(theirs):
        limit = overflow_limit(statistics_of(g), statistics_of(W), case["K"], config.range[1])
        scale = 2.0 ** math.floor(math.log2(limit)) if c["pot"] else limit
        if theirs > limit and not close(float(np.float16(scale)), theirs):
            return "the overflow guard holds for every method", scale
    return None


def test_final_scales() -> None:
    deviations = Counter()
    for case in REFERENCE["cases"]:
        g, W = arrays(case)
        for i, c in configs("final"):
            theirs = expected(case, "final", i)
            if theirs is None or (is_constant(case) and not c["W"]):
                continue
            config, ours = final_scale(case, c, g, W)
            why = deviation(case, c, theirs, g, W, config)
            if why is not None:
                deviations[why[0]] += 1
                assert math.isclose(ours, why[1], rel_tol=1e-6), (case["tag"], i, ours, theirs)
            elif math.isinf(theirs):
                deviations["scales that float16 cannot hold stay finite"] += 1
                assert 65504 < ours < math.inf
            elif theirs == 0.0:
                deviations["scales that float16 cannot hold stay positive"] += 1
                assert 0.0 < ours < 2.0**-24
            else:  # the reference keeps scales in float16
                assert close(float(np.float16(ours)), theirs), (case["tag"], i, ours, theirs)
    assert deviations == {
        "1 instead of NaN, 0 or an error for an infinity or a NaN": 112,
        "1 instead of an error for an all-zero or empty array": 45,
        "a bound does not turn a scale of 1 into one below what overflow demands": 84,
        "scales that float16 cannot hold stay finite": 93,
        "scales that float16 cannot hold stay positive": 28,
        "the deviation of a tiny gradient does not underflow": 1,
        "the overflow guard holds for every method": 4,
    }
