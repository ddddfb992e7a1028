# SPDX-License-Identifier: Apache-2.0
"""A loss that jumps under every method."""

from __future__ import annotations

import pytest
from scaling_study.jumps import until_right
from scaling_study.planted import PlantedJob, experiment, work


@pytest.mark.slow
def test_a_jump_changes_the_scale_and_not_the_steps() -> None:
    jumps = ("none", "2^10, for good")
    calm, jumped = (work(PlantedJob("mlp8", 1.0, "approx_range", jump, 0)) for jump in jumps)
    assert jumped["lost"] == calm["lost"] == 0
    assert jumped["repeats"] > calm["repeats"]
    assert until_right(jumped, calm) == 0
    assert jumped["score"] == pytest.approx(calm["score"], abs=0.02)


def test_every_jump_has_a_training_without_one() -> None:
    jobs = experiment(None).jobs
    assert len(set(jobs)) == len(jobs)
    assert {job._replace(jump="none") for job in jobs} <= set(jobs)
