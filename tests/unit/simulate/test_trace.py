"""Reading request traces."""

import json

import pytest

from kvoffload.errors import TraceError
from kvoffload.simulate.trace import TraceReader, TraceRequest

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def changed(**changes):
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}


@pytest.mark.parametrize(("stamps", "seconds"), [([0, 27, 3000], [0, 0.027, 3]), ([0.0, 1.5, 30], [0, 1.5, 30])])
def test_whole_timestamps_are_milliseconds_and_decimal_ones_seconds(tmp_path, stamps, seconds):
    path = write(tmp_path, *(changed(timestamp=stamp) for stamp in stamps))
    assert [request.arrival_seconds for request in TraceReader(path)] == seconds


def test_qwen_traces_are_told_by_their_chat_ids(tmp_path):
    line = {**GOOD, "timestamp": 61, "chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1}
    reader = TraceReader(write(tmp_path, line, {**line, "chat_id": 8, "parent_chat_id": 7, "turn": 2}))
    assert list(reader) == [
        TraceRequest(61.0, 1000, 5, (1, 2), 7, None),
        TraceRequest(61.0, 1000, 5, (1, 2), 8, 7),
    ]
    assert reader.block_tokens == 16


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{oops", "not JSON"),
        ("[]", "expected object"),
        (changed(hash_ids=...), "hash_ids"),
        (changed(timestamp=...), "timestamp"),
        (changed(input_length=-1), "input_length: expected int >= 0"),
        (changed(output_length="5"), "output_length: expected int, got str"),
        (changed(output_length=True), "output_length: expected int, got bool"),
        (changed(hash_ids=[1, "a"]), r"hash_ids\[1\]: expected int, got str"),
        (changed(hash_ids=[-1]), r"hash_ids\[0\]: expected int >= 0"),
        (changed(hash_ids=3), "hash_ids: expected array, got int"),
        (changed(timestamp=-1), "timestamp"),
        (changed(timestamp=3), "timestamp 3 is before the line above, 5"),
    ],
)
def test_bad_line_is_named_with_file_number_and_fault(tmp_path, line, expected):
    path = write(tmp_path, changed(timestamp=5), "", line)
    with pytest.raises(TraceError, match=expected) as caught:
        list(TraceReader(path))
    assert f"{path}:3: " in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_bad_lines_are_skipped_and_counted_on_request(tmp_path):
    path = write(tmp_path, changed(timestamp=5), "{", changed(timestamp=3), changed(timestamp=6))
    reader = TraceReader(path, skip_bad_lines=True)
    for _ in range(2):
        assert [request.arrival_seconds for request in reader] == [0.005, 0.006]
        assert reader.bad_lines == 2
        assert reader.first_error is not None
        assert ":2: not JSON" in reader.first_error


def test_absent_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.jsonl cannot be read: No such file"):
        list(TraceReader(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="directory"):
        list(TraceReader(tmp_path))


@pytest.mark.parametrize(
    ("tokens", "ids", "dropped"),
    [(1000, (1, 2), (1,)), (1024, (1, 2), (1, 2)), (1500, (1, 2), (1, 2)), (600, (1, 1), (1,)), (100, (9,), ())],
)
def test_unfinished_last_block_is_dropped_unless_kept(tokens, ids, dropped):
    request = TraceRequest(0.0, tokens, 1, ids)
    assert request.blocks(512) == dropped
    assert request.blocks(512, keep_partial=True) == tuple(dict.fromkeys(ids))
