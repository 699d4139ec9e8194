"""The bytes on the feed: vLLM's event batches, in its map and its array profile, both ways.

A payload is the msgpack array `[ts float64, events, data_parallel_rank int]`: exactly three elements, `ts` always a
float, the rank always an int, because one consumer or another drops the whole batch otherwise. Events are encoded one
by one and joined: live batches and replays share the bytes of a stored block, so it is encoded once in its life.

Hashes are unsigned 64-bit integers and always packed in nine bytes (`0xcf`): a consumer refuses the short forms that
msgpack would choose for small numbers. In `bytes` mode they are the hash's own bytes. One feed never mixes them.

A change of vLLM's format becomes a new profile, never an edit of one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import msgspec

from kvoffload.errors import KVOffloadError

Hash = int | bytes
"""A block hash as the feed names it: an unsigned 64-bit integer, or bytes in `bytes` mode."""

Encoding = Literal["map", "array"]
HashMode = Literal["uint64", "bytes"]

END_SEQUENCE = b"\xff" * 8
"""Sequence frame of the message that ends a replay."""
MEDIA = ("GPU", "CPU", "STORAGE")
"""The only media that consumers know; one of them drops `"cpu"` silently."""

_MASK = (1 << 64) - 1
_SHORT_LIMIT = 1 << 32
_SAMPLE = 0x1122334455667788
_TAG_STORED, _TAG_REMOVED, _TAG_CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


class WireError(KVOffloadError, ValueError):
    """A message does not follow the format."""


class BlockStored(msgspec.Struct, tag=_TAG_STORED, tag_field="type", omit_defaults=True, gc=False):
    """Blocks that became present in one medium: consecutive blocks of one sequence, each the parent of the next."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=_TAG_REMOVED, tag_field="type", omit_defaults=True, gc=False):
    """Blocks that are no longer present in one medium."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=_TAG_CLEARED, tag_field="type", omit_defaults=True, gc=False):
    """Nothing is present any more, in any medium: consumers clear every tier of the worker."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A decoded payload; `skipped` events had an unknown tag or an unusable form."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None
    skipped: int = 0


class Template(NamedTuple):
    """The bytes around what differs between stores of one block: hash, parent, tokens.

    A store is `head, hash, parent_mark, parent, tokens_mark, tokens, tail`, or without a parent
    `head, hash, no_parent, tokens, tail`; hashes are their eight bytes, tokens are encoded.
    """

    head: bytes
    parent_mark: bytes
    tokens_mark: bytes
    no_parent: bytes
    tail: bytes


