# SPDX-License-Identifier: Apache-2.0
"""Event files of TensorBoard, read back."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import pytest

from nnabla_adaloss import LayerRow, LossScaleWarning, Recorder, Recording, UpdateEnded
from tests.worlds.trainings import watched

from .watched import layer, whole

pytest.importorskip("tensorboardX")


def events_in(folder: Path) -> Iterator[Any]:
    """The events of the one file in a folder: length, checksum, event, checksum; as far as it is written."""
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-not-found,unused-ignore]

    (path,) = folder.iterdir()
    content = path.read_bytes()
    while len(content) >= 8:
        (length,) = struct.unpack("<Q", content[:8])
        if len(content) < 16 + length:
            return
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def values_in(folder: Path) -> Dict[Tuple[str, int], Any]:
    """The values of an event file by their tag and step."""
    return {(value.tag, event.step): value for event in events_in(folder) for value in event.summary.value}


def test_a_recording_afterwards(tmp_path: Path) -> None:
    recording = whole()
    recording.rows.append(UpdateEnded(4, False, "nonfinite_loss", 512.0, 0, math.nan))
    recording.to_tensorboard(tmp_path)
    found = values_in(tmp_path)
    assert found["loss", 3].simple_value == 0.25
    assert ("loss", 4) not in found
    assert found["conv/conv/scale", 1].simple_value == 8.0
    assert found["loss_scale", 2].simple_value == 512.0
    assert [key for key, value in found.items() if value.HasField("histo")] == [("conv/conv/exponents", 1)]
    histogram = found["conv/conv/exponents", 1].histo
    assert (histogram.min, histogram.max, histogram.num) == (-4.0, -2.0, 40.0)
    (text,) = found["overflows/text_summary", 2].tensor.string_val
    assert text == b"overflow, first bad layer conv/conv, loss scale 1024"


def test_the_last_pass_of_an_iteration_is_written(tmp_path: Path) -> None:
    passes = [layer(1, "a", underflowed=9), layer(1, "a", underflowed=2, attempt=1), layer(2, "b")]
    Recording(passes).to_tensorboard(tmp_path)
    values = [value for event in events_in(tmp_path) for value in event.summary.value]
    shares = [(value.tag[0], value.simple_value) for value in values if value.tag.endswith("/underflow")]
    assert shares == [("a", pytest.approx(0.02)), ("b", 0.0)]


def test_an_event_file_while_training(tmp_path: Path) -> None:
    recorder = Recorder(every=2, layers=["hid*"], histograms=True, tensorboard=tmp_path)
    watched([recorder], 5)
    found = values_in(tmp_path)  # nothing was closed
    (settings,) = found.pop(("settings/text_summary", 1)).tensor.string_val
    assert b"storage = float16" in settings
    of_layers = {tag for tag, _ in found if "/" in tag}
    assert {tag.rsplit("/", 1)[0] for tag in of_layers} == {"hidden/affine"}
    for row in recorder.recording.of(LayerRow):
        assert found[f"{row.layer}/scale", row.iteration].simple_value == row.scale
        assert found[f"{row.layer}/underflow", row.iteration].simple_value == pytest.approx(row.underflow)
        assert found[f"{row.layer}/nonfinite", row.iteration].simple_value == row.nonfinite
        assert found[f"{row.layer}/exponents", row.iteration].HasField("histo")
    assert [row.iteration for row in recorder.recording.of(UpdateEnded)] == [2, 4]
    recorder.close()
    with pytest.warns(LossScaleWarning, match="tfevents.* is closed"):
        recorder.on_update_ended(UpdateEnded(6, True, "updated", 1.0, 0, 0.5))
