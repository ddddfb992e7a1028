# SPDX-License-Identifier: Apache-2.0
"""Extension of Griffe for the reference: our section `Example:` is its `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):  # type: ignore[misc]
    """Rename the section to the one that Griffe shows as a program."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Rename the section of a loaded module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
