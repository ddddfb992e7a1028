# SPDX-License-Identifier: Apache-2.0
"""Arguments and methods of torch's `GradScaler` that ours does not have, and their replacements."""

from __future__ import annotations

_MEASURED = (
    "scales follow from what was measured, so that nothing grows or backs off "
    "(LossScaler has growth and back-off)"
)

ARGUMENTS = {
    "init_scale": "use history=HistoryPolicy(start_scale=...)",
    "growth_factor": _MEASURED,
    "backoff_factor": _MEASURED,
    "growth_interval": _MEASURED,
}
METHODS = {
    "scale": "call scaler.forward(loss) and scaler.backward(loss) in the place of "
    "scaler.scale(loss).backward()",
    **{f"{verb}_{name}": _MEASURED for verb in ("get", "set") for name in [*ARGUMENTS][1:]},
}
