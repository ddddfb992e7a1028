# SPDX-License-Identifier: Apache-2.0
"""Networks as people build them, branches included, are diagnosed and left as they were."""

from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import Way, diagnose
from tests.engine.test_architectures import NETWORKS


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_any_graph_is_left_as_it_was_and_needs_nothing(network: str) -> None:
    nn.clear_parameters()
    loss = NETWORKS[network]()
    parameters = nn.get_parameters(grad_only=False)
    for v in parameters.values():
        v.grad.zero()
    loss.forward()
    loss.backward()
    before = {name: (v.d.copy(), v.g.copy()) for name, v in parameters.items()}

    diagnosis = diagnose(loss)

    assert diagnosis.verdict.needs in (Way.NONE, Way.START), diagnosis
    assert not any(cause.fatal for cause in diagnosis.verdict.causes), diagnosis
    for name, v in parameters.items():
        np.testing.assert_array_equal(v.d, before[name][0], err_msg=name)
        np.testing.assert_array_equal(v.g, before[name][1], err_msg=name)
