"""The feed's bytes: golden vectors, both profiles, tolerance of what other publishers send."""

from __future__ import annotations

import ast
import re
import struct
from pathlib import Path

import msgspec
import pytest

from kvoffload.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Codec,
    WireError,
    decode_batch,
    pack_stamp,
    stamp_sequence,
)

SHARED = Path(__file__).resolve().parents[4] / "shared" / "wire"
HASHES = [0x8000000000000005, 0x0000010000000066, 0x0000010000000067, 0x4000000000000068]
TS8 = struct.pack(">d", 1.5)

GOLDEN = {  # name: (profile, payload in hex); ts 1.5, rank 0
    "map": (
        "map",
        (
            "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657394cf8000000000000005cf00000100"
            "00000066cf0000010000000067cf4000000000000068b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0010010203"
            "0405060708090a0b0c0d0e0f10aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c000"
        ),
    ),
    "array": (
        "array",
        (
            "93cb3ff80000000000009198ab426c6f636b53746f72656494cf8000000000000005cf0000010000000066cf0000010000000067cf40000000"
            "00000068c0dc00100102030405060708090a0b0c0d0e0f1004c0a3435055c000"
        ),
    ),
    "removed map": (
        "map",
        (
            "93cb3ff80000000000009183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657394cf8000000000000005cf000001"
            "0000000066cf0000010000000067cf4000000000000068a66d656469756da343505500"
        ),
    ),
    "removed array": (
        "array",
        (
            "93cb3ff80000000000009193ac426c6f636b52656d6f76656494cf8000000000000005cf0000010000000066cf0000010000000067cf400000"
            "0000000068a343505500"
        ),
    ),
    "cleared map": ("map", "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"),
    "cleared array": ("array", "93cb3ff80000000000009191b0416c6c426c6f636b73436c656172656400"),
    "heartbeat": ("map", "93cb3ff80000000000009000"),
}


def stored(**changes) -> BlockStored:
    event = BlockStored(list(HASHES), None, list(range(1, 17)), 4, None, "CPU", None)
    return msgspec.structs.replace(event, **changes)


def encode(name: str) -> bytes:
    profile, _ = GOLDEN[name]
    codec = Codec(profile)
    if "removed" in name:
        events = [codec.removed(HASHES, "CPU", None)]
    elif "cleared" in name:
        events = [codec.cleared]
    else:
        events = [] if name == "heartbeat" else [codec.stored(stored())]
    return codec.payload(TS8, events)


@pytest.mark.parametrize("name", GOLDEN)
def test_our_encoding_equals_the_golden_vector(name):
    assert encode(name).hex() == GOLDEN[name][1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded vectors are not beside this checkout")
def test_our_encoding_equals_every_recorded_vector_whose_name_applies():
    rows = {
        name: bytes.fromhex(payload)
        for name, _, payload in (
            line.split("\t") for line in (SHARED / "golden-payloads.tsv").read_text().splitlines() if line
        )
    }
    names = {
        "map_032": "map", "array8": "array", "removed_map": "removed map", "removed_array": "removed array",
        "cleared_map": "cleared map", "cleared_array": "cleared array", "empty_heartbeat": "heartbeat",
    }  # fmt: skip
    for theirs, ours in names.items():
        assert encode(ours) == rows[theirs], theirs
    wide = [bytes.fromhex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f")]
    for theirs, profile in (("map_bytes32_hash", "map"), ("array_bytes32", "array")):
        codec = Codec(profile, "bytes")
        assert codec.payload(TS8, [codec.stored(stored(block_hashes=wide))]) == rows[theirs]
    salted = Codec().payload(TS8, [Codec().stored(stored(extra_keys=[[["mmhash", 3]], None, None, None]))])
    assert salted == rows["extra_keys_mm_tuple"]


def test_hashes_are_always_packed_in_nine_bytes():
    """A-E5: a small number, one above 2**63 and a 32-byte hash keep their form, constant per setting."""
    for profile in ("map", "array"):
        codec = Codec(profile)
        data = codec.stored(stored(block_hashes=[7, 2**63 + 5], parent_block_hash=3, token_ids=[1] * 8))
        for number in (7, 2**63 + 5, 3):
            assert b"\xcf" + number.to_bytes(8, "big") in data
        event = decode_batch(codec.payload(TS8, [data])).events[0]
        assert event.block_hashes == [7, 2**63 + 5]
        assert event.parent_block_hash == 3
        assert b"\xcf" + (7).to_bytes(8, "big") in codec.removed([7], "CPU", 0)
    wide = bytes(range(32))
    codec = Codec("map", "bytes")
    event = decode_batch(codec.payload(TS8, [codec.stored(stored(block_hashes=[wide], token_ids=[1] * 4))])).events[0]
    assert event.block_hashes == [wide]


def test_a_hash_is_never_zero():
    assert Codec().hash_of(b"\x01" * 24 + bytes(8)) == 1
    assert Codec().hash_of(bytes(24) + (2**63 + 5).to_bytes(8, "big")) == 2**63 + 5
    with pytest.raises(WireError):
        Codec().stored(stored(block_hashes=[0]))


def test_what_cannot_be_encoded_is_a_wire_error():
    for bad in (stored(extra_keys=[object()]), stored(token_ids=[2**70]), stored(block_hashes=[2**64])):
        with pytest.raises(WireError):
            Codec().stored(bad)


def test_array_profile_drops_only_trailing_defaults():
    codec = Codec("array")
    full = msgspec.msgpack.decode(codec.stored(stored(group_idx=0, kv_cache_spec_kind="full_attention")))
    assert full[8:] == [None, 0, "full_attention"]
    assert len(msgspec.msgpack.decode(codec.stored(stored()))) == 8


def test_a_part_of_an_event_keeps_its_own_parent_and_tokens():
    for profile in ("map", "array"):
        codec = Codec(profile)
        extra = [["a"], None, ["b"], None]
        part = codec.part(codec.stored(stored(extra_keys=extra, group_idx=0)), 1, 3)
        event = decode_batch(codec.payload(TS8, [part])).events[0]
        assert event.block_hashes == HASHES[1:3]
        assert event.parent_block_hash == HASHES[0]
        assert event.token_ids == list(range(5, 13))
        assert event.extra_keys == [None, ["b"]]


def test_stamps_sort_by_sequence():
    stamps = [pack_stamp(n, 1e9 - n) for n in (0, 1, 255, 256, 2**40)]
    assert stamps == sorted(stamps)
    assert stamp_sequence(stamps[-1]) == 2**40


def encode_any(value) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    ("payload", "events", "skipped", "rank"),
    [
        ([1, [], None], [], 0, None),
        ([1.5, [["BlockRemoved", [-1], "GPU"]], 3], [BlockRemoved([2**64 - 1], "GPU")], 0, 3),
        ([1.5, [{"type": "AllBlocksCleared", "medium": "CPU"}], 0], [AllBlocksCleared()], 0, 0),
        ([1.5, [["Heartbeat", 1], {"type": "Other"}, ["AllBlocksCleared"]], 0], [AllBlocksCleared()], 2, 0),
        ([1.5, [["BlockStored", [5], None, [1], 1]]], [BlockStored([5], None, [1], 1, None, None, None)], 0, None),
        ([1.5, [], 0, b"publisher"], [], 0, 0),
    ],
    ids=["rank nil", "signed hash", "cleared medium", "unknown tags", "oldest array", "fourth element"],
)
def test_batches_of_other_publishers_are_understood(payload, events, skipped, rank):
    batch = decode_batch(encode_any(payload))
    assert (batch.events, batch.skipped, batch.data_parallel_rank) == (events, skipped, rank)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", encode_any({"ts": 1.0}), encode_any([1.0]), encode_any(["x", [], 0])]
)
def test_what_is_no_batch_is_a_wire_error(payload):
    with pytest.raises(WireError):
        decode_batch(payload)


