# SPDX-License-Identifier: Apache-2.0
"""Common parts of the samples. The packages that any of them needs are checked at import."""

import sys
from importlib.util import find_spec

# Imported modules and their packages: the extra `samples` of the package.
NEEDED = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}

missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
if missing:
    sys.exit(f"The samples need {' and '.join(missing)}: python -m pip install {' '.join(missing)}")
