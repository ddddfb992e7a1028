# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater against nnabla's dynamic one, with ordinary and with unusual graphs; and what it
does when things go wrong.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    LossScaleError,
    LossScaleWarning,
)
from nnabla_adaloss.updaters.exchange import GradientExchange
from tests.worlds.architectures import NETWORKS
from tests.worlds.networks import two_layers
from tests.worlds.ranks import Pair
from tests.worlds.tampering import Gate
from tests.worlds.trainings import AS_THE_BASELINE, METHODS, Training, solver_of, training, updater_of
from tests.worlds.values import FLOAT, HALF, assert_equal, data, gradients, snapshot
from tests.worlds.warned import silent, warned

PLANTED = (3, 4, 11, 30)


def updater_on(train: Training, **options: Any) -> AdaptiveLossScalingUpdater:
    return AdaptiveLossScalingUpdater(train.solver, train.loss, train.feed, **options, **AS_THE_BASELINE)


def parameters_after(adaptive: bool, storage: Any, accum_grad: int, weight_decay: Any) -> Dict[str, Any]:
    train = training(overflow=[b * accum_grad for b in PLANTED])
    options = {"N": 5, "accum_grad": accum_grad, "weight_decay": weight_decay}
    if adaptive:
        ones = AdaLossConfig(loss_scale_method="fixed")
        updater: Any = updater_on(train, config=ones, storage=storage, **options)
    else:
        loss = FormatEmulation(train.loss, storage) if storage else train.loss
        updater = DynamicLossScalingUpdater(train.solver, loss, train.feed, **options)
    for _ in range(50):
        updater.update()
    return {**snapshot(train.parameters), "scale": np.array(updater.scale)}


def test_positional_arguments_are_the_baselines() -> None:
    theirs = inspect.signature(DynamicLossScalingUpdater).parameters
    ours = inspect.signature(AdaptiveLossScalingUpdater).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in set(theirs) - {"data_feeder", "grads"}:
        assert ours[name].default == theirs[name].default
    assert issubclass(AdaptiveLossScalingUpdater, DynamicLossScalingUpdater)


@pytest.mark.parametrize(("storage", "weight_decay"), [(None, None), (None, 1e-3), ("float16", 1e-3)])
def test_an_updater_with_all_layer_scales_one_is_the_baseline(storage: Any, weight_decay: Any) -> None:
    ours = parameters_after(True, storage, 1, weight_decay)
    assert_equal(ours, parameters_after(False, storage, 1, weight_decay))


