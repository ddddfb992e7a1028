#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds sdist and wheel as a package index would get them, installs the wheel with its samples' needs into an empty
# environment, and runs there the command and the demo that the sdist brings.
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
"$folder/builder/bin/python" "${pip[@]}" install build
"$folder/builder/bin/python" -m build --outdir "$folder" . >"$folder/build.log" || { cat "$folder/build.log"; exit 1; }
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
