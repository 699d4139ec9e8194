#!/usr/bin/env bash
# Builds sdist and wheel, and installs both in empty virtual environments of every Python that is here:
# `.ci/distributions.sh DIRECTORY`. In each: `pip check`, the version, and a short run of the real service.
set -euo pipefail
work=$1
mkdir -p "$work"
root=$(cd "$(dirname "$0")/.." && pwd)
python -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --outdir "$work/dist" "$root" > "$work/build.log" || { cat "$work/build.log"; exit 1; }

try() { # try PYTHON FILE: from an empty environment to a run
  local venv
  venv=$(mktemp -d "$work/venv.XXXXXX")
  "$1" -m venv "$venv"
  "$venv/bin/pip" install --quiet "$2"
  "$venv/bin/pip" check
  "$venv/bin/kvoffload" --version
  (cd "$venv" && bin/kvoffload run --requests 100 --json | "$venv/bin/python" -c '
import json, sys
values = json.load(sys.stdin)
assert values["verified_blocks"] == values["loaded_blocks"] > 0, values
assert values["corrupt_blocks"] == 0 and not any(values["leaked"].values()), values
')
  printf '%s: %s installs and runs\n' "$("$1" --version)" "${2##*/}"
  rm -rf "$venv"
}
for python in python3.11 python3.12 python3.13; do
  if "$python" -c '' 2> /dev/null; then
    try "$python" "$work"/dist/*.whl
    try "$python" "$work"/dist/*.tar.gz
  else
    printf '%s is not here\n' "$python"
  fi
done
