#!/usr/bin/env bash
# All GPU checks in one command, under five minutes: tests/gpu, the handler contract, then `kvoffload bench cuda`.
# Each runs whatever came of the ones before; the exit code is 1 if any failed, 2 without a CUDA device.
# Needs torch with CUDA in the current Python; installs nothing but this package's light dependencies.
#   tests/gpu/run.sh [FOLDER for the JSON report]
set -uo pipefail
out=$(realpath "${1:-.}")
cd "$(dirname "$0")/../.." || exit 2
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "tests/gpu/run.sh: torch sees no CUDA device here; nothing was run" >&2
  exit 2
fi
python -m pip install --quiet anyio msgspec numpy prometheus-client pydantic pyzmq rich pytest pytest-asyncio pytest-timeout ||
  echo "packages could not be installed: going on with what is there"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0
python -m pytest tests/gpu -q -rs || failed=1
KVOFFLOAD_TEST_GPU=1 python -m pytest tests/unit/transfer/test_contract.py -m gpu -q -rs || failed=1
python -c "import sys; from kvoffload.cli.main import main; sys.exit(main(['bench', 'cuda', '--json', '--check']))" |
  tee "$out/bench-cuda.json" || failed=1
exit "$failed"
