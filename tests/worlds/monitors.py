# SPDX-License-Identifier: Apache-2.0
"""A monitor that keeps what it receives."""

from __future__ import annotations

from typing import List

from nnabla_adaloss import LayerRecord, LayerScaled, Monitor


class Records(Monitor):
    """Keeps the record of each layer."""

    def __init__(self) -> None:
        self.records: List[LayerRecord] = []

    def on_layer_scaled(self, event: LayerScaled) -> None:
        self.records.append(event.record)
