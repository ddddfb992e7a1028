# SPDX-License-Identifier: Apache-2.0
"""Patterns of layer names."""

from __future__ import annotations

import pytest

from nnabla_adaloss.core import LayerSelection

NAMES = ["block[0]/conv", "block[1]/conv", "rnn/affine", "rnn/affine#2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_pattern_of_itself(name: str) -> None:
    selection = LayerSelection(include=(name,))
    assert [n for n in NAMES if selection.selects(n)] == [name]
    selection.check(NAMES)


def test_exclude_wins() -> None:
    selection = LayerSelection(include=("rnn/*",), exclude=("*#*",))
    assert [n for n in NAMES if selection.selects(n)] == ["rnn/affine"]


def test_a_layer_may_go_by_several_names() -> None:
    assert LayerSelection(include=("a",)).selects("b", "a")
    assert not LayerSelection(exclude=("a",)).selects("b", "a")


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_the_names(argument: str) -> None:
    selection = LayerSelection(**{argument: ("rnn/*", "cnn/*")})
    with pytest.raises(ValueError, match=rf"{argument} has the pattern 'cnn/\*', .* are block\[0\]/conv, "):
        selection.check(NAMES)
    with pytest.raises(ValueError, match="no matrix product"):
        selection.check([])


def test_what_is_made_to_match_everything_may_match_nothing() -> None:
    LayerSelection(include=("*",), exclude=("**",)).check([])


def test_a_pattern_of_one_letter_is_no_pattern_for_everything() -> None:
    with pytest.raises(
        ValueError, match="^include has the pattern 'X', which matches no layer; .* layers are fc$"
    ):
        LayerSelection(include=("X",)).check(["fc"])
    with pytest.raises(ValueError, match="^exclude has .* layers are none: it has no matrix product"):
        LayerSelection(exclude=("X",)).check([])
