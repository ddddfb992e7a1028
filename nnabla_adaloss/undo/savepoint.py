# SPDX-License-Identifier: Apache-2.0
"""What objects know at a moment, to go back to when an iteration is broken off."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Protocol, Sequence, Tuple


class Undoable(Protocol):
    """An object that an iteration changes."""

    @property
    def undone(self) -> Sequence[str]:
        """The attributes that are brought back.

        Their values are replaced, never changed, so that to keep them costs nothing.
        """


class Savepoint:
    """The present attributes of objects.

    Args:
        objects: the objects.

    Example:
        >>> class Count:
        ...     undone = ("value",)
        ...     value = 0
        >>> count = Count()
        >>> count.value = 1
        >>> before = Savepoint([count])
        >>> count.value = 2
        >>> before.restore()
        >>> count.value
        1
    """

    def __init__(self, objects: Iterable[Undoable]) -> None:
        self._saved: List[Tuple[Dict[str, Any], Dict[str, Any]]] = []
        for one in objects:
            attributes = vars(one)
            self._saved.append((attributes, {name: attributes[name] for name in one.undone}))

    def restore(self) -> None:
        """Bring the attributes back; it may be called again after it was interrupted."""
        for attributes, saved in self._saved:
            attributes.update(saved)
