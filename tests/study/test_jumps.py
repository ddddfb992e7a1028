# SPDX-License-Identifier: Apache-2.0
"""How soon a scale is right again after a jump."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
from scaling_study.jumps import until_right


def record(exponents: List[float], jump: str) -> Dict[str, Any]:
    return {"jump": jump, "exponents": exponents, "fed": list(range(1, len(exponents) + 1))}


CALM = record([16.0] * 140, "none")


@pytest.mark.parametrize(
    ("after", "jump", "until"),
    [
        ([6.0] * 40, "2^10, for good", 0),
        ([16.0, 14.0, 12.0] + [8.0] * 37, "2^10, for good", 3),
        ([16.0] * 40, "2^10, for good", None),
        ([6.0] + [16.0] * 39, "2^10, one batch", 0),
        ([6.0] * 15 + [16.0] * 25, "2^10, one batch", 15),
        ([6.0] * 25 + [16.0] * 15, "2^10, one batch", None),
        ([6.0] * 15 + [16.0] * 20 + [1.0] * 5, "2^10, one batch", 15),
        ([16.0] * 40, "2^-10, one batch", 1),
    ],
)
def test_a_scale_is_right_where_it_would_be_without_the_jump(
    after: List[float], jump: str, until: Any
) -> None:
    assert until_right(record([16.0] * 100 + after, jump), CALM) == until
