"""HTTP/2 on one connection: frames read and written by h2, requests served as those of HTTP/1.1 are.

    client ── frames ──► h2 ── events ──► Http2Stream.feed ──► the application's `receive`
    client ◄── frames ── h2 ◄── what windows and connection take ── Http2Stream.unsent ◄── `send`

Nothing grows with what a client does or leaves undone:

    answers     an application waits in `send` while its stream's window, or the connection, takes nothing; a
                stream that takes nothing for `stuck_s` seconds is reset
    bodies      are acknowledged as they are read, so no more than the windows arrive unread
    streams     MAX_STREAMS at once, and as many more whose applications are still ending; a client that
                resets over MAX_RESETS of them in RESETS_S seconds is disconnected (rapid reset)
    replies     to pings and settings: while the connection is full, nothing more is read of it
"""

from base64 import b64decode
from collections import deque
from collections.abc import Callable
from urllib.parse import unquote

from h2 import events as h2
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings
from msgspec import Struct
from starlette.types import Scope

from runtime.http.http1 import IdleTimer
from runtime.http.http2_stream import Headers, Http2Stream
from runtime.http.http2_streams import Http2Streams
from runtime.http.request_cycle import refusal_bytes
from runtime.http.request_parser import ASGI, MAX_HEAD_BYTES, Peer
from runtime.http.streaming.connection import Connection

MAX_STREAMS = 100  # of one connection at once
MAX_RESETS, RESETS_S = 500, 10.0  # most streams that a client may reset in so many seconds
WINDOW_BYTES = 2**20  # of all bodies of a connection that are not read yet
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


class Http2Server(Struct, frozen=True):
    """What the connections of one server share."""

    run: Callable[[Http2Stream], None]  # serves a request in a task
    is_stopping: Callable[[], bool]  # no further request is served
    stuck_s: float  # the longest that a client may take nothing of an answer


class _Wire(H2Connection):
    """h2's state machine; remembers few of the streams that have ended."""

    MAX_CLOSED_STREAMS = 4 * MAX_STREAMS


