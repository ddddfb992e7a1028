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
    checksum,
    describe_mismatch,
    fingerprint,
    from_ordered_int,
    to_ordered_int,
)

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


def test_nan_of_either_sign_is_above_infinity():
    nan, negative_nan, inf = to_ordered_int([np.nan, -np.nan, np.inf])
    assert nan == negative_nan > inf
    assert np.isnan(from_ordered_int(max(nan, inf)))


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
