# SPDX-License-Identifier: Apache-2.0
"""Where the records of the layers go: the user's recorder and the log."""

from __future__ import annotations

import logging

from .config import AdaLossConfig
from .layer_log import LayerLog
from .layer_record import LayerRecord

logger = logging.getLogger("nnabla_adaloss")


class LayerObserver:
    """Hands records to `config.recorder` and logs them as `config.debug_level` says.

    `needed` is False when nobody looks at records.
    """

    def __init__(self, config: AdaLossConfig) -> None:
        self._recorder = config.recorder
        self._recorder_failed = False
        self._log = LayerLog(config.debug_level) if config.debug_level else None
        self.needed = config.recorder is not None or self._log is not None

    def __call__(self, record: LayerRecord) -> None:
        """Take one record."""
        if self._recorder is not None:
            self._record(record)
        if self._log is not None:
            self._log(record)

    def _record(self, record: LayerRecord) -> None:
        assert self._recorder is not None
        try:
            self._recorder(record)
        except Exception:
            # Told once: who only watches must not end a training of days.
            if not self._recorder_failed:
                self._recorder_failed = True
                logger.exception("recorder raised an exception for layer %s; training goes on", record.layer)
