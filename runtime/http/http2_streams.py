"""The streams of one HTTP/2 connection: which there are, whose turn it is to send, and which take nothing."""

from collections import deque
from collections.abc import Callable
from math import inf

from h2.connection import H2Connection
from h2.errors import ErrorCodes
from starlette.types import Scope

from runtime.http.http2_stream import Headers, Http2Stream
from runtime.http.streaming.connection import Connection

LOOKS = 4  # at streams that take nothing, in each `stuck_s`


class Http2Streams:
    """Streams by number. Sends their answers, a frame of each in turn, as far as windows and the connection
    have room, and resets those that take nothing for `stuck_s` seconds."""

    def __init__(
        self,
        wire: H2Connection,
        connection: Connection,
        run: Callable[[Http2Stream], None],
        on_empty: Callable[[], None],
        stuck_s: float,
    ) -> None:
        """`run` serves a request in a task. `on_empty` is called when the last stream has ended."""
        self.wire = wire
        self.connection = connection
        self.run = run
        self.on_empty = on_empty
        self.stuck_s = stuck_s
        self.by_id: dict[int, Http2Stream] = {}  # whose answers are not complete
        self.turns: deque[Http2Stream] = deque()  # those with something to send and a window for it
        self.num_running = 0  # applications, also those whose stream has ended
        self.is_closed = False  # the connection takes nothing more
        self.is_watching = False  # for streams that take nothing

    def close(self) -> None:
        """Ends all streams: the connection is closed."""
        self.is_closed = True
        self.turns.clear()
        for stream in self.by_id.values():
            stream.end()
        self.by_id.clear()

    def start(self, stream: Http2Stream, headers: Headers) -> None:
        """Sends the head of an answer."""
        self.wire.send_headers(stream.id, headers)
        self.flush()

    def send_waiting(self, stream: Http2Stream) -> None:
        """Sends what the client has room for of an answer, and its end."""
        if stream not in self.turns:
            self.turns.append(stream)
        stream.progress_s = min(stream.progress_s, self.connection.loop.time())
        self.pump()
        self.flush()

    def acknowledge(self, stream: Http2Stream, num_bytes: int) -> None:
        """Lets the client send so many bytes more."""
        if not self.is_closed:
            self.wire.acknowledge_received_data(num_bytes, stream.id)
            self.flush()

    def give_up(self, stream: Http2Stream) -> None:
        """An application has ended: 500 if it has not answered; a broken answer is reset. A whole one may
        still wait for the client."""
        self.num_running -= 1
        if stream.is_over or stream.is_complete:
            return
        if not stream.is_started:
            self.wire.send_headers(
                stream.id, [(b":status", b"500"), (b"content-length", b"0")], end_stream=True
            )
            self.end(stream)
        else:
            self.reset(stream, ErrorCodes.INTERNAL_ERROR)
        self.flush()

    def serve(self, stream_id: int, scope: Scope) -> None:
        """Serves a request."""
        stream = self.by_id[stream_id] = Http2Stream(stream_id, scope, self)
        self.num_running += 1
        self.run(stream)

    def take_turn(self, stream: Http2Stream) -> None:
        """The stream's window may have room."""
        if (stream.unsent or stream.is_complete) and stream not in self.turns:
            self.turns.append(stream)

    def pump(self) -> None:
        """Sends a frame of each stream in turn, until nothing has room."""
        turns, wire, connection = self.turns, self.wire, self.connection
        while turns and not connection.is_full:
            stream = turns[0]
            if stream.unsent:
                room = min(wire.local_flow_control_window(stream.id), wire.max_outbound_frame_size)
                if room <= 0:
                    if wire.outbound_flow_control_window <= 0:
                        break  # no stream has room
                    turns.popleft()  # until its window grows
                    continue
                wire.send_data(stream.id, bytes(stream.unsent[:room]))
                del stream.unsent[:room]
                stream.progress_s = connection.loop.time()
                self.flush()
            if stream.unsent:
                turns.rotate(-1)
            else:
                turns.popleft()
                stream.progress_s = inf
                if stream.is_complete:
                    wire.end_stream(stream.id)
                    self.end(stream)
            stream.sent()
        self._watch()

    def end(self, stream: Http2Stream) -> None:
        """The stream has ended, from whichever side."""
        del self.by_id[stream.id]
        if stream in self.turns:
            self.turns.remove(stream)
        if num_bytes := stream.end():
            self.wire.acknowledge_received_data(num_bytes, stream.id)
        if not stream.has_whole_body and self.is_open(stream.id):
            self.wire.reset_stream(stream.id, ErrorCodes.NO_ERROR)
        if not self.by_id:
            self.on_empty()

    def is_open(self, stream_id: int) -> bool:
        """Whether frames of the stream may be sent."""
        stream = self.wire.streams.get(stream_id)
        return stream is not None and not stream.closed

    def reset(self, stream: Http2Stream, code: ErrorCodes) -> None:
        """Ends a stream whose answer is not complete."""
        if self.is_open(stream.id):
            self.wire.reset_stream(stream.id, code)
        self.end(stream)

    def _watch(self) -> None:
        if not self.is_watching and any(stream.progress_s < inf for stream in self.by_id.values()):
            self.is_watching = True
            self.connection.loop.call_later(self.stuck_s / LOOKS, self._look)

    def _look(self) -> None:
        """Resets the streams that have taken nothing of what waits for them."""
        self.is_watching = False
        if self.is_closed:
            return
        least_s = self.connection.loop.time() - self.stuck_s
        for stream in list(self.by_id.values()):
            if stream.progress_s <= least_s:
                self.reset(stream, ErrorCodes.CANCEL)
        self.flush()
        self._watch()

    def flush(self) -> None:
        """Writes the frames that are ready to the connection."""
        if data := self.wire.data_to_send():
            self.connection.write(data)
