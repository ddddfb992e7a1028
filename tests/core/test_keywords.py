# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from typing import Any, Dict

import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, GradScaler

UPDATER = "AdaptiveLossScalingUpdater has no argument"


@pytest.mark.parametrize(
    ("kind", "argument", "message"),
    [
        (AdaptiveLossScalingUpdater, "init_scale", f"^{UPDATER} init_scale; use scale="),
        (AdaptiveLossScalingUpdater, "growth_factor", f"^{UPDATER} growth_factor; use scaling_factor="),
        (AdaptiveLossScalingUpdater, "backoff_factor", f"^{UPDATER} backoff_factor; use scaling_factor="),
        (AdaptiveLossScalingUpdater, "growth_interval", f"^{UPDATER} growth_interval; use N="),
        (AdaptiveLossScalingUpdater, "enabled", f"^{UPDATER} enabled; use nnabla's solver by itself"),
        (AdaptiveLossScalingUpdater, "acum_grad", f"^{UPDATER} acum_grad; did you mean accum_grad="),
        (AdaptiveLossScalingUpdater, "n", f"^{UPDATER} n; did you mean N="),
        (AdaptiveLossScalingUpdater, "zzz", f"^{UPDATER} zzz; it takes solver, loss, data_feeder, scale"),
        (GradScaler, "init_scale", r"^GradScaler has no argument init_scale; use history=HistoryPolicy\("),
        (GradScaler, "growth_interval", "scales follow from what was measured"),
        (GradScaler, "storag", "did you mean storage="),
    ],
)
def test_what_to_use_instead(kind: Any, argument: str, message: str) -> None:
    unknown: Dict[str, Any] = {argument: 2}
    with pytest.raises(TypeError, match=message):
        kind(object(), object(), **unknown)


def test_signatures_stay_as_they_are() -> None:
    assert list(inspect.signature(AdaptiveLossScalingUpdater).parameters)[:3] == [
        "solver",
        "loss",
        "data_feeder",
    ]
    assert "enabled" in inspect.signature(GradScaler).parameters
