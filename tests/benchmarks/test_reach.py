# SPDX-License-Identifier: Apache-2.0
"""How far each way of scaling reaches: what is compared with what."""

from __future__ import annotations

from collections import OrderedDict

import nnabla as nn
import numpy as np
import pytest
from common.digits import load
from scaling_study.reach import FORMATS, WAYS, ReachJob, combined, of_small_loss, work
from scaling_study.several_losses import PAIRS, terms


def test_what_is_compared_with_is_the_gradient_of_the_sum() -> None:
    with nn.parameter_scope("", OrderedDict()):
        losses = terms(PAIRS["heads"], load(), 0)
        parameters = nn.get_parameters()
        losses.feed()
        found = combined(losses, parameters, 0.25)
        for parameter in parameters.values():
            parameter.grad.zero()
        loss = losses.large + 0.25 * losses.small
        loss.forward()
        loss.backward()
        for name, parameter in parameters.items():
            assert np.linalg.norm(parameter.g - found[name]) < 1e-6 * np.linalg.norm(found[name]), name


def test_components_reach_where_one_scale_does_not() -> None:
    errors = {m: of_small_loss(work(ReachJob("heads", "float16", m, 1e-12))) for m in WAYS}
    reached = {method for method, error in errors.items() if error < 2e-3}
    assert reached == {"amax_history", "approx_range"}
    assert min(error for method, error in errors.items() if method not in reached) > 0.5


@pytest.mark.parametrize("storage", FORMATS)
def test_every_format_has_its_own_error_at_a_ratio_of_1(storage: str) -> None:
    found = work(ReachJob("heads", storage, "amax_history", 1.0))
    largest = {"float16": 2e-3, "bfloat16": 2e-2}.get(storage, 0.5)
    assert 0.0 < of_small_loss(found) < largest
    assert set(found["errors"]) == {
        *("trunk0", "trunk1", "trunk2"),
        *(f"{loss}/{layer}" for loss in ("large", "small") for layer in ("hidden", "out")),
    }
