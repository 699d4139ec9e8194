"""Open reservations by ticket: which blocks a copy whose end was not reported yet reads or writes.

A reservation remembers its blocks until the copy's end is reported, so a late report finds exactly the memory it speaks
of, whatever happened to the keys meanwhile. The usual completion names exactly the keys of its reservation, in order:
then nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import Ids

Owners = dict[OffloadKey, int]
"""The ticket under which each key is meant."""


class Reservation:
    """The blocks of one store or load.

    Attributes:
        is_store: A store's, else a load's.
        keys: Its keys, each once.
        ids: Their blocks.
        rest: What is left of it, once a part was completed.
    """

    __slots__ = ("ids", "is_store", "keys", "rest")

    def __init__(self, keys: list[OffloadKey], ids: Ids, *, is_store: bool) -> None:
        self.is_store = is_store
        self.keys = keys
        self.ids = ids
        self.rest: dict[OffloadKey, int] | None = None

    def blocks(self) -> dict[OffloadKey, int]:
        """Return what is open, to be changed by the caller."""
        if self.rest is None:
            self.rest = dict(zip(self.keys, self.ids.tolist(), strict=True))
        return self.rest

    def open_ids(self) -> Ids:
        """Return the blocks that are open."""
        return self.ids if self.rest is None else np.array(list(self.rest.values()), np.int64)

    def is_exactly(self, keys: list[OffloadKey]) -> bool:
        """Whether `keys` are all that is open, in order."""
        return (self.keys if self.rest is None else list(self.rest)) == keys

    def is_attached(self, detached: AbstractSet[int]) -> bool:
        """Whether none of its memory is detached."""
        return not detached or detached.isdisjoint(self.open_ids().tolist())


class Reservations:
    """Every open reservation; tickets are never used twice."""

    def __init__(self) -> None:
        self._open: dict[int, Reservation] = {}
        self._next_ticket = 1

    def tickets(self) -> list[int]:
        """Return the open tickets, oldest first."""
        return list(self._open)

    def open(self, keys: list[OffloadKey], ids: Ids, *, is_store: bool) -> int:
        """Remember a new reservation; return its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._open[ticket] = Reservation(keys, ids, is_store=is_store)
        return ticket

    def get(self, ticket: int) -> Reservation | None:
        """Return an open reservation."""
        return self._open.get(ticket)

    def close(self, ticket: int) -> Ids:
        """Forget a reservation; return the blocks that were open."""
        return self._open.pop(ticket).open_ids()

    def close_key(self, ticket: int, key: OffloadKey) -> int:
        """Forget one key of a reservation; return its block."""
        blocks = self._open[ticket].blocks()
        block = blocks.pop(key)
        if not blocks:
            del self._open[ticket]
        return block

    def whole(
        self, keys: list[OffloadKey], ticket: int | None, detached: AbstractSet[int], *, is_store: bool
    ) -> int | None:
        """Return the reservation whose open keys are these, in order, if none of its memory is detached."""
        if not keys:
            return None
        if ticket is None:
            named = ((t, r) for t, r in self._open.items() if r.is_store is is_store and r.is_exactly(keys))
            return next((t for t, r in named if r.is_attached(detached)), None)
        one = self._open.get(ticket)
        if one is None or one.is_store is not is_store or not one.is_exactly(keys):
            return None
        return ticket if one.is_attached(detached) else None

    def under(self, keys: Iterable[OffloadKey], ticket: int, *, is_store: bool) -> Owners:
        """Return the keys that are open under `ticket`.

        Raises:
            UsageError: The ticket is of the other kind.
        """
        reservation = self._open.get(ticket)
        if reservation is None:
            return {}
        if reservation.is_store is not is_store:
            raise UsageError(f"ticket {ticket} is of a {'store' if reservation.is_store else 'load'}")
        blocks = reservation.blocks()
        return {key: ticket for key in keys if key in blocks}

    def loads_of(self, keys: list[OffloadKey], current: Mapping[OffloadKey, int | None]) -> Owners:
        """Return the load that each key means without a ticket, given which block holds it now.

        That is the oldest one of exactly these keys, as they are held now; else, key by key, the oldest load that pins
        it now; else the oldest that still reads its detached memory.

        Raises:
            UsageError: A key has no load.
        """
        for ticket, load in self._open.items():
            if not load.is_store and load.is_exactly(keys) and load.blocks() == current:
                return dict.fromkeys(keys, ticket)
        owners: Owners = {}
        for key, block in current.items():
            owner = self._oldest(key, block, is_store=False)
            if owner is None:
                raise UsageError(f"key {key.hex()} has no load to complete: prepare_load comes first")
            owners[key] = owner
        return owners

    def stores_of(self, current: Mapping[OffloadKey, int | None]) -> Owners:
        """Return the store that each key means without a ticket, given which block is being written for it now.

        That is the one that writes it now, else the oldest that still writes its detached memory; other keys are left
        out.
        """
        owners = {key: self._oldest(key, block, is_store=True) for key, block in current.items()}
        return {key: owner for key, owner in owners.items() if owner is not None}

    def _oldest(self, key: OffloadKey, block: int | None, *, is_store: bool) -> int | None:
        """Return the oldest reservation of `key` that holds `block`, else the oldest one of `key`."""
        oldest: int | None = None
        for ticket, reservation in self._open.items():
            its = reservation.blocks().get(key) if reservation.is_store is is_store else None
            if its is None:
                continue
            if its == block:
                return ticket
            oldest = ticket if oldest is None else oldest
        return oldest