class Codec:
    """Encodes events in one profile and hash mode. Belongs to one thread.

    Args:
        encoding: `map` (vLLM from 0.26 on) or `array` (vLLM 0.19 to 0.25, AIBrix).
        hash_mode: `uint64` or `bytes`.
        rank: The data-parallel rank that every batch carries.
    """

    def __init__(self, encoding: Encoding = "map", hash_mode: HashMode = "uint64", rank: int = 0) -> None:
        self.encoding = encoding
        self.hash_mode = hash_mode
        encoder = msgspec.msgpack.Encoder()
        self._encode = encoder.encode
        self._encode_into = self.encode_into = encoder.encode_into
        self._buffer = bytearray()
        self._templates: dict[tuple[object, ...], Template] = {}
        self._rank = self._encode(int(rank))
        self.cleared = self._encode(AllBlocksCleared() if encoding == "map" else [_TAG_CLEARED])

    def hash_of(self, raw: bytes) -> Hash:
        """Return the feed's name of a block hash; 0 is no name, 1 stands for it."""
        if self.hash_mode == "uint64":
            return int.from_bytes(raw[-8:], "big") or 1
        return bytes(raw)

    def stored(self, event: BlockStored) -> bytes:
        """Encode one event.

        Raises:
            WireError: A value has no place in the format.
        """
        try:
            hashes, parent = event.block_hashes, event.parent_block_hash
            if self.encoding == "map":
                if self.hash_mode == "uint64":
                    event.block_hashes = self._full(hashes)
                    event.parent_block_hash = None if parent is None else self._full([parent])[0]
                data = self._pack(event)
                event.block_hashes, event.parent_block_hash = hashes, parent
                return data
            return self._pack(self._as_array(event))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"cannot encode {type(event).__name__}: {error}") from error

    def template(
        self, medium: str, group_idx: int, block_size: int, lora_name: str | None, kind: str | None, window: int | None
    ) -> Template:
        """Return the parts of a store of one block that are the same for all its like; 64-bit hashes only.

        Raises:
            WireError: A value has no encoding.
        """
        like = (medium, group_idx, block_size, lora_name, kind, window)
        found = self._templates.get(like)
        if found is not None:
            return found
        if len(self._templates) > 1000:  # adapters come and go
            self._templates.clear()
        name, parent, tokens = _SAMPLE, 0x99AABBCCDDEEFF11, [0xFFFFFFF1]
        event = BlockStored([name], parent, tokens, block_size, None, medium, lora_name, None, group_idx, kind, window)
        with_parent = self.stored(event)
        event.parent_block_hash = None
        without = self.stored(event)
        head, rest = with_parent.split(name.to_bytes(8, "big"))
        parent_mark, rest = rest.split(parent.to_bytes(8, "big"))
        tokens_mark, tail = rest.split(self._encode(tokens))
        no_parent = without.split(name.to_bytes(8, "big"))[1].split(self._encode(tokens))[0]
        found = self._templates[like] = Template(head, parent_mark, tokens_mark, no_parent, tail)
        return found

    def _pack(self, value: object) -> bytes:
        """Encode through a buffer that is kept: the encoder's own result holds more memory than it shows."""
        self._encode_into(value, self._buffer)
        return bytes(self._buffer)

    def removed(self, hashes: Sequence[Hash], medium: str, group_idx: int | None) -> bytes:
        """Encode the removal of `hashes`."""
        packed = self._full(list(hashes)) if self.hash_mode == "uint64" else list(hashes)
        if self.encoding == "map":
            return self._encode(BlockRemoved(packed, medium, group_idx))
        fields: list[Any] = [_TAG_REMOVED, packed, medium]
        return self._encode(fields if group_idx is None else [*fields, group_idx])

    def part(self, data: bytes, start: int, stop: int) -> bytes:
        """Return the event that stores only blocks `start` to `stop` of the encoded `data`."""
        event = _decode_event(data)
        if not isinstance(event, BlockStored):
            raise WireError("only a BlockStored has parts")
        size = event.block_size
        return self.stored(
            msgspec.structs.replace(
                event,
                block_hashes=event.block_hashes[start:stop],
                parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
                token_ids=event.token_ids[start * size : stop * size],
                extra_keys=None if event.extra_keys is None else event.extra_keys[start:stop],
            )
        )

    def payload(self, ts8: bytes, events: Sequence[bytes]) -> bytes:
        """Join encoded events to a payload; `ts8` is the time as a big-endian double, as msgpack has it."""
        count = len(events)
        if count < 16:
            header = bytes((0x90 | count,))
        elif count < 1 << 16:
            header = b"\xdc" + count.to_bytes(2, "big")
        else:
            header = b"\xdd" + count.to_bytes(4, "big")
        return b"".join((b"\x93\xcb", ts8, header, *events, self._rank))

    def _as_array(self, event: BlockStored) -> list[Any]:
        hashes, parent = event.block_hashes, event.parent_block_hash
        if self.hash_mode == "uint64":
            hashes = self._full(hashes)
            parent = None if parent is None else self._full([parent])[0]
        fields: list[Any] = [
            _TAG_STORED, hashes, parent, event.token_ids, event.block_size, event.lora_id, event.medium,
            event.lora_name, event.extra_keys, event.group_idx, event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        ]  # fmt: skip
        while len(fields) > 8 and fields[-1] is None:
            fields.pop()
        return fields

    @staticmethod
    def _full(hashes: list[int | bytes]) -> list[int | bytes]:
        """Make sure that each integer is packed in nine bytes."""
        numbers = cast("list[int]", hashes)
        low, high = min(numbers), max(numbers)
        if low < 1 or high > _MASK:
            raise WireError(f"a block hash must be in [1, 2**64), got {low if low < 1 else high}")
        if low >= _SHORT_LIMIT:
            return hashes
        packed = [h if h >= _SHORT_LIMIT else msgspec.Raw(b"\xcf" + h.to_bytes(8, "big")) for h in numbers]
        return cast("list[int | bytes]", packed)


