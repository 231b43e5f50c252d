"""What --kv-events-config may say: the fields of vLLM's and SGLang's option of that name, and no others."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.options.declare import Count

Endpoint = A[str, Meta(pattern="^(tcp|ipc)://.+")]


class KVEvents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the events of the prefix cache go."""

    publisher: Literal["zmq", "null"] | None = None  # None: zmq where enable_kv_cache_events says so
    endpoint: Endpoint = "tcp://*:5557"
    replay_endpoint: Endpoint | None = None
    buffer_steps: Count = 10_000  # batches that can be asked for again
    hwm: Count = 100_000  # batches that may wait for one slow reader
    max_queue_size: Count = 100_000  # batches that may wait to be published
    topic: str = ""
    enable_kv_cache_events: bool | None = None  # vLLM has this switch beside the publisher's name

    @property
    def is_on(self) -> bool:
        if self.enable_kv_cache_events is None:
            return self.publisher == "zmq"
        return self.enable_kv_cache_events and self.publisher != "null"
