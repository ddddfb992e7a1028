# SPDX-License-Identifier: Apache-2.0
"""The formats and the ways of scaling whose reach is compared, and what is read off each record."""

from __future__ import annotations

from typing import Any, Callable, Dict

from nnabla_adaloss import AdaLossConfig, Precision

from .methods import METHODS, STORAGES, Job, Loop, adaptive

FORMATS: Dict[str, Precision] = {
    "float16": STORAGES["float16"],
    "bfloat16": Precision("bfloat16"),
    "fp8_hybrid": STORAGES["fp8_hybrid"],
    "float8_e5m2": Precision("float8_e5m2"),
    "float8_e4m3": Precision("float8_e4m3"),
}
LIFTED = "approx_range_lifted"
WAYS: Dict[str, Callable[[Job], Loop]] = {
    **METHODS,
    LIFTED: adaptive(config=AdaLossConfig(loss_scale_method="approx_range", use_bound=False)),
}


def of_small_loss(record: Dict[str, Any]) -> float:
    """The error of the worst layer that only the small loss trains."""
    errors = [error for name, error in record["errors"].items() if name.startswith("small")]
    return float(max(errors))
