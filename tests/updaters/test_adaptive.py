# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater against nnabla's dynamic one, and what it does when things go wrong."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    LossScaleError,
    LossScaleWarning,
)
from nnabla_adaloss.updaters.exchange import GradientExchange
from tests.updaters.networks import AS_THE_BASELINE, Training, snapshot, training

ALL_ONE = AdaLossConfig(loss_scale_method="fixed")
PLANTED = (3, 4, 11, 30)


def parameters_after(
    iterations: int, adaptive: bool, storage: Any, accum_grad: int, weight_decay: Any
) -> Dict[str, np.ndarray]:
    train = training(overflow=[b * accum_grad for b in PLANTED])
    options = {"N": 5, "accum_grad": accum_grad, "weight_decay": weight_decay}
    if adaptive:
        updater: Any = AdaptiveLossScalingUpdater(
            train.solver,
            train.loss,
            train.feed,
            config=ALL_ONE,
            storage=storage,
            **options,
            **AS_THE_BASELINE,
        )
    else:
        loss = FormatEmulation(train.loss, storage) if storage else train.loss
        updater = DynamicLossScalingUpdater(train.solver, loss, train.feed, **options)
    for _ in range(iterations):
        updater.update()
    found = snapshot(train.parameters)
    found["scale"] = np.array(updater.scale)
    return found


def test_positional_arguments_are_the_baselines() -> None:
    theirs = inspect.signature(DynamicLossScalingUpdater).parameters
    ours = inspect.signature(AdaptiveLossScalingUpdater).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in set(theirs) - {"data_feeder", "grads"}:
        assert ours[name].default == theirs[name].default
    assert issubclass(AdaptiveLossScalingUpdater, DynamicLossScalingUpdater)


@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.parametrize("weight_decay", [None, 1e-3])
def test_with_all_layer_scales_one_it_is_the_baseline(storage: Any, weight_decay: Any) -> None:
    ours = parameters_after(50, True, storage, 1, weight_decay)
    theirs = parameters_after(50, False, storage, 1, weight_decay)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_with_accumulation_it_is_the_baseline_to_rounding() -> None:
    ours = parameters_after(50, True, None, 3, 1e-3)
    theirs = parameters_after(50, False, None, 3, 1e-3)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def updater_on(train: Training, **options: Any) -> AdaptiveLossScalingUpdater:
    return AdaptiveLossScalingUpdater(train.solver, train.loss, train.feed, **options, **AS_THE_BASELINE)


def test_an_overflow_backs_off_and_takes_the_next_batch() -> None:
    updater = updater_on(training(overflow=[1]))
    # The first batch runs once more, with what it has shown.
    assert updater.update()[:5] == (True, 8.0, 1, "updated", ())
    result = updater.update()
    assert (result.updated, result.scale, result.retries) == (True, 4.0, 1)
    assert result.overflow_layers


def test_without_retries_an_overflow_skips_the_iteration() -> None:
    train = training(overflow=[0])
    before = snapshot(train.parameters)
    result = updater_on(train, max_retries=0).update()
    assert (result.updated, result.scale, result.reason) == (False, 4.0, "overflow")
    for name in ("conv/conv/W", "output/affine/W"):
        np.testing.assert_array_equal(train.parameters[name].d, before[name])


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
        assert result.nonfinite_layers[0] == "output/affine/Add2"
    else:
        with pytest.warns(LossScaleWarning) as caught:
            results = [updater.update(), updater.update()]
        assert len(caught) == 1
        assert [r.reason for r in results] == ["nonfinite_loss"] * 2
    assert updater.scale == 8.0


def test_at_the_floor_the_error_names_the_layer() -> None:
    updater = updater_on(training(overflow=range(100)), min_scale=2.0)
    with pytest.raises(LossScaleError, match="smallest loss scale, 2; first bad layer: output/affine/Add2"):
        updater.update()
    assert updater.scale == 8.0


def test_at_the_floor_an_update_may_be_skipped() -> None:
    updater = updater_on(training(overflow=range(100)), min_scale=2.0, on_scale_floor="skip")
    result = updater.update()
    assert result[:4] == (False, 8.0, 2, "overflow")
    assert result.overflow_layers == result.nonfinite_layers
    assert result.overflow_layers[0] == "output/affine/Add2"


class OfTwo:
    """A communicator of two ranks: what the other one has of an array follows from ours."""

    rank, size = 0, 2

    def __init__(self, other: Callable[[np.ndarray], Any]) -> None:
        self._other = other

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        for array in arrays:
            array.data = array.data + self._other(array.data)

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        """Nothing to do on the first rank."""


