"""`Workload`: the requests of a run, from traces or from the built-in chats, as block contents and arrival times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffload.errors import ConfigError, TraceError
from kvoffload.simulate.generator import ChatWorkload, generate_chats
from kvoffload.simulate.trace import TraceReader, TraceRequest


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request as an engine sees it.

    Attributes:
        number: Counts from 0.
        arrival_seconds: Time of arrival.
        block_hashes: Name of each block that can be kept, in prefix order.
        num_blocks: Blocks of the prompt, the unfinished last one included.
        output_tokens: Tokens generated.
    """

    number: int
    arrival_seconds: float
    block_hashes: list[bytes]
    num_blocks: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """What one pass over a workload found.

    Attributes:
        requests: Requests.
        requested_blocks: Blocks of all prompts, unfinished ones included.
        unique_blocks: Different ones among them.
        largest_request: Blocks of the longest prompt.
        bad_lines: Trace lines that were skipped.
    """

    requests: int
    requested_blocks: int
    unique_blocks: int
    largest_request: int
    bad_lines: int


class Workload(Iterable[WorkloadRequest]):
    """Requests of a run; each iteration streams them anew.

    Args:
        traces: Trace files, one after the other; none: the built-in chats.
        seed: Seed of the built-in chats.
        limit: Requests to take; None: all of the traces, `DEFAULT_CHATS` built-in ones.
        keep_partial: Also keep a prompt's unfinished last block, which real engines do not offer.
        skip_bad_lines: Go on after a line that cannot be used, and count it.

    Raises:
        ConfigError: The traces count different numbers of tokens in one block (found while measuring).
    """

    DEFAULT_CHATS = 2000

    def __init__(
        self,
        traces: Sequence[Path] = (),
        *,
        seed: int = 0,
        limit: int | None = None,
        keep_partial: bool = False,
        skip_bad_lines: bool = False,
    ) -> None:
        self._readers = [TraceReader(path, skip_bad_lines=skip_bad_lines) for path in traces]
        self._seed = seed
        self._limit = limit if limit is not None or traces else self.DEFAULT_CHATS
        self.keep_partial = keep_partial
        self.block_tokens = ChatWorkload().block_tokens

    @property
    def name(self) -> str:
        """The traces' file names, or what the built-in chats are called."""
        return ", ".join(reader.path.name for reader in self._readers) or f"built-in chats (seed {self._seed})"

    def measure(self) -> WorkloadSize:
        """Read everything once: sizes the run, and finds every bad line before it begins."""
        requests = requested = largest = 0
        unique: list[set[int]] = [set() for _ in self._readers] or [set()]
        for source, request in itertools.islice(self._raw(), self._limit):
            requests += 1
            ids = dict.fromkeys(request.hash_ids)
            requested += len(ids)
            largest = max(largest, len(ids))
            unique[source].update(ids)
        bad = sum(reader.bad_lines for reader in self._readers)
        if not requested:
            what = "no requests" if not requests else "no prompt has a block"
            skipped = f"; skipped {bad} line(s), the first: {self.first_error()}" if bad else ""
            raise TraceError(
                f"{self.name}: {what}{skipped}; give a trace with at least one line of a request that has blocks"
            )
        sizes = {reader.block_tokens for reader in self._readers}
        if len(sizes) > 1:
            raise ConfigError(
                f"traces of one run must have blocks of one size, got {sorted(sizes)} tokens: run them one by one"
            )
        if sizes:
            self.block_tokens = sizes.pop()
        return WorkloadSize(requests, requested, sum(map(len, unique)), largest, bad)

    def first_error(self) -> str | None:
        """Return what was wrong with the first line that was skipped."""
        return next((reader.first_error for reader in self._readers if reader.first_error), None)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests; call `measure` first where traces are read."""
        start = end = 0.0
        current = 0
        for number, (source, request) in enumerate(itertools.islice(self._raw(), self._limit)):
            if source != current:
                current, start = source, end
            end = start + request.arrival_seconds
            ids = request.blocks(self.block_tokens, keep_partial=self.keep_partial)
            hashes = [_hash(source, block) for block in ids]
            yield WorkloadRequest(number, end, hashes, len(set(request.hash_ids)), request.output_length)

    def _raw(self) -> Iterator[tuple[int, TraceRequest]]:
        if not self._readers:
            yield from ((0, request) for request in generate_chats(self._seed))
        for source, reader in enumerate(self._readers):
            yield from ((source, request) for request in reader)


def _hash(source: int, block: int) -> bytes:
    """Name a trace's block: ids of different traces never meet, and no name ends in eight zero bytes."""
    return source.to_bytes(4, "big") + (block + 1).to_bytes(12, "big")
