"""A small planner that drives an Executor as the scheduler does: it knows the rules of StepPlan and nothing
of torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices.executor import Executor
from runtime.devices.progress import without_progress
from runtime.messages.lora import LoraAssignment
from runtime.messages.ranks import RankReady, StartRank
from runtime.messages.speculation import DraftModel, Speculation
from runtime.messages.steps import (
    Admit,
    PageCopies,
    PromptLogprobs,
    Samples,
    SlotSampling,
    StateCopies,
    StepPlan,
    StepResult,
    WindowPages,
)
from runtime.ranks.open_executor import open_executor
from runtime.scheduling.drafts import Draft
from runtime.scheduling.step_builder import draft_parents

GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "bias_ids": [],
    "bias_values": [],
    "stop_ids": [],
    "min_len": 0,
    "top_logprobs": -1,
    "prompt_logprobs": -1,
}


def speculation(algorithm: str, path: Path | str | None, **fields: Any) -> Speculation:
    fields = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5} | fields
    model = DraftModel(path=None if path is None else str(path))
    return Speculation(algorithm=algorithm, draft_model=model, **fields)  # type: ignore[arg-type]


def sampling(**params: Any) -> SlotSampling:
    return SlotSampling(**(GREEDY | params))


def start_rank(folder: Path | str, **options: Any) -> StartRank:
    base: dict[str, Any] = {
        "device": "cpu",
        "model_path": str(folder),
        "dtype": "auto",
        "load_format": "auto",
        "tp_size": 1,
        "page_size": 4,
        "max_slots": 8,
        "max_len": 256,
        "max_step_tokens": 512,
        "memory_fraction": 0.5,
        "max_total_tokens": None,
        "num_threads": 1,
        "rendezvous": "",
        "seed": 0,
    }
    return StartRank(**(base | options))


def start(folder: Path | str, rank: int = 0, **options: Any) -> tuple[Executor, RankReady]:
    message = start_rank(folder, **options)
    executor = open_executor(rank, message, without_progress)
    return executor, executor.ready


@dataclass
class Row:
    """A sequence in a slot. `computed` tokens are in its pages; a decode's token is not in `tokens` before
    its result came."""

    slot: int
    tokens: list[int]
    sampling: SlotSampling
    pages: list[int]
    computed: int = 0
    prompt_len: int = 0
    is_admitted: bool = False
    state_from: int = 0  # state slot of the state it begins with; 0: the empty one
    lora_slot: int = -1  # of its adapter
    window: dict[int, int] = field(default_factory=dict)  # pages of the windows' pool, by page-table row
    sent: set[int] = field(default_factory=set)  # page-table rows whose window pages the rank has
    results: list[tuple[int, float, list[int], list[float]]] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)


class Planner:
    """Plans steps for rows; pages are handed out in a scrambled order, as they are after a while in a
    server."""

    def __init__(
        self, executor: Executor, ready: RankReady, page_size: int, scramble: int = 0, window: int = 0
    ) -> None:
        self.executor = executor
        self.page_copies: PageCopies | None = None  # of the next plan
        self.lora_assignment: LoraAssignment | None = None  # of the next plan
        self.page_size = page_size
        self.free = [
            int(page) + 1 for page in np.random.default_rng(scramble).permutation(ready.num_pages - 1)
        ]
        self.window = window  # of a model with two pools
        self.free_window = list(range(1, ready.num_window_pages))
        self.known_pages: dict[int, int] = {}
        self.step = 0
        self.has_states = ready.num_state_slots > 0
        # states to keep after the next step: from, to, and at which length (-1: behind the row)
        self.keeps: list[tuple[int, int, int]] = []
        self.follows = False  # a draft model follows the steps

    def row(
        self,
        slot: int,
        prompt: list[int],
        params: SlotSampling,
        *,
        prefix: "Row | None" = None,
        shared: int = 0,
        state_from: int = 0,
    ) -> Row:
        """A new sequence; with `prefix`, its first `shared` tokens (whole pages) are those of that row,
        already computed; `state_from`: the state slot that has the state after them."""
        assert shared % self.page_size == 0 and (prefix is None or prompt[:shared] == prefix.tokens[:shared])
        pages = prefix.pages[: shared // self.page_size] if prefix else []
        self.known_pages[slot] = 0
        return Row(slot, list(prompt), params, list(pages), shared, len(prompt), state_from=state_from)

    def plan(
        self, decodes: list[Row], extends: list[tuple[Row, int]], verifies: Sequence[tuple[Row, Draft]] = ()
    ) -> StepPlan:
        """Decode rows, verify rows with drafts, and extend rows with so many of their next known tokens."""
        drafted = [(row, 1 + len(draft.tokens)) for row, draft in verifies]
        rows = [(row, 1) for row in decodes] + drafted + extends
        admits, updates, targets = [], [], []
        tokens = [token for _, draft in verifies for token in draft.tokens]
        for row, count in rows:
            if not row.is_admitted:
                row.is_admitted = True
                admits.append(
                    Admit(
                        row.slot,
                        row.sampling,
                        row.prompt_len,
                        np.array(row.tokens, dtype=np.int32),
                        lora_slot=row.lora_slot,
                        length=row.computed,
                    )
                )
            while len(row.pages) * self.page_size < row.computed + count:
                row.pages.append(self.free.pop())
            updates += [
                (row.slot, i, row.pages[i]) for i in range(self.known_pages[row.slot], len(row.pages))
            ]
            self.known_pages[row.slot] = len(row.pages)
        for row, count in extends:
            tokens += row.tokens[row.computed : row.computed + count]
            if row.sampling.prompt_logprobs >= 0:
                targets += (row.tokens[row.computed + 1 : row.computed + 1 + count] + [-1])[:count]
        self.step += 1
        pages = np.array(updates, dtype=np.int32).reshape(-1, 3).T
        plan = StepPlan(
            step=self.step,
            num_decodes=len(decodes),
            num_verifies=len(verifies),
            admits=admits,
            slots=np.array([row.slot for row, _ in rows], dtype=np.int32),
            counts=np.array([count for _, count in rows], dtype=np.int32),
            samples=np.array(
                [
                    *[Samples.LAST] * len(decodes),
                    *(Samples.LAST if draft.is_sure else Samples.ALL for _, draft in verifies),
                    *(row.computed + count >= len(row.tokens) for row, count in extends),
                ],
                dtype=np.uint8,
            ),
            token_ids=np.array(tokens, dtype=np.int32),
            **dict(zip(("page_slots", "page_rows", "page_ids"), pages, strict=True)),
            prompt_targets=np.array(targets, dtype=np.int32),
            draft_parents=draft_parents([draft for _, draft in verifies]),
            page_copies=self.page_copies,
            window=self.window_pages(rows) if self.window else None,
            states=self.state_copies([row for row, _ in rows], admits),
            lora_assignment=self.lora_assignment,
            follows=self.follows,
        )
        self.page_copies = self.lora_assignment = None
        for row, count in (*((row, 1) for row in decodes), *extends):
            row.computed += count
        return read_only(plan)

    def state_copies(self, rows: list[Row], admits: list[Admit]) -> StateCopies | None:
        """Rows own the state slot behind their slot's number; others may be used to keep states."""
        slots, keeps = {admit.slot for admit in admits}, self.keeps
        admitted, self.keeps = [row for row in rows if row.slot in slots], []
        if not self.has_states or not (admitted or keeps):
            return None
        owned = [(row.slot, row.slot + 1) for row in admitted]
        loads = [(row.state_from, row.slot + 1) for row in admitted]
        return StateCopies(
            *(
                np.array([entry[i] for entry in entries], dtype=np.int32)
                for entries, size in ((owned, 2), (loads, 2), (keeps, 3))
                for i in range(size)
            )
        )

    def window_pages(self, rows: list[tuple[Row, int]]) -> WindowPages:
        """First gives back what no row can see any more, then takes what the step computes."""
        updates = []
        for row, _ in rows:
            for old in [i for i in row.window if i < (row.computed - self.window + 1) // self.page_size]:
                self.free_window.append(row.window.pop(old))
        for row, count in rows:
            for i in range(row.computed // self.page_size, (row.computed + count - 1) // self.page_size + 1):
                if i not in row.window:
                    row.window[i] = self.free_window.pop(0)
            updates += [(row.slot, i, page) for i, page in row.window.items() if i not in row.sent]
            row.sent |= row.window.keys()
        return WindowPages(*np.array(updates, dtype=np.int32).reshape(-1, 3).T)

    def run(
        self, decodes: list[Row], extends: list[tuple[Row, int]], verifies: Sequence[tuple[Row, Draft]] = ()
    ) -> StepResult | None:
        """One step; appends what was sampled to the rows."""
        plan = self.plan(decodes, extends, verifies)
        result = self.executor.launch(plan).result()
        if result is None:
            return None
        rows = [*decodes, *(row for row, _ in verifies), *(row for row, _ in extends)]
        sampled = [row for row, samples in zip(rows, plan.samples, strict=True) if samples]
        counts = [1] * len(sampled) if result.num_tokens is None else result.num_tokens.tolist()
        for (row, draft), count in zip(verifies, counts[len(decodes) :], strict=False):
            if draft.is_sure:
                row.tokens += draft.tokens
            row.computed += 1 + len(draft.tokens) if draft.is_sure else count
        sampled = [row for row, count in zip(sampled, counts, strict=True) for _ in range(count)]
        assert len(sampled) == len(result.token_ids)
        width = max(result.width, 0)
        for i, row in enumerate(sampled):
            row.tokens.append(int(result.token_ids[i]))
            if result.width >= 0:
                part = slice(i * width, (i + 1) * width)
                tops = result.top_ids[part].tolist(), result.top_logprobs[part].tolist()
                row.results.append((row.tokens[-1], float(result.logprobs[i]), *tops))
        for found in result.prompt:
            next(row for row, _ in extends if row.slot == found.slot).prompt.append(found)
        return result

    def generate(self, row: Row, num_tokens: int, chunk: int = 1000) -> list[int]:
        """Prefill in chunks, then decode, alone. Returns the new tokens."""
        self.prefill(row, chunk)
        for _ in range(num_tokens - 1):
            self.run([row], [])
        return row.tokens[row.prompt_len :]

    def prefill(self, row: Row, chunk: int = 1000) -> None:
        total = len(row.tokens)
        while row.computed < total:
            self.run([], [(row, min(chunk, total - row.computed))])


def page_copies(saves: dict[int, int] | None = None, loads: dict[int, int] | None = None) -> PageCopies:
    """`saves`: host page by device page; `loads`: device page by host page."""
    saves, loads = saves or {}, loads or {}
    return PageCopies(
        *(
            np.array(list(pages), dtype=np.int32)
            for pages in (saves.keys(), saves.values(), loads.keys(), loads.values())
        )
    )


def read_only(plan: StepPlan) -> StepPlan:
    """As plans come from a ring."""
    for name in plan.__struct_fields__:
        value = getattr(plan, name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return plan