def troubled(*flags: bool) -> Callable[[np.ndarray], Any]:
    """A rank whose gradients are not finite, and what it says of the cause."""

    def other(own: np.ndarray) -> Any:
        if own.ndim > 1:
            return np.full_like(own, np.nan)
        return np.array([*flags, *[False] * (own.size - len(flags))], np.float32)

    return other


@pytest.mark.parametrize(
    ("nan", "other", "told"),
    [
        ([0], lambda own: 0.0, "the loss of this rank is not finite in iteration 1: a/affine"),
        (
            [],
            "loss",
            "the loss of another rank is not finite in iteration 1; this is not a gradient overflow",
        ),
        (
            [],
            "forward",
            "the forward pass of another rank is not finite in iteration 1; this is not a gradient overflow",
        ),
    ],
)
def test_the_rank_with_a_bad_batch_is_told(nan: List[int], other: Any, told: str) -> None:
    h = x = nn.Variable((4, 8))
    for name in "abcde":
        h = F.tanh(PF.affine(h, 8, name=name, with_bias=False))
    loss = F.mean(h**2)
    x.d = np.nan if nan else 0.5
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    answers = {"loss": troubled(True, False), "forward": troubled(False, True)}
    comm = OfTwo(answers[other] if isinstance(other, str) else other)
    config = AdaLossConfig()
    updater = AdaptiveLossScalingUpdater(solver, loss, comm=comm, config=config, **AS_THE_BASELINE)
    with pytest.raises(LossScaleError, match=f"^{told}"):
        updater.update()


def test_on_gradients_sees_unscaled_gradients_before_the_update() -> None:
    seen: List[float] = []
    train = training()

    def look(solver: Any) -> None:
        assert solver is train.solver
        seen.append(float(np.abs(train.parameters["output/affine/W"].g).max()))

    updater_on(train, scale=2.0**14, on_gradients=look).update()
    assert 0.0 < seen[0] < 10.0


def test_average_divides_by_the_number_of_batches() -> None:
    summed, averaged = [], []
    for average, found in ((False, summed), (True, averaged)):
        train = training()
        updater_on(
            train,
            accum_grad=2,
            average=average,
            on_gradients=lambda _, t=train, f=found: f.append(t.parameters["output/affine/W"].g.copy()),
        ).update()
    np.testing.assert_array_equal(summed[0], 2.0 * averaged[0])


def scalar_loss() -> Any:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    loss = F.mean(PF.affine(x, 2) ** 2)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    return solver, loss


class NoAllReduce:
    pass


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"scale": 0.0}, ValueError, "scale"),
        ({"scale": -1.0}, ValueError, "scale"),
        ({"scale": float("inf")}, ValueError, "scale"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"scale": "8"}, TypeError, "scale"),
        ({"scaling_factor": 0.5}, ValueError, "scaling_factor"),
        ({"N": -1}, ValueError, "N="),
        ({"accum_grad": 0}, ValueError, "accum_grad"),
        ({"accum_grad": 1.5}, TypeError, "accum_grad"),
        ({"comm": NoAllReduce()}, TypeError, "comm.*all_reduce"),
        ({"storage": "float17"}, ValueError, "storage.*float16"),
        ({"max_retries": -1}, ValueError, "max_retries"),
        ({"on_nonfinite_loss": "ignore"}, ValueError, "on_nonfinite_loss.*'skip'"),
        ({"on_nonfinite_forward": "ignore"}, ValueError, "on_nonfinite_forward='ignore'"),
        ({"max_retries": 0.5}, TypeError, "max_retries=0.5"),
        ({"grads": 3}, TypeError, "grads must be a list of NdArrays, got int"),
        (
            {"grads": [nn.NdArray(()), nn.Variable(())]},
            TypeError,
            r"grads\[1\] must be an NdArray, .*Variable",
        ),
        ({"grads": [nn.NdArray((1,))]}, ValueError, "grads are exchanged through comm"),
        ({"solver": 3}, TypeError, r"solver must be an nnabla solver; int has no zero_grad\(\)"),
        ({"on_gradients": 3}, TypeError, "on_gradients"),
        ({"data_feeder": None}, TypeError, "data_feeder"),
        ({"config": {}}, TypeError, "config"),
        ({"weight_decay": "big"}, TypeError, "weight_decay"),
    ],
)
def test_bad_arguments_are_named(options: Dict[str, Any], error: type, named: str) -> None:
    solver, loss = scalar_loss()
    before = snapshot(nn.get_parameters())
    with pytest.raises(error, match=f"^{named}"):
        AdaptiveLossScalingUpdater(**{"solver": solver, "loss": loss, **options}, **AS_THE_BASELINE)
    for name, value in before.items():
        np.testing.assert_array_equal(nn.get_parameters()[name].d, value)


