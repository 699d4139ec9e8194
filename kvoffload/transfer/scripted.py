"""The scripted backend: copies finish, fail, reorder or hang when a test says so. Public test support.

It keeps the contract of every handler and has no thread: a job ends inside the call that lets it end. By default jobs
end at once (as soon as they are ready and their turn has come); after `hold()` they stay until `finish`, `fail` or
`finish_all`. With a layout, bytes are really copied when a job finishes, so tests can look for torn or misplaced ones.

    handlers = ScriptedOffloadingHandlers.over(kv_caches, block_size_factor=1, num_cpu_blocks=8)
    load = handlers.cpu_to_gpu_handler
    load.hold()
    ...                                   # the code under test submits job 7
    load.fail(7, OSError("link down"))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvoffload.errors import ClosedError, TransferError, UsageError
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready, TransferResult, TransferSpec, TransferType
from kvoffload.transfer.checks import HostWait, OwnerProcess, host_wait
from kvoffload.transfer.host_copy import copy_plan
from kvoffload.transfer.plan import CopyPlan, TransferLayout

_POLL_SECONDS = 0.005


@dataclass(slots=True, eq=False)
class ScriptedJob:
    """One submitted transfer, kept for the test to look at.

    Attributes:
        job_id: The caller's id.
        spec: Source and destination.
        ready: As submitted.
        held: It ends only when the test says so.
        hung: It does not end with `finish_all` either.
        ended: Its copy has ended, well or not.
    """

    job_id: int
    spec: TransferSpec
    ready: Ready
    held: bool
    hung: bool = False
    ended: bool = False
    plan: CopyPlan | None = None
    wait: HostWait | None = None
    error: BaseException | None = None

    @property
    def gpu_blocks(self) -> set[int]:
        """Engine blocks that the job reads or writes."""
        return {int(b) for side in self.spec if isinstance(side, GPULoadStoreSpec) for b in side.block_ids}


class _Script:
    """What the handlers of both directions share: one lock, all unended jobs in order of submission."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.unended: list[tuple[ScriptedOffloadingHandler, ScriptedJob]] = []

    def pump(self) -> set[ScriptedOffloadingHandler]:
        """End every job that may end by itself (its turn, ready, not held); return the handlers with news."""
        news: set[ScriptedOffloadingHandler] = set()
        blocked: list[tuple[ScriptedOffloadingHandler, ScriptedJob]] = []
        for handler, job in list(self.unended):
            waits = any(other is handler or earlier.gpu_blocks & job.gpu_blocks for other, earlier in blocked)
            if job.held or waits or (job.wait is not None and not job.wait(0)):
                blocked.append((handler, job))
            else:
                handler.end_locked(job, job.error, copy=job.error is None)
                news.add(handler)
        return news


