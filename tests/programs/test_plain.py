# SPDX-License-Identifier: Apache-2.0
"""Programs around one net: what they learn with our updater, and with nnabla's own."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    CLASSES,
    FEATURES,
    Outcome,
    Progress,
    Stream,
    Training,
    assert_same_or_better,
    checksum,
    emulated,
    images,
    planted,
    points,
    start,
    updater_of,
)
from tests.worlds.values import FLOAT, snapshot

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


def dynamic_graph(kind: str) -> Outcome:
    """A recurrent net that is built anew for each batch, as long as the sequences in it are."""
    width, state, length = 3, 20, 6

    def network(count: int) -> Built:
        x, t = nn.Variable((count, length, width)), nn.Variable((count, 1))
        h = F.constant(0.0, (count, state))
        for i in range(length):
            step = PF.affine(F.reshape(x[:, i : i + 1, :], (count, width)), state, name="in")
            h = F.tanh(step + PF.affine(h, state, with_bias=False, name="recurrent"))
        y = PF.affine(h, 1, name="out")
        return [x, t], y, F.mean(F.sigmoid_cross_entropy(y, t))

    def sequences(rng: np.random.Generator, count: int) -> List[np.ndarray]:
        """Sequences, and whether the sum of their first channel is positive."""
        x = rng.standard_normal((count, length, width))
        return [x, x[:, :, 0].sum(axis=1, keepdims=True) > 0.0]

    stream = Stream(120, overflow=(15, 16, 60, 100))
    lengths = np.random.default_rng(3)
    training = Training(kind, network, sequences, stream, S.Adam(0.01), size=24)

    def rebuild() -> None:
        nonlocal length
        length = int(lengths.integers(2, 7))
        training.inputs, _, loss = network(24)
        training.updater.loss = emulated(kind, stream.gated(loss))

    return training.run(rebuild)


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
        solver = S.Momentum(0.05)
        solver.set_parameters(nn.get_parameters())
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
    solver = S.Momentum(0.02)
    with nn.parameter_scope("head"):
        solver.set_parameters(nn.get_parameters())
    return Training(kind, network, diagonal, many(), solver, size=16).run()


def input_gradients(kind: str) -> Outcome:
    """Inputs that need gradients, for a look at what a net sees, and that no solver clears."""

    def network(count: int) -> Built:
        inputs = of_images(count)
        h = F.elu(PF.convolution(inputs[0], 6, (3, 3), name="conv"))
        return classified(inputs, PF.affine(F.tanh(PF.affine(h, 16, name="hidden")), CLASSES, name="output"))

    training = Training(kind, network, images, many(), S.Momentum(0.01), size=16)
    training.inputs[0].need_grad = True
    return training.run()


def masked_log(kind: str) -> Outcome:
    """A likelihood of counts, where there are any: where there are none, a logarithm of 0 is not taken."""

    def network(count: int) -> Built:
        x, t = of_points(count)
        rate = F.softplus(PF.affine(F.tanh(PF.affine(x, 32, name="hidden")), 1, name="rate"))
        some = F.minimum_scalar(t, 1.0)
        # In float16 the constant is 0: where there is no count, the logarithm and its slope are infinite.
        logarithm = F.log(F.maximum_scalar(rate * some, 1e-12))
        return [x, t], rate, F.mean(F.where(some, rate - t * logarithm, rate))

    # Forward is infinite in each batch, and taken for the cause where a gradient is, too, whatever the scale.
    # No scale is lowered then, and it would soon grow to where a batch is lost for each time that it does.
    policy = {"on_nonfinite_forward": "skip"} if kind != "dynamic" else {}
    training = Training(kind, network, points, many(), S.Momentum(0.01), tests=300, N=200, **policy)
    masked = 0
    while training.stream.left:
        result = training.update()
        masked += bool(kind != "dynamic" and result.nonfinite_layers)
    # Only passes with hooks look at single functions, and what is masked reaches no parameter.
    assert kind != "adaptive" or masked, "no gradient had to be masked"
    return training.examination.outcome(training.learned)


def multi_loss(kind: str) -> Outcome:
    """Two losses on one trunk, with weights of 1 and 1e-8."""

    def network(count: int, auxiliary: float = 1e-8) -> Built:
        inputs = of_points(count)
        h = F.tanh(PF.affine(inputs[0], 32, name="trunk1"))
        h = F.tanh(PF.affine(h, 32, name="trunk2"))
        y = PF.affine(F.tanh(PF.affine(h, 16, name="main1")), CLASSES, name="main2")
        decoded = PF.affine(F.tanh(PF.affine(h, 16, name="auxiliary1")), FEATURES, name="auxiliary2")
        _, _, main = classified(inputs, y)
        return inputs, y, main + auxiliary * F.sum((decoded - inputs[0]) ** 2)

    stream = Stream(200, overflow=(20, 60, 100, 160))
    return Training(kind, network, points, stream, S.Momentum(0.05), scale=2.0**15).run()


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


def siamese(kind: str) -> Outcome:
    """Two images go through the same weights, and are told apart by their distance."""

    def embedding(x: nn.Variable) -> nn.Variable:
        with nn.parameter_scope("tower"):
            h = F.elu(PF.convolution(x, 6, (3, 3), name="conv"))
            h = F.elu(PF.affine(h, 24, name="hidden"))
            return PF.affine(h, 4, name="embedding")

    def network(count: int) -> Built:
        left, right = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1, 8, 8))
        same = nn.Variable((count,))
        squared = F.sum((embedding(left) - embedding(right)) ** 2, axis=1)
        gap = F.maximum_scalar(1.0 - (squared + 1e-3) ** 0.5, 0.0)
        return [left, right, same], squared, F.mean(same * squared + (1.0 - same) * gap**2)

    def pairs(rng: np.random.Generator, count: int) -> List[np.ndarray]:
        left, ours = images(rng, count)
        right, theirs = images(rng, count)
        return [left, right, (ours == theirs)[:, 0]]

    stream = Stream(200, overflow=(0, 50, 51, 52, 140))
    return Training(kind, network, pairs, stream, S.Adam(0.003), size=24, weight_decay=1e-4).run()


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
    solver = S.Momentum(0.02)
    solver.set_parameters(halves["classifier"])
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


def two_solvers(kind: str) -> Outcome:
    """One net and one loss, but a solver for each half of the layers; they take turns."""
    halved_network(1)
    encoder, classifier = S.Adam(0.003), S.Momentum(0.05)
    for solver, scope in ((encoder, "encoder"), (classifier, "classifier")):
        with nn.parameter_scope(scope):
            solver.set_parameters(nn.get_parameters())
    stream = Stream(240, overflow=(12, 45, 46, 101, 180))
    training = Training(kind, halved_network, points, stream, encoder, tests=300)
    feed = training.updater.data_feeder
    other = updater_of(kind, classifier, stream.gated(training.loss), feed)
    progress = Progress(classifier, stream)
    while stream.left:
        training.update()
        other.update()
        progress.note()
    return training.examination.outcome([*training.learned, *progress.learned])


# By program: how much greater our loss may be.
PROGRAMS: Dict[Callable[[str], Any], float] = {
    dynamic_graph: 0.02,
    fine_tuning: 0.02,
    input_gradients: 0.02,
    masked_log: 0.02,
    multi_loss: 0.02,
    poisoned_batches: 0.05,
    siamese: 0.02,
    thawing: 0.02,
    two_solvers: 0.02,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_learns_what_it_learns_with_nnablas_updater(program: Callable[[str], Outcome]) -> None:
    start()
    ours = program("adaptive")
    start()
    assert_same_or_better(ours, program("dynamic"), tolerance=PROGRAMS[program])
