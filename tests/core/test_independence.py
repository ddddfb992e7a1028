# SPDX-License-Identifier: Apache-2.0
"""The core runs where nnabla is not installed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
sys.modules["nnabla"] = None  # importing it raises
import nnabla_adaloss
import nnabla_adaloss.core as core
from nnabla_adaloss import AdaLossConfig
for module in pkgutil.walk_packages(core.__path__, "nnabla_adaloss.core."):
    importlib.import_module(module.name)
from nnabla_adaloss.published import get_loss_scale
import numpy as np
g, W = np.full((2, 2), 1e-7), np.full((2, 2), 0.1)
assert get_loss_scale(g, W, config=AdaLossConfig(), fan_in=2) == 16.0
frameworks = {name.split(".")[0] for name in sys.modules} & {"nnabla", "nnabla_ext", "cupy"}
assert frameworks == {"nnabla"}, frameworks
"""


def test_core_never_imports_nnabla() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