def test_losses_that_cannot_be_trained_on() -> None:
    solver, _ = scalar_loss()
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="needs no gradient"):
        AdaptiveLossScalingUpdater(solver, F.mean(x), **AS_THE_BASELINE)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        AdaptiveLossScalingUpdater(solver, PF.affine(x, 2, name="vector"), **AS_THE_BASELINE)
    with pytest.raises(TypeError, match="loss"):
        AdaptiveLossScalingUpdater(solver, 3.0, **AS_THE_BASELINE)  # type: ignore[arg-type]
    with nn.context_scope(nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")):
        half = F.mean(PF.affine(x, 2, name="half") ** 2)
    with pytest.raises(ValueError, match=r"storage.*cpu:half"):
        AdaptiveLossScalingUpdater(solver, half, storage="float16", **AS_THE_BASELINE)


class Planned(Exception):
    pass


@pytest.mark.parametrize("storage", [None, "float16"])
def test_what_the_data_feeder_raises_comes_out_as_itself(storage: Any) -> None:
    solver, loss = scalar_loss()
    arrays = {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}

    def feed() -> None:
        raise Planned

    with pytest.raises(Planned):
        AdaptiveLossScalingUpdater(solver, loss, feed, storage=storage, **AS_THE_BASELINE).update()
    for name, v in nn.get_parameters().items():
        assert (v.data, v.grad) == arrays[name]


def test_a_new_loss_can_be_assigned_as_in_the_baseline() -> None:
    solver, loss = scalar_loss()
    updater = AdaptiveLossScalingUpdater(solver, loss, **AS_THE_BASELINE)
    updater.update()
    x = nn.Variable.from_numpy_array(np.full((5, 3), 2.0, np.float32))
    updater.loss = F.mean(PF.affine(x, 2) ** 2)
    first = updater.update()
    assert first.updated
    assert isinstance(updater.scaling, AdaptiveLossScaling)
    assert updater.scaling.variable is updater.loss


class Alone:
    """A communicator of one rank, which writes down what it is asked for."""

    rank, size = 0, 1
    iteration = 0

    def __init__(self) -> None:
        self.asked: List[Any] = []

    def all_reduce(self, arrays: Sequence[nn.NdArray], division: bool = False, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "all_reduce", len(arrays)))

    def bcast(self, arrays: Sequence[nn.NdArray], src: int, inplace: bool = False) -> None:
        self.asked.append((self.iteration, "bcast", len(arrays)))


@pytest.mark.parametrize("delay", [0, 1])
def test_with_one_rank_it_trains_as_without_a_communicator(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: List[Any] = []
    monkeypatch.setattr(
        GradientExchange,
        "check_ranks_agree",
        lambda _, scales, iteration: checked.append((iteration, scales)),
    )
    found, comm = [], Alone()
    for given in (None, comm):
        train = training(overflow=[4])
        config = AdaLossConfig(loss_scale_method="approx_range", delay=delay)
        updater = updater_on(train, storage="float16", config=config, comm=given, check_every=3)
        found.append(([updater.update() for _ in range(6)], updater.state_dict()))
    assert found[0] == found[1]
    # Ranks must have measured the same of each component: all scales follow from that.
    assert [iteration for iteration, _ in checked] == [3, 6]
    assert [len(scales) for _, scales in checked] == [1 + len(updater.scaling.components.amaxes())] * 2
    assert [scales[0] for _, scales in checked] == [8.0, 4.0]
    parameters = len(train.solver.get_parameters())
    assert [entry for entry in comm.asked if entry[1] == "bcast"] == [(1, "bcast", parameters)]
    # The statistics go with the gradients: there is no message more.
    assert comm.asked.count((2, "all_reduce", parameters + 1)) == 1
    assert updater_on(training()).check_every == 1000


def test_what_the_baseline_has_as_attributes_is_there() -> None:
    train, comm = training(), Alone()
    updater = updater_on(train, scaling_factor=4.0, N=7, accum_grad=2, weight_decay=0.5, comm=comm)
    assert (updater.scaling_factor, updater.N, updater.accum_grad, updater.weight_decay) == (4.0, 7, 2, 0.5)
    assert updater.comm is comm
    assert updater.grads == [v.grad for _, v in sorted(train.solver.get_parameters().items())]
    assert updater_on(train).grads == []
