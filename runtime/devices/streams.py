"""Streams and events of a device, as torch.cuda and torch.npu have them. Torch-free at run time."""

from contextlib import AbstractContextManager
from typing import Protocol


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Marks the end of the work that the stream has been given so far."""
        ...

    def query(self) -> bool:
        """Whether that work is done."""
        ...

    def synchronize(self) -> None:
        """Makes the host wait for that work."""
        ...

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds from here to `other`, where both are for timing and have come."""
        ...


class Stream(Protocol):
    """A queue of work of the device."""

    def wait_event(self, event: Event) -> None:
        """Work that comes later waits for the event."""
        ...

    def wait_stream(self, stream: "Stream") -> None:
        """Work that comes later waits for what the other stream has been given so far."""
        ...

    def record_event(self) -> Event:
        """A new event at the end of the work that the stream has been given so far."""
        ...

    def synchronize(self) -> None:
        """Makes the host wait for the stream's work."""
        ...


# names of these classes inside Streams, whose methods have the same names
_Stream = Stream
_Event = Event


class Streams(Protocol):
    """The part of torch's module of a device (torch.cuda, torch.npu) that deals with streams."""

    def Stream(self) -> _Stream:
        """A new stream."""
        ...

    def Event(self, enable_timing: bool = False) -> _Event:
        """A new event, for timing if need be."""
        ...

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        """Makes the stream the current one in a with block."""
        ...

    def current_stream(self) -> _Stream:
        """The stream that is given work now."""
        ...

    def current_device(self) -> int:
        """Number of this process's device."""
        ...

    def set_device(self, device: int) -> None:
        """Makes it the current thread's device."""
        ...
