#!/usr/bin/env bash
# consumers.sh DIR: virtual environments for the real consumers of the feed; prints the variables that the tests read.
# Their pins are not ours, so each lives alone. One that cannot be installed is left out, and its suite says so.
set -euo pipefail
dir=$1
mkdir -p "$dir"
make() { # make NAME REQUIREMENT VARIABLE
  if "${PYTHON:-python3}" -m venv "$dir/$1" >&2 && "$dir/$1/bin/pip" install --quiet "$2" >&2; then
    printf 'export %s=%q\n' "$3" "$dir/$1/bin/python"
  else
    echo "consumers.sh: $2 cannot be installed here" >&2
  fi
}
make dynamo ai-dynamo-runtime==1.6.1 KVOFFLOAD_DYNAMO_PYTHON
make vllm-router vllm-router==0.1.17 KVOFFLOAD_VLLM_ROUTER_PYTHON
