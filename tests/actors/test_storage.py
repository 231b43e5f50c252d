"""The storage actor with the scheduler actor and the oracle rank: what one life computed, the next one
finds."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import pytest

from runtime.actors.channels import Channel, Signal
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.storage import StorageActor, cache_identity
from runtime.cache.audit import findings
from runtime.cache.host import HostConfig
from runtime.cache.kv import CacheConfig
from runtime.messages.requests import CacheSources, Request
from runtime.messages.sampling import Limits, SamplingParams
from runtime.messages.scheduler import Abort, Arrive, StepTokens, ToDetokenizer, ToScheduler
from runtime.metrics import Metrics
from runtime.metrics.meter import Meter
from runtime.models.config.model_config import read_config
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from runtime.storage.settings import TierSettings
from runtime.storage.store import Store, open_store
from tests.actors.test_scheduler import FakeRanks
from tests.scheduling.answers import VOCAB, generate
from tests.scheduling.oracle import OracleRank

pytestmark = pytest.mark.anyio

PAGE, HOSTS = 4, 64
IDENTITY = b"i" * 16
PROMPT = [1 + i % 40 for i in range(41)]  # ten full pages and a token


class Life:
    """A server from start to end, over files that outlive it."""

    def __init__(self, store: Store, policy: str, settings: TierSettings) -> None:
        self.rank = OracleRank(64, PAGE, 8, num_host_pages=HOSTS)
        self.ranks = FakeRanks()
        self.ranks.rank = self.rank
        cache = CacheConfig(host=HostConfig(num_pages=HOSTS, has_storage=True))
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=8,
                max_step_tokens=64,
                max_len=200,
                page_size=PAGE,
                num_pages=64,
                eos_ids=(),
                cache=cache,
            )
        )
        self.inbox = Channel[ToScheduler](100)
        self.outbox = Channel[ToDetokenizer](1000)
        signal = Signal()
        self.storage = StorageActor(
            store,
            self.scheduler,
            self.page,
            identity=IDENTITY,
            page_bytes=8 * PAGE,
            settings=settings,
            policy=policy,
            wake=signal.set,
        )
        self.actor = SchedulerActor(
            self.scheduler,
            self.inbox,
            self.outbox,
            depth=2,
            meter=Meter(Metrics()),
            limits=Limits(vocab_size=VOCAB, context_len=200, pool_tokens=252),
            signal=signal,
            storage=self.storage,
        )
        self.seen: list[StepTokens] = []
        self.store = store

    def page(self, host: int) -> list[memoryview]:
        whole = memoryview(self.rank.host[host]).cast("B")
        return [whole[:5], whole[5:]]

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Steps run until something has come true."""
        with anyio.fail_after(20):
            while not is_done():
                if self.ranks.plans:
                    self.ranks.step()
                await anyio.sleep(0.001)
                if self.outbox.statistics.waiting:
                    self.seen += [m for m in await self.outbox.drain() if isinstance(m, StepTokens)]

    def ask(self, name: str, prompt: Sequence[int] = PROMPT, namespace: str = "") -> None:
        self.inbox.send_nowait(
            Arrive(
                Request(
                    id=name,
                    prompt_ids=list(prompt),
                    params=SamplingParams(max_new_tokens=3, ignore_eos=True),
                    seed=1,
                    arrival_s=0,
                    namespace=namespace,
                )
            )
        )

    async def answer(self, name: str, prompt: Sequence[int] = PROMPT, namespace: str = "") -> int:
        """Asks and checks the tokens. -> how many of the prompt were cached"""
        before = len(self.seen)
        self.ask(name, prompt, namespace)
        await self.until(lambda: any(m.ended for m in self.seen[before:]))
        assert [t for m in self.seen[before:] for t in m.token_ids] == generate(
            list(prompt), set(), len(prompt) + 3
        )
        (end,) = [end for m in self.seen[before:] for end in m.ended]
        return end.cached_tokens

    @property
    def wrong(self) -> list[str]:
        """What the cache's own audit finds when no sequence runs."""
        return findings(self.scheduler.cache).messages

    async def stored(self, num_pages: int) -> None:
        await self.until(lambda: self.store.totals.pages_written >= num_pages)