def check_message(line: str, text: str) -> None:
    """One recorded message decodes to its recorded text, and our encoding of its stores gives its bytes again."""
    topic, sequence, payload = (bytes.fromhex(frame) for frame in line.split())
    found = re.fullmatch(r"topic=(b'.*?') seq=(\d+) nframes=3 payload=(.*)", text)
    assert found is not None
    assert (topic, int.from_bytes(sequence, "big")) == (ast.literal_eval(found[1]), int(found[2]))
    ts, events, rank = ast.literal_eval(found[3])
    batch = decode_batch(payload)
    assert (batch.ts, batch.data_parallel_rank, batch.skipped) == (ts, rank, 0)
    raw = msgspec.msgpack.decode(payload, type=tuple[float, list[msgspec.Raw], int])[1]
    for event, expected, theirs in zip(batch.events, events, raw, strict=True):
        ours = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
        assert {name: ours[name] for name in expected} == expected
        assert all(value is None for name, value in ours.items() if name not in expected)
        if isinstance(event, BlockStored):
            assert Codec(hash_mode=_mode(event)).stored(event) == bytes(theirs)


def test_messages_of_a_real_engine_decode_to_their_recorded_text():
    lines = Path(__file__).with_name("data").joinpath("engine_messages.txt").read_text().splitlines()
    assert len(lines) >= 10
    for line, text in zip(lines[::2], lines[1::2], strict=True):
        check_message(line, text)


CAPTURES = sorted(SHARED.glob("captured/*.pub.hex")) if SHARED.is_dir() else []


@pytest.mark.skipif(not CAPTURES, reason="the recorded engine messages are not beside this checkout")
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name.split(".")[0])
def test_every_message_of_a_real_engine_decodes_to_its_recorded_text(path):
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    texts = path.with_name(path.name.replace(".pub.hex", ".decoded.txt")).read_text().splitlines()
    assert len(lines) == len(texts) > 20
    for line, text in zip(lines, texts, strict=True):
        check_message(line, text)


@pytest.mark.skipif(not CAPTURES, reason="the recorded engine messages are not beside this checkout")
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name.split(".")[0])
def test_every_replayed_message_of_a_real_engine_decodes_to_the_same_text(path):
    texts = path.with_name(path.name.replace(".pub.hex", ".decoded.txt")).read_text().splitlines()
    replayed = path.with_name(path.name.replace(".pub.", ".replay.")).read_text().splitlines()
    by_number = {int(re.search(r" seq=(\d+) ", text)[1]): text for text in texts}
    checked = 0
    for line in replayed:
        delimiter, *frames = line.split()
        assert delimiter == "-"
        if len(frames) == 3 and "-" not in frames:
            check_message(" ".join(frames), by_number[int(frames[1], 16)])
            checked += 1
    assert checked > 20


def _mode(event: BlockStored) -> str:
    return "bytes" if isinstance(event.block_hashes[0], bytes) else "uint64"
