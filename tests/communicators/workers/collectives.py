# SPDX-License-Identifier: Apache-2.0
"""Every exchange on the ranks it is started on, against plain NumPy on all ranks' values."""

from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from mpi4py import MPI
from nnabla import NdArray

from nnabla_adaloss import CollectiveMismatchError, MPICommunicator, RankDisagreementError
from nnabla_adaloss.communicators.messages import SMALL_ARRAY

SHAPES = [(7, 3)] * 60 + [(SMALL_ARRAY + 1,), (400, 400), (), (0, 5), (1,)]


def ndarray(values):
    return NdArray.from_numpy_array(np.asarray(values))


def values_of(rank):
    rng = np.random.default_rng(rank)
    return [np.float32(rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, shape)) for shape in SHAPES]


def assert_same_bits_on_all_ranks(comm, arrays):
    everybody = MPI.COMM_WORLD.allgather([array.data.tobytes() for array in arrays])
    assert all(one == everybody[0] for one in everybody)


def check_ranks_know_each_other(comm):
    assert sorted(MPI.COMM_WORLD.allgather(comm.rank)) == list(range(comm.size))
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)  # all on one host
    comm.barrier()


def check_all_reduce_sums_in_every_layout(comm):
    for division in (False, True):
        arrays = [ndarray(values) for values in values_of(comm.rank)]
        comm.all_reduce(arrays, division=division, inplace=division)  # accepted, and all the same
        assert_same_bits_on_all_ranks(comm, arrays)
        everybody = [values_of(rank) for rank in range(comm.size)]
        for array, *parts in zip(arrays, *everybody):
            exact = np.sum(parts, axis=0, dtype=np.float64) / (comm.size if division else 1)
            magnitude = np.sum(np.abs(parts), axis=0, dtype=np.float64)
            assert np.all(np.abs(array.data - exact) <= 1e-7 * comm.size * magnitude)


def check_dtypes_stay_and_only_a_result_overflows(comm):
    one = ndarray(np.float32([comm.rank + 1]))
    comm.all_reduce(one)
    assert one.data[0] == comm.size * (comm.size + 1) / 2
    comm.all_reduce([])
    for dtypes, size in ((("f4", "f2", "f8"), 1000), (("f2",), SMALL_ARRAY + 3)):
        arrays = [ndarray(np.full(size, comm.rank + 0.5, dtype)) for dtype in dtypes]
        comm.all_reduce(arrays)
        assert tuple(array.dtype for array in arrays) == dtypes
        assert all((array.data == sum(rank + 0.5 for rank in range(comm.size))).all() for array in arrays)
    total, mean = (ndarray(np.full(3, 60000, np.float16)) for _ in range(2))
    comm.all_reduce(total)
    comm.all_reduce(mean, division=True)
    assert (total.data == (np.inf if comm.size > 1 else 60000)).all()
    assert (mean.data == 60000).all()


def check_non_finite_values_reach_every_rank(comm):
    values = np.zeros((2, 5), np.float32)
    if comm.rank == comm.size - 1:
        values[0, 1], values[1, 2] = np.inf, np.nan
    arrays = [ndarray(row) for row in values]
    comm.all_reduce(arrays)
    assert np.isposinf(arrays[0].data[1])
    assert np.isnan(arrays[1].data[2])
    assert np.isfinite(arrays[0].data).sum() == 4


def check_nan_payloads_and_subnormals_are_the_same_bits(comm):
    payloads = np.full(999, 0x7FC00001 + comm.rank, np.uint32).view(np.float32)
    tiny = np.full(999, (comm.rank + 1) * 2.0**-149, np.float32)
    arrays = [ndarray(payloads), ndarray(tiny), ndarray(np.full(9, -0.0, np.float32))]
    comm.all_reduce(arrays)
    assert_same_bits_on_all_ranks(comm, arrays)
    assert (arrays[1].data == comm.size * (comm.size + 1) / 2 * 2.0**-149).all()
    assert np.signbit(arrays[2].data).all()


def check_lazily_zero_everywhere_stays_so(comm):
    nowhere, somewhere = (ndarray(np.ones(4, np.float32)) for _ in range(2))
    unwritten = NdArray((4,))
    nowhere.zero()
    unwritten.zero()
    if comm.rank:
        somewhere.zero()
    comm.all_reduce([nowhere, somewhere, unwritten])
    assert (nowhere.zeroing, unwritten.zeroing, somewhere.zeroing) == (True, True, False)
    assert (somewhere.data == 1).all()


def check_bcast_copies_bits_and_dtypes(comm):
    for src in range(comm.size):
        given = [
            np.float32([np.nan, -0.0, 1e-45]),
            np.int32([2**31 - 1 - comm.rank]),
            np.float16([comm.rank]),
            np.zeros((0, 2), np.float32),
        ]
        arrays = [ndarray(values) if src == comm.rank else NdArray(values.shape) for values in given]
        comm.bcast(arrays, src)
        assert_same_bits_on_all_ranks(comm, arrays)
        assert [array.dtype for array in arrays] == ["f4", "i4", "f2", "f4"]
        assert arrays[1].data[0] == 2**31 - 1 - src


