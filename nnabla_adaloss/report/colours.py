# SPDX-License-Identifier: Apache-2.0
"""Colours that are distinct for everybody, and strips of them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Optional, Sequence, Tuple

Colour = Tuple[int, int, int]

# Viridis at 17 places (S. van der Walt and N. Smith, CC0): its lightness rises evenly, also for those who
# see few colours, and in print without any.
_VIRIDIS = (
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
_PLACES = [tuple(bytes.fromhex(colour)) for colour in _VIRIDIS.split()]


def viridis(value: float) -> Colour:
    """The colour of a value between 0 (dark) and 1 (light); what lies outside gets that of the end."""
    place = min(max(value, 0.0), 1.0) * (len(_PLACES) - 1)
    index = min(int(place), len(_PLACES) - 2)
    share = place - index
    red, green, blue = (
        round(low + (high - low) * share) for low, high in zip(_PLACES[index], _PLACES[index + 1])
    )
    return red, green, blue


def strip(values: Sequence[Optional[float]]) -> str:
    """A picture, one pixel high, with a pixel for each value from 0 to 1, as a `data:` URL; None is clear."""
    row = b"".join(b"\0\0\0\0" if value is None else bytes((*viridis(value), 255)) for value in values)
    header = struct.pack(">IIBBBBB", len(values), 1, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row, 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
