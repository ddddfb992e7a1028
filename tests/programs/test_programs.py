# SPDX-License-Identifier: Apache-2.0
"""What programs learn with our updater: emulated what they learn with nnabla's own, natively the same."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs import programs, test_threads
from tests.programs.programs import (
    CLASSES,
    FEATURES,
    Examination,
    Outcome,
    Progress,
    Stream,
    Training,
    assert_same_or_better,
    checksum,
    images,
    planted,
    points,
    start,
    updater_of,
)
from tests.worlds.trainings import solver_of
from tests.worlds.values import FLOAT, HALF, constant, snapshot

MANY = 1000
Built = Tuple[Sequence[nn.Variable], nn.Variable, nn.Variable]


def of_points(count: int) -> List[nn.Variable]:
    return [nn.Variable((count, FEATURES)), nn.Variable((count, 1))]


def of_images(count: int) -> List[nn.Variable]:
    return [nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))]


def classified(inputs: Sequence[nn.Variable], y: nn.Variable) -> Built:
    return inputs, y, F.mean(F.softmax_cross_entropy(y, inputs[1]))


def many() -> Stream:
    return Stream(MANY, overflow=planted(MANY))


def fine_tuning(kind: str) -> Outcome:
    """A head is trained on a backbone that needs gradients, too, but that no solver has."""

    def backbone(x: nn.Variable) -> nn.Variable:
        with nn.parameter_scope("backbone"):
            h = F.relu(PF.convolution(x, 8, (3, 3), name="conv1"))
            h = F.relu(PF.convolution(h, 8, (3, 3), name="conv2"))
            return F.tanh(PF.affine(h, 24, name="features"))

    def pretrain() -> None:
        """Teach the backbone which quarter of an image is bright."""
        inputs = of_images(16)
        _, _, loss = classified(inputs, PF.affine(backbone(inputs[0]), CLASSES, name="old_head"))
        solver = solver_of(S.Momentum(0.05))
        for i in range(40):
            inputs[0].d, inputs[1].d = images(np.random.default_rng((1, i)), 16)
            loss.forward(clear_no_need_grad=True)
            solver.zero_grad()
            loss.backward(clear_buffer=True)
            solver.update()

    def network(count: int) -> Built:
        x, t = of_images(count)
        h = backbone(x)
        with nn.parameter_scope("head"):
            y = PF.affine(F.tanh(PF.affine(h, 16, name="hidden")), 1, name="output")
        return [x, t], y, F.mean(F.sigmoid_cross_entropy(y, t))

    def diagonal(rng: np.random.Generator, count: int) -> List[np.ndarray]:
        """The new task: is the bright quarter on the diagonal?"""
        x, quarter = images(rng, count)
        return [x, np.isin(quarter, (0, 3))]

    with nn.context_scope(FLOAT):
        pretrain()
    network(1)
    with nn.parameter_scope("head"):
        solver = solver_of(S.Momentum(0.02))
    return Training(kind, network, diagonal, many(), solver, size=16).run()


def poisoned_batches(kind: str) -> Outcome:
    """Batch normalization, and a NaN in each tenth batch."""

    def network(count: int, *, test: bool = False) -> Built:
        inputs = of_images(count)
        h = PF.convolution(inputs[0], 6, (3, 3), with_bias=False, name="conv")
        h = F.tanh(PF.batch_normalization(h, batch_stat=not test, name="bn1"))
        h = PF.affine(h, 16, with_bias=False, name="hidden")
        h = F.tanh(PF.batch_normalization(h, batch_stat=not test, name="bn2"))
        return classified(inputs, PF.affine(h, CLASSES, name="output"))

    stream = Stream(150, overflow=(25, 26, 88))

    def poisoned(rng: np.random.Generator, count: int) -> Tuple[np.ndarray, np.ndarray]:
        x, t = images(rng, count)
        if stream.number >= 0 and stream.number % 10 == 9:  # not in the examination
            x[3, 0, 2, 5] = np.nan
        return x, t

    # nnabla's updater takes each NaN for an overflow: it ends with a scale of 2**-6.
    policy = {"on_nonfinite_loss": "skip"} if kind != "dynamic" else {}
    options = {"scale": 2.0**12, "N": 2000, **policy}
    training = Training(
        kind,
        network,
        poisoned,
        stream,
        S.Momentum(0.02),
        size=16,
        examined=lambda count: network(count, test=True),
        **options,
    )
    while stream.left:
        training.update()
    if kind == "dynamic":
        # What nnabla's updater is left with: running statistics are NaN for ever after the first NaN.
        for name, v in nn.get_parameters(grad_only=False).items():
            if name.endswith(("/mean", "/var")):
                assert np.isnan(v.d).all(), name
                v.d = 0.0 if name.endswith("/mean") else 1.0
        for i in range(60):
            training.inputs[0].d, _ = images(np.random.default_rng((4, i)), 16)
            training.loss.forward()
    return training.examination.outcome(training.learned)


def thawing(kind: str) -> Outcome:
    """Layers that are frozen for the first half of a training, and trained with the others in the second."""

    def leaves(loss: nn.Variable, parameters: Mapping[str, nn.Variable]) -> List[nn.Variable]:
        """Parameters as a graph has them: nnabla registers others, with a `need_grad` of their own."""
        arrays = {v.data for v in parameters.values()}
        found: List[nn.Variable] = []
        loss.visit(lambda f: found.extend(v for v in f.inputs if v.parent is None and v.data in arrays))
        return found

    halves: Dict[str, Dict[str, nn.Variable]] = {}
    halved_network(1)
    for scope in ("encoder", "classifier"):
        with nn.parameter_scope(scope):
            halves[scope] = {f"{scope}/{name}": v for name, v in nn.get_parameters().items()}
    solver = solver_of(S.Momentum(0.02), halves["classifier"])
    training = Training(kind, halved_network, points, many(), solver, tests=300)
    frozen = leaves(training.loss, halves["encoder"])
    for v in frozen:
        v.need_grad = False
    before = checksum(snapshot(halves["encoder"]))

    def thaw() -> None:
        if training.stream.number >= training.stream.batches // 2 and frozen:
            assert checksum(snapshot(halves["encoder"])) == before
            while frozen:
                frozen.pop().need_grad = True
            solver.set_parameters(halves["encoder"], reset=False, retain_state=True)

    outcome = training.run(thaw)
    assert checksum(snapshot(halves["encoder"])) != before
    return outcome


def halved_network(count: int) -> Built:
    """A net of two halves."""
    inputs = of_points(count)
    h = inputs[0]
    with nn.parameter_scope("encoder"):
        for name in ("fc1", "fc2"):
            h = F.tanh(PF.affine(h, 32, name=name))
    with nn.parameter_scope("classifier"):
        return classified(inputs, PF.affine(F.tanh(PF.affine(h, 16, name="fc3")), CLASSES, name="fc4"))


BATCH, NOISE = 32, 4


def gan(kind: str) -> Outcome:
    """Two nets in one graph, each with a solver: the generator's loss runs through the discriminator."""

    def dense(x: nn.Variable, scope: str, *widths: int) -> nn.Variable:
        with nn.parameter_scope(scope):
            for index, width in enumerate(widths):
                x = PF.affine(F.leaky_relu(x, 0.2) if index else x, width, name=f"fc{index}")
        return x

    def generator(z: nn.Variable) -> nn.Variable:
        return dense(z, "generator", 24, 24, 2)

    def entropy(score: nn.Variable, real: int) -> nn.Variable:
        return F.sigmoid_cross_entropy(score, F.constant(real, score.shape))

    z, x = nn.Variable((BATCH, NOISE)), nn.Variable((BATCH, 2))
    fake = generator(z)
    fake.persistent = True
    of_fake, of_real = (dense(d, "discriminator", 32, 32, 1) for d in (fake, x))
    losses = {
        "generator": F.mean(entropy(of_fake, 1)),
        "discriminator": F.mean(entropy(of_real, 1) + entropy(of_fake, 0)),
    }
    players: Dict[str, Tuple[Any, Stream, Progress]] = {}
    for seed, (scope, loss) in enumerate(losses.items(), 1):
        stream = Stream(MANY, overflow=planted(MANY, seed=seed), seed=seed)
        with nn.parameter_scope(scope):
            solver = solver_of(S.Adam(0.001 * seed, beta1=0.5))

        def feed(stream: Stream = stream) -> None:
            rng = stream.next()
            z.d = rng.standard_normal(z.shape)
            x.d = rng.standard_normal((BATCH, 2)) * (0.8, 0.4) + (1.5, -1.0)

        updater = updater_of(kind, solver, stream.gated(loss), feed)
        players[scope] = updater, stream, Progress(solver, stream, scope)

    # How far the mean of what is generated is from that of the data, and the spread.
    examined = generator(constant(np.random.default_rng(3).standard_normal((1000, NOISE))))
    mean = F.mean(examined, axis=0, keepdims=True)
    spread = F.mean((examined - F.broadcast(mean, examined.shape)) ** 2, axis=0, keepdims=True) ** 0.5
    goals = [constant([values]) for values in ([1.5, -1.0], [0.8, 0.4])]
    distances = [F.sum(F.abs(found - goal)) for found, goal in zip([mean, spread], goals)]
    examination = Examination(F.add_n(*distances), examined)
    while all(stream.left for _, stream, _ in players.values()):
        for scope in ("discriminator", "generator"):
            fake.need_grad = scope == "generator"  # the discriminator's loss does not reach the generator
            updater, _, progress = players[scope]
            updater.update()
            progress.note()
    return examination.outcome([batch for *_, progress in players.values() for batch in progress.learned])


