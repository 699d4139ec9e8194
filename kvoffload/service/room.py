"""The line in which loads wait while too many bytes are in flight: first come, first served.

A *turn* is a baton. Who is given it looks whether there is room, and hands it on when done looking (`next`), whether a
load was started or not, so that no wake-up is lost: also when the holder was cancelled, timed out or aborted meanwhile.
Only one who finds no room and goes back to the head of the line keeps it to himself: then something runs, and its end
gives the next turn. There is one turn at a time, so those who go back stay in order.
"""

from __future__ import annotations

from collections import OrderedDict

from kvoffload.service.waiting import Resolver, Wait


class RoomLine:
    """Loads that wait for their turn; loop thread only."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._waiting: OrderedDict[Wait, None] = OrderedDict()
        self._called: set[Wait] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Somebody waits or was just called: a newcomer stands at the end."""
        return bool(self._waiting or self._called)

    @property
    def num_called(self) -> int:
        """Those who were given their turn and have not looked yet."""
        return len(self._called)

    def next(self) -> None:
        """Give the first in line its turn, unless somebody was called and has not looked yet."""
        while self._waiting and not self._called:
            future, _ = self._waiting.popitem(last=False)
            if not future.done():  # it gave up, and its task has not run since
                self._called.add(future)
                self._resolver.resolve(future)

    async def wait(self, seconds: float, interrupts: set[Wait], *, first: bool) -> bool:
        """Wait for a turn; False when `seconds` passed or the wait was interrupted. A turn must be ended by `next`.

        Args:
            seconds: Longest wait.
            interrupts: The future is put here while waiting; resolving it with False ends the wait.
            first: Stand at the head of the line: the caller had its turn, but there was no room yet.
        """
        future: Wait = self._resolver.loop.create_future()
        self._waiting[future] = None
        if first:
            self._waiting.move_to_end(future, last=False)
        interrupts.add(future)
        turn = False
        try:
            turn = await self._resolver.wait(future, seconds)
            return turn
        finally:
            interrupts.discard(future)
            self._waiting.pop(future, None)
            if future in self._called:
                self._called.discard(future)
                if not turn:
                    self.next()
