# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnabla_adaloss.communicators.agreement import (
    Call,
    RankDisagreementError,
    check_equal,
    checksum,
    describe_mismatch,
    differing,
    fingerprint,
    from_ordered_int,
    lower_and_upper,
    to_ordered_int,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
ODD_FLOATS = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, -5e-324, 1.5, -1.5]


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_ordered_integers_are_in_the_order_of_the_floats(a, b):
    x, y = to_ordered_int([a, b])
    if a != b:
        assert (x < y) == (a < b)


@given(arrays(np.float64, st.integers(0, 5), elements=st.sampled_from(ODD_FLOATS) | st.floats()))
def test_ordered_integers_give_the_floats_back(values):
    back = from_ordered_int(to_ordered_int(values))
    np.testing.assert_array_equal(back, values)
    finite = ~np.isnan(values)
    assert (np.signbit(back) == np.signbit(values))[finite].all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_ordered_integers_have_the_shape_of_the_floats(shape):
    ordered = to_ordered_int(np.ones(shape, order="F"))
    assert ordered.shape == from_ordered_int(ordered).shape == shape
    assert ordered.flags.c_contiguous
    np.testing.assert_array_equal(ordered, to_ordered_int(np.ones(shape, np.int64)))


def test_nan_of_either_sign_is_above_infinity():
    nan, negative_nan, inf = to_ordered_int([np.nan, -np.nan, np.inf])
    assert nan == negative_nan > inf
    assert np.isnan(from_ordered_int(max(nan, inf)))


@given(st.lists(st.lists(INT64, min_size=3, max_size=3), min_size=1, max_size=4))
def test_one_minimum_finds_the_positions_that_differ(rows):
    held = np.array(rows, np.int64)
    reduced = np.min([lower_and_upper(row) for row in held], axis=0)
    assert differing(reduced) == [i for i in range(3) if len(set(held[:, i].tolist())) > 1]


def test_checksum_tells_bits_dtypes_and_lengths_apart():
    values = [
        np.float32([0.0]),
        np.float32([-0.0]),
        np.float32([np.nan]),
        np.float32([0.0, 0.0]),
        np.int32([0]),
        np.float32([]),
        np.float64([0.0]),
    ]
    sums = [checksum(value) for value in values]
    assert len(set(sums)) == len(values)
    assert sums == [checksum(value.copy()) for value in values]
    assert all(-(2**63) <= one < 2**63 for one in sums)


def test_checksum_does_not_depend_on_the_layout():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (
        checksum(values) == checksum(np.asfortranarray(values)) == checksum(np.repeat(values, 2, 1)[:, ::2])
    )


def test_fingerprint_is_the_same_in_every_process():
    program = (
        "from nnabla_adaloss.communicators.agreement import Call, fingerprint; "
        "print(fingerprint(Call('bcast', (('src', 1),), ((2, 3), 'w'))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "17"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) == fingerprint(Call("bcast", (("src", 1),), ((2, 3), "w")))


def test_fingerprint_tells_calls_apart():
    calls = [
        Call("a"),
        Call("b"),
        Call("a", (("x", 1),)),
        Call("a", (("x", 2),)),
        Call("a", (), ((1, 2),)),
        Call("a", (), ((1,), (2,))),
    ]
    assert len({fingerprint(call) for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([Call("bcast"), Call("barrier")], r"bcast\(\) on rank 4; barrier\(\) on rank 7\."),
        (
            [Call("bcast", (("src", 0),)), Call("bcast", (("src", 1),))],
            r"bcast\(src=0\) on rank 4; bcast\(src=1\) on rank 7\.",
        ),
        (
            [Call("r", (), ((1,), (2, 3))), Call("r", (), ((1,), (3, 2)))],
            r"entry 1 given to r is \(2, 3\) on rank 4; \(3, 2\) on rank 7; entries: 2 on ranks 4, 7\.",
        ),
        (
            [Call("r", (), ("a",)), Call("r", (), ())],
            r"entry 0 given to r is a on rank 4; missing on rank 7; entries: 1 on rank 4; 0 on rank 7\.",
        ),
    ],
)
def test_mismatch_names_the_first_difference(calls, message):
    assert re.search(message, describe_mismatch([4, 7], calls))


def on_all(*held: dict[str, np.ndarray]) -> list[str]:
    """The errors that ranks with these values get from `check_equal`, without any MPI."""
    bounds = [lower_and_upper(np.array([checksum(v) for v in values.values()], np.int64)) for values in held]
    owns: list[object] = []

    def smallest(own: np.ndarray) -> np.ndarray:
        assert any(np.array_equal(own, bound) for bound in bounds)
        return np.min(bounds, axis=0)

    for gather in (lambda own: owns.append(own) or [own], lambda own: list(owns)):
        errors = []
        for values in held:
            try:
                check_equal(values, "scales", smallest, gather)
            except RankDisagreementError as error:
                errors.append(str(error))
    return errors


def test_equal_values_pass():
    assert on_all({"a": np.float64(1)}, {"a": np.float64(1)}) == []
    assert on_all({}, {}) == []


def test_unequal_values_raise_the_same_on_every_rank():
    ranks = [{"a": np.ones(9), "b": np.float64(rank == 1), "c": np.ones(9) * rank} for rank in range(3)]
    errors = on_all(*ranks)
    assert len(errors) == 3
    assert len(set(errors)) == 1
    assert errors[0].startswith(
        "scales differ between ranks: 'b' is 0.0 on ranks 0, 2; 1.0 on rank 1; 2 of 3 differ."
    )


def test_an_array_of_several_elements_is_told_by_its_checksum():
    first = np.arange(3.0)
    # The checksum of one is negative, that of the other is not.
    other = next(first + i for i in range(1, 99) if (checksum(first + i) < 0) != (checksum(first) < 0))
    ranks = [{"a": np.ones(9), "w": value, "z": value * 2} for value in (first, other)]
    (error,) = set(on_all(*ranks))
    one, two = (
        f"checksum {checksum(value) % 2**64:#018x} on rank {rank}"
        for rank, value in enumerate((first, other))
    )
    assert error.startswith(f"scales differ between ranks: 'w' is {one}; {two}; 2 of 3 differ. ")
