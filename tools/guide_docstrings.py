# SPDX-License-Identifier: Apache-2.0
"""What Griffe calls for each docstring of the reference: our section `Example:` is its `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):  # type: ignore[misc]
    """Give the section the name under which Griffe shows programs."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Look at a module, class, function or attribute that was loaded."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
