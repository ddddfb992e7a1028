# SPDX-License-Identifier: Apache-2.0
"""benchmarks/steady.py counts what happens to batches, and knows how large gradients really are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
import steady
from scaling_study.records import read
from scaling_study.task import Net, Player, Task
from steadiness import jumps, nets, quiet, turns
from steadiness.true_gradients import TrueGradients
from steadiness.ways import REFERENCE, WAYS, Tally, Trainee, longest_row, train

JUMP = 40


def jumping(factor: float, seed: int) -> Task:
    """A network whose gradients are what they are, and from batch `JUMP` on a multiple of that."""
    x = nn.Variable.from_numpy_array(np.random.RandomState(0).randn(8, 4))
    weight, fed = nn.Variable(()), 0

    def feed() -> None:
        nonlocal fed
        fed += 1
        weight.d = factor if fed >= JUMP else 1.0

    loss = F.mean(PF.affine(F.tanh(PF.affine(x, 6, name="a")), 3, name="b") ** 2) * weight
    parameters = nn.get_parameters()
    return Task([Player(loss, parameters, feed)], lambda: float(sum(v.d.sum() for v in parameters.values())))


def watched(monkeypatch: pytest.MonkeyPatch, factor: float, way: str) -> Any:
    net = Net("", "", partial(jumping, factor), 1e-9, 60, 0.0, S.Sgd)
    monkeypatch.setitem(nets.NETS, "jumping", net)
    return quiet.work(quiet.QuietJob("jumping", quiet.EMULATED, way, 0, 60))


@pytest.mark.parametrize(("way", "loses"), [("default", False), ("next", True), ("GradScaler", True)])
def test_an_overflow_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, way: str, *, loses: bool
) -> None:
    found = watched(monkeypatch, 2.0**10, way)
    assert found["batches_of_late"][0] == JUMP
    assert found["late"] == len(found["batches_of_late"]) > 0
    assert (found["late_lost"] > 0) == loses
    assert found["growth_of_late"][0] == pytest.approx(2.0**10)


@pytest.mark.parametrize("way", ["default", "next", "GradScaler", "dynamic", REFERENCE])
def test_a_training_without_a_jump_is_quiet(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    found = watched(monkeypatch, 1.0, way)
    assert found["late"] == found["late_lost"] == 0
    assert found["growth_of_late"] == found["warnings"] == []


def test_gradients_of_the_twin_are_told_by_layer() -> None:
    with nn.parameter_scope("", {}):
        (player,) = jumping(2.0**5, 0).players
        seen = TrueGradients(player.loss, player.feed)
        for _ in range(JUMP):
            seen()
        assert [seen.growth(batch, "a/affine") for batch in (2, JUMP)] == [1.0, 2.0**5]
        assert seen.growth(JUMP, "no such layer") is None
        assert not any(v.g.any() for v in player.parameters.values())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_and_feeds_so_many_batches(way: str) -> None:
    with nn.parameter_scope("", {}):
        nn.seed(0)
        (player,) = jumping(1.0, 0).players
        solver = S.Sgd(0.1)
        solver.set_parameters(player.parameters)
        tally = Tally(player.feed)
        losses: List[float] = []
        watch = lambda: losses.append(float(player.loss.d))  # noqa: E731
        assert train(way, [Trainee(player.loss, solver, tally)], "float16", 60, watch) == []
    assert tally.fed == 60
    assert losses[-1] < 0.5 * losses[0]
    # 2^40 has to be halved until it fits.
    assert (len(tally.lost) > 10) == (way == "halving")
    assert [overflow.batch for overflow in tally.overflows] == tally.lost


def test_the_longest_row() -> None:
    assert [longest_row(batches) for batches in ([], [3], [1, 2, 4, 5, 6, 9])] == [0, 1, 3]


def test_jumps_are_counted_from_the_jump_on() -> None:
    job = jumps.JumpJob("mlp4", "2^10, for good", "halving", 0, 30)
    found = jumps.work(job)
    # Before it the scale was halved from 2^40 on.
    assert 5 <= found["in_a_row"] <= found["lost"] <= 12
    assert found["last_overflow"] <= 30
    assert f"{found['lost']} of 30" in jumps.markdown("", [found])


def test_fp32_learns_both_tasks_whatever_the_ratio() -> None:
    small = [
        turns.work(turns.TurnJob("large first", ratio, "SGD", REFERENCE, 0, 60))["small"]
        for ratio in (1e-6, 1e-12)
    ]
    assert small[0] == pytest.approx(small[1], abs=0.01)
    assert small[0] > 0.5


@pytest.mark.parametrize("part", steady.PARTS)
@pytest.mark.parametrize("quick", [True, False])
def test_trainings_have_a_reference_each(part: str, *, quick: bool) -> None:
    experiment = steady.part_of(part, quick=quick)
    jobs = experiment.jobs
    assert len(set(jobs)) == len(jobs)
    plain = {job._replace(way=REFERENCE) for job in jobs if getattr(job, "half", "") != quiet.NATIVE}
    assert plain <= set(jobs)


@pytest.mark.slow
def test_the_command_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--parts=quiet", "--nets=classifier", "--jobs=1", f"--results={tmp_path}"]
    assert steady.main([*arguments, "--ways=default"]) == 0
    assert steady.main([*arguments, "--ways=default,next"]) == 0
    assert "2 of 3 were there, 1 were done now" in capsys.readouterr().out
    lines = read(tmp_path / "steady_quiet_quick.jsonl")
    assert [line["way"] for line in lines] == [REFERENCE, "default", "next"]
    assert steady.main([*arguments, "--report"]) == 0
    assert "classifier" in (tmp_path / "steady_quiet_quick.md").read_text("utf-8")
    assert steady.main([*arguments, "--ways=default", "--fresh"]) == 0
    assert len(read(tmp_path / "steady_quiet_quick.jsonl")) == 2


def test_a_name_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        steady.main(["--ways", "defualt"])
    assert "--ways: 'defualt' is unknown; choose of fp32,default" in capsys.readouterr().err