def searched(name: str, context: Any, *, adaptive: bool) -> Tuple[List[float], Dict[str, Any]]:
    """The scale of each of 500 iterations, and the parameters after them; some batches overflow."""
    nn.clear_parameters()
    batches, overflowing = itertools.count(), Gate()

    def feed() -> None:
        overflowing.factor = np.inf if next(batches) in (3, 4, 11, 60, 250, 251, 252, 400) else 1.0

    with nn.context_scope(context):
        loss, options = overflowing(NETWORKS[name]()), {"scale": 32768.0, "N": 60}
        solver = solver_of(S.Momentum(0.01))
        if adaptive:
            options.update(AS_THE_BASELINE, config=AdaLossConfig("fixed"))
            updater: Any = AdaptiveLossScalingUpdater(solver, loss, feed, **options)
        else:
            updater = DynamicLossScalingUpdater(solver, loss, feed, **options)
        scales = []
        for _ in range(500):
            updater.update()
            scales.append(updater.scale)
    return scales, snapshot(nn.get_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("context", [FLOAT, HALF], ids=["float", "half"])
@pytest.mark.parametrize(
    "name", ["transformer_block", "u_net", "dense_block", "squeeze_and_excite", "weight_normalization"]
)
def test_it_searches_for_the_scale_as_the_baseline_does(name: str, context: Any) -> None:
    scales, parameters = searched(name, context, adaptive=False)
    found = searched(name, context, adaptive=True)
    assert found[0] == scales
    assert_equal(found[1], parameters)
    # Beyond this, the loss gradient of nnabla's updater is infinite in half precision.
    assert len({*scales}) > 4
    assert max(scales) <= 32768.0


def test_an_updater_with_accumulation_is_the_baseline_to_rounding() -> None:
    ours = parameters_after(True, None, 3, 1e-3)
    for name, value in parameters_after(False, None, 3, 1e-3).items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_lost_batches_with_good_ones_in_between_are_no_alarm() -> None:
    updater = updater_on(training(overflow=range(1, 40, 2)))
    with silent():
        assert all(updater.update().updated for _ in range(13))
    assert updater.counters.lost == {"overflow": 12}


def test_hysteresis_tolerates_an_overflow_and_is_refilled() -> None:
    updater = updater_on(training(overflow=[0, 2, 3]), hysteresis=2)
    assert [updater.update().scale for _ in range(3)] == [8.0, 4.0, 4.0]


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_a_loss_that_is_not_finite_is_no_overflow(policy: str) -> None:
    updater = updater_on(training(nan=[1, 2]), on_nonfinite_loss=policy)
    updater.update()
    if policy == "raise":
        with pytest.raises(LossScaleError, match="^the loss is not finite in iteration 2: conv/conv"):
            updater.update()
    elif policy == "skip":
        result = updater.update()
        assert (result.reason, result.retries) == ("nonfinite_loss", 0)
        assert result.nonfinite_layers == result.overflow_layers
        assert result.nonfinite_layers[0] == result.component == "output/affine/Add2"
    else:
        with pytest.warns(LossScaleWarning) as caught:
            results = [updater.update(), updater.update()]
        assert len(caught) == 1
        assert [r.reason for r in results] == ["nonfinite_loss"] * 2
    assert updater.scale == 8.0


@pytest.mark.parametrize(("policy", "told"), [("warn", 2), ("skip", 0)])
def test_ten_bad_batches_in_a_row_are_warned_of_once_more(policy: str, told: int) -> None:
    updater = updater_on(training(nan=range(1, 40)), on_nonfinite_loss=policy)
    updater.update()
    with warned() as caught:
        assert not any(updater.update().updated for _ in range(25))
    assert len(caught) == told
    if told:
        assert caught[0].startswith("the loss is not finite in iteration 2")
        lost = (
            "10 batches in a row were lost up to iteration 11, the last because forward is not finite: conv"
        )
        assert caught[1].startswith(lost)


def test_an_update_at_the_floor_may_be_skipped() -> None:
    updater = updater_on(training(overflow=range(100)), min_scale=2.0, on_scale_floor="skip")
    result = updater.update()
    # S0 is at the floor after two batches, and no scale of the network helps.
    assert result[:4] == (False, 8.0, 2, "overflow")
    assert result.overflow_layers == result.nonfinite_layers
    assert result.overflow_layers[0] == "output/affine/Add2"


def troubled(*flags: bool) -> Callable[[np.ndarray], Any]:
    """A rank whose gradients are not finite, and what it says of the cause."""

    def other(own: np.ndarray) -> Any:
        if own.ndim > 1:
            return np.full_like(own, np.nan)
        return np.array([*flags, *[False] * (own.size - len(flags))], np.float32)

    return other


NO_OVERFLOW = "is not finite in iteration 1; this is not a gradient overflow"


@pytest.mark.parametrize(
    ("nan", "activation", "other", "told"),
    [
        (True, F.tanh, lambda own: 0.0, "the loss of this rank is not finite in iteration 1: a/affine"),
        (
            True,
            F.relu,
            lambda own: 0.0,
            "the forward pass of this rank is not finite in iteration 1: a/affine",
        ),
        (False, F.tanh, troubled(True, False), f"the loss of another rank {NO_OVERFLOW}"),
        (False, F.tanh, troubled(False, True), f"the forward pass of another rank {NO_OVERFLOW}"),
    ],
)
def test_the_rank_with_a_bad_batch_is_told(nan: bool, activation: Any, other: Any, told: str) -> None:
    h = x = nn.Variable((4, 8))
    for name in "abcde":
        h = activation(PF.affine(h, 8, name=name, with_bias=False))
    x.d = np.nan if nan else 0.5
    options = {"config": AdaLossConfig(), **AS_THE_BASELINE}
    updater = AdaptiveLossScalingUpdater(solver_of(), F.mean(h**2), comm=Pair(other), **options)
    with pytest.raises(LossScaleError, match=f"^{told}"):
        updater.update()


def test_a_sum_that_overflows_where_no_rank_did_lowers_the_global_scale() -> None:
    gain, gains = nn.Variable((1,)), iter([1.0, 2e38, 1.0])
    loss = F.sum(F.reshape(F.mean(PF.affine(data(4, 3) * 0.01, 1)), (1,)) * gain)

    def feed() -> None:
        gain.d = next(gains)

    # The other rank has the same gradients, and nothing to report; in no layer can the cause be.
    config = AdaLossConfig(loss_scale_method="fixed", delay=0)
    options = {"scale": 1.0, "comm": Pair(lambda own: own), "config": config, **AS_THE_BASELINE}
    updater = AdaptiveLossScalingUpdater(solver_of(), loss, feed, **options)
    assert updater.update()[:4] == (True, 1.0, 0, "updated")
    result = updater.update()
    assert result[:4] == (True, 0.5, 1, "updated")
    assert result.overflow_layers == ()


def test_gradients_are_clipped_before_weight_decay() -> None:
    loss = F.mean(PF.affine(data(4, 3), 5, name="a") ** 2)
    before = snapshot()
    solver, sizes = solver_of(S.Sgd(0.1)), []

    def clip(given: Any) -> None:
        assert given is solver
        sizes.append(max(np.abs(v.g).max() for v in solver.get_parameters().values()))
        solver.scale_grad(0.0)

    options = {"weight_decay": 0.5, "on_gradients": clip, "storage": "float16"}
    assert AdaptiveLossScalingUpdater(solver, loss, **options).update().updated
    assert 0.0 < sizes[0] < 10.0
    for name, value in snapshot().items():
        np.testing.assert_allclose(value, before[name] * (1.0 - 0.1 * 0.5), rtol=1e-6)


def test_average_divides_by_the_number_of_batches() -> None:
    found: Dict[bool, np.ndarray] = {}
    for average in (False, True):
        train = training()
        updater = updater_on(train, accum_grad=2, average=average)
        updater.on_gradients = lambda _, t=train, a=average: found.update(
            {a: t.parameters["output/affine/W"].g.copy()}
        )
        updater.update()
    np.testing.assert_array_equal(found[False], 2.0 * found[True])


def test_losses_that_cannot_be_trained_on() -> None:
    two_layers(data(4, 3))
    solver = solver_of()
    with nn.context_scope(HALF):
        half = two_layers(data(4, 3))
    for loss, options, error, told in (
        (F.mean(data(2, 3)), {}, ValueError, "needs no gradient"),
        (PF.affine(data(2, 3), 2, name="vector"), {}, ValueError, r"shape \(2, 2\)"),
        (3.0, {}, TypeError, "loss must be"),
        (None, {}, TypeError, "loss must be"),
        (half, {"storage": "float16"}, ValueError, "storage.*cpu:half"),
    ):
        with pytest.raises(error, match=told):
            AdaptiveLossScalingUpdater(solver, loss, **options, **AS_THE_BASELINE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "delay"), [*zip(METHODS, (0, 1))])