class Http2:
    """The requests of one connection. Takes its bytes from `feed` and writes to the connection."""

    def __init__(self, shared: Http2Server, connection: Connection, peer: Peer) -> None:
        self.shared = shared
        self.connection = connection
        self.peer = peer
        self.resets: deque[float] = deque(maxlen=MAX_RESETS)  # when the client has reset streams
        self.is_closed = False
        self.wire = _Wire(config=H2Configuration(client_side=False, header_encoding=None))
        self.wire.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES,
            },
        )
        self.streams = Http2Streams(self.wire, connection, shared.run, self._emptied, shared.stuck_s)
        self.idle = IdleTimer(connection.loop, lambda: not self.streams.by_id, self.close_if_idle)
        connection.on_drain = self._drained

    def open(self) -> None:
        """Begins a connection whose client speaks HTTP/2 from its first byte."""
        self.wire.initiate_connection()
        self._open_window()

    def upgrade(self, scope: Scope, settings: bytes) -> None:
        """Begins a connection that came over from HTTP/1.1, with its first request and the value of its
        header http2-settings."""
        try:
            settings += b"=" * (-len(settings) % 4)
            if len(b64decode(settings, b"-_", validate=True)) % 6:
                raise ValueError("settings have six bytes each")
            self.wire.initiate_upgrade_connection(settings)
        except (H2Error, ValueError):
            self.connection.write(refusal_bytes(400))
            self.wire.clear_outbound_data_buffer()
            self.close()
            return
        self.connection.write(SWITCHING)
        self._open_window()
        scope["http_version"] = "2"
        self.streams.serve(1, scope)
        self.streams.by_id[1].feed_end()

    def _open_window(self) -> None:
        self.wire.increment_flow_control_window(WINDOW_BYTES - self.wire.inbound_flow_control_window)
        self.streams.flush()

    def feed(self, data: bytes) -> None:
        """Takes what the client has sent."""
        if self.is_closed:
            return
        try:
            for event in self.wire.receive_data(data):
                if not self.is_closed:
                    self._handle(event)
        except ProtocolError:  # the reason is among what is to be sent
            self.close()
            return
        self.streams.pump()
        self.streams.flush()
        if self.connection.is_full:  # of replies, which nothing else bounds
            self.connection.pause_reading()

    def eof(self) -> None:
        """The client sends nothing more. Called after `leave`."""

    def leave(self) -> None:
        """The client has left: nothing is answered any more."""
        self.close()

    def close(self) -> None:
        """Ends the connection when what was written is sent, and its streams at once."""
        if self.is_closed:
            return
        self.is_closed = True
        self.idle.stop()
        self.streams.close()
        self.streams.flush()
        self.connection.close()

    def close_if_idle(self) -> None:
        """Takes no request any more, and closes once the last is answered."""
        if not self.streams.by_id and not self.is_closed:
            self.wire.close_connection()
            self.close()

    def _handle(self, event: h2.Event) -> None:
        match event:
            case h2.RequestReceived():
                self._take(event.stream_id, event.headers)
            case h2.DataReceived():
                self._take_data(event)
            case h2.StreamEnded():
                if (stream := self.streams.by_id.get(event.stream_id)) is not None:
                    stream.feed_end()
            case h2.StreamReset():
                self._take_reset(event.stream_id)
            case h2.WindowUpdated():
                if (stream := self.streams.by_id.get(event.stream_id)) is not None:
                    self.streams.take_turn(stream)
            case h2.RemoteSettingsChanged():
                if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                    for stream in self.streams.by_id.values():
                        self.streams.take_turn(stream)
            case h2.ConnectionTerminated():
                self.close()

    def _take(self, stream_id: int, head: Headers) -> None:
        scope = scope_of(head, self.peer)
        if not self.streams.is_open(stream_id):
            self._count_reset()  # by what came with it
        elif self.shared.is_stopping() or self.streams.num_running >= 2 * MAX_STREAMS:
            self.wire.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        elif scope is None:
            self.wire.reset_stream(stream_id, ErrorCodes.PROTOCOL_ERROR)
        elif scope["method"] == "CONNECT":  # WebSockets are served over HTTP/1.1
            self.wire.reset_stream(stream_id, ErrorCodes.HTTP_1_1_REQUIRED)
        else:
            self.streams.serve(stream_id, scope)

    def _take_data(self, event: h2.DataReceived) -> None:
        stream_id, num_bytes = event.stream_id, event.flow_controlled_length
        stream = self.streams.by_id.get(stream_id)
        if stream is not None:
            stream.feed(event.data, num_bytes)
        elif num_bytes:  # the answer, a refusal, was complete before the body
            self.wire.acknowledge_received_data(num_bytes, stream_id)

    def _take_reset(self, stream_id: int) -> None:
        stream = self.streams.by_id.get(stream_id)
        if stream is None:
            return
        self.streams.end(stream)
        self._count_reset()

    def _count_reset(self) -> None:
        now_s = self.connection.loop.time()
        self.resets.append(now_s)
        if len(self.resets) == MAX_RESETS and now_s - self.resets[0] < RESETS_S:
            self.wire.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self.close()

    def _emptied(self) -> None:
        """The last stream has ended."""
        self.idle.start()
        if self.shared.is_stopping():
            self.streams.flush()
            self.close_if_idle()

    def _drained(self) -> None:
        """The connection has room again."""
        if not self.is_closed:
            self.streams.pump()
            self.streams.flush()
            if not self.connection.is_full:
                self.connection.resume_reading()


def scope_of(head: Headers, peer: Peer) -> Scope | None:
    """The ASGI scope of a request; None for one whose target is no ASCII."""
    special = {name: value for name, value in head if name[:1] == b":"}
    target, authority = special.get(b":path", b""), special.get(b":authority")
    if not target.isascii() or not special[b":method"].isascii():
        return None
    headers = [(name, value) for name, value in head if name[:1] != b":"]
    if authority is not None:
        headers = [(b"host", authority), *[header for header in headers if header[0] != b"host"]]
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "http_version": "2",
        "asgi": ASGI,
        "method": special[b":method"].decode().upper(),
        "scheme": peer.scheme,
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": peer.root_path,
        "headers": headers,
        "client": peer.client,
        "server": peer.server,
        "extensions": {},
    }
