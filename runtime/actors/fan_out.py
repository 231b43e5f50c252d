"""One call for each replica, at the same time."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from runtime.errors import RequestError

T = TypeVar("T")


async def call_all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Runs the calls concurrently. -> their results, in order. Raises the first RequestError after all calls
    have ended."""
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, T] = {}
    errors: list[RequestError] = []

    async def run(index: int) -> None:
        try:
            results[index] = await calls[index]()
        except RequestError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(run, index)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(calls))]
