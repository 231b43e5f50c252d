"""What the runtime reports about itself: load, metrics and ranks, of all replicas together."""

import time
from collections.abc import Callable, Sequence
from itertools import chain

from msgspec import structs

from runtime.actors.replicas import Replicas
from runtime.admin.adapter_registry import AdapterRegistry
from runtime.metrics import Metrics
from runtime.options.plan import Plan
from runtime.scheduling.lora_slots import LoraSlots
from runtime.scheduling.scheduler import Scheduler
from runtime.service import Load
from runtime.transfer.halves import Halves


class Status:
    """Reads the replicas and writes nothing but the metrics."""

    def __init__(
        self,
        plan: Plan,
        replicas: Replicas,
        metrics: Metrics,
        adapters: AdapterRegistry | None,
        halves: Halves | None,
        num_open: Callable[[], int],
    ) -> None:
        """`halves`: with --disaggregation-mode; `num_open` gives the number of open requests."""
        self._plan = plan
        self._replicas = replicas
        self._metrics = metrics
        self._adapters = adapters
        self._halves = halves
        self._num_open = num_open

    @property
    def num_waiting_requests(self) -> int:
        """Open requests of which no sequence runs."""
        return self._num_open() - self.num_running_requests

    @property
    def num_running_requests(self) -> int:
        """Open requests with running sequences."""
        return sum([scheduler.roster.num_running_requests for scheduler in self._schedulers()])

    def load(self) -> Load:
        """How busy all replicas are. While the model loads, all open requests wait."""
        if not self._schedulers():
            return structs.replace(self._replicas[0].load(), waiting=self._num_open())
        return combined([replica.load() for replica in self._replicas])

    def ranks(self) -> list[dict[str, object]]:
        """Facts about each rank of each replica; JSON-serialisable."""
        return [
            {
                "rank": replica.index * replica.supervisor.setup.num_ranks + ready.rank,
                "device": ready.device_name,
                "num_pages": ready.num_pages - 1,
                "weights_bytes": ready.weights_bytes,
                "pages_bytes": ready.pages_bytes,
                "used_bytes": ready.used_bytes,
                "phases_s": ready.phases_s,
            }
            for replica in self._replicas.owners
            for ready in replica.supervisor.readies
        ]

    @property
    def generation(self) -> int:
        """Highest generation of ranks of all replicas; 1 until ranks have been started again."""
        return max([replica.supervisor.generation for replica in self._replicas])

    def metrics(self) -> bytes:
        """Prometheus text of all metrics, brought up to date."""
        load, metrics = self.load(), self._metrics
        for gauge, value in (
            (metrics.running, load.running),
            (metrics.waiting, load.waiting),
            (metrics.demand, load.demand),
            (metrics.used_pages, load.used_pages),
            (metrics.cached_pages, load.cached_pages),
            (metrics.total_pages, load.total_pages),
            (metrics.used_host_pages, load.used_host_pages),
            (metrics.total_host_pages, load.total_host_pages),
            (metrics.used_window_pages, load.used_window_pages),
            (metrics.total_window_pages, load.total_window_pages),
        ):
            gauge.set(value)
        metrics.page_usage.set((load.used_pages - load.cached_pages) / max(load.total_pages, 1))
        metrics.page_info.set({"block_size": f"{load.page_size}", "num_gpu_blocks": f"{load.total_pages}"})
        if schedulers := self._schedulers():
            self._count(schedulers)
        if storages := [replica.storage for replica in self._replicas if replica.storage is not None]:
            metrics.reset_storage()
            for storage in storages:
                storage.add_to(metrics)
        if self._halves is not None:
            self._halves.report(metrics, [one.pages for one in self._replicas if one.pages is not None])
        supervisors = [replica.supervisor for replica in self._replicas.owners]
        metrics.standby_ranks.set(sum([supervisor.standby.num_ready for supervisor in supervisors]))
        pids = chain(
            _named("rank", [pid for supervisor in supervisors for pid in supervisor.ranks.pids]),
            _named("standby", [pid for supervisor in supervisors for pid in supervisor.standby.pids]),
            _named("forks", [pid for one in supervisors if one.forks is not None for pid in one.forks.pids]),
        )
        labels = {name: str(value) for name, value in (self._plan.observe.extra_metric_labels or {}).items()}
        return metrics.render(dict(pids), labels)

    def _count(self, schedulers: list[Scheduler]) -> None:
        """Sets the counters that schedulers keep themselves."""
        metrics = self._metrics
        totals = [scheduler.totals for scheduler in schedulers]
        rosters = [scheduler.roster for scheduler in schedulers]
        for counter, values in (
            (metrics.prompt_tokens, [t.prompt_tokens for t in totals]),
            (metrics.cached_tokens, [t.cached_tokens for t in totals]),
            (metrics.loaded_tokens, [t.loaded_tokens for t in totals]),
            (metrics.saved_pages, [t.saved_pages for t in totals]),
            (metrics.preemptions, [t.preemptions for t in totals]),
            (metrics.held_back, [t.held_back for t in totals]),
            (metrics.priority_preemptions, [t.priority_preemptions for t in totals]),
            (metrics.aged, [roster.waiting.num_aged for roster in rosters]),
        ):
            counter.value = sum(values)
        encodings = [one.planner.encodings for one in schedulers if one.planner.encodings is not None]
        metrics.encoded_media.value = sum([one.num_encoded for one in encodings])
        metrics.reused_media.value = sum([one.num_reused for one in encodings])
        metrics.kept_media_rows.set(sum([one.num_rows for one in encodings]))
        metrics.timeouts.values.update(_sums([scheduler.timeouts for scheduler in schedulers]))
        metrics.tenant_tokens.values = _sums([roster.shares.tokens for roster in rosters])
        if self._adapters is not None:
            self._count_adapters(self._adapters, [roster.lora_slots for roster in rosters])

    def _count_adapters(self, adapters: AdapterRegistry, slots: Sequence[LoraSlots]) -> None:
        """Sets the metrics of adapters. /metrics needs no key, so it names no adapter of one tenant alone."""
        self._metrics.set_lora_slots(len(adapters.cards), slots)
        wanted = [sequence.request.adapter for one in slots for sequence in one.waiting]
        running = adapters.public_names(chain.from_iterable(one.used_adapters for one in slots))
        waiting = adapters.public_names(adapter.id for adapter in wanted if adapter is not None)
        labels = {
            "max_lora": f"{adapters.limits.num_lora_slots}",
            "running_lora_adapters": ",".join(dict.fromkeys(running)),
            "waiting_lora_adapters": ",".join(dict.fromkeys(waiting)),
        }
        self._metrics.adapter_info.set(labels, time.time())

    def _schedulers(self) -> list[Scheduler]:
        """The schedulers of replicas that are ready."""
        return [replica.scheduler for replica in self._replicas if replica.scheduler is not None]


def _named(kind: str, pids: Sequence[int]) -> list[tuple[str, int]]:
    """Processes of a kind by name, e.g. rank0."""
    return [(f"{kind}{index}", pid) for index, pid in enumerate(pids)]


def combined(loads: Sequence[Load]) -> Load:
    """The load of several replicas together: sums, the page size, which is the same, and the load of each."""
    if len(loads) == 1:
        return loads[0]
    names = [name for name in Load.__struct_fields__ if name not in ("page_size", "each")]
    sums = {name: sum([getattr(load, name) for load in loads]) for name in names}
    return Load(**sums, page_size=loads[0].page_size, each=tuple(loads))


def _sums(counts: Sequence[dict[str, int]] | Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        name: sum([each.get(name, 0) for each in counts]) for name in dict(chain(*map(dict.items, counts)))
    }
