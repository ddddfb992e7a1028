# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training on CPU hosts: nnabla's communicator interface over MPI."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Dict, List, NoReturn, Optional, Tuple, TypeVar, Union

import numpy as np
import numpy.typing as npt
from nnabla import NdArray

from ..host_context import HOST, dtype_of, host_view
from . import failure
from .agreement import Call, ProcessGroup
from .messages import Arrays, Packer, array_list

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class MPICommunicator:
    """nnabla's communicator over MPI: gradients of CPU processes, summed in float32.

    It replaces `nnabla.communicators.MultiProcessCommunicator` on hosts without GPUs for data-parallel
    training: `bcast`, `all_reduce`, `barrier` and groups. Every exchange is collective: all ranks of the
    group make the same calls, with the same shapes and in one order, or all raise `CollectiveMismatchError`.

    Sums are computed in float32, whatever the dtypes, and have the same bits on all ranks. Not thread-safe.

    Args:
        comm: the mpi4py communicator of the training's processes. Default: all of the job.
        timeout_s: seconds that one exchange may wait. After that the process reports where it waits and ends
            the job. It must exceed the longest time that a rank works alone between exchanges, such as a
            validation on rank 0. Default None: wait forever.

    Attributes:
        iteration: the training iteration, set by the loop and named by a timeout; None: unknown.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
        TypeError: `comm` is not an mpi4py communicator.

    Example:
        >>> from nnabla import NdArray
        >>> from nnabla_adaloss import MPICommunicator
        >>> comm = MPICommunicator()
        >>> comm.init()
        >>> gradient = NdArray((2, 3))
        >>> gradient.fill(1.0)
        >>> comm.all_reduce([gradient])
        >>> float(gradient.data[0, 0]) == comm.size
        True
    """

    def __init__(self, comm: Optional[MPI.Intracomm] = None, *, timeout_s: Optional[float] = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(
                f"MPICommunicator needs mpi4py and an MPI library: pip install nnabla-adaloss[mpi] ({error})"
            ) from error
        if comm is not None and not isinstance(comm, MPI.Intracomm):
            raise TypeError(
                "`comm` must be an mpi4py communicator, or None for all processes of the job, got a "
                f"{type(comm).__name__}; no nnabla context is needed here"
            )
        self._mpi = MPI
        self._comm: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
        self._groups: Dict[str, ProcessGroup] = {}
        self._packer = Packer()
        self._watchdog = failure.Watchdog(timeout_s, partial(failure.end_stalled_process, self.rank))
        self._exchanges = 0
        self.iteration: Optional[int] = None

    def init(self) -> None:
        """Set up the exchange; every rank must call this before anything else.

        From then on an uncaught exception (`sys.excepthook`) ends all ranks: the others would wait forever.
        """
        if self._groups:
            return
        ranks = tuple(range(self.size))
        with self._watchdog.watch(partial(self._describe, "init", ranks)):
            self._groups["world"] = ProcessGroup(ranks, self._comm.Dup())
            self._local_comm = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        if self.size > 1:
            failure.on_uncaught_exception(self._end)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._comm.Get_rank()

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._comm.Get_size()

    @property
    def local_rank(self) -> int:
        """This process's number among those on its host."""
        return self._on_this_host.Get_rank()

    @property
    def local_size(self) -> int:
        """Number of processes on this host."""
        return self._on_this_host.Get_size()

    def new_group(self, name_ranks: Tuple[str, Sequence[int]]) -> str:
        """Name some of the ranks, for the `group` argument of the exchanges. All ranks make this call.

        Args:
            name_ranks: the name, which is returned, and the ranks in the order of their numbers in the group.

        Raises:
            ValueError: the name exists already, or the ranks are missing, repeated or out of range.
        """
        name, ranks = name_ranks[0], tuple(map(int, name_ranks[1]))
        if name in self._groups:
            raise ValueError(f"group {name!r} exists already, with ranks {list(self._groups[name].ranks)}")
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(
                f"group {name!r}: ranks must be distinct numbers from 0 to {self.size - 1}, got {list(ranks)}"
            )
        with self._exchange("new_group", name=name, ranks=ranks) as world:
            chosen = world.comm.Get_group().Incl(ranks)
            self._groups[name] = ProcessGroup(ranks, world.comm.Create(chosen))
            chosen.Free()
        return name

    def find_group(self, group: str) -> List[int]:
        """The ranks of a group; empty when there is no such group."""
        return self.list_groups().get(group, [])

    def list_groups(self) -> Dict[str, List[int]]:
        """The ranks of every group, by name."""
        return {name: list(group.ranks) for name, group in self._groups.items()}

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._exchange("barrier"):
            pass  # comparing the calls has waited for all ranks

    def bcast(self, data: Arrays, src: int, inplace: bool = False, group: str = "world") -> None:
        """Copy the arrays of one rank, with their dtypes, to every rank, bit for bit.

        Args:
            data: NdArray or sequence of them, of any dtype.
            src: the rank that sends, as numbered in the group.
            inplace: for compatibility: arrays are never packed.
            group: name of the group.
        """
        arrays = array_list("data", data)
        with self._exchange("bcast", group, [array.shape for array in arrays], src=int(src)) as members:
            dtypes = members.comm.bcast([dtype_of(array).str for array in arrays], src)
            for array, dtype in zip(arrays, dtypes):
                if dtype_of(array) != dtype:
                    array.cast(np.dtype(dtype), HOST)
                if array.size:
                    members.comm.Bcast(host_view(array).view(np.uint8), src)

    def all_reduce(
        self, data: Arrays, division: bool = False, inplace: bool = False, group: str = "world"
    ) -> None:
        """Replace every array, on every rank, by its sum over the ranks.

        The sum keeps infinities and NaNs, so all ranks see an overflow on any of them. An array that is
        lazily zero (`NdArray.zero`, not written since) on all ranks stays so: solvers skip its parameter.

        Args:
            data: NdArray or sequence of them, of floating point dtypes, which do not change.
            division: divide the sum by the number of ranks, before it is rounded to a narrower dtype.
            inplace: for compatibility: small arrays are always packed.
            group: name of the group.

        Raises:
            CollectiveMismatchError: on every rank, when the ranks' calls or shapes differ.
            TypeError: an array is not floating point.
        """
        arrays = array_list("data", data, floating=True)
        shapes = [array.shape for array in arrays]
        with self._exchange("all_reduce", group, shapes, division=bool(division)) as members:
            if len(members.ranks) == 1:
                return
            lazily_zero = np.array([array.zeroing for array in arrays], np.int8)
            members.comm.Allreduce(self._mpi.IN_PLACE, lazily_zero, self._mpi.MIN)

            def sum_over_ranks(values: npt.NDArray[np.float32]) -> None:
                members.comm.Allreduce(self._mpi.IN_PLACE, values, self._mpi.SUM)
                if division:
                    values /= len(members.ranks)

            written = [array for array, skipped in zip(arrays, lazily_zero) if not skipped]
            self._packer.exchange(written, sum_over_ranks)

    def all_reduce_callback(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: a NotImplementedError that names the alternative."""
        raise NotImplementedError(
            "Variable.backward(communicator_callbacks=...) takes only objects made by nnabla's own GPU "
            "communicator. Call `comm.all_reduce(grads)` after `backward`, or pass `comm` to the updater."
        )

    def all_reduce_max_float(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The largest of each value over the ranks, as float64; NaN where any rank has a NaN.

        `values` is an array of any shape, the same on each rank.
        """
        own = np.array(values, np.float64, order="C")
        with self._exchange("all_reduce_max_float", shape=own.shape) as world:
            # Gather: MPI's own maximum of floats loses a NaN that is on one rank only.
            everybody = np.empty((len(world.ranks), *own.shape))
            world.comm.Allgather(own, everybody)
            return np.asarray(everybody.max(axis=0))

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Send a picklable object of one rank to every rank, and return it."""
        with self._exchange("broadcast_object", src=int(src)) as world:
            received: T = world.comm.bcast(obj, src)
            return received

    def check_agreement(
        self, values: Union[Mapping[str, Any], Sequence[Any]], what: str = "parameters"
    ) -> None:
        """Compare arrays or numbers bit for bit across the ranks, by a CRC-32 of each.

        Args:
            values: NdArrays, NumPy arrays or numbers, by name or in a sequence.
            what: a noun for the error.

        Raises:
            RankDisagreementError: on every rank; names the first value that differs, and tells it by rank.

        Example:
            >>> from nnabla_adaloss import MPICommunicator
            >>> comm = MPICommunicator()
            >>> comm.init()
            >>> comm.check_agreement({"loss scale": 1024.0}, "scales")
        """
        named = values if isinstance(values, Mapping) else {str(i): value for i, value in enumerate(values)}
        with self._exchange("check_agreement", entries=named, what=what) as world:
            hosted = {}
            for name, value in named.items():
                # A lazily zero NdArray stays so.
                hosted[name] = value.get_data("r") if isinstance(value, NdArray) else np.asarray(value)
            world.compare_values(hosted, what)

    def abort(self, exit_code: int = 1) -> None:
        """End all processes of the job, at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(exit_code)

    @contextmanager
    def abort_on_exception(self) -> Iterator[None]:
        """End the job when the block raises on one of several ranks, and report the error.

        Unlike the hook of `init`, this covers `sys.exit` with an error, and test runners and notebooks, which
        catch exceptions. In a single process the exception passes as usual.

        Example:
            >>> from nnabla_adaloss import MPICommunicator
            >>> comm = MPICommunicator()
            >>> comm.init()
            >>> with comm.abort_on_exception():
            ...     pass  # training
        """
        try:
            yield
        except BaseException as error:
            if self.size > 1 and failure.exit_code_of(error):
                self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        failure.report(self.rank, "".join(lines))
        self.abort(failure.exit_code_of(error))

    @property
    def _on_this_host(self) -> MPI.Comm:
        self._group("world")  # made by `init`
        return self._local_comm

    def _group(self, name: str) -> ProcessGroup:
        """The group with a name, of which this rank must be a member."""
        if not self._groups:
            raise RuntimeError("call `init()` on every rank before anything else")
        if name not in self._groups:
            raise ValueError(f"`group`: there is no group {name!r}, only {sorted(self._groups)}")
        group = self._groups[name]
        if self.rank not in group.ranks:
            raise ValueError(f"`group`: rank {self.rank} is not in {name!r}, which is {list(group.ranks)}")
        return group

    @contextmanager
    def _exchange(
        self, operation: str, group: str = "world", entries: Iterable[Hashable] = (), **options: Hashable
    ) -> Iterator[ProcessGroup]:
        """Run a block once all members of a group have made an equal call, and watch both."""
        members = self._group(group)
        self._exchanges += 1
        with self._watchdog.watch(partial(self._describe, operation, members.ranks)):
            members.compare_calls(Call(operation, tuple(options.items()), tuple(entries)))
            yield members

    def _describe(self, operation: str, ranks: Tuple[int, ...]) -> str:
        iteration = "" if self.iteration is None else f", iteration {self.iteration}"
        return f"{operation} with ranks {list(ranks)} (exchange {self._exchanges}{iteration})"
