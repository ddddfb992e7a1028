# SPDX-License-Identifier: Apache-2.0
"""The processes of an MPI job: their groups, their exchanges, and their common end when one fails."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ContextManager,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import numpy.typing as npt

from . import failure
from .agreement import (
    Call,
    CollectiveMismatchError,
    describe_mismatch,
    differing,
    fingerprint,
    lower_and_upper,
)

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class ProcessGroup:
    """Named ranks and the MPI communicator between them.

    Attributes:
        ranks: the members' ranks in the job, in the order of their numbers in the group.
        comm: mpi4py communicator of the members; MPI's null communicator on all other ranks.
        mpi: the module `mpi4py.MPI`, which is imported only when a communicator is made.
    """

    name: str
    ranks: Tuple[int, ...]
    comm: MPI.Comm
    mpi: Any

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def compare_calls(self, call: Call) -> None:
        """Wait until all members make a call; a CollectiveMismatchError on all of them unless it is the same.

        It takes a message of 16 bytes.
        """
        bounds = lower_and_upper(np.array([fingerprint(call)], np.int64))
        if differing(self.reduce_ints(bounds, self.mpi.MIN)):
            raise CollectiveMismatchError(describe_mismatch(self.ranks, self.comm.allgather(call)))

    def reduce_ints(self, values: npt.NDArray[Any], operation: MPI.Op) -> npt.NDArray[Any]:
        """Reduce integers over the members in place, and return them."""
        self.comm.Allreduce(self.mpi.IN_PLACE, values, operation)
        return values


class Job:
    """The processes that train together.

    Args:
        comm: their mpi4py communicator; None: that of all processes of the job.
        timeout_s: seconds that one exchange may wait for the other ranks before this process ends; None:
            forever.

    Attributes:
        groups: groups of ranks by name; `"world"` has all ranks.
        iteration: the training iteration, which a timeout names; None: unknown.
    """

    def __init__(self, comm: Optional[MPI.Intracomm], timeout_s: Optional[float]) -> None:
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
        self.comm: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
        self.groups: Dict[str, ProcessGroup] = {}
        self.iteration: Optional[int] = None
        self._watchdog = None if timeout_s is None else failure.Watchdog(timeout_s, self._end_stalled)
        self._exchanges = 0

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.comm.Get_size()

    @property
    def local(self) -> MPI.Comm:
        """The mpi4py communicator of the processes on this host."""
        self.group("world")
        return self._local

    def init(self) -> None:
        """Make the group of all ranks, and end all of them when one raises; later calls do nothing."""
        if self.groups:
            return
        ranks = tuple(range(self.size))
        with self._watched("init", ranks):
            self.groups["world"] = ProcessGroup("world", ranks, self.comm.Dup(), self._mpi)
            self._local = self.comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        if self.size > 1:
            failure.on_uncaught_exception(self.end)

    def group(self, name: str) -> ProcessGroup:
        """The group with a name, of which this rank is a member.

        Raises:
            RuntimeError: `init` was not called.
            ValueError: there is no such group, or this rank is not in it.
        """
        if not self.groups:
            raise RuntimeError("call `init()` on every rank before anything else")
        if name not in self.groups:
            raise ValueError(f"`group`: there is no group {name!r}, only {sorted(self.groups)}")
        group = self.groups[name]
        if self.rank not in group.ranks:
            raise ValueError(f"`group`: rank {self.rank} is not in {name!r}, which is {list(group.ranks)}")
        return group

    def new_group(self, name: str, ranks: Sequence[int]) -> None:
        """Make a group of some of the ranks, numbered in this order; all ranks make this call."""
        ranks = tuple(int(rank) for rank in ranks)
        if name in self.groups:
            raise ValueError(f"group {name!r} exists already, with ranks {list(self.groups[name].ranks)}")
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(
                f"group {name!r}: ranks must be distinct numbers from 0 to {self.size - 1}, got {list(ranks)}"
            )
        with self.exchange("new_group", name=name, ranks=ranks) as world:
            chosen = world.comm.Get_group().Incl(ranks)
            self.groups[name] = ProcessGroup(name, ranks, world.comm.Create(chosen), self._mpi)
            chosen.Free()

    @contextmanager
    def exchange(
        self, operation: str, group: str = "world", entries: Iterable[Hashable] = (), **options: Hashable
    ) -> Iterator[ProcessGroup]:
        """A watched block that begins once all members of a group have made the same call; yields the group.

        Args:
            operation: name of the call.
            group: name of the group.
            entries: the shapes or names of its data; the same on each rank.
            **options: its other arguments; the same on each rank.

        Raises:
            CollectiveMismatchError: on every rank, when their calls differ.
        """
        members = self.group(group)
        self._exchanges += 1
        with self._watched(operation, members.ranks):
            members.compare_calls(Call(operation, tuple(options.items()), tuple(entries)))
            yield members

    def end(self, error: BaseException) -> None:
        """Print the error of this rank, and end all processes."""
        failure.report_exception(self.rank, error)
        self.abort(failure.exit_code_of(error))

    def abort(self, exit_code: int) -> None:
        """End all processes, at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.comm.Abort(exit_code)

    def _end_stalled(self, exchange: str, timeout_s: float) -> None:
        failure.end_stalled_process(self.rank, exchange, timeout_s)

    def _watched(self, operation: str, ranks: Tuple[int, ...]) -> ContextManager[None]:
        if self._watchdog is None:
            return nullcontext()

        def describe() -> str:
            iteration = "" if self.iteration is None else f", iteration {self.iteration}"
            return f"{operation} with ranks {list(ranks)} (exchange {self._exchanges}{iteration})"

        return self._watchdog.watch(describe)
