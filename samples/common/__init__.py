# SPDX-License-Identifier: Apache-2.0
"""What the samples share. All that any of them needs has to be there before one starts."""

import sys
from importlib.util import find_spec

# What is imported, and what pip calls it: the extra `samples` of the package.
NEEDED = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}

missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
if missing:
    sys.exit(f"The samples need {' and '.join(missing)}: python -m pip install {' '.join(missing)}")
