# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, LossScaleError, NanDump
from tests.worlds.trainings import training, updater_of, watched
from tests.worlds.values import constant


def test_the_arrays_of_the_first_bad_layer_are_saved(tmp_path: Path) -> None:
    train = training(nan=[1])
    dump = NanDump(tmp_path / "bad")
    # Where scales are held, a batch that is lost runs once more, to see why: that would be dumped as well.
    updater = watched([dump], 1, train, config=AdaLossConfig(measure_every=1, delay=0))
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
        for name in ("output_gradient", "input_gradient", "input"):
            assert np.isnan(saved[name]).any()
        # As it is stored where it is used.
        np.testing.assert_allclose(saved["weight"], weight, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_no_more_files_than_wanted(tmp_path: Path) -> None:
    watched([NanDump(tmp_path, limit=3)], 2, training(overflow=range(1, 8)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"00000002-{attempt}-output_affine.npz" for attempt in range(3)
    ]
    with pytest.raises(ValueError, match="limit=0 must be 1 or more"):
        NanDump(tmp_path, limit=0)


def test_a_layer_whose_name_no_file_could_have(tmp_path: Path) -> None:
    h = F.tanh(PF.affine(constant(np.ones((4, 3))), 3, name="first"))
    loss = F.mean(PF.affine(h, 2, name="x" * 300) * constant(np.full((4, 2), np.nan)))
    dump = NanDump(tmp_path)
    updater = updater_of(loss, lambda: None, solver=S.Sgd(0.1), monitors=[dump])
    with pytest.raises(LossScaleError):
        updater.update()
    assert dump.files
