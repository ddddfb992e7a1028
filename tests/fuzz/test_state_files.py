# SPDX-License-Identifier: Apache-2.0
"""State files with flipped, missing and added bytes: refused, or read as what was written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import List, Tuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nnabla_adaloss import StateFileError
from nnabla_adaloss.state.state_file import read_state, write_state
from tests.fuzz.budget import budget

pytestmark = [pytest.mark.slow, pytest.mark.gate]

STATE = {
    "scale": 2.0**-24,
    "layers": {"conv1": [3, 16.0, math.inf, 1.0], "größe/affine": [0, 5e-324, 1e308, 0.1]},
    "network": ["Affine conv1 4x6", "Mean Mean "],
}

Edit = Tuple[float, int, str]
edits = st.lists(
    st.tuples(
        st.floats(0.0, 1.0, exclude_max=True), st.integers(1, 255), st.sampled_from(["flip", "drop", "add"])
    ),
    min_size=1,
    max_size=4,
)


@budget(200)
@given(edits)
def test_edited_files_are_refused_or_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, changes: List[Edit]
) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    whole, edited = folder / "whole.state", folder / "edited.state"
    if not whole.exists():
        write_state(whole, STATE)
    content = bytearray(whole.read_bytes())
    for where, mask, kind in changes:
        position = int(where * len(content))
        if kind == "flip":
            content[position] ^= mask
        elif kind == "drop":
            del content[position : position + mask]
        else:
            content[position:position] = bytes([mask])
        if not content:
            break
    edited.write_bytes(content)
    try:
        assert read_state(edited) == STATE
    except StateFileError as error:
        assert "edited.state" in str(error)  # noqa: PT017
