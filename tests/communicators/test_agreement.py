# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nnabla_adaloss.communicators.agreement import (
    Call,
    CollectiveMismatchError,
    ProcessGroup,
    RankDisagreementError,
    call_number,
    checksum,
)


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
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    for layout in (np.asfortranarray(grid), np.repeat(grid, 2, 1)[:, ::2]):
        assert checksum(layout) == checksum(grid)


def test_fingerprint_tells_calls_apart_and_is_the_same_in_every_process():
    calls = [
        Call("a"),
        Call("b"),
        Call("a", (("x", 1),)),
        Call("a", (("x", 2),)),
        Call("a", (), ((1, 2),)),
        Call("a", (), ((1,), (2,))),
    ]
    program = (
        "from nnabla_adaloss.communicators.agreement import Call, call_number\n"
        f"print(*map(call_number, {calls!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    told = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert list(map(int, told.split())) == list(map(call_number, calls))
    assert len({*told.split()}) == len(calls)


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
    answers = iter([list(map(call_number, calls)), calls])
    group = ProcessGroup((4, 7), SimpleNamespace(allgather=lambda own: next(answers)))
    with pytest.raises(CollectiveMismatchError, match=message):
        group.compare_calls(calls[0])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((0.0, -0.0, 0.0), "'scale' is 0.0 on ranks 0, 2; -0.0 on rank 1;"),
        ((float("nan"), 1.0, float("nan")), "'scale' is nan on ranks 0, 2; 1.0 on rank 1;"),
    ],
)
def test_values_are_told_apart_as_they_are_written(values, told):
    answers = iter([[[checksum(np.array(value))] for value in values], list(values)])
    group = ProcessGroup((0, 1, 2), SimpleNamespace(allgather=lambda own: next(answers)))
    with pytest.raises(RankDisagreementError, match=re.escape(told)):
        group.compare_values({"scale": np.array(values[0])}, "scales")
