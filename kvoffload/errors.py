"""Every exception of kvoffload, under `KVOffloadError`.

An exception means a bug in the caller (`UsageError`), a wrong configuration (`ConfigError`), or a closed object
(`ClosedError`). A miss, a refusal, a timeout or a failed copy is a *result*, never an exception.
"""

from collections.abc import Sequence


class KVOffloadError(Exception):
    """Base class of everything that kvoffload raises on purpose."""


class UsageError(KVOffloadError):
    """The caller broke a documented rule; the call changed nothing."""


class LayoutError(UsageError, ValueError):
    """A KV cache layout is ambiguous or unsupported; the message holds shape, stride and the right call."""


class ConfigError(KVOffloadError, ValueError):
    """A configuration value is missing or wrong; the message names key, value and what would be right.

    Attributes:
        problems: Of a configuration that was checked as a whole: each wrong key, dotted, and what is wrong with it.
    """

    problems: tuple[tuple[str, str], ...] = ()


class RegistrationError(ConfigError):
    """A spec or policy name is unknown or already taken."""


class ExtensionTypeError(KVOffloadError, TypeError):
    """A dynamically loaded class is not a subclass of what its place requires."""


class ExtensionImportError(KVOffloadError, ImportError):
    """A module named in the configuration cannot be imported."""


class ExtensionAttributeError(KVOffloadError, AttributeError):
    """A module named in the configuration lacks the class named beside it."""


class UnsupportedError(KVOffloadError):
    """This machine or build lacks what the call needs (a device, a library, a kernel feature)."""


class NoSpaceError(KVOffloadError):
    """Memory or disk space is too small; `requested_bytes` and `available_bytes` say by how much."""

    def __init__(self, message: str, *, requested_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes


class TransferError(KVOffloadError):
    """A copy failed; found in results, raised only by calls that promise bytes.

    Attributes:
        cuda_error: The CUDA driver's error code, where it came from there.
        undefined_gpu_blocks: GPU blocks whose content the failed copy left undefined.
    """

    cuda_error: int | None = None
    undefined_gpu_blocks: tuple[int, ...] = ()


class ClosedError(KVOffloadError):
    """The object is closed."""


class QuarantinedError(KVOffloadError):
    """A copy outlived its deadline; its GPU blocks must never go to another owner."""

    def __init__(self, message: str, *, gpu_blocks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.gpu_blocks = tuple(gpu_blocks)


class UndrainedCopies(KVOffloadError):  # noqa: N818 - the documented public name
    """Copies still run at the deadline of `aclose`: their memory stays mapped on purpose."""

    def __init__(self, message: str, *, jobs: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.jobs = tuple(jobs)


class TraceError(KVOffloadError, ValueError):
    """A line of a trace file cannot be used; the message names file, line number and what is wrong."""
