"""Managers that `kvoffload bench manager` measures side by side, behind one small interface."""

# ruff: noqa: D102 - the methods are described by `Peer`

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.base import BlockStatus

Keys = Sequence[OffloadKey]


class Peer(Protocol):
    """What is measured, in batches of keys; `begin` and `end` enclose what one request does."""

    name: str

    def begin(self, req_id: str) -> None:
        """A request begins."""

    def end(self, keys: Keys) -> None:
        """It ends."""

    def lookup(self, keys: Keys) -> int:
        """Look up in order until the first miss; return the hits."""

    def touch(self, keys: Keys) -> None:
        """Mark as used."""

    def load(self, keys: Keys) -> None:
        """Pin and unpin."""

    def pin(self, keys: Keys) -> object:
        """Pin; the result goes to `unpin`."""

    def unpin(self, keys: Keys, pinned: object) -> None:
        """Unpin."""

    def store(self, keys: Keys) -> int:
        """Reserve, evicting what is needed, and complete; return how many were stored, -1 when refused."""


class OwnPeer:
    """kvoffload's manager."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.name = f"kvoffload_{policy}"
        self._manager = CPUOffloadingManager(num_blocks, policy)
        self._context = ReqContext()

    def begin(self, req_id: str) -> None:
        self._context = ReqContext(req_id)

    def end(self, keys: Keys) -> None:
        self._manager.finish_request(self._context, None, keys)
        self._context = ReqContext()

    def lookup(self, keys: Keys) -> int:
        return self._manager.lookup_prefix(keys, self._context).ready

    def touch(self, keys: Keys) -> None:
        self._manager.touch(keys, self._context)

    def load(self, keys: Keys) -> None:
        spec = self._manager.prepare_load(keys, self._context)
        self._manager.complete_load(keys, self._context, ticket=spec.ticket)

    def pin(self, keys: Keys) -> object:
        return self._manager.prepare_load(keys, self._context).ticket

    def unpin(self, keys: Keys, pinned: object) -> None:
        self._manager.complete_load(keys, self._context, ticket=pinned if isinstance(pinned, int) else None)

    def store(self, keys: Keys) -> int:
        output = self._manager.prepare_store(keys, self._context)
        if output is None:
            return -1
        self._manager.complete_store(output.keys_to_store, True, self._context, ticket=output.ticket)
        return len(output.keys_to_store)


class OrderedDictPeer:
    """The plainest LRU manager: an OrderedDict of `BlockStatus`, one key at a time, without tickets or statistics."""

    name = "ordereddict_lru"

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def begin(self, req_id: str) -> None: ...

    def end(self, keys: Keys) -> None: ...

    def _lookup(self, key: OffloadKey) -> bool | None:
        block = self._blocks.get(key)
        if block is None:
            return False
        return True if block.is_ready else None

    def lookup(self, keys: Keys) -> int:
        hits = 0
        for key in keys:
            if not self._lookup(key):
                break
            hits += 1
        return hits

    def touch(self, keys: Keys) -> None:
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def load(self, keys: Keys) -> None:
        self.unpin(keys, self.pin(keys))

    def pin(self, keys: Keys) -> object:
        blocks = []
        for key in keys:
            block = self._blocks[key]
            if not block.is_ready:
                raise ValueError(key)
            block.ref_cnt += 1
            blocks.append(block)
        return np.array([block.block_id for block in blocks], np.int64)

    def unpin(self, keys: Keys, pinned: object) -> None:  # noqa: ARG002
        for key in keys:
            block = self._blocks[key]
            if block.ref_cnt <= 0:
                raise ValueError(key)
            block.ref_cnt -= 1

    def store(self, keys: Keys) -> int:
        wanted = [key for key in keys if self._blocks.get(key) is None]
        if not self._make_room(len(wanted) - len(self._free), set(keys)):
            return -1
        blocks = []
        for key in wanted:
            block = self._blocks[key] = BlockStatus(self._free.pop())
            blocks.append(block)
        np.array([block.block_id for block in blocks], np.int64)
        for key in wanted:
            found = self._blocks.get(key)
            if found is not None and not found.is_ready:
                found.ref_cnt = 0
        return len(wanted)

    def _make_room(self, count: int, protected: set[OffloadKey]) -> bool:
        if count <= 0:
            return True
        victims = []
        for key, block in self._blocks.items():
            if block.ref_cnt == 0 and key not in protected:
                victims.append(key)
                if len(victims) == count:
                    break
        else:
            return False
        for key in victims:
            self._free.append(self._blocks.pop(key).block_id)
        return True


class VllmPeer:
    """The manager of an unpacked vLLM 0.32 wheel; `load_vllm` makes it importable."""

    def __init__(self, modules: tuple[Any, Any], policy: str, num_blocks: int) -> None:
        self.name = f"vllm_{policy}"
        self._base, manager = modules
        self._manager = manager.CPUOffloadingManager(num_blocks, cache_policy=policy)
        self._hit = self._base.LookupResult.HIT
        self._context: Any = None
        self._one_request = False

    def begin(self, req_id: str) -> None:
        self._one_request = True
        self._context = self._base.ReqContext(req_id)

    def end(self, keys: Keys) -> None:  # noqa: ARG002
        self._manager.on_request_finished(self._context)
        self._one_request = False

    def _request(self) -> Any:  # noqa: ANN401 - a class of vLLM's
        return self._context if self._one_request else self._base.ReqContext("r")

    def lookup(self, keys: Keys) -> int:
        context, hits = self._request(), 0
        for key in keys:
            if self._manager.lookup(key, context) is not self._hit:
                break
            hits += 1
        return hits

    def touch(self, keys: Keys) -> None:
        self._manager.touch(keys, self._request())

    def load(self, keys: Keys) -> None:
        self.unpin(keys, self.pin(keys))

    def pin(self, keys: Keys) -> object:
        context = self._request()
        self._manager.prepare_load(keys, context)
        return context

    def unpin(self, keys: Keys, pinned: object) -> None:
        self._manager.complete_load(keys, pinned)

    def store(self, keys: Keys) -> int:
        context = self._request()
        output = self._manager.prepare_store(keys, context)
        if output is None:
            return -1
        self._manager.complete_store(output.keys_to_store, context)
        return len(output.keys_to_store)


def load_vllm(path: Path) -> tuple[Any, Any]:
    """Import the manager of an unpacked vLLM wheel, with stand-ins for the parts of vLLM that it does not need.

    Raises:
        ConfigError: `path` holds no such wheel, or one whose manager cannot be imported this way.
    """
    root = path / "vllm"
    if not (root / "v1" / "kv_offload" / "cpu" / "manager.py").is_file():
        raise ConfigError(f"--vllm-path {path} is no unpacked vLLM wheel: vllm/v1/kv_offload/cpu/manager.py is missing")
    for name, folder in (("vllm", root), ("vllm.v1", root / "v1")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    offloading = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    _stand_in("vllm.logger", init_logger=lambda _: types.SimpleNamespace(info=print, warning=print, debug=print))
    _stand_in("vllm.v1.kv_hints", KvHintsEnvelope=object)
    for name in ("vllm.distributed", *(offloading.rsplit(".", n)[0] for n in (3, 2, 1)), offloading):
        _stand_in(name)
    _stand_in(f"{offloading}.metrics", OffloadingConnectorStats=object)
    if importlib.util.find_spec("torch") is None:
        _stand_in("torch", Tensor=object, device=object, dtype=object)
    try:
        base = importlib.import_module("vllm.v1.kv_offload.base")
        return base, importlib.import_module("vllm.v1.kv_offload.cpu.manager")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--vllm-path {path}: its manager cannot be imported alone: {error}") from error


def _stand_in(name: str, **attributes: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