def test_one_rank_trains_as_without_a_communicator(
    method: str, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: List[Any] = []
    monkeypatch.setattr(GradientExchange, "check_ranks_agree", lambda _, *found: checked.append(found))
    found, comm = [], Pair(size=1)
    for given in (None, comm):
        train = training(overflow=[4])
        config = AdaLossConfig(loss_scale_method=method, delay=delay)
        updater = updater_on(train, storage="float16", config=config, comm=given, check_every=3)
        found.append(([updater.update() for _ in range(6)], updater.state_dict()))
    assert found[0] == found[1]
    # Ranks must have measured the same of each component: all scales follow from that.
    assert [iteration for _, iteration in checked] == [3, 6]
    assert [len(scales) for scales, _ in checked] == [1 + len(updater.scaling.components.unit_amaxes())] * 2
    assert [scales[0] for scales, _ in checked] == [8.0, 4.0]
    parameters = len(train.solver.get_parameters())
    assert [count for _, name, count in comm.asked if name == "bcast"] == [1, parameters]
    # The statistics go with the gradients: there is no message more.
    assert comm.asked.count((2, "all_reduce", parameters + 1)) == 1
    assert updater.grads == [v.grad for _, v in sorted(train.solver.get_parameters().items())]
    assert (updater_on(train).grads, updater_on(train).check_every) == ([], 1000)


def cast(which: str) -> nn.Variable:
    """A loss of which something is of another type."""
    x = nn.Variable.from_numpy_array(data(4, 3).d.astype(np.float64 if which == "data" else np.float32))
    loss = two_layers(x)
    if which == "loss":
        loss.data.cast(np.float64)
    for v in nn.get_parameters().values():
        if which == "parameters":
            v.data.cast(np.float16)
        if which == "gradients":
            v.grad.cast(np.float16)
    return loss


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("which", ["loss", "data", "parameters", "gradients"])
def test_other_types_train_as_with_nnabla(which: str) -> None:
    loss = cast(which)
    solver = solver_of(S.Momentum(0.1))
    for _ in range(5):
        solver.zero_grad()
        loss.forward()
        loss.backward()
        solver.update()
    expected = snapshot()
    nn.clear_parameters()
    updater = updater_of(cast(which), solver=S.Momentum(0.1), storage=None)
    assert {updater.update().reason for _ in range(5)} == {"updated"}
    assert_equal(snapshot(), expected)


@pytest.mark.parametrize("weight", [1.0, 1e-9])
def test_a_context_that_changes_in_the_middle(weight: float) -> None:
    def make(contexts: List[nn.Context]) -> nn.Variable:
        h = data(4, 3)
        for name, context in zip("abc", contexts):
            with nn.context_scope(context):
                h = F.tanh(PF.affine(h, 5, name=name, rng=np.random.RandomState(ord(name))))
        with nn.context_scope(contexts[3]):
            return F.mean(h**2) * weight

    found: List[Dict[str, np.ndarray]] = []
    for contexts in ([FLOAT] * 4, [HALF, FLOAT, HALF, FLOAT], [FLOAT, HALF, FLOAT, HALF]):
        nn.clear_parameters()
        storage = "float32" if HALF not in contexts else None
        updater = updater_of(make(contexts), solver=S.Sgd(0.0), storage=storage)
        for _ in range(3):
            assert updater.update().reason == "updated"
        found.append(gradients())
    for mixed in found[1:]:
        for name, exact in found[0].items():
            assert np.linalg.norm(mixed[name] - exact) < 0.01 * np.linalg.norm(exact), name


def test_a_network_that_is_half_in_part_is_not_emulated() -> None:
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(data(4, 3), 5, name="a"))
    loss = F.mean(PF.affine(h, 2, name="b") ** 2)
    with pytest.raises(ValueError, match=r"^storage: Affine is computed in cpu:half.*or leave storage out$"):
        updater_of(loss)