@asynccontextmanager
async def life(
    folder: Path, policy: str = "wait_complete", store: Store | None = None, **settings: Any
) -> AsyncIterator[Life]:
    store = store or open_store("file", {"dir": str(folder)}, IDENTITY, 8 * PAGE)
    it = Life(store, policy, TierSettings(**{"prefetch_threshold": PAGE, **settings}))
    async with anyio.create_task_group() as tasks:
        for run in (it.storage.run, it.actor.run):
            tasks.start_soon(run)
        tasks.start_soon(it.actor.drive, it.ranks)
        try:
            yield it
        finally:
            tasks.cancel_scope.cancel()
            it.inbox.discard()
            it.outbox.discard()


async def test_what_one_life_computed_the_next_one_finds(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        assert await first.answer("a") == 0
        await first.stored(10)
    async with life(tmp_path) as second:
        assert await second.answer("b") == 40 and second.scheduler.totals.loaded_tokens == 40
        assert await second.answer("c", namespace="other") == 0, "nothing crosses namespaces"
        assert second.storage.fetching.num_pages == 10 and second.storage.wait_s > 0
        assert not second.wrong
        metrics = Metrics()
        second.storage.add_to(metrics)
        assert metrics.storage_pages["read"] == 10 and metrics.storage_fetched_tokens.value == 40
        assert await second.storage.clear() > 0
    async with life(tmp_path) as third:
        assert await third.answer("d") == 0


@pytest.mark.parametrize(("row", "cached"), [(0, 0), (3, 12), (9, 36)])
async def test_a_damaged_page_ends_the_prefix(tmp_path: Path, row: int, cached: int) -> None:
    async with life(tmp_path) as first:
        await first.answer("a")
        await first.stored(10)
        node = first.scheduler.cache.tree.root
        for number in range(row + 1):
            node = node.children[
                b"".join(token.to_bytes(4, "little") for token in PROMPT[number * PAGE : (number + 1) * PAGE])
            ]
        (path,) = tmp_path.rglob(f"{node.digest.hex()}.page")
    record = bytearray(path.read_bytes())
    record[-1] ^= 1
    path.write_bytes(record)
    async with life(tmp_path) as second:
        assert await second.answer("b") == cached and second.store.totals.pages_corrupt == 1


async def test_too_little_is_not_fetched(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.answer("a")
        await first.stored(10)
    async with life(tmp_path, prefetch_threshold=41) as second:
        assert await second.answer("b") == 0 and second.storage.fetching.num_fetches == 0
    async with life(tmp_path, prefetch_threshold=40) as third:
        assert await third.answer("c", [*PROMPT, 3, 3, 3, 3]) == 40
        assert (
            await third.answer("d", [*PROMPT[:40], *range(2, 46)]) == 40
            and third.storage.fetching.num_fetches == 1
        )


class Slow(Store):
    """A store whose reads wait until they are let, and its writes where the test asks for it."""

    go = Event()
    is_slow_to_write = False

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        assert self.go.wait(20)
        return super().load(key, parts)

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        assert not self.is_slow_to_write or self.go.wait(20)
        super().save(key, parts)


@pytest.fixture
async def slow(tmp_path: Path) -> Slow:
    """With PROMPT in it."""
    async with life(tmp_path) as first:
        await first.answer("a")
        await first.stored(10)
    store = open_store("file", {"dir": str(tmp_path)}, IDENTITY, 8 * PAGE)
    slow = Slow(store._backend, IDENTITY)
    slow.go = Event()
    return slow


async def test_best_effort_waits_for_nothing(slow: Slow, tmp_path: Path) -> None:
    async with life(tmp_path, "best_effort", slow) as it:
        assert await it.answer("b") == 0
        slow.go.set()
        await it.until(lambda: not it.storage.fetching._leaders)
        assert not it.wrong


async def test_best_effort_takes_what_has_come_by_its_turn(slow: Slow, tmp_path: Path) -> None:
    slow.go.set()
    async with life(tmp_path, "best_effort", slow) as it:
        for number in range(8):  # all slots are taken
            it.ask(f"x{number}", [40 - number, 5, 6])
        it.ask("b")
        with anyio.fail_after(20):
            while it.storage.fetching.num_pages < 10:
                await anyio.sleep(0.001)
        await it.until(lambda: sum(len(m.ended) for m in it.seen) == 9)
        assert [
            (end.cached_tokens, end.loaded) for m in it.seen for end in m.ended if end.sequence_id == 8
        ] == [(40, CacheSources(0, 40))]


async def test_wait_complete_waits_and_timeout_does_not_for_long(slow: Slow, tmp_path: Path) -> None:
    async with life(
        tmp_path, "timeout", slow, prefetch_timeout_base=0.05, prefetch_timeout_per_ki_token=0.0
    ) as it:
        assert await it.answer("b") == 0 and it.storage.num_timeouts == 1
        slow.go.set()
    store = open_store("file", {"dir": str(tmp_path)}, IDENTITY, 8 * PAGE)
    again = Slow(store._backend, IDENTITY)
    again.go = Event()
    async with life(tmp_path, "wait_complete", again) as it:
        it.ask("c")
        it.ask("d", [7, 7, 7])
        await it.until(lambda: any(m.ended for m in it.seen))
        assert {i for m in it.seen for i in m.sequence_ids} == {1}, "others go on"
        again.go.set()
        await it.until(lambda: sum(len(m.ended) for m in it.seen) == 2)
        assert [end.cached_tokens for m in it.seen for end in m.ended] == [0, 40]


async def test_a_client_that_leaves_ends_its_fetch(slow: Slow, tmp_path: Path) -> None:
    async with life(tmp_path, "wait_complete", slow) as it:
        it.ask("b")
        await it.until(lambda: it.storage.fetching.num_fetches == 1)
        it.inbox.send_nowait(Abort("b"))
        await it.until(lambda: any(m.ended for m in it.seen))
        slow.go.set()
        await it.until(lambda: not it.storage.fetching._leaders)
        assert it.storage.num_timeouts == 0 and not it.scheduler.roster.live
        assert not it.wrong


async def test_two_who_want_the_same_fetch_it_once(slow: Slow, tmp_path: Path) -> None:
    async with life(tmp_path, "wait_complete", slow) as it:
        it.ask("b")
        it.ask("c")
        await it.until(lambda: it.storage.fetching.num_fetches == 1)
        slow.go.set()
        await it.until(lambda: sum(len(m.ended) for m in it.seen) == 2)
        assert [end.cached_tokens for m in it.seen for end in m.ended] == [
            40,
            40,
        ] and slow.totals.pages_read == 10


async def test_what_finds_no_room_in_the_queue_is_dropped(tmp_path: Path) -> None:
    store = Slow(open_store("file", {"dir": str(tmp_path)}, IDENTITY, 8 * PAGE)._backend, IDENTITY)
    store.go, store.is_slow_to_write = Event(), True
    async with life(tmp_path, store=store, max_queued_bytes=3 * 8 * PAGE) as it:
        await it.answer("a")
        await it.until(lambda: store.totals.pages_dropped > 0)
        store.go.set()
        await it.until(lambda: store.totals.pages_written + store.totals.pages_dropped == 10)
        assert store.totals.pages_written >= 3
        await it.until(lambda: not any(node.pins for node in it.scheduler.cache.tree.root.children.values()))


async def test_the_queue_is_written_when_the_server_stops(tmp_path: Path) -> None:
    async with life(tmp_path) as it:
        await it.answer("a")
        await it.until(lambda: it.scheduler.totals.saved_pages >= 10 and not it.scheduler.num_in_flight)
    async with life(tmp_path) as second:
        assert await second.answer("b") == 40


async def test_the_death_of_ranks_disturbs_nothing(slow: Slow, tmp_path: Path) -> None:
    """They die while a fetch is under way; the new ones find the pages in host memory."""
    async with life(tmp_path, "wait_complete", slow) as it:
        it.ask("b")
        await it.until(lambda: it.storage.fetching.num_fetches == 1)
        it.scheduler.lose_ranks()
        assert not it.scheduler.resume(64, HOSTS)
        slow.go.set()
        await it.until(lambda: any(m.ended for m in it.seen))
        assert [end.cached_tokens for m in it.seen for end in m.ended] == [40]


def test_the_identity_is_of_all_that_decides_keys_and_values() -> None:
    def of(
        parts: tuple[int, ...] = (64, 64),
        name: str | None = None,
        states: list[int] | None = None,
        **options: Any,
    ) -> bytes:
        plan = plan_for(from_values({"device": "cpu", "num_threads": 1, **options}))
        return cache_identity(plan, read_config(plan.model.model_path), name, [parts], states or [])

    plain = of()
    assert of(port=1, max_running_requests=3, random_seed=5) == plain, "what has nothing to do with it"
    others = [
        of((32, 32)),
        of(name="mine"),
        of(states=[64]),
        of(dtype="float32"),
        of(page_size=32),
        of(device="null"),
        of(kv_cache_dtype="fp8_e5m2"),
        of(load_format="dummy", random_seed=1),
        of(load_format="dummy", random_seed=2),
        of(tp_size=2),
        of(tp_size=2, attn_cp_size=2),  # both ranks have all heads
    ]
    assert len({plain, *others}) == 1 + len(others)
