"""Request traces in JSON lines: Mooncake's format, and Qwen-Bailian's, told apart by their fields.

Mooncake: `timestamp` (an integer is milliseconds, a decimal is seconds), `input_length`, `output_length` (tokens) and
`hash_ids`, one for each 512 tokens of the prompt, the unfinished last block included; equal ids mean equal prefixes.
Qwen-Bailian adds `chat_id, parent_chat_id, type, turn`, has seconds and one id for each 16 tokens.

Files are streamed: a line is gone when the next one is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvoffload.errors import TraceError

MOONCAKE_BLOCK_TOKENS = 512
QWEN_BLOCK_TOKENS = 16

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...]
    chat_id: int | None = None
    parent_chat_id: int | None = None
    turn: int | None = None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_seconds: Time of arrival, from the trace's own zero.
        input_length: Prompt tokens.
        output_length: Generated tokens.
        hash_ids: One id per block of the prompt, in prefix order, the unfinished last one included.
        chat_id: Names this request in traces that link turns.
        parent_chat_id: The turn before, in traces that link turns; None for a first one.
    """

    arrival_seconds: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    chat_id: int | None = None
    parent_chat_id: int | None = None

    def blocks(self, block_tokens: int, *, keep_partial: bool = False) -> tuple[int, ...]:
        """Return the ids of the prompt's blocks, each once; the unfinished last one only with `keep_partial`."""
        ids = self.hash_ids
        if not keep_partial and self.input_length % block_tokens and len(ids) * block_tokens > self.input_length:
            ids = ids[:-1]
        return tuple(dict.fromkeys(ids))


class TraceReader(Iterable[TraceRequest]):
    """Reads one trace file, from its start at each iteration.

    Args:
        path: The file.
        skip_bad_lines: Go on after a line that cannot be used, and count it.

    Attributes:
        bad_lines: Lines skipped in the latest iteration.
        block_tokens: Tokens for one id; known after the first line.
    """

    def __init__(self, path: Path | str, *, skip_bad_lines: bool = False) -> None:
        self.path = Path(path)
        self.skip_bad_lines = skip_bad_lines
        self.bad_lines = 0
        self.block_tokens = MOONCAKE_BLOCK_TOKENS
        self.first_error: str | None = None

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests.

        Raises:
            TraceError: The file cannot be read, or a line cannot be used: it names file, line and what is wrong.
        """
        self.bad_lines = 0
        self.first_error = None
        decode = msgspec.json.Decoder(_Line).decode
        clock = _Clock()
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise TraceError(
                f"trace {self.path} cannot be read: {error.strerror or error}; give the path of a JSON lines file"
            ) from None
        with file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TraceError(
                    f"trace {self.path} is not a regular file: it is read more than once; write it to a file first"
                )
            for number, text in enumerate(_lines(file, self.path), start=1):
                if text.isspace():
                    continue
                try:
                    line = decode(text)
                    arrival = clock.seconds(line)
                except (msgspec.MsgspecError, ValueError) as error:
                    problem = f"{self.path}:{number}: {_what(error)}"
                    if not self.skip_bad_lines:
                        raise TraceError(
                            f"{problem}; correct it, or go on after such lines (--skip-bad-lines)"
                        ) from None
                    self.bad_lines += 1
                    self.first_error = self.first_error or problem
                    continue
                if line.chat_id is not None:
                    self.block_tokens = QWEN_BLOCK_TOKENS
                parent = line.parent_chat_id
                yield TraceRequest(
                    arrival,
                    line.input_length,
                    line.output_length,
                    line.hash_ids,
                    line.chat_id,
                    parent if parent is not None and parent >= 0 else None,
                )


def _lines(file: Iterable[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror or error}; give the path of a JSON lines file"
        ) from None


class _Clock:
    """Seconds of each line: the first time that is not zero says what the file's unit is."""

    def __init__(self) -> None:
        self._last: float = 0
        self._per_second: float | None = None

    def seconds(self, line: _Line) -> float:
        stamp = line.timestamp
        if stamp < self._last:
            raise ValueError(f"timestamp {stamp} is before the line above, {self._last}: requests must be in order")
        self._last = stamp
        if self._per_second is None and stamp:
            self._per_second = 1000.0 if isinstance(stamp, int) and line.chat_id is None else 1.0
        return stamp / (self._per_second or 1.0)


def _what(error: Exception) -> str:
    """Return what is wrong in words: `field: expected int, got str`."""
    if not isinstance(error, msgspec.MsgspecError):
        return str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON: {error}"
    what, _, place = str(error).replace("`", "").partition(" - at $")
    what = what[:1].lower() + what[1:]
    return f"{place.lstrip('.')}: {what}" if place else what
