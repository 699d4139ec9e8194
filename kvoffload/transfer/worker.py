"""`OffloadingWorker` routes transfers to the handler of their direction and gathers what finished.

Reference, chapter 9.2. One broken handler never takes the others down: what it raises is logged, kept for the owner,
and isolated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvoffload.errors import TransferError, UsageError
from kvoffload.manager.specs import LoadStoreSpec
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready, TransferResult, TransferSpec, TransferType

logger = logging.getLogger(__name__)

_MAX_SUBMIT_ERRORS = 1024


class OffloadingWorker:
    """All transfer directions of one rank. One owner thread calls everything but `wait` and `pending_jobs`."""

    def __init__(self) -> None:
        self.handlers: set[OffloadingHandler] = set()
        self.transfer_type_to_handler: dict[TransferType, OffloadingHandler] = {}
        self._notify: Callable[[], None] | None = None
        self._submit_errors: dict[int, BaseException] = {}
        self._handler_errors: dict[TransferType, BaseException] = {}
        self._broken: set[TransferType] = set()

    def register_handler(
        self, src_cls: type[LoadStoreSpec], dst_cls: type[LoadStoreSpec], handler: OffloadingHandler
    ) -> None:
        """Route transfers from one spec class's medium to another's to a handler.

        Raises:
            UsageError: That direction has a handler already.
        """
        transfer_type = (src_cls.medium(), dst_cls.medium())
        if transfer_type in self.transfer_type_to_handler:
            raise UsageError(f"transfers {_arrow(transfer_type)} already have a handler: register another direction")
        self.handlers.add(handler)
        self.transfer_type_to_handler[transfer_type] = handler
        handler.notify = self._notify

    def set_notify(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` from handler threads whenever `get_finished` has news; it must return at once."""
        self._notify = callback
        for handler in self.handlers:
            handler.notify = callback

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Queue one transfer; return False if its handler refused, and then no byte moves for that job.

        Why it was refused is told once by `take_submit_error`.

        Raises:
            UsageError: No handler is registered for that direction.
        """
        src, dst = spec
        transfer_type = (src.medium(), dst.medium())
        handler = self.transfer_type_to_handler.get(transfer_type)
        if handler is None:
            known = ", ".join(map(_arrow, sorted(self.transfer_type_to_handler))) or "none"
            raise UsageError(
                f"no handler for transfers {_arrow(transfer_type)}; registered: {known}; call register_handler first"
            )
        try:
            return handler.transfer_async(job_id, spec, ready)
        except Exception as error:
            logger.debug("transfer %s of job %d was refused", _arrow(transfer_type), job_id, exc_info=error)
            if len(self._submit_errors) >= _MAX_SUBMIT_ERRORS:
                self._submit_errors.pop(next(iter(self._submit_errors)))
            self._submit_errors[job_id] = error
            return False

    def take_submit_error(self, job_id: int) -> BaseException | None:
        """Return what the handler raised when it refused a job, once; None if it just returned False."""
        return self._submit_errors.pop(job_id, None)

    def get_finished(self) -> list[TransferResult]:
        """Return what finished since the last call: per handler in its order; a handler that raises has no news."""
        finished: list[TransferResult] = []
        for transfer_type, handler in self.transfer_type_to_handler.items():
            try:
                finished.extend(handler.get_finished())
            except Exception as error:
                if transfer_type not in self._broken:  # it is polled ten times a second until its copies have ended
                    logger.exception("handler for %s failed when polled", _arrow(transfer_type))
                self._broken.add(transfer_type)
                self._handler_errors[transfer_type] = error
            else:
                self._broken.discard(transfer_type)
        return finished

    def take_handler_errors(self) -> dict[TransferType, BaseException]:
        """Return, once, the last error of each handler that raised in `get_finished`."""
        errors, self._handler_errors = self._handler_errors, {}
        return errors

    def absent(self) -> str | None:
        """Return None: handlers in this process are always there."""
        return None

    def num_up(self) -> int:
        """Return 1: this process."""
        return 1

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until the given jobs have ended; return False if that took longer than `timeout` seconds in all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ended = True
        for handler in self.transfer_type_to_handler.values():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = handler.wait(job_ids, left) and ended
        return ended

    def pending_jobs(self) -> list[int]:
        """Return the ids of all jobs whose copy has not ended."""
        return [job_id for handler in self.transfer_type_to_handler.values() for job_id in handler.pending_jobs()]

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shut every handler down within `timeout` seconds in all; one that raises does not stop the rest.

        Raises:
            TransferError: Some handlers raised; all were shut down, and its cause is the group of what they raised.
        """
        deadline = time.monotonic() + timeout
        errors: list[Exception] = []
        for transfer_type, handler in self.transfer_type_to_handler.items():
            try:
                handler.shutdown(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                logger.exception("handler for %s failed to shut down", _arrow(transfer_type))
                errors.append(error)
        if errors:
            raise TransferError(f"{len(errors)} handlers failed to shut down: {errors!r}") from ExceptionGroup(
                "shutdown", errors
            )


def _arrow(transfer_type: TransferType) -> str:
    return f"{transfer_type[0]} to {transfer_type[1]}"
