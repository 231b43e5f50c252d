"""Sends hostile requests and says what was answered wrongly."""

import asyncio
from collections.abc import Callable, Sequence

from tests.hostile.case import Case
from tests.hostile.fuzz import MAX_ERROR_BYTES
from tests.hostile.wire import Reply, exchange

Complaint = Callable[[Case, Reply], str | None]
AT_ONCE = 8


def names(reply: Reply, param: str) -> bool:
    """Whether an error names a parameter, or an item of it."""
    return str(reply.error.get("param")).partition("[")[0] == param.partition("[")[0]


def misanswered(case: Case, reply: Reply) -> str | None:
    """What is wrong with the answer to a case of the corpus, if anything is."""
    if reply.status not in case.status:
        return f"{reply.status}, not {case.status}: {reply.body[:300]!r}"
    if reply.status >= 400 and len(reply.body) > MAX_ERROR_BYTES:
        return f"an error of {len(reply.body)} bytes"
    if case.param is not None and reply.status >= 400 and not names(reply, case.param):
        return f"the error does not name {case.param}: {reply.body[:300]!r}"
    return None


async def attack(
    port: int, cases: Sequence[Case], complaint: Complaint = misanswered, at_once: int = AT_ONCE
) -> list[str]:
    """Sends all cases, some at once. Returns what was answered wrongly, or not at all."""
    pending, wrong = iter(cases), list[str]()

    async def client() -> None:
        for case in pending:
            try:
                problem = complaint(case, await exchange(port, case.request(), case.method))
            except Exception as error:  # a hang, or an answer that is none
                problem = repr(error)
            if problem is not None:
                wrong.append(f"{case.name} {case.method} {case.path[:80]}: {problem}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(client())
    return wrong