_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NUMBER = msgspec.msgpack.Decoder(float)
_RANK = msgspec.msgpack.Decoder(int | None)
_MAP_EVENT = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_ARRAY_EVENT = msgspec.msgpack.Decoder(list[Any])


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Decode a payload of any vLLM from 0.19 on; events of an unknown form are skipped and counted.

    Raises:
        WireError: The payload is no batch.
    """
    try:
        parts = _BATCH.decode(payload)
        if len(parts) < 2:
            raise WireError(f"a batch has at least two elements, got {len(parts)}")
        ts = _NUMBER.decode(parts[0])
        raw_events = _EVENTS.decode(parts[1])
        rank = _RANK.decode(parts[2]) if len(parts) > 2 else None
    except msgspec.MsgspecError as error:
        raise WireError(f"not an event batch: {error}") from error
    events: list[Event] = []
    skipped = 0
    for raw in raw_events:
        try:
            events.append(_decode_event(raw))
        except (msgspec.MsgspecError, WireError, IndexError, TypeError):
            skipped += 1
    return EventBatch(ts, events, rank, skipped)


def _decode_event(raw: msgspec.Raw | bytes) -> Event:
    first = memoryview(raw)[0]
    event: Event
    if 0x80 <= first <= 0x8F or first in {0xDE, 0xDF}:
        event = _MAP_EVENT.decode(raw)
    else:
        event = _from_array(_ARRAY_EVENT.decode(raw))
    if isinstance(event, BlockStored):
        event.block_hashes = [_unsigned(h) for h in event.block_hashes]
        if event.parent_block_hash is not None:
            event.parent_block_hash = _unsigned(event.parent_block_hash)
    elif isinstance(event, BlockRemoved):
        event.block_hashes = [_unsigned(h) for h in event.block_hashes]
    return event


def _unsigned(value: int | bytes) -> int | bytes:
    """Old engines send signed hashes; the number is the same modulo 2**64."""
    return value & _MASK if isinstance(value, int) else value


def _from_array(fields: list[Any]) -> Event:
    tag, values = fields[0], fields[1:]
    target: type[BlockStored | BlockRemoved | AllBlocksCleared]
    if tag == _TAG_STORED:
        target, values = BlockStored, [*values, None, None, None][: max(7, len(values))]
    elif tag == _TAG_REMOVED:
        target, values = BlockRemoved, [*values, None][: max(2, len(values))]
    elif tag == _TAG_CLEARED:
        return AllBlocksCleared()
    else:
        raise WireError(f"unknown event tag {tag!r}")
    names = target.__struct_fields__
    return msgspec.convert({"type": tag, **dict(zip(names, values, strict=False))}, target)


def event_schema() -> dict[str, Any]:
    """Return the JSON Schema of a decoded batch, in the map profile; hashes in bytes are base64 text there."""
    schema = msgspec.json.schema(tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "EventBatch", **schema}


def sequence_frame(sequence: int) -> bytes:
    """Return the sequence frame: 8 bytes, big-endian."""
    return sequence.to_bytes(8, "big")


def pack_stamp(sequence: int, ts: float) -> bytes:
    """Return sequence and time in 16 bytes; stamps sort by sequence."""
    return struct.pack(">Qd", sequence, ts)


def stamp_sequence(stamp: bytes) -> int:
    """Return the sequence inside a stamp."""
    return int.from_bytes(stamp[:8], "big")
