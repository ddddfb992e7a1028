# SPDX-License-Identifier: Apache-2.0
"""What the training programs share: data, planted overflows, the two updaters, and how they are compared."""

from __future__ import annotations

import zlib
from typing import (
    Any,
    Callable,
    Collection,
    Hashable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import nnabla as nn
import nnabla.functions as F
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, DynamicLossScalingUpdater, FormatEmulation
from tests.worlds.values import snapshot

CLASSES = 4
FEATURES = 16
_TEACHER = np.random.default_rng(7).standard_normal((FEATURES, CLASSES))


class Outcome(NamedTuple):
    """What a training program led to."""

    learned: Collection[Hashable]  # the batches that updated parameters, by number, or by name and number
    loss: float  # of data that were not trained on, without emulation
    before: float  # the same, before the training
    arrays: Mapping[str, np.ndarray]  # what must be finite: outputs in test mode, and parameters


class Stream:
    """Batches by number, the same ones in each training; in those of `overflow` all gradients are lost at any
    scale. Retries of the last one go on behind them.
    """

    def __init__(self, batches: int, *, overflow: Collection[int] = (), seed: int = 0) -> None:
        self.batches, self.overflow, self.seed = batches, overflow, seed
        self.number = -1
        self._slope = nn.Variable.from_numpy_array(np.ones((1,), np.float32))

    @property
    def left(self) -> bool:
        """Whether there are batches left."""
        return self.number + 1 < self.batches

    def next(self) -> np.random.Generator:
        """The random numbers that the next batch is made of."""
        self.number += 1
        self._slope.d = float(self.number not in self.overflow)
        return np.random.default_rng((self.seed, self.number))

    def gated(self, loss: nn.Variable) -> nn.Variable:
        """`loss`, whose gradient is lost in the batches that overflow."""
        # A square root has an infinite slope at 0.
        return loss + F.sum(F.pow_scalar(F.reshape(loss * 0.0, (1,)) + self._slope, 0.5)) - 1.0


def planted(batches: int, *, seed: int = 0) -> Collection[int]:
    """Numbers of batches that overflow: one in fifty, here and there two or three in a row."""
    rng = np.random.default_rng((seed, batches))
    first = rng.choice(batches - 3, batches // 75, replace=False)
    return {int(number + i) for number in first for i in range(rng.integers(1, 4)) if rng.random() < 0.9}


class Progress:
    """Which batches a solver's parameters were updated with."""

    def __init__(self, solver: Any, stream: Stream, name: str = "") -> None:
        self._solver, self._stream, self._name = solver, stream, name
        self._updates = updates_of(solver)
        self.learned: List[Hashable] = []

    def note(self) -> None:
        """Look whether the last batch was learned from; to be called after each update."""
        before, self._updates = self._updates, updates_of(self._solver)
        if self._updates > before and self._stream.number < self._stream.batches:
            number = self._stream.number
            self.learned.append((self._name, number) if self._name else number)


def updates_of(solver: Any) -> int:
    """How many updates a solver has made of the parameters that it has had for longest."""
    return int(max(state.t for state in solver.get_states().values()))


def start() -> None:
    """Forget all parameters, and begin with the same random numbers."""
    nn.clear_parameters()
    nn.seed(0)


def emulated(kind: str, loss: nn.Variable) -> Any:
    """What an updater of this kind is given, so that both train under emulated float16."""
    return FormatEmulation(loss, "float16") if kind == "dynamic" else loss


def updater_of(
    kind: str, solver: Any, loss: nn.Variable, feed: Any, **options: Any
) -> Union[AdaptiveLossScalingUpdater, DynamicLossScalingUpdater]:
    """Ours or nnabla's updater, for a few hundred batches. "adaptive" and "dynamic" emulate float16; "native"
    is ours in the context of the network.
    """
    options = {"scale": 64.0, "N": 20, **options}
    if kind == "dynamic":
        return DynamicLossScalingUpdater(solver, emulated(kind, loss), feed, **options)
    storage = "float16" if kind == "adaptive" else None
    return AdaptiveLossScalingUpdater(solver, loss, feed, storage=storage, **options)


def points(rng: np.random.Generator, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Points in space, and their classes."""
    x = rng.standard_normal((count, FEATURES)).astype(np.float32)
    return x, np.argmax(x @ _TEACHER, axis=1)[:, np.newaxis]


def images(rng: np.random.Generator, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Noisy images of 8x8 with one bright quarter, and the number of this quarter."""
    t = rng.integers(0, CLASSES, (count, 1))
    x = rng.standard_normal((count, 1, 8, 8)).astype(np.float32)
    for image, quarter in zip(x, t[:, 0]):
        row, column = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, row : row + 4, column : column + 4] += 0.7
    return x, t


class Examination:
    """A net's loss of data that it is not trained on, in test mode and without emulation."""

    def __init__(self, loss: nn.Variable, output: nn.Variable) -> None:
        self._loss, self._output = loss, output
        output.persistent = True
        self.before = self.loss()

    def loss(self) -> float:
        """The loss as it is now."""
        self._loss.forward()
        return float(self._loss.d)

    def outcome(self, learned: Collection[Hashable]) -> Outcome:
        """What a training led to in which these batches were learned from."""
        loss = self.loss()
        arrays = {"outputs": self._output.d.copy(), **snapshot()}
        return Outcome(learned, loss, self.before, arrays)


# Of so many examples: what is put in, what comes out, and the loss.
Network = Callable[[int], Tuple[Sequence[nn.Variable], nn.Variable, nn.Variable]]


class Training:
    """A net that is trained on a stream with one solver, which gets all parameters unless it has some. It is
    examined as `examined` builds it, or as it is trained. `batch` draws the inputs of so many examples.
    """

    def __init__(
        self,
        kind: str,
        network: Network,
        batch: Callable[[np.random.Generator, int], Sequence[Any]],
        stream: Stream,
        solver: Any,
        *,
        size: int = 32,
        tests: int = 200,
        examined: Optional[Network] = None,
        **options: Any,
    ) -> None:
        inputs, output, loss = (examined or network)(tests)
        _fill(inputs, batch(np.random.default_rng(2), tests))
        self.examination = Examination(loss, output)
        self.inputs, _, self.loss = network(size)
        self.stream = stream

        def feed() -> None:
            _fill(self.inputs, batch(stream.next(), size))

        if not solver.get_parameters():
            solver.set_parameters(nn.get_parameters())
        self.updater: Any = updater_of(kind, solver, stream.gated(self.loss), feed, **options)
        self._progress = Progress(solver, stream)

    def update(self) -> Any:
        """Train on the next batch; what the updater returns."""
        result = self.updater.update()
        self._progress.note()
        return result

    @property
    def learned(self) -> List[Hashable]:
        """The batches that parameters were updated with."""
        return self._progress.learned

    def run(self, before: Callable[[], Any] = lambda: None) -> Outcome:
        """Train on all batches, each after a call of `before`."""
        while self.stream.left:
            before()
            self.update()
        return self.examination.outcome(self.learned)


def _fill(variables: Sequence[nn.Variable], arrays: Sequence[Any]) -> None:
    for variable, array in zip(variables, arrays):
        variable.d = array


def checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """A number that tells whether arrays are bit for bit the same."""
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name], np.float32).tobytes(), found)
    return found


def assert_same_or_better(ours: Outcome, theirs: Outcome, *, tolerance: float) -> None:
    """Ours kept every update that nnabla's updater kept, is finite, and at most so much worse."""
    lost = [batch for batch in theirs.learned if batch not in set(ours.learned)]
    assert not lost, f"{len(lost)} of {len(theirs.learned)} updates were lost, the first ones in {lost[:5]}"
    bad = [name for name, array in ours.arrays.items() if not np.isfinite(array).all()]
    assert not bad, f"not finite: {', '.join(bad)}"
    assert theirs.loss < 0.8 * theirs.before, "the program does not train with nnabla's own updater"
    assert ours.loss <= theirs.loss + tolerance, (ours.loss, theirs.loss)
