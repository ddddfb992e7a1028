# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from nnabla_adaloss.core.precision import stream_key


def test_keys_are_64_bits_and_differ() -> None:
    keys = [stream_key(seed, count) for seed in (-1, 0, 1, 2, 2**63) for count in range(1000)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    ones = sum(bin(key).count("1") for key in keys) / len(keys)
    assert abs(ones - 32) < 0.5


def test_keys_do_not_change_from_version_to_version() -> None:
    assert (stream_key(0, 0), stream_key(7, 3)) == (0xA706DD2F4D197E6F, 0x9AAF21D8296E1E3D)
