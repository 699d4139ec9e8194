"""A-K1: the adapter with the vLLM it was written for, with another one, and with none."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvoffload.errors import ExtensionImportError
from kvoffload.integrations import vllm_version

ADAPTER = [
    "vllm", "vllm_exposition", "vllm_feed", "vllm_manager", "vllm_metrics", "vllm_recency", "vllm_requests",
    "vllm_spec", "vllm_state", "vllm_taps", "vllm_worker",
]  # fmt: skip


@pytest.fixture
def no_vllm(monkeypatch):
    """Nothing on this machine answers to the name of vLLM."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "vllm", None)


def imported():
    return [name for name in ADAPTER if f"kvoffload.integrations.{name}" in sys.modules]


def test_another_version_is_refused_with_both_versions_and_nothing_is_imported(monkeypatch):
    stub = types.ModuleType("vllm")
    stub.__version__ = "0.31.2+cpu"
    monkeypatch.setitem(sys.modules, "vllm", stub)
    with pytest.raises(ExtensionImportError, match=r"0\.32.*0\.31\.2\+cpu"):
        importlib.import_module("kvoffload.integrations.vllm")
    assert imported() == []


def test_a_newer_minor_version_is_refused_too(monkeypatch):
    stub = types.ModuleType("vllm")
    stub.__version__ = "0.320.0"
    monkeypatch.setitem(sys.modules, "vllm", stub)
    with pytest.raises(ExtensionImportError, match=r"0\.32; vLLM 0\.320\.0"):
        vllm_version.require_vllm()


def test_missing_vllm_is_said_to_be_missing(no_vllm):
    with pytest.raises(ExtensionImportError, match="vLLM is not installed"):
        importlib.import_module("kvoffload.integrations.vllm")
    assert imported() == []


def test_the_refusal_is_an_import_error():
    assert issubclass(ExtensionImportError, ImportError)


def test_the_right_version_without_its_names_is_refused_by_name(monkeypatch):
    stub = types.ModuleType("vllm")
    stub.__version__ = "0.32.9"
    stub.__path__ = []
    monkeypatch.setitem(sys.modules, "vllm", stub)
    with pytest.raises(ExtensionImportError, match=r"vLLM 0\.32\.9 is installed and lacks: vllm\.v1\.kv_offload\.base"):
        vllm_version.require_vllm()
    assert imported() == []


def test_the_version_is_read_from_metadata_without_importing_vllm():
    program = (
        "import importlib.metadata as m, sys\n"
        "m.version = lambda name: '0.30.1' if name == 'vllm' else (_ for _ in ()).throw(m.PackageNotFoundError(name))\n"
        "from kvoffload.errors import ExtensionImportError\n"
        "try:\n    import kvoffload.integrations.vllm\n"
        "except ExtensionImportError as error:\n    print(error)\n"
        "print('vllm' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    message, loaded = done.stdout.strip().splitlines()
    assert "0.32" in message
    assert "0.30.1" in message
    assert loaded == "False False"


def test_the_check_knows_every_name_that_the_adapter_imports_from_vllm():
    """A-K1: a name that moved is reported by the check, before any module of the adapter is imported."""
    folder = Path(vllm_version.__file__).parent
    used = {
        (node.module, name.name)
        for path in folder.glob("vllm*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for name in node.names
    }
    checked = {(module, name) for module, names in vllm_version.NAMES.items() for name in names}
    assert used - checked == set()


@pytest.mark.parametrize(
    ("owner", "member"),
    [
        ("KVConnectorTransferResults", "failed_recving"),
        ("ReqContext", "_offload_key_positions"),
        ("OffloadingConnector", "connector_scheduler"),
        ("OffloadingConnector", "connector_worker"),
        ("OffloadingConnectorScheduler", "config"),
        ("OffloadingConnectorWorker", "worker"),
        ("SchedulerOffloadConfig", "kv_group_configs"),
        ("GroupOffloadConfig", "tokens_per_chunk"),
        ("OffloadingEventGroupSpec", "kv_cache_spec_kind"),
    ],
)
def test_a_patch_release_without_a_field_that_the_adapter_reads_is_refused_by_its_name(
    fake, monkeypatch, owner, member
):
    """A-K1: a private field may go in any release; without the check prompts would lose their order silently."""
    module = next(module for module, names in vllm_version.NAMES.items() if owner in names)
    assert vllm_version.require_vllm() == fake.VERSION
    monkeypatch.setattr(
        sys.modules[module], owner, type(owner, (), dict.fromkeys(vllm_version.MEMBERS[f"{module}:{owner}"]))
    )
    assert vllm_version.require_vllm() == fake.VERSION
    monkeypatch.delattr(getattr(sys.modules[module], owner), member)
    with pytest.raises(ExtensionImportError, match=rf"lacks: {re.escape(module)}\.{owner}\.{member}$"):
        vllm_version.require_vllm()
