"""Engines that take arrays as images or sounds."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio

import runtime
from runtime.engine import Answer
from runtime.scheduling.encodings import Encodings
from runtime.scheduling.scheduler import Scheduler
from tests.models.make_media import ArrayLoader, File

COUNT = 8
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "dtype": "float32",
    "page_size": 4,
}
# two attention groups of one rank each
GROUPS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "enable_dp_attention": True,
    "load_balance_method": "round_robin",
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
Prompt = tuple[list[int], Sequence[File]]  # with one placeholder a file, and the files


class Images:
    """An engine that takes arrays as files: samples, images, frames of videos."""

    def __init__(self, engine: runtime.Engine) -> None:
        self.engine = engine
        self._loader = ArrayLoader()
        media = engine._core._text.media
        assert media is not None
        media.loader = self._loader

    async def ask(self, prompt: list[int], images: Sequence[File], **params: Any) -> Answer:
        sources = [self._loader.source(image) for image in images]
        return await self.engine.generate(prompt, media=sources, **GREEDY | params)

    async def ask_all(self, prompts: Mapping[str, Prompt]) -> dict[str, list[int]]:
        """All prompts in company."""
        found: dict[str, list[int]] = {}

        async def one(name: str) -> None:
            found[name] = (await self.ask(*prompts[name])).token_ids

        async with anyio.create_task_group() as tasks:
            for name in prompts:
                tasks.start_soon(one, name)
        return found

    async def ask_each(self, prompts: Sequence[Prompt], **params: Any) -> list[list[int]]:
        """The answers of prompts in company: none begins before the files of all are prepared."""
        found: list[list[int]] = [[] for _ in prompts]
        await self.engine.pause_generation()

        async def one(index: int) -> None:
            found[index] = (await self.ask(*prompts[index], **params)).token_ids

        async with anyio.create_task_group() as tasks:
            for index in range(len(prompts)):
                tasks.start_soon(one, index)
            await self.continue_with(len(prompts))
        return found

    async def continue_with(self, count: int) -> None:
        """Ends a pause when so many requests wait."""
        with anyio.fail_after(60):
            while len(self.scheduler.roster.waiting) < count:
                await anyio.sleep(0.001)
        await self.engine.continue_generation()

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.engine._core.replicas[0].scheduler
        assert scheduler is not None
        return scheduler

    @property
    def num_encoded(self) -> list[int]:
        """Files that each replica has encoded."""
        schedulers = [replica.scheduler for replica in self.engine._core.replicas]
        found = [one.planner.encodings for one in schedulers if one is not None]
        return [one.num_encoded for one in found if one is not None]

    @property
    def encodings(self) -> Encodings:
        assert self.scheduler.planner.encodings is not None
        return self.scheduler.planner.encodings
