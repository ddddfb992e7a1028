#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with the first Python version that can be had; keeps one that is already there.
#
#   usage: tools/make_venv.sh DIRECTORY VERSION...        e.g. tools/make_venv.sh .venv 3.10 3.9
#
# Where this machine has none of the versions, uv downloads the first one (uv from the PATH, or from a throw-away
# environment of whatever Python 3 there is).
set -eu

directory=$1
shift

if version=$("$directory/bin/python" -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    case " $* " in *" $version "*)
        echo "Using $directory, which has Python $version."
        exit 0
    esac
fi

if python=$("$(dirname "$0")/find_python.sh" "$@"); then
    echo "Making $directory with $python."
    exec "$python" -m venv --clear "$directory"
fi

echo "No Python $(echo "$*" | sed 's/ / or /g') on this machine: asking uv to download Python $1."
uv=$(command -v uv) || {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m venv "$scratch" && "$scratch/bin/python" -m pip install --quiet --disable-pip-version-check uv
    uv=$scratch/bin/uv
} || {
    echo "uv could not be installed. Install uv or Python $1 (nnabla has no wheels for newer ones), then try again." >&2
    exit 1
}
rm -rf "$directory"
"$uv" venv --quiet --seed --python "$1" "$directory" || {
    echo "Python $1 could not be downloaded. Install it (nnabla has no wheels for newer ones), then try again." >&2
    exit 1
}
