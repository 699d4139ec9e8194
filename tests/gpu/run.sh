#!/usr/bin/env bash
# All GPU checks in one command, under five minutes: tests/gpu, the handler contract, then `kvoffload bench cuda`.
# Needs torch with CUDA in the current Python; installs nothing but this package's light dependencies.
#   tests/gpu/run.sh [FOLDER for the JSON report]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-.}
python -m pip install --quiet anyio msgspec numpy prometheus-client pydantic pyzmq rich pytest pytest-asyncio pytest-timeout ||
  echo "packages could not be installed: going on with what is there"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python -m pytest tests/gpu -q -rs
KVOFFLOAD_TEST_GPU=1 python -m pytest tests/unit/transfer/test_contract.py -m gpu -q -rs
python -c "import sys; from kvoffload.cli.main import main; sys.exit(main(['bench', 'cuda', '--json', '--check']))" |
  tee "$out/bench-cuda.json"