def check_groups(comm):
    if comm.size < 3:
        return
    last_two = [comm.size - 1, comm.size - 2]  # not in order: the last rank is number 0 of the group
    assert comm.new_group(("tail", last_two)) == "tail"
    assert comm.list_groups() == {"world": list(range(comm.size)), "tail": last_two}
    assert comm.find_group("tail") == last_two
    assert comm.find_group("none") == []
    own = ndarray(np.float32([comm.rank]))
    if comm.rank not in last_two:
        with pytest.raises(ValueError, match=f"rank {comm.rank} is not in 'tail'"):
            comm.all_reduce(own, group="tail")
        return
    comm.all_reduce(own, division=True, group="tail")
    assert own.data[0] == comm.size - 1.5
    chosen = ndarray(np.float32([comm.rank]))
    comm.bcast(chosen, 0, group="tail")
    assert chosen.data[0] == comm.size - 1
    with pytest.raises(ValueError, match="exists already"):
        comm.new_group(("tail", [0]))


def check_maxima_and_objects(comm):
    last = comm.size - 1
    nan_on_one = np.array([[comm.rank, np.nan if comm.rank == 0 else 5.0], [-np.inf, -1.0 - comm.rank]])
    layout = np.asfortranarray if comm.rank else np.ascontiguousarray
    found = comm.all_reduce_max_float(layout(nan_on_one))
    np.testing.assert_array_equal(found, [[last, np.nan], [-np.inf, -1.0]], strict=True)
    np.testing.assert_array_equal(comm.all_reduce_max_float(comm.rank), np.float64(last), strict=True)
    assert comm.broadcast_object({"seed": comm.rank}, src=last) == {"seed": last}


def check_agreement(comm):
    same = {"w": ndarray(np.float32([1, np.nan])), "scale": 2.0, "zero": NdArray((3,))}
    same["zero"].zero()
    comm.check_agreement(same)
    assert same["zero"].zeroing
    comm.check_agreement([])
    comm.check_agreement([np.float64(3.0), 7])
    if comm.size == 1:
        return
    told = r"gradients differ .* 'b' is checksum 0x[0-9a-f]{8} on .*checksum 0x[0-9a-f]{8} on"
    large = np.ones(100, np.float32)
    large[57] = 0.0 if comm.rank else -0.0
    with pytest.raises(RankDisagreementError, match=told):
        comm.check_agreement({"a": 1.0, "b": ndarray(large), "c": large}, "gradients")
    others = f"rank {1}" if comm.size == 2 else f"ranks {', '.join(map(str, range(1, comm.size)))}"
    with pytest.raises(RankDisagreementError, match=f"'1' is 8.0 on rank 0; 16.0 on {others}; 1 of 2 differ"):
        comm.check_agreement([3.0, 16.0 if comm.rank else 8.0], "scales")


def check_different_calls_raise_everywhere_and_do_no_harm(comm):
    if comm.size == 1:
        return
    arrays = [ndarray(np.ones(shape, np.float32)) for shape in ((2, 3), (4,), (4,))]
    odd = comm.rank == comm.size - 1
    with pytest.raises(CollectiveMismatchError, match=r"entry 1 .*all_reduce is \(4,\) on .*; \(2, 3\) on"):
        comm.all_reduce([arrays[0], arrays[0]] if odd else arrays[:2])
    with pytest.raises(CollectiveMismatchError, match=r"entry 2 .* is missing on .*; entries: 2 on .*; 3 on"):
        comm.all_reduce(arrays if odd else arrays[:2])
    with pytest.raises(CollectiveMismatchError, match=r"division=False.* on .*division=True"):
        comm.all_reduce(arrays, division=odd)
    with pytest.raises(CollectiveMismatchError, match=r"barrier\(\) on .*all_reduce\(3 entries.* on"):
        comm.all_reduce(arrays) if odd else comm.barrier()
    with pytest.raises(CollectiveMismatchError, match=r"src=0\) on .*src=1\) on"):
        comm.bcast(arrays, int(odd))
    with pytest.raises(CollectiveMismatchError, match=r"shape=\(1,\)\) on .*shape=\(2,\)\) on"):
        comm.all_reduce_max_float([1, 2] if odd else [1])
    assert all((array.data == 1).all() for array in arrays)
    comm.all_reduce(arrays)
    assert all((array.data == comm.size).all() for array in arrays)


def check_our_messages_do_not_mix_with_the_users(comm):
    ours = comm._groups["world"].comm
    assert MPI.Comm.Compare(ours, MPI.COMM_WORLD) == MPI.CONGRUENT  # not identical


def check_what_cannot_be_done_is_said(comm):
    with pytest.raises(TypeError, match="no nnabla context is needed"):
        MPICommunicator(nn.Context())
    early = MPICommunicator()
    for ask in (early.barrier, lambda: early.local_rank):
        with pytest.raises(RuntimeError, match="call `init"):
            ask()
    comm.init()  # again
    comm.barrier()
    with pytest.raises(TypeError, match=r"data\[0\] has dtype int32"):
        comm.all_reduce(ndarray(np.ones(2, np.int32)))
    with pytest.raises(NotImplementedError, match=r"comm\.all_reduce\(grads\)"):
        comm.all_reduce_callback([], 1024)
    for ranks in ([], [0, 0], [comm.size], [-1]):
        with pytest.raises(ValueError, match="distinct numbers"):
            comm.new_group(("bad", ranks))
    with pytest.raises(ValueError, match="no group 'bad'"):
        comm.all_reduce([], group="bad")
