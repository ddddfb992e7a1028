# SPDX-License-Identifier: Apache-2.0
"""What holds for every test and for every example in a docstring."""

from __future__ import annotations

import nnabla as nn
import pytest

pytest_plugins = ["tests.context_option"]


@pytest.fixture(autouse=True)
def _no_parameters() -> None:
    """NNabla keeps parameters by name, and where they are drawn from, for the whole process; no test sees
    those of another, whichever ran before it.
    """
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
