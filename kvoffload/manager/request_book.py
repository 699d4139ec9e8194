"""What each running request was already counted for, within bounds."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.keys import OffloadKey

MAX_REQUESTS = 8192
MAX_KEYS = 262_144


class RequestBook:
    """Remembers the keys booked per request, so that a retry is not booked again.

    Bounded for callers that never finish a request: past `max_requests` requests or `max_keys` keys in all the oldest
    request is forgotten, and its retries count anew.
    """

    __slots__ = ("_booked", "_num_keys", "_requests", "max_keys", "max_requests")

    def __init__(self, max_requests: int = MAX_REQUESTS, max_keys: int = MAX_KEYS) -> None:
        self.max_requests = max_requests
        self.max_keys = max_keys
        self._num_keys = 0
        self._requests: dict[str, set[OffloadKey]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def booked(self, req_id: str) -> set[OffloadKey]:
        """Return the keys booked for a request. Do not modify."""
        return self._requests.get(req_id) or set()

    def book_one(self, req_id: str, key: OffloadKey) -> bool:
        """Book one key; return whether it was not booked for this request before."""
        booked = self._requests.get(req_id)
        if booked is not None and key in booked:
            return False
        return bool(self.book(req_id, (key,)))

    def book(self, req_id: str, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Book `keys` and return those that were not booked for this request before, in order, each once."""
        requests = self._requests
        booked = requests.get(req_id)
        if booked is None:
            while len(requests) >= self.max_requests:
                self.forget(next(iter(requests)))
            booked = requests[req_id] = set()
        fresh = [key for key in dict.fromkeys(keys) if key not in booked]
        booked.update(fresh)
        self._num_keys += len(fresh)
        while self._num_keys > self.max_keys:
            self.forget(next(iter(requests)))
        return fresh

    def forget(self, req_id: str) -> None:
        """Free what a request holds here; unknown ones are ignored."""
        booked = self._requests.pop(req_id, None)
        if booked is not None:
            self._num_keys -= len(booked)
