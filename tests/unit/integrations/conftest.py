from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from kvoffload.integrations.vllm_version import NAMES

HERE = Path(__file__).parent


def _fake():
    spec = importlib.util.spec_from_file_location("fake_vllm", HERE / "fake_vllm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_vllm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fake():
    """The fake names of vLLM, findable under vLLM's module names while the module's tests run."""
    names = _fake()
    before = set(sys.modules)
    root = types.ModuleType("vllm")
    root.__version__ = names.VERSION
    sys.modules["vllm"] = root
    for path, wanted in NAMES.items():
        parts = path.split(".")
        for length in range(2, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(parts[length - 1]))
        for name in wanted:
            setattr(sys.modules[path], name, getattr(names, name))
    yield names
    for name in set(sys.modules) - before | {"vllm", "fake_vllm"}:
        if name.split(".")[0] in {"vllm", "fake_vllm"} or name.startswith("kvoffload.integrations.vllm"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def adapter(fake):
    """The adapter, imported over the fake names."""
    return importlib.import_module("kvoffload.integrations.vllm")
