# SPDX-License-Identifier: Apache-2.0
"""The program in the guide runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import nnabla as nn
import numpy as np
import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "functions.md"


def test_the_program_of_the_guide_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    nn.clear_parameters()
    names: Dict[str, Any] = {}
    exec(program, names)
    assert "'fc3/affine'" in capsys.readouterr().out
    assert not names["tracker"].found_inf
    assert float(names["loss"].d) < np.log(10) + 1.0
    nn.clear_parameters()