class ScriptedOffloadingHandler(OffloadingHandler):
    """A handler for one direction whose jobs end when the test says so; every method may be called from any thread.

    Args:
        transfer_type: Source and destination medium.
        layout: Where bytes are; None moves none and checks no block id.
        script: Shared with the other direction's handler.
        transfer_time: Seconds that results report.

    Attributes:
        submitted: Every accepted job, in order, ended ones included.
    """

    def __init__(
        self,
        transfer_type: TransferType = ("GPU", "CPU"),
        layout: TransferLayout | None = None,
        script: _Script | None = None,
        transfer_time: float = 0.001,
    ) -> None:
        self.transfer_type = transfer_type
        self.submitted: list[ScriptedJob] = []
        self._layout = layout
        self._script = script or _Script()
        self._transfer_time = transfer_time
        self._process = OwnerProcess("this scripted handler")
        self._finished: list[TransferResult] = []
        self._holding = False
        self._refusals: list[BaseException | None] = []
        self._failures: list[BaseException] = []
        self._closed = False

    # ---- the contract

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Queue one transfer; see `OffloadingHandler`."""
        self._process.check()
        wait = host_wait(ready)
        with self._script.changed:
            if self._closed:
                raise ClosedError("this scripted handler is shut down")
            if self._refusals:
                refusal = self._refusals.pop(0)
                if refusal is not None:
                    raise refusal
                return False
            if any(job_id == job.job_id for _, job in self._mine()):
                raise UsageError(f"job {job_id} has not ended yet: ids must be unique among unfinished jobs")
            plan = None
            if self._layout is not None:
                plan = self._layout.plan(*spec, gpu_to_cpu=self.transfer_type[0] == "GPU")
            job = ScriptedJob(job_id, spec, ready, held=self._holding, plan=plan, wait=wait)
            if self._failures:
                job.error = self._failures.pop(0)
            self.submitted.append(job)
            self._script.unended.append((self, job))
        self._pump()
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what ended since the last call, in the order in which it ended."""
        self._process.check()
        self._pump()
        with self._script.changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until the given jobs have ended; see `OffloadingHandler`."""
        self._process.check()
        return self._wait(lambda: not job_ids.intersection(self.pending_jobs()), timeout)

    def pending_jobs(self) -> list[int]:
        """Return the ids of jobs that have not ended, in order of submission."""
        with self._script.changed:
            return [job.job_id for _, job in self._mine()]

    def shutdown(self, timeout: float = 10.0) -> None:
        """Wait for jobs to end; at the timeout, fail those that were never ready and leave held ones pending."""
        self._process.check()
        with self._script.changed:
            self._closed = True
        if self._wait(lambda: not self.pending_jobs(), timeout):
            return
        with self._script.changed:
            for _, job in self._mine():
                if not job.held:
                    self.end_locked(job, ClosedError(f"job {job.job_id}: shut down before it started"), copy=False)
        self._notify()

    # ---- the script

    def hold(self) -> None:
        """Keep jobs that are submitted from now on until `finish`, `fail` or `finish_all`."""
        with self._script.changed:
            self._holding = True

    def resume(self) -> None:
        """End jobs by themselves again, held ones included, hung ones not."""
        with self._script.changed:
            self._holding = False
            for _, job in self._mine():
                job.held = job.hung
        self._pump()

    def finish(self, job_id: int, *, copy: bool = True) -> None:
        """End a pending job with success, out of turn if need be; `copy=False` reports success and moves no byte."""
        self._end(job_id, None, copy=copy)

    def fail(self, job_id: int, error: BaseException | None = None, *, copy: bool = False) -> None:
        """End a pending job as failed; `copy=True` writes its bytes all the same, as a broken device may."""
        self._end(job_id, error or TransferError(f"job {job_id} failed by script"), copy=copy)

    def finish_all(self) -> None:
        """End all pending jobs that are not hung, with success, in order of submission."""
        with self._script.changed:
            for _, job in self._mine():
                if not job.hung:
                    self.end_locked(job, None, copy=True)
        self._notify()

    def copy_now(self, job_id: int) -> None:
        """Move a pending job's bytes now and leave it pending: a late or early write, as a running copy makes."""
        with self._script.changed:
            plan = self._pending(job_id).plan
            if plan is None:
                raise UsageError("this scripted handler has no layout, so it has no bytes to copy")
            copy_plan(plan)

    def hang(self, job_id: int) -> None:
        """Let a pending job never end, except by `finish` or `fail` with its id."""
        with self._script.changed:
            job = self._pending(job_id)
            job.held = job.hung = True

    def refuse_next(self, error: BaseException | None = None) -> None:
        """Refuse the next submission: by `error` if given, else by returning False."""
        with self._script.changed:
            self._refusals.append(error)

    def fail_next(self, error: BaseException | None = None) -> None:
        """Let the next accepted job fail in flight when its turn comes (or when it is finished, if held)."""
        with self._script.changed:
            self._failures.append(error or TransferError("failed by script"))

    def wait_submitted(self, count: int, timeout: float = 5.0) -> bool:
        """Block until `count` jobs were accepted since the start; return False if that took too long."""
        return self._wait(lambda: len(self.submitted) >= count, timeout)

    # ---- inside

    def end_locked(self, job: ScriptedJob, error: BaseException | None, *, copy: bool) -> None:
        """End a job; the script's lock is held."""
        error = error or job.error
        if copy and job.plan is not None:
            copy_plan(job.plan)
        job.ended, job.error = True, error
        self._script.unended.remove((self, job))
        size = job.plan.num_bytes if job.plan else 0
        self._finished.append(
            TransferResult(job.job_id, error is None, size, self._transfer_time, self.transfer_type, 0.0, error)
        )
        self._script.changed.notify_all()

    def _mine(self) -> list[tuple[ScriptedOffloadingHandler, ScriptedJob]]:
        return [entry for entry in self._script.unended if entry[0] is self]

    def _pending(self, job_id: int) -> ScriptedJob:
        for _, job in self._mine():
            if job.job_id == job_id:
                return job
        raise UsageError(f"job {job_id} is not pending; pending are {self.pending_jobs()}")

    def _end(self, job_id: int, error: BaseException | None, *, copy: bool) -> None:
        with self._script.changed:
            self.end_locked(self._pending(job_id), error, copy=copy)
        self._pump()
        self._notify()

    def _pump(self) -> None:
        with self._script.changed:
            news = self._script.pump()
        for handler in news:
            handler._notify()  # noqa: SLF001 - the other direction of one pair

    def _notify(self) -> None:
        if self.notify is not None:
            self.notify()

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._pump()
            with self._script.changed:
                if done():
                    return True
                left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._script.changed.wait(left)


class ScriptedOffloadingHandlers:
    """The scripted counterpart of `CpuGpuOffloadingHandlers`: one handler per direction over one script."""

    def __init__(self, layout: TransferLayout | None = None) -> None:
        script = _Script()
        self.layout = layout
        self.gpu_to_cpu_handler = ScriptedOffloadingHandler(("GPU", "CPU"), layout, script)
        self.cpu_to_gpu_handler = ScriptedOffloadingHandler(("CPU", "GPU"), layout, script)

    @classmethod
    def over(cls, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int) -> Self:
        """Build over real memory: KV caches on the host, and CPU tensors made here."""
        cpu = [np.zeros((num_cpu_blocks, t.page_size_bytes * block_size_factor), np.int8) for t in kv_caches.tensors]
        gpu = [tensor.view for tensor in kv_caches.tensors]
        return cls(TransferLayout(gpu, cpu, block_size_factor, kv_caches.group_data_refs))

    @property
    def both(self) -> Iterable[ScriptedOffloadingHandler]:
        """Both handlers, the store direction first."""
        return (self.gpu_to_cpu_handler, self.cpu_to_gpu_handler)

    def hold(self) -> None:
        """Hold both directions."""
        for handler in self.both:
            handler.hold()

    def resume(self) -> None:
        """Resume both directions."""
        for handler in self.both:
            handler.resume()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shut both directions down."""
        for handler in self.both:
            handler.shutdown(timeout)
