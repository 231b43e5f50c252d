"""Every error of the runtime: one class for each remedy.

    RuntimeFault
    ├── StartError                 the server cannot start; exit code 2, one line, names the remedy
    │   ├── SpawnError             the system refuses a process, memory or descriptors for a rank
    │   ├── OptionsError           the options cannot work; lists every problem found
    │   └── ModelError             the model folder cannot be served
    ├── RequestError               one request cannot be served; becomes an HTTP error
    │   ├── InvalidRequest   400   a field is wrong; `param` names it
    │   │   ├── TooLong            the prompt does not fit; agents recognise the message, and shorten it
    │   │   └── ThreadsNotServed   there are no threads; Anthropic's clients send whole conversations then
    │   ├── Unauthorized     401   no key, or a wrong one
    │   ├── Forbidden        403   this is not allowed on this server
    │   ├── NotFound         404   no such model, route or object
    │   ├── Busy             400   not possible while requests run (400, as in SGLang)
    │   ├── TooLarge         413   the body is over the limit
    │   ├── HeadTooLarge     431   the target and headers are over the limit
    │   ├── Overloaded       429   the queue is full; try again later
    │   ├── InternalFault    500   a bug, or a request that kills the ranks; the log has the details
    │   ├── Unavailable      503   draining, or the ranks died for good; try again
    │   ├── StorageUnavailable 503 the disk of stored objects fails; try again when it is repaired
    │   └── StorageFull      507   the disk or the quota of stored objects is full; make room
    ├── RingError                  a ring record that cannot be written or read
    ├── LinkError                  bytes from another node that no node of this runtime sends
    ├── NodeGone                   another node was away for longer than --dist-timeout; exit code 1
    └── RankDied                   a rank process ended while it was needed

Messages are safe to show to a client: they never hold a secret, a path of this machine or a stack.
"""

import signal
from typing import ClassVar

DISTRIBUTION = "runtime-serve"  # what pip installs; PyPI's `runtime` is another package

# the out-of-memory killer, an operator or a container's end
KILL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MAX_CHARS = 2000  # of a message to a client, which may quote what the client sent


def shortened(text: str) -> str:
    """`text`, cut where it is longer than an error message may be."""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"


class RuntimeFault(Exception):
    """Root of all errors that this package raises on purpose."""


class StartError(RuntimeFault):
    """The server cannot start: one line that names the remedy. Exit code 2."""


class SpawnError(StartError):
    """The system refuses a process, memory or file descriptors for a rank. It may not later."""


class AddressInUse(StartError):
    """The address of the server is another program's at this moment."""


class OptionsError(StartError):
    """The options cannot work. `problems` has one sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ModelError(StartError):
    """The model folder is incomplete, inconsistent, or of an unknown kind."""


class OwnCodeLacks(ModelError):
    """A known family has a variant that transformers' code computes, and this runtime's own does not."""


class RequestError(RuntimeFault):
    """One request cannot be served. `param` names the field, where there is one."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"
    details: ClassVar[dict[str, object] | None] = None  # what Anthropic's clients act upon

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = shortened(message)
        self.param = None if param is None else shortened(param)


class InvalidRequest(RequestError):
    """A field of the request is wrong; `param` names it and the message says what would be right."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class TooLong(InvalidRequest):
    """The prompt does not fit into the context."""

    code = "context_length_exceeded"


class ThreadsNotServed(InvalidRequest):
    """Conversations are not kept here as Anthropic's threads; clients send them whole when they see these
    details."""

    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class Unauthorized(RequestError):
    """The request has no valid key for this route."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(RequestError):
    """The server's options do not allow this."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(RequestError):
    """There is no such model, route or stored object."""

    status, type, code = 404, "invalid_request_error", "not_found"


class Busy(RequestError):
    """The operation is not possible while requests run."""

    status, type, code = 400, "invalid_request_error", "busy"


class TooLarge(RequestError):
    """The request body is over the size limit."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class HeadTooLarge(RequestError):
    """The request's target and headers are over the size limit."""

    status, type, code = 431, "invalid_request_error", "head_too_large"


class Overloaded(RequestError):
    """The waiting queue is full."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class InternalFault(RequestError):
    """A bug, or a request that kills the ranks. The log has the details; the client gets the request's id."""


class Unavailable(RequestError):
    """The server is draining, or its ranks have died and cannot be started again. The same request may
    succeed later."""

    status, type, code = 503, "server_error", "unavailable"


class StorageUnavailable(RequestError):
    """The disk of stored objects can't be read or written, or does not answer."""

    status, type, code = 503, "server_error", "storage_unavailable"


class StorageFull(RequestError):
    """The disk or the quota of stored objects is full."""

    status, type, code = 507, "server_error", "storage_full"


class RingError(RuntimeFault):
    """A ring record that is too large, of another generation, or out of sequence."""


class LinkError(RuntimeFault):
    """Bytes from another node that no node with the same secret and version sends."""


class NodeGone(RuntimeFault):
    """Another node was away for longer than --dist-timeout."""


class RankDied(RuntimeFault):
    """A rank process ended while it was needed. `rank` and `exit_code` say which and how."""

    def __init__(
        self,
        rank: int,
        exit_code: int | None,
        reason: str = "",
        *,
        is_for_memory: bool = False,
        is_with_node: bool = False,
    ) -> None:
        """`is_for_memory`: the kernel killed it because memory was used up; `is_with_node`: its node is gone
        or could not start it."""
        super().__init__(f"rank {rank} ended with exit code {exit_code}" + (f": {reason}" if reason else ""))
        self.rank = rank
        self.exit_code = exit_code
        self.reason = reason
        self.is_for_memory = is_for_memory
        self.is_with_node = is_with_node

    @property
    def is_kill(self) -> bool:
        """Whether the process was ended from outside: by a signal that no process raises by its own mistake,
        for no known reason or for want of memory; or with its node."""
        if self.is_for_memory or self.is_with_node:
            return True
        return not self.reason and self.exit_code is not None and -self.exit_code in KILL_SIGNALS


def first_fault(group: BaseExceptionGroup[BaseException]) -> RuntimeFault | None:
    """The first error of the runtime in a group that has no others; None: it has."""
    faults, rest = group.split(RuntimeFault)
    if faults is None or rest is not None:
        return None
    error: BaseException = faults
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RuntimeFault), "split by its class"
    return error


def install_line(extra: str) -> str:
    """The command that installs what an optional feature needs, as a remedy."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
