# SPDX-License-Identifier: Apache-2.0
"""Monitor that records events."""

from __future__ import annotations

import os
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

from ..core.layer_selection import LayerSelection, unmatched
from ..core.validation import boolean, path_name, positive_integer, strings
from ..errors import warn
from ..state.whole_file import PathLike
from .events import Event, LayerScaled, Monitor, UpdateEnded
from .recording import Recording
from .row_file import RowFile
from .rows import row_of
from .tensorboard import TensorBoardFile


class Recorder(Monitor):
    """Records each layer's scales and gradient statistics, and all overflows, repeats and lost batches.

    Args:
        path: a file to which each row is appended as it happens, as JSON lines. It survives a crash, and a
            resumed training with the same path appends to it. Each rank needs its own. None for memory only.
        every: layers and losses are recorded in iterations whose number is a multiple of this; the others
            cost nothing. Overflows, lost batches and changes of the scale are always recorded. Default 1.
        layers: names of the layers to record, as `fnmatch` patterns. Default: all. A warning names the
            patterns that match no layer in the first recorded iteration.
        limit: number of latest rows kept in memory, about half a kilobyte each; the file holds all. Default
            20000.
        histograms: record how many elements have each binary exponent, for TensorBoard; doubles the size of a
            row. Default False.
        data: also record each layer's weight and input: the largest magnitude, and the share of elements
            below the format's normal range; reads two more arrays per layer. Default False.
        tensorboard: a folder for an event file of TensorBoard, written while training: scales, shares of
            underflow and overflow, and headroom of each layer, the loss, the loss scale, repeats and lost
            batches. None for no such file.

    In a `with` statement the files are closed at its end. A file that cannot be written, as on a full disk,
    causes one warning and lacks the rows until it can be written again; memory and the other file do not.

    Attributes:
        recording: the rows in memory.

    Raises:
        TypeError, ValueError: an argument is not as described; `path` is not a recording, or another recorder
            has it open.
        OSError: `path` or `tensorboard` cannot be written.
        ImportError: `tensorboard` is given, and tensorboardX is not installed.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater, Recorder
        >>> nn.clear_parameters()
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> recorder = Recorder()
        >>> updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16", monitors=[recorder])
        >>> for _ in range(3):
        ...     result = updater.update()
        >>> recorder.recording.layers
        ['b/affine']
        >>> recorder.recording.at("b/affine", 3).underflowed
        0
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        every: int = 1,
        layers: Sequence[str] = ("*",),
        limit: int = 20000,
        *,
        histograms: bool = False,
        data: bool = False,
        tensorboard: Optional[PathLike] = None,
    ) -> None:
        self.every = positive_integer("every", every)
        self._histograms, self._data = boolean("histograms", histograms), boolean("data", data)
        self._selection = LayerSelection(strings("layers", layers, "patterns of layer names"))
        self._selected: Dict[str, bool] = {}
        self._patterns: Tuple[str, ...] = self._selection.include  # matched no layer yet
        self.recording = Recording(limit=positive_integer("limit", limit))
        self._files: List[Union[RowFile, TensorBoardFile]] = []
        self._unwritten: Set[str] = set()  # names of files that could not be written
        name = None if path is None else path_name("path", path)
        folder = None if tensorboard is None else path_name("tensorboard", tensorboard)
        is_new = name is not None and not os.path.lexists(name)
        try:
            if name is not None:
                self._files.append(RowFile(name))
            if folder is not None:
                self._files.append(TensorBoardFile(folder))
        except BaseException:
            self.close()
            if name is not None and is_new and os.path.exists(name):
                os.remove(name)
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files: recording ends. The file of `path` is complete at any time."""
        for file in self._files:
            self._do(file, file.close)

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Record a layer if the patterns select it."""
        layer = event.record.layer
        if layer not in self._selected:
            self._selected[layer] = self._selection.selects(layer)
        elif self._patterns:  # all layers have been seen; a hand-written loop has no other sign of it
            self._warn_of_patterns()
        if self._selected[layer]:
            self.on_event(row_of(event, histograms=self._histograms, data=self._data))

    def on_event(self, event: Event) -> None:
        """Record an event as it is."""
        self.recording.rows.append(event)
        for file in self._files:
            self._do(file, file.append_row, event)

    def _do(self, file: Union[RowFile, TensorBoardFile], action: Callable[..., None], *rows: Event) -> None:
        """Write to a file; warn the first time that it fails."""
        try:
            action(*rows)
        except Exception as error:
            if file.name not in self._unwritten:
                self._unwritten.add(file.name)
                warn(
                    f"Recorder: {file.name} cannot be written: {error}. Training continues; its rows are "
                    "lost until it can be written again"
                )

    def on_update_ended(self, event: UpdateEnded) -> None:
        """Record the end of an update, and check the patterns: all layers have been seen."""
        self._warn_of_patterns()
        self.on_event(event)

    def _warn_of_patterns(self) -> None:
        """Warn once of patterns that match no layer; call when all layers have been seen."""
        patterns, self._patterns = unmatched(self._patterns, list(self._selected)), ()
        if patterns:
            warn(
                f"Recorder(layers=...): {', '.join(map(repr, patterns))} matches no scaled layer; "
                f"known layers: {', '.join(self._selected) or 'none'}"
            )
