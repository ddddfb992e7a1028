# SPDX-License-Identifier: Apache-2.0
"""Patterns of layer names."""

from __future__ import annotations

import pytest

from nnabla_adaloss.core.layer_selection import LayerSelection

NAMES = ["block[0]/conv", "block[1]/conv", "rnn/affine", "rnn/affine#2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_pattern_of_itself(name: str) -> None:
    selection = LayerSelection(include=(name,))
    assert [n for n in NAMES if selection.selects(n)] == [name]
    selection.check(NAMES)


def test_exclude_wins_and_a_layer_may_go_by_several_names() -> None:
    selection = LayerSelection(include=("rnn/*",), exclude=("*#*",))
    assert [n for n in NAMES if selection.selects(n)] == ["rnn/affine"]
    assert LayerSelection(include=("a",)).selects("b", "a")
    assert not LayerSelection(exclude=("a",)).selects("b", "a")


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_the_names(argument: str) -> None:
    # A pattern of one letter is none for everything.
    selection = LayerSelection(**{argument: ("rnn/*", "X")})
    with pytest.raises(ValueError, match=rf"^{argument} has the pattern 'X', .* are block\[0\]/conv, "):
        selection.check(NAMES)
    with pytest.raises(ValueError, match=f"^{argument} has .* none: it has no matrix product"):
        selection.check([])
    LayerSelection(include=("*",), exclude=("**",)).check([])  # made to match everything
    with pytest.raises(ValueError, match=f"^{argument} has the pattern '', which matches no layer"):
        LayerSelection(**{argument: ("",)}).check(NAMES)
