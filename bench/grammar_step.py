"""CPU time of a constrained step on the rank, and the grammar library's part of it: 32 decoding rows of
pocket, one thread.

    python -m bench.grammar_step [--rows 32] [--rounds 9]

`free` steps have no grammar. `anything` steps have one whose library allows every token: their additional
time is the runtime's. With `xgrammar` and `llguidance` the rest is the time of these libraries to accept a
token of each row and to fill its next mask.
"""

import argparse
import json
import statistics
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from msgspec import structs

import runtime
from bench.cpu_rank import GREEDY, PAGE, start_rank
from bench.grammar import ENDLESS, EOS, SIZE
from bench.record import record
from runtime.grammar.backend import BACKENDS, GrammarVocabulary, find_byte_ids
from runtime.messages.constraint import Grammar, GrammarSetup, grammar_of
from runtime.messages.requests import GrammarConstraint
from runtime.messages.steps import Admit, StepPlan
from runtime.ranks.torch_executor import TorchExecutor

POCKET = Path(runtime.__file__).parent / "pocket"
STEPS, SKIPPED = 120, 20
BACKENDS["anything"] = ("bench.grammar_step", "nothing")


class Anything:
    """A Backend, Compiled and Matcher that bans nothing."""

    def __init__(self, terms: GrammarVocabulary) -> None:
        self.byte_ids = find_byte_ids(terms)

    def compile(self, grammar: Grammar) -> "Anything":
        """Itself: it is its own compiled grammar."""
        return self

    def matcher(self) -> "Anything":
        """Itself: it is its own matcher."""
        return self

    def accept(self, token: int) -> bool:
        """Accepts every token."""
        return True

    num_bytes = 0

    def fill(self, bits: np.ndarray) -> bool:
        """Allows every token."""
        bits.fill(-1)
        return True

    def fork(self) -> "Anything":
        """Itself: it has no state."""
        return self

    def jump_forward(self) -> list[int]:
        """No token is forced."""
        return []


def create_backend(terms: GrammarVocabulary) -> Anything:
    """The opener of the backend, as runtime/grammar/backend.py calls it."""
    return Anything(terms)


def start(rows: int, backend: str) -> TorchExecutor:
    """A rank of the cpu device with pocket and a grammar backend."""
    setup = GrammarSetup(backend=backend, tokenizer_path=str(POCKET), vocab_size=SIZE, eos_ids=(EOS,))
    return start_rank(POCKET, rows, max_len=512, grammar=setup)


def admit(slot: int, grammar_constraint: GrammarConstraint | None) -> Admit:
    """Admits a request to a slot."""
    sampling = structs.replace(GREEDY, temperature=1.0, seed=slot)
    return Admit(
        slot,
        sampling,
        1,
        np.empty(0, np.int32) if grammar_constraint is None else np.full(1, 5, np.int32),
        grammar_constraint,
    )


def plan(step: int, rows: int, grammar_constraint: GrammarConstraint | None) -> StepPlan:
    """A step of all rows at position `step`; the first step admits them."""
    slots, empty, page = np.arange(rows, dtype=np.int32), np.empty(0, np.int32), step // PAGE
    takers = empty if step % PAGE else slots  # slots that get a new page
    return StepPlan(
        step=step,
        num_decodes=rows if step else 0,
        admits=[] if step else [admit(slot, grammar_constraint) for slot in range(rows)],
        slots=slots,
        counts=np.ones(rows, np.int32),
        samples=np.ones(rows, np.uint8),
        token_ids=empty if step else np.full(rows, 5, np.int32),
        page_slots=takers,
        page_rows=np.full(len(takers), page, np.int32),
        page_ids=(1 + takers * 32 + page).astype(np.int32),
    )


def measure(rows: int, kinds: dict[str, str | None]) -> dict[str, list[float]]:
    """CPU microseconds of each step by kind. Steps of all kinds alternate, as the machine's speed drifts more
    in a second than the kinds differ."""
    runners = {name: start(rows, backend or "anything") for name, backend in kinds.items()}
    grammar_masks = {
        name: None if backend is None else GrammarConstraint(grammar_of(ENDLESS), (), (EOS,))
        for name, backend in kinds.items()
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for step in range(STEPS):
        for name, runner in runners.items():
            begin = thread_time()
            runner.launch(plan(step, rows, grammar_masks[name])).result()
            if step >= SKIPPED:
                times[name].append((thread_time() - begin) * 1e6)
    for runner in runners.values():
        runner.close()
    return times


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kinds = {"free": None, "anything": "anything", "xgrammar": "xgrammar", "llguidance": "llguidance"}
    rounds = [measure(arguments.rows, kinds) for _ in range(arguments.rounds)]
    results: dict[str, Any] = {"rows": arguments.rows, "step_cpu_us": {}, "dearer_percent": {}}
    for name in kinds:
        results["step_cpu_us"][name] = round(
            statistics.median(time for times in rounds for time in times[name])
        )
        if name != "free":  # by round, from pairs of consecutive steps
            results["dearer_percent"][name] = sorted(
                round(
                    100
                    * statistics.median(
                        time / base - 1 for time, base in zip(times[name], times["free"], strict=True)
                    ),
                    1,
                )
                for times in rounds
            )
    print(json.dumps(results, indent=2))
    print(record("grammar_step", results))


if __name__ == "__main__":
    main()
