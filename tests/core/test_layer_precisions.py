# SPDX-License-Identifier: Apache-2.0
"""Which precision a layer has, and which mappings are refused."""

from __future__ import annotations

from typing import Any

import pytest

from nnabla_adaloss.core.precision import FP8_HYBRID, FP32, LayerPrecisions, Precision, get_precision, widest


def test_the_first_pattern_that_matches_decides() -> None:
    precisions = LayerPrecisions({"head/out": "float16", "head/*": "bf16", "*": "fp8_hybrid"})
    assert precisions.of("head/out") == Precision("float16")
    assert precisions.of("head/fc") == Precision("bfloat16")
    assert precisions.of("body/conv") is FP8_HYBRID
    assert precisions.only is None


def test_what_no_pattern_matches_is_fp32() -> None:
    assert LayerPrecisions({"head/*": "half"}).of("body/conv") is FP32


@pytest.mark.parametrize("storage", ["fp16", {"*": "half"}, {"**": Precision("float16")}])
def test_one_precision_is_that_of_all_layers(storage: Any) -> None:
    precisions = LayerPrecisions(storage)
    assert precisions.only == Precision("float16")
    assert str(precisions) == "float16"
    precisions.check(["a"])


def test_names_with_brackets_match_themselves() -> None:
    assert LayerPrecisions({"a[0]/fc": "float16"}).of("a[0]/fc") == Precision("float16")


def test_the_narrowest_is_the_one_whose_gradients_reach_least_far() -> None:
    precisions = LayerPrecisions({"a": "bfloat16", "b": Precision("float8_e5m2", "float8_e4m3"), "*": "fp16"})
    assert precisions.narrowest.backward.name == "float8_e4m3"
    assert LayerPrecisions({"a": "bfloat16"}).narrowest == get_precision("bfloat16")


def test_the_widest_of_several() -> None:
    eight, half, brain = map(get_precision, ("float8_e5m2", "float16", "bfloat16"))
    assert widest([eight, half]) is half
    assert widest([half, brain]) is brain  # its range holds what both hold
    assert widest([FP32, brain]) is FP32
    assert widest([FP8_HYBRID, half]) is FP8_HYBRID  # what it stores is as wide


def test_operands_and_random_rounding_of_any_layer() -> None:
    plain = LayerPrecisions({"a": "float16", "*": "bfloat16"})
    assert (plain.operands_only, plain.at_random) == (False, False)
    both = LayerPrecisions({"a": "fp8_hybrid", "*": Precision("float16", stochastic_seed=3)})
    assert (both.operands_only, both.at_random) == (True, True)


def test_a_pattern_behind_one_that_matches_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"storage has the pattern 'head/\*' behind '\*'.*put '\*' last"):
        LayerPrecisions({"*": "float16", "head/*": "float32"})


def test_unknown_formats_name_their_pattern() -> None:
    with pytest.raises(ValueError, match=r"storage\['head/\*'\]='hafl' is unknown; choose one of float16"):
        LayerPrecisions({"head/*": "hafl"})
    with pytest.raises(ValueError, match="storage='hafl' is unknown"):
        LayerPrecisions("hafl")


def test_keys_that_are_no_strings_and_empty_mappings_are_refused() -> None:
    with pytest.raises(TypeError, match="storage has the key 3"):
        LayerPrecisions({3: "float16"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="empty mapping"):
        LayerPrecisions({})


def test_a_pattern_that_decides_nothing_is_refused_with_the_layers_there_are() -> None:
    layers = ["head/affine", "body/conv"]
    with pytest.raises(ValueError, match=r"'tail/\*', which matches no layer.*are head/affine, body/conv"):
        LayerPrecisions({"tail/*": "float16", "*": "float16"}).check(layers)
    with pytest.raises(ValueError, match=r"'head/affine', which matches only layers that an earlier"):
        LayerPrecisions({"head/*": "float16", "head/affine": "bfloat16"}).check(layers)
    LayerPrecisions({"head/*": "float16", "*": "bfloat16"}).check(["head/affine"])  # "*" may be left nothing


def test_messages_name_the_precision_of_each_pattern() -> None:
    assert str(LayerPrecisions({"a/*": "bf16", "*": "half"})) == "bfloat16 in a/*; float16 in *"
