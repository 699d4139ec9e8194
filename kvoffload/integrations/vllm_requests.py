"""What describes a block: tokens, parent, hashes and extra keys, read from vLLM's `Request`.

vLLM's offloading manager is told keys and positions only, and the connector's own self-describing events leave out the
extra keys (LoRA, multimodal content, salts) without which such a block is a false hit in an indexer. The scheduler's
`Request` holds everything, so the adapter keeps a view of it while the request lives (`vllm_taps` hands it over) and
describes each block at the moment it is offered. Extra keys come from the functions that vLLM's own GPU events use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, resolve_block_hashes, to_event_extra_keys

from kvoffload.keys import BlockInfo, OffloadKey, get_offload_group_idx


@dataclass(frozen=True, slots=True)
class GroupView:
    """How one KV-cache group cuts a request, and what vLLM calls its kind.

    Attributes:
        tokens_per_block: Tokens in an engine block.
        tokens_per_chunk: Tokens in an offloaded block.
        kind: KV cache spec kind, as in vLLM's own events.
        sliding_window: Window in tokens, for sliding-window groups.
    """

    tokens_per_block: int
    tokens_per_chunk: int
    kind: str = "full_attention"
    sliding_window: int | None = None


class RequestView:
    """One live vLLM request, read when its blocks are offered.

    Args:
        request: vLLM's `Request`; only read.
        groups: Layout per KV-cache group.
        tokens_per_hash: Tokens that one entry of `request.block_hashes` covers.
    """

    __slots__ = ("_groups", "_plain", "_request", "_tokens_per_hash")

    def __init__(self, request: Any, groups: Mapping[int, GroupView], tokens_per_hash: int) -> None:  # noqa: ANN401
        self._request = request
        self._groups = groups
        self._tokens_per_hash = tokens_per_hash
        self._plain = not (
            request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None
        )

    def info(self, key: OffloadKey, end_token: int | None) -> BlockInfo | None:
        """Describe one offloaded block; None when the request does not cover all of it.

        Args:
            key: Key of the block.
            end_token: Position after its last token, as vLLM recorded it.
        """
        group = self._groups.get(get_offload_group_idx(key))
        request, per_hash = self._request, self._tokens_per_hash
        if group is None or end_token is None or end_token % group.tokens_per_chunk:
            return None
        start = end_token - group.tokens_per_chunk
        raw = request.block_hashes[start // per_hash : end_token // per_hash]
        tokens = request.all_token_ids[start:end_token]
        if len(tokens) < group.tokens_per_chunk or len(raw) * per_hash < group.tokens_per_chunk:
            return None
        lora = request.lora_request
        return BlockInfo(
            block_hashes=tuple(map(bytes, resolve_block_hashes(raw, per_hash, group.tokens_per_block))),
            parent_hash=bytes(request.block_hashes[start // per_hash - 1]) if start else None,
            token_ids=tuple(tokens),
            block_size=group.tokens_per_block,
            lora_name=lora.lora_name if lora else None,
            extra_keys=None if self._plain else self._extra_keys(start, end_token, group.tokens_per_block),
            salted=bool(request.cache_salt) and start == 0,
            kind=group.kind,
            sliding_window=group.sliding_window,
        )

    def _extra_keys(self, start: int, end: int, step: int) -> tuple[tuple[Any, ...] | None, ...] | None:
        per_block = [
            generate_block_hash_extra_keys(self._request, first, first + step, 0)[0]
            for first in range(start, end, step)
        ]
        if not any(per_block):
            return None
        return tuple(to_event_extra_keys(per_block) or ())
