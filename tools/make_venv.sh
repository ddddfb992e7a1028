#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with the first Python version that can be had; keeps one that is already there.
#
#   usage: tools/make_venv.sh DIRECTORY VERSION...        e.g. tools/make_venv.sh .venv 3.10 3.9
#
# Where this machine has none of the versions, uv downloads the first one.
set -eu

directory=$1
shift

download_python() { # VERSION: prints the interpreter
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    uv=$(command -v uv) || {
        # uv in a throw-away environment of whatever Python 3 there is
        python3 -m venv "$scratch" || return
        "$scratch/bin/python" -m pip install --quiet --disable-pip-version-check uv || return
        uv=$scratch/bin/uv
    }
    export UV_PYTHON_INSTALL_BIN=0 UV_PYTHON_PREFERENCE=only-managed
    "$uv" python install "$1" && "$uv" python find "$1"
}

if version=$("$directory/bin/python" -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    case " $* " in *" $version "*)
        echo "Using $directory, which has Python $version."
        exit 0
    esac
fi

python=$("$(dirname "$0")/find_python.sh" "$@") || {
    echo "No Python $(echo "$*" | sed 's/ / or /g') on this machine: asking uv to download Python $1."
    python=$(download_python "$1")
} || {
    echo "Python $1 could not be had. Install it (nnabla has no wheels for newer ones), then try again." >&2
    exit 1
}
echo "Making $directory with $python."
"$python" -m venv --clear "$directory"
