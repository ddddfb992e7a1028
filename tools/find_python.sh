#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python of one of the given versions that can make virtual environments; exit code 1 if none.
#
#   usage: tools/find_python.sh VERSION...        e.g. tools/find_python.sh 3.10 3.9
#
# Looks, version by version, at python3.N and python3 on the PATH, then at pyenv's installations. A candidate
# counts only if it runs: pyenv's shims exist for versions that are not active, and fail.

usable() { # COMMAND VERSION: prints the interpreter behind the command
    "$1" - "$2" <<'PYTHON' 2>/dev/null
import sys
import ensurepip, venv

if sys.implementation.name != "cpython" or "%d.%d" % sys.version_info[:2] != sys.argv[1]:
    sys.exit(1)
print(sys.executable)
PYTHON
}

pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}

for version in "$@"; do
    for candidate in "python$version" python3 "$pyenv_root/versions/$version".*/bin/python; do
        usable "$candidate" "$version" && exit 0
    done
done
exit 1
