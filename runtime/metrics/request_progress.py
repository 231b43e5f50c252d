"""What is known of a request before it is scheduled: its files, and when it was tokenised."""

from collections.abc import Sequence
from time import monotonic

from runtime.messages.media import Media
from runtime.metrics.request_records import Records
from runtime.metrics.table import Metrics


class RequestProgress:
    """Notes it in the metrics and in the request's record, where it has one."""

    def __init__(self, metrics: Metrics, records: Records) -> None:
        self._metrics = metrics
        self._records = records

    def known(self, request_id: str, count: int) -> None:
        """The files of a request came before, and are not loaded again."""
        self._metrics.known_media.add(count)
        if (record := self._records.find(request_id)) is not None:
            record.known_files += count

    def loaded(self, request_id: str, media: Sequence[Media]) -> None:
        """The files of a request were fetched and decoded."""
        metrics, record = self._metrics, self._records.find(request_id)
        for one in media:
            if (load := one.loaded) is None:  # it came as an array
                continue
            metrics.media_files[one.kind.value] += 1
            metrics.media_bytes[one.kind.value] += load.num_bytes
            metrics.media_fetch_s.observe(load.fetched_s - load.begin_s)
            metrics.media_decode_s.observe(load.end_s - load.decode_s)
            if record is not None:
                record.loads.append((one.kind, load))

    def tokenized(self, request_id: str) -> None:
        """A request goes to the scheduler."""
        if (record := self._records.find(request_id)) is not None:
            record.tokenized_s = monotonic()
