# SPDX-License-Identifier: Apache-2.0
"""Exchange between ranks: sums of gradients, statistics and flags."""

from __future__ import annotations

import json
import math
from itertools import compress, islice
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..communicators.agreement import RankDisagreementError, checksum
from ..communicators.messages import array_list
from ..core.verdict import PassVerdict
from ..engine import Outcome
from ..host_context import dtype_of, host_view
from ..kernels import Kernels

# The first of these on any rank is the cause; otherwise it is an overflow.
_CAUSES = PassVerdict.NONFINITE_LOSS, PassVerdict.NONFINITE_FORWARD, PassVerdict.HOPELESS, PassVerdict.RETRIES

Numbers = Mapping[str, Sequence[float]]
"""Numbers that a rank sends to the others, by name."""


class GradientExchange:
    """Sums gradients over ranks, and agrees on flags; `comm` needs `all_reduce` and `bcast`, or is None."""

    def __init__(self, comm: Optional[Any], grads: Optional[Sequence[nn.NdArray]], solver: Any) -> None:
        if comm is not None and not callable(getattr(comm, "all_reduce", None)):
            raise TypeError(
                f"comm must be a communicator with all_reduce(arrays, division, inplace); "
                f"{type(comm).__name__} has no all_reduce"
            )
        if grads is not None and not isinstance(grads, Collection):
            raise TypeError(f"grads must be a list of NdArrays, got {type(grads).__name__}")
        self._grads = [] if grads is None else array_list("grads", grads)
        if self._grads and comm is None:
            raise ValueError("grads are exchanged through comm, but comm is None: pass one, or no grads")
        self.comm: Any = comm
        self._solver = solver
        self._broadcast = False
        self._lengths: Dict[str, int] = {}  # names that all ranks have sent numbers under, and how many

    @property
    def parameters(self) -> Dict[str, nn.Variable]:
        """The solver's parameters, in the same order on every rank."""
        return dict(sorted(self._solver.get_parameters().items()))

    @property
    def grads(self) -> List[nn.NdArray]:
        """Exchanged gradients, in the same order on every rank."""
        return self._grads or [v.grad for v in self.parameters.values()]

    def begin_iteration(self, iteration: int, check_every: int) -> bool:
        """Set a communicator's iteration, broadcast parameters once, and return whether to compare ranks."""
        if hasattr(self.comm, "iteration"):
            self.comm.iteration = iteration
        if not self._broadcast:
            # The communicator's context cannot be read.
            sent = nn.NdArray.from_numpy_array(np.ones(1, np.float32))
            self.comm.bcast([sent], 0, inplace=True)
            if dtype_of(sent) != np.float32:
                raise ValueError(
                    f"comm was made in a half context: it makes {dtype_of(sent)} of all it sends, master "
                    "weights included; give it a float context, as in "
                    "MultiProcessDataParallelCommunicator(get_extension_context('cudnn', device_id=...))"
                )
            self.comm.bcast([v.data for v in self.parameters.values()], 0, inplace=False)
            self._broadcast = True
            return False
        return bool(check_every) and iteration % check_every == 0

    def sum_with(self, own: Numbers, kernels: Kernels, *, average: bool) -> Tuple[List[Numbers], bool]:
        """Sum the gradients; return each rank's numbers, by name, and whether all are finite afterwards."""
        # One message suffices for common names, whose numbers are ordered. A rank with new names announces
        # that, and sends them in a second one; from then on all have them. A GPU waits once.
        new = {name: list(values) for name, values in own.items() if self._lengths.get(name) != len(values)}
        text = json.dumps(new).encode() if new else b""
        # Length of the second message, then all numbers under known names; NaN where this rank has none.
        row = [float(len(text))]
        for name, count in self._lengths.items():
            values = own.get(name, ())
            row += values if len(values) == count else [math.nan] * count
        rows, finite = self._gather(np.array(row, np.float64), kernels, average=average)
        messages: List[Numbers] = []
        for values in map(iter, rows[:, 1:].tolist()):
            common = {name: list(islice(values, count)) for name, count in self._lengths.items()}
            messages.append({name: sent for name, sent in common.items() if not math.isnan(sent[0])})
        longest = int(rows[:, 0].max())
        if longest:
            # Filled up with spaces to one even length, as `_gather` sends pairs of bytes.
            texts, _ = self._gather(np.frombuffer(text.ljust(longest + longest % 2), np.uint8))
            more = [json.loads(bytes(one).strip() or b"{}") for one in texts]
            messages = [{**common, **further} for common, further in zip(messages, more)]
            names = {name: len(values) for further in more for name, values in further.items()}
            self._lengths = {**self._lengths, **names}
        # Sums carry infinities and NaNs to all ranks, except those of gradients that are not exchanged.
        if self._grads and not {v.grad for v in self.parameters.values()} <= {*self._grads}:
            finite = not self.any([not finite])[0]
        return messages, finite

    def _gather(
        self, own: NDArray[Any], kernels: Optional[Kernels] = None, *, average: bool = False
    ) -> Tuple[NDArray[Any], bool]:
        """Gather rows of all ranks; with `kernels`, also sum gradients and return whether they are finite."""
        comm = self.comm
        # A communicator can only sum float32: each rank fills one row of a table, which is zero on all
        # others. In pieces of 16 bits, which float32 holds exactly.
        pieces = own.view(np.uint16)
        # The last column is for `mark_nonfinite_gradients`, after the sum: one copy moves all to the host.
        table = np.zeros((comm.size, pieces.size + 1), np.float32)
        # An average over the ranks divides by their number.
        table[comm.rank, :-1] = pieces * np.float32(comm.size if average else 1)
        array = nn.NdArray.from_numpy_array(table)
        comm.all_reduce([*(self.grads if kernels else ()), array], division=average, inplace=False)
        if kernels:
            kernels.mark_nonfinite_gradients(self._solver.get_parameters().values(), array)
        summed = host_view(array).reshape(table.shape)
        rows: NDArray[Any] = np.rint(summed[:, :-1]).astype(np.uint16).view(own.dtype)
        return rows, math.isfinite(summed[-1, -1])

    def any(self, flags: Sequence[bool]) -> List[bool]:
        """Combine each flag by `or` over the ranks, which must all pass the same number of flags."""
        if self.comm is None:
            return list(flags)
        array = nn.NdArray.from_numpy_array(np.array(flags, np.float32))
        self.comm.all_reduce([array], division=False, inplace=True)
        return [bool(total > 0.0) for total in host_view(array)]

    def agree(self, outcome: Outcome, *, repeat: bool) -> Tuple[PassVerdict, bool]:
        """Agree on the verdict of lost batches, and if lowered scales suffice; False: S0 must go down."""
        # Where a batch overflowed, but S0 is the only scale, lowered scales of other ranks do not help.
        overflowed_at_s0 = outcome.facts.overflowed and not outcome.lowered and not repeat
        *causes, lowered, only_s0 = self.any(
            [*(outcome.verdict is verdict for verdict in _CAUSES), outcome.lowered, overflowed_at_s0]
        )
        cause = next(compress(_CAUSES, causes), PassVerdict.OVERFLOW)
        # If not explained, the sum over the ranks has overflowed, although no rank's own gradients did.
        explained = lowered or cause in (PassVerdict.HOPELESS, PassVerdict.RETRIES)
        return cause, explained and not only_s0

    def check_ranks_agree(self, scales: Sequence[float], iteration: int) -> None:
        """Compare parameters and scales with those of rank 0; every rank raises if one differs."""
        names = [*self.parameters, "the loss scales"]
        arrays = [v.data.get_data("r") for v in self.parameters.values()] + [np.array(scales, np.float64)]
        rows, _ = self._gather(np.array(list(map(checksum, arrays)), np.uint32))
        different = list(compress(names, (rows != rows[0]).any(axis=0)))
        if different:
            own = self.comm.rank
            here = "agrees with" if (rows[own] == rows[0]).all() else "differs from"
            raise RankDisagreementError(
                f"ranks disagree in iteration {iteration}: {', '.join(different[:5])}"
                f"{' and others' if len(different) > 5 else ''} (rank {own} {here} rank 0). "
                "Resume from a checkpoint; look for data or code that differs between ranks"
            )
