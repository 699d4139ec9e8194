"""Adapter to vLLM 0.32's offloading connector: `KVOffloadSpec`, named by two keys.

`kv_transfer_config` of the engine::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm", "cpu_bytes_to_use": "8GiB"}}

vLLM imports this module in each of its processes. It checks the version first: with another vLLM it raises
`ExtensionImportError` and imports nothing else. `docs/vllm.md` says what is configured and what happens when.
"""

from __future__ import annotations

from kvoffload.integrations.vllm_version import SUPPORTED, require_vllm

VLLM_VERSION = require_vllm()
"""Version of the vLLM in this process."""

from kvoffload.integrations.vllm_manager import KVOffloadManager  # noqa: E402 - after the version check
from kvoffload.integrations.vllm_spec import KVOffloadSpec  # noqa: E402
from kvoffload.integrations.vllm_worker import KVOffloadWorker  # noqa: E402

__all__ = ["SUPPORTED", "VLLM_VERSION", "KVOffloadManager", "KVOffloadSpec", "KVOffloadWorker"]
