# SPDX-License-Identifier: Apache-2.0
"""Where the records of the layers go: to the user's recorder, and as lines to the log."""

from __future__ import annotations

import logging
import math
from typing import Optional

from .config import AdaLossConfig
from .layer_record import LayerRecord

logger = logging.getLogger("nnabla_adaloss")


class LayerObserver:
    """Hands records to `config.recorder`, and logs them as `config.debug_level` says: each iteration when the
    first record of the next arrives, and from 2 on also each layer.
    """

    def __init__(self, config: AdaLossConfig) -> None:
        self._recorder, self._level = config.recorder, config.debug_level
        self._recorder_failed = False
        self.needed = self._recorder is not None or self._level > 0
        self._iteration: Optional[int] = None
        self._begin()

    def __call__(self, record: LayerRecord) -> None:
        """Take one record."""
        if self._recorder is not None:
            try:
                self._recorder(record)
            except Exception:
                # Told once: who only watches must not end a training of days.
                if not self._recorder_failed:
                    self._recorder_failed = True
                    logger.exception(
                        "recorder raised an exception for layer %s; training goes on", record.layer
                    )
        if self._level:
            self._log(record)

    def _begin(self) -> None:
        self._layers = 0
        self._alpha_min = math.inf
        self._alpha_max = self._accumulated_max = 0.0

    def _log(self, record: LayerRecord) -> None:
        if record.iteration != self._iteration:
            self._finish()
            self._iteration = record.iteration
        self._layers += 1
        self._alpha_min = min(self._alpha_min, record.alpha)
        self._alpha_max = max(self._alpha_max, record.alpha)
        self._accumulated_max = max(self._accumulated_max, record.accumulated_scale)
        if self._level >= 2:
            logger.info(
                "iteration %d, layer %s: scale %g (unbounded %g), accumulated scale %g -> %g, fan-in %g",
                record.iteration,
                record.layer,
                record.alpha,
                record.unbounded,
                record.previous_scale,
                record.accumulated_scale,
                record.fan_in,
            )

    def _finish(self) -> None:
        if self._layers:
            logger.info(
                "iteration %d: %d layers, scales from %g to %g, largest accumulated scale %g",
                self._iteration,
                self._layers,
                self._alpha_min,
                self._alpha_max,
                self._accumulated_max,
            )
        self._begin()