BATCHES = 24
# Gradients are lost in these, whatever the loss scale, in one of them twice in a row.
OVERFLOW = (4, 5, 11)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = programs.Stream.__init__

    def init(self: Any, batches: int, *, overflow: Collection[int] = (), seed: int = 0) -> None:
        made(self, min(batches, BATCHES), overflow=OVERFLOW if overflow else (), seed=seed)

    monkeypatch.setattr(programs.Stream, "__init__", init)
    yield
    nn.set_default_context(nn.Context())


def thread_average(kind: str) -> Outcome:
    # Which updates are averaged is decided by the clock.
    return test_threads.parameter_average(kind, examined=False).outcome


# By program: how much greater our loss may be.
PROGRAMS: Dict[Callable[[str], Outcome], float] = {
    fine_tuning: 0.02,
    poisoned_batches: 0.05,
    thawing: 0.02,
    # The two nets chase each other: small differences do not stay small.
    gan: 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ours_learns_as_nnablas_updater_does(program: Callable[[str], Outcome]) -> None:
    start()
    ours = program("adaptive")
    start()
    assert_same_or_better(ours, program("dynamic"), tolerance=PROGRAMS[program])


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.usefixtures("_short")
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("program", [*PROGRAMS, thread_average], ids=lambda program: program.__name__)
def test_native_half_learns_as_emulation_does(program: Callable[[str], Outcome]) -> None:
    start()
    emulated = program("adaptive")
    nn.set_default_context(HALF)
    start()
    native = program("native")
    assert native.learned == emulated.learned
    assert native.learned
    for name, array in native.arrays.items():
        assert np.isfinite(array).all(), name
    # The loss falls by little in so few batches; what native half rounds besides is less than that.
    assert native.loss == pytest.approx(emulated.loss, rel=0.02)
