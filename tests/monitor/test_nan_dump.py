# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, LossScaleError, NanDump
from tests.updaters.networks import training


def test_the_arrays_of_the_first_bad_layer_are_saved(tmp_path: Path) -> None:
    train = training(nan=[1])
    dump = NanDump(tmp_path / "bad")
    # Where scales are held, a batch that is lost runs once more, to see why: that would be dumped as well.
    config = AdaLossConfig(measure_every=1, delay=0)
    updater = AdaptiveLossScalingUpdater(
        train.solver, train.loss, train.feed, storage="float16", monitors=[dump], config=config
    )
    updater.update()
    assert dump.files == []
    assert not (tmp_path / "bad").exists()
    weight = train.parameters["output/affine/W"].d.copy()
    with pytest.raises(LossScaleError):
        updater.update()
    assert dump.files == [str(tmp_path / "bad/00000002-0-output_affine.npz")]
    with np.load(dump.files[0]) as saved:
        assert str(saved["layer"]) == "output/affine"
        assert (int(saved["iteration"]), int(saved["attempt"])) == (2, 0)
        assert float(saved["scale"]) > 0.0
        assert saved["output_gradient"].shape == (8, 10)
        assert np.isnan(saved["output_gradient"]).any()
        assert np.isnan(saved["input_gradient"]).any()
        assert np.isnan(saved["input"]).any()
        # As it is stored where it is used.
        np.testing.assert_allclose(saved["weight"], weight, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_no_more_files_than_wanted(tmp_path: Path) -> None:
    train = training(overflow=range(1, 8))
    dump = NanDump(tmp_path, limit=3)
    updater = AdaptiveLossScalingUpdater(
        train.solver, train.loss, train.feed, storage="float16", monitors=[dump]
    )
    for _ in range(2):
        updater.update()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"00000002-{attempt}-output_affine.npz" for attempt in range(3)
    ]


def test_a_bad_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit=0 must be 1 or more"):
        NanDump(tmp_path, limit=0)
