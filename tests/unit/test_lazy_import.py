"""`import kvoffload` is light: heavy libraries load when they are used."""

import subprocess
import sys


def test_import_loads_neither_torch_nor_zmq_nor_pydantic():
    code = "import kvoffload, sys; print(sorted({'torch', 'zmq', 'pydantic', 'prometheus_client'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
