#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with the first Python version that can be had; keeps one that is already there.
#
#   usage: tools/make_venv.sh DIRECTORY VERSION...        e.g. tools/make_venv.sh .venv 3.10 3.9
#
# uv finds a Python or downloads it. Without uv, python3.N does, and if there is none, uv from a throw-away environment.
set -eu

directory=$1
shift

if version=$("$directory/bin/python" -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    case " $* " in *" $version "*)
        echo "Using $directory, which has Python $version."
        exit 0
    esac
fi

made_with() { # COMMAND...: true if the command makes the environment
    "$@" "$directory" 2>/dev/null && echo "Making $directory with $("$directory/bin/python" -V)."
}

# pyenv's python3.N fails unless PYENV_VERSION names it.
if ! uv=$(command -v uv); then
    for version in "$@"; do
        PYENV_VERSION=$version made_with "python$version" -m venv --clear && exit 0
    done
    echo "No Python $(echo "$*" | sed 's/ / or /g') on the PATH: asking uv for one."
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv "$scratch" && "$scratch/bin/python" -m pip install --quiet --disable-pip-version-check uv || true
    uv=$scratch/bin/uv
fi
for version in "$@"; do
    PYENV_VERSION=$version made_with "$uv" venv --quiet --clear --seed --python "cpython@$version" && exit 0
done
echo "Python $(echo "$*" | sed 's/ / or /g') could not be had. Install one (nnabla has no wheels for newer ones), then try again." >&2
exit 1
