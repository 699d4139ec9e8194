"""Who may touch which GPU block: blocks go back to their owner only when no copy can touch them.

`GPUBlockBook` counts the running copies per GPU block. An owner that leaves gives its whole block table and its `free`
callback; blocks that no copy uses are passed at once, the others when their last copy ended. Each block of a table is
passed exactly once, and never while a copy may still read or write it. One owner thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

Free = Callable[[Sequence[int]], None]


class GPUBlockBook:
    """Counts copies per GPU block and passes blocks to `free` when the last copy of each has ended.

    Args:
        before_free: Called with blocks right before they are passed.
        on_failure: Called when `free` has raised; its blocks are lost to their owner.
    """

    def __init__(
        self,
        before_free: Callable[[Sequence[int]], None] = lambda _: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_free = before_free
        self._busy: dict[int, int] = {}
        self._waiting: dict[int, list[Free]] = {}
        self._on_failure = on_failure

    @property
    def num_busy(self) -> int:
        """GPU blocks that a copy may touch."""
        return len(self._busy)

    @property
    def num_deferred(self) -> int:
        """GPU blocks whose owner has left and that wait for the end of a copy."""
        return len(self._waiting)

    def busy(self, blocks: Iterable[int]) -> list[int]:
        """Return those of `blocks` that a copy may touch, in order."""
        busy = self._busy
        return [block for block in blocks if block in busy]

    def hold(self, blocks: Iterable[int]) -> None:
        """A copy that touches `blocks` is about to be submitted."""
        busy = self._busy
        for block in blocks:
            busy[block] = busy.get(block, 0) + 1

    def unhold(self, blocks: Iterable[int]) -> None:
        """That copy has ended, or was refused before it was submitted."""
        busy, waiting = self._busy, self._waiting
        ready: dict[int, tuple[Free, list[int]]] = {}
        for block in blocks:
            left = busy[block] - 1
            if left:
                busy[block] = left
                continue
            del busy[block]
            for free in waiting.pop(block, ()):
                ready.setdefault(id(free), (free, []))[1].append(block)
        for free, freed in ready.values():
            self._pass(free, freed)

    def give_back(self, blocks: Iterable[int], free: Free | None) -> None:
        """The owner of `blocks` has left: pass each to `free` once, the busy ones later."""
        if free is None:
            return
        idle: list[int] = []
        for block in dict.fromkeys(blocks):
            if block in self._busy:
                self._waiting.setdefault(block, []).append(free)
            else:
                idle.append(block)
        if idle:
            self._pass(free, idle)

    def _pass(self, free: Free, blocks: list[int]) -> None:
        try:
            self._before_free(blocks)
            free(blocks)
        except Exception:
            self._on_failure()
            logger.exception("the free callback raised for GPU blocks %s", blocks)
