# SPDX-License-Identifier: Apache-2.0
"""Examination of an installation: working parts, missing parts, and how to add them."""

from .checks import examine as examine
from .findings import AREAS as AREAS
from .findings import Finding as Finding
from .findings import area_works as area_works
from .findings import as_json as as_json
from .findings import as_text as as_text
