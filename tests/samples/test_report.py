# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00%"), (1e-9, "< 0.01%"), (4.9e-5, "< 0.01%"), (5.1e-5, "0.01%"), (1.0, "100.00%")],
)
def test_a_share_that_is_not_zero_does_not_look_like_zero(share: float, text: str) -> None:
    from report import percent

    assert percent(share) == text


@pytest.mark.parametrize(
    ("weight", "text"),
    [(1.0, "1"), (1e-4, "1e-4"), (1e-6, "1e-6"), (0.25, "2.5e-1"), (100.0, "100"), (1e4, "1e4")],
)
def test_a_loss_weight_is_written_as_people_write_it(weight: float, text: str) -> None:
    from report import weight_label

    assert weight_label(weight) == text
