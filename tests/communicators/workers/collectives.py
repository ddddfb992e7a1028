# SPDX-License-Identifier: Apache-2.0
"""Every exchange on the ranks it is started on, against plain NumPy on all ranks' values."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from nnabla import NdArray

from nnabla_adaloss.communicators import CollectiveMismatchError, MPICommunicator, RankDisagreementError
from nnabla_adaloss.communicators.messages import SMALL_ARRAY

COMM = MPICommunicator()
COMM.init()
RANK, SIZE = COMM.rank, COMM.size
SHAPES = [(7, 3)] * 60 + [(SMALL_ARRAY + 1,), (400, 400), (), (0, 5), (1,)]


def ndarray(values):
    array = NdArray(np.shape(values))
    array.cast(np.asarray(values).dtype)
    array.data = np.asarray(values)
    return array


def values_of(rank, dtype=np.float32):
    rng = np.random.default_rng(rank)
    return [
        (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, shape)).astype(dtype) for shape in SHAPES
    ]


def assert_same_bits_on_all_ranks(arrays):
    everybody = COMM._job.comm.allgather([array.data.tobytes() for array in arrays])
    assert all(one == everybody[0] for one in everybody)


def check_ranks_know_each_other():
    assert sorted(COMM._job.comm.allgather(RANK)) == list(range(SIZE))
    assert (COMM.local_rank, COMM.local_size) == (RANK, SIZE)  # all on one host
    COMM.barrier()


def check_all_reduce_sums_in_every_layout():
    for division in (False, True):
        for inplace in (False, True):
            arrays = [ndarray(values) for values in values_of(RANK)]
            COMM.all_reduce(arrays, division=division, inplace=inplace)
            assert_same_bits_on_all_ranks(arrays)
            everybody = [values_of(rank) for rank in range(SIZE)]
            for array, *parts in zip(arrays, *everybody):
                exact = np.sum(parts, axis=0, dtype=np.float64) / (SIZE if division else 1)
                magnitude = np.sum(np.abs(parts), axis=0, dtype=np.float64)
                assert np.all(np.abs(array.data - exact) <= 1e-7 * SIZE * magnitude)


def check_all_reduce_takes_one_array_and_none():
    one = ndarray(np.float32([RANK + 1]))
    COMM.all_reduce(one)
    assert one.data[0] == SIZE * (SIZE + 1) / 2
    COMM.all_reduce([])


def check_dtypes_stay():
    single, half, double = (ndarray(np.full(1000, RANK + 0.5, dtype)) for dtype in ("f4", "f2", "f8"))
    large_half = ndarray(np.full(SMALL_ARRAY + 3, 0.25, np.float16))
    COMM.all_reduce([single, half, double, large_half])
    assert [a.dtype for a in (single, half, double, large_half)] == ["f4", "f2", "f8", "f2"]
    assert (large_half.data == 0.25 * SIZE).all()
    for array in (single, half, double):
        assert (array.data == sum(rank + 0.5 for rank in range(SIZE))).all()


def check_half_precision_overflows_only_in_its_own_result():
    total, mean = (ndarray(np.full(3, 60000, np.float16)) for _ in range(2))
    COMM.all_reduce(total)
    COMM.all_reduce(mean, division=True)
    assert (total.data == (np.inf if SIZE > 1 else 60000)).all()
    assert (mean.data == 60000).all()


def check_non_finite_values_reach_every_rank():
    values = np.zeros((2, 5), np.float32)
    if RANK == SIZE - 1:
        values[0, 1], values[1, 2] = np.inf, np.nan
    arrays = [ndarray(row) for row in values]
    COMM.all_reduce(arrays)
    assert np.isposinf(arrays[0].data[1])
    assert np.isnan(arrays[1].data[2])
    assert np.isfinite(arrays[0].data).sum() == 4


def check_nan_payloads_and_subnormals_are_the_same_bits():
    payloads = np.full(999, 0x7FC00001 + RANK, np.uint32).view(np.float32)
    tiny = np.full(999, (RANK + 1) * 2.0**-149, np.float32)
    arrays = [ndarray(payloads), ndarray(tiny), ndarray(np.full(9, -0.0, np.float32))]
    COMM.all_reduce(arrays)
    assert_same_bits_on_all_ranks(arrays)
    assert (arrays[1].data == SIZE * (SIZE + 1) / 2 * 2.0**-149).all()
    assert np.signbit(arrays[2].data).all()


def check_lazily_zero_everywhere_stays_so():
    nowhere, somewhere, unwritten = (
        ndarray(np.ones(4, np.float32)),
        ndarray(np.ones(4, np.float32)),
        NdArray((4,)),
    )
    nowhere.zero()
    unwritten.zero()
    if RANK:
        somewhere.zero()
    COMM.all_reduce([nowhere, somewhere, unwritten])
    assert nowhere.zeroing
    assert unwritten.zeroing
    assert not somewhere.zeroing
    assert (somewhere.data == 1).all()


def check_integers_are_refused():
    with pytest.raises(TypeError, match="element 0 has dtype int32"):
        COMM.all_reduce(ndarray(np.ones(2, np.int32)))


def check_bcast_copies_bits_and_dtypes():
    for src in range(SIZE):
        given = [
            np.float32([np.nan, -0.0, 1e-45]),
            np.int32([2**31 - 1 - RANK]),
            np.float16([RANK]),
            np.zeros((0, 2), np.float32),
        ]
        arrays = [ndarray(values) for values in given] if src == RANK else [NdArray(v.shape) for v in given]
        COMM.bcast(arrays, src)
        assert_same_bits_on_all_ranks(arrays)
        assert [array.dtype for array in arrays] == ["f4", "i4", "f2", "f4"]
        assert arrays[1].data[0] == 2**31 - 1 - src


def check_reduce_gives_the_sum_to_one_rank():
    for dst in range(SIZE):
        for dtype in (np.float32, np.float16):
            arrays = [ndarray(np.full(shape, RANK + 1, dtype)) for shape in SHAPES]
            COMM.reduce(arrays, dst, division=True)
            expected = (SIZE + 1) / 2 if dst == RANK else RANK + 1
            assert all((array.data == expected).all() for array in arrays)


def check_all_gather():
    own = ndarray(np.full((2, 3), RANK, np.float16))
    everybody = [NdArray((2, 3)) for _ in range(SIZE)]
    COMM.all_gather(own, everybody)
    assert [array.data[1, 2] for array in everybody] == list(range(SIZE))
    with pytest.raises(ValueError, match="must hold one array of 6 elements"):
        COMM.all_gather(own, [*everybody, NdArray((2, 3))])


def check_reduce_scatter():
    for dtype in (np.float32, np.float16):
        parts = [ndarray(np.full((2, 3), 10 * part + RANK, dtype)) for part in range(SIZE)]
        own = ndarray(np.zeros((2, 3), dtype))
        COMM.reduce_scatter(parts, own, division=True)
        assert own.dtype == dtype
        assert (own.data == np.float32(10 * RANK + (SIZE - 1) / 2)).all()
        assert parts[0].data[0, 0] == RANK


def check_groups():
    if SIZE < 3:
        return
    last_two = [SIZE - 1, SIZE - 2]  # not in order: the last rank is number 0 of the group
    assert COMM.new_group(("tail", last_two)) == "tail"
    assert COMM.list_groups() == {"world": list(range(SIZE)), "tail": last_two}
    assert COMM.find_group("tail") == last_two
    assert COMM.find_group("none") == []
    own = ndarray(np.float32([RANK]))
    if RANK not in last_two:
        with pytest.raises(ValueError, match=f"rank {RANK} is not in 'tail'"):
            COMM.all_reduce(own, group="tail")
        return
    COMM.all_reduce(own, division=True, group="tail")
    assert own.data[0] == SIZE - 1.5
    chosen = ndarray(np.float32([RANK]))
    COMM.bcast(chosen, 0, group="tail")
    assert chosen.data[0] == SIZE - 1
    with pytest.raises(ValueError, match="exists already"):
        COMM.new_group(("tail", [0]))


def check_bad_groups_are_refused():
    for ranks in ([], [0, 0], [SIZE], [-1]):
        with pytest.raises(ValueError, match="distinct numbers"):
            COMM.new_group(("bad", ranks))
    with pytest.raises(ValueError, match="no group 'bad'"):
        COMM.all_reduce([], group="bad")


def check_maxima():
    assert COMM.all_reduce_max_int([RANK, -RANK, 2**62 + RANK]) == [SIZE - 1, 0, 2**62 + SIZE - 1]
    assert COMM.all_reduce_max_int([]) == []
    nan_on_one = np.array([[RANK, np.nan if RANK == 0 else 5.0], [-np.inf, -1.0 - RANK]])
    np.testing.assert_array_equal(
        COMM.all_reduce_max_float(nan_on_one), [[SIZE - 1, np.nan], [-np.inf, -1.0]]
    )
    assert COMM.all_reduce_max_float(float(RANK)) == SIZE - 1
    columns_first = np.asfortranarray if RANK else np.ascontiguousarray
    grid = columns_first(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(COMM.all_reduce_max_float(grid), np.arange(6.0).reshape(2, 3))
    assert COMM.any(RANK == SIZE - 1)
    assert not COMM.any(False)


def check_objects():
    assert COMM.broadcast_object({"seed": RANK}, src=SIZE - 1) == {"seed": SIZE - 1}


def check_agreement():
    same = {"w": ndarray(np.float32([1, np.nan])), "scale": 2.0, "zero": NdArray((3,))}
    same["zero"].zero()
    COMM.check_agreement(same)
    assert same["zero"].zeroing
    COMM.check_agreement([])
    COMM.check_agreement([np.float64(3.0), 7])
    if SIZE == 1:
        return
    large = np.zeros(100, np.float32)
    large[57] = 0.0 if RANK else -0.0
    with pytest.raises(RankDisagreementError, match=r"gradients differ .* 'b' is checksum 0x\w+ on"):
        COMM.check_agreement({"a": 1.0, "b": ndarray(large), "c": large}, "gradients")
    others = f"rank {1}" if SIZE == 2 else f"ranks {', '.join(map(str, range(1, SIZE)))}"
    with pytest.raises(RankDisagreementError, match=f"'1' is 8.0 on rank 0; 16.0 on {others}; 1 of 2 differ"):
        COMM.check_agreement([3.0, 16.0 if RANK else 8.0], "scales")


def check_different_calls_raise_everywhere_and_do_no_harm():
    if SIZE == 1:
        return
    arrays = [ndarray(np.ones(shape, np.float32)) for shape in ((2, 3), (4,), (4,))]
    odd = RANK == SIZE - 1
    with pytest.raises(CollectiveMismatchError, match=r"entry 1 .*all_reduce is \(4,\) on .*; \(2, 3\) on"):
        COMM.all_reduce([arrays[0], arrays[0]] if odd else arrays[:2])
    with pytest.raises(CollectiveMismatchError, match=r"entry 2 .* is missing on .*; entries: 2 on .*; 3 on"):
        COMM.all_reduce(arrays if odd else arrays[:2])
    with pytest.raises(CollectiveMismatchError, match=r"division=False.* on .*division=True"):
        COMM.all_reduce(arrays, division=odd)
    with pytest.raises(CollectiveMismatchError, match=r"barrier\(\) on .*all_reduce\(3 entries.* on"):
        COMM.all_reduce(arrays) if odd else COMM.barrier()
    with pytest.raises(CollectiveMismatchError, match=r"src=0\) on .*src=1\) on"):
        COMM.bcast(arrays, int(odd))
    with pytest.raises(CollectiveMismatchError, match=r"length=1\) on .*length=2\) on"):
        COMM.all_reduce_max_int([1, 2] if odd else [1])
    assert all((array.data == 1).all() for array in arrays)
    COMM.all_reduce(arrays)
    assert all((array.data == SIZE).all() for array in arrays)


def check_user_messages_do_not_mix_with_ours():
    if SIZE == 1:
        return
    own = ndarray(np.float32([1]))
    request = COMM._job.comm.Ibarrier()  # the user's, still open on the user's communicator
    COMM.all_reduce(own)
    request.Wait()
    assert own.data[0] == SIZE


def check_callback_says_what_to_use():
    with pytest.raises(NotImplementedError, match=r"comm\.all_reduce\(grads\)"):
        COMM.all_reduce_callback([], 1024)


if __name__ == "__main__":
    with COMM.abort_on_exception():
        for name, check in list(globals().items()):
            if name.startswith("check_"):
                check()
                if RANK == 0:
                    print(name, file=sys.stdout, flush=True)
        COMM.barrier()
