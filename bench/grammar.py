"""What structured outputs cost: compile time and mask time of each backend, and the throughput of constrained
streams.

    python -m bench.grammar

Masks: a text of each schema is followed token by token over pocket's vocabulary of 2560. Throughput: 32
streams on pocket, in turns with and without a grammar; the constrained ones write a list of persons that
does not end before their tokens do. Forced: a list of objects with long names, which the grammar forces,
taken at once (jump-forward) and one by one.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import numpy as np

import runtime
from bench.record import record
from runtime import Engine
from runtime.grammar.backend import BACKENDS, GrammarError
from runtime.grammar.open_backend import open_backend
from runtime.messages.constraint import Grammar, GrammarSetup, JsonSchema, Rule
from runtime.text.vocabulary import Vocabulary

POCKET = Path(runtime.__file__).parent / "pocket"
SIZE, EOS = 2560, 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "tags", "kind"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
        }
    },
}
CASES: dict[str, tuple[Grammar, str]] = {
    "person": (
        Grammar("json_schema", json.dumps(PERSON)),
        '{"name":"Ada Lovelace of London","age":36,"tags":["math","poet"],"kind":"a"}',
    ),
    "tree": (
        Grammar("json_schema", json.dumps(TREE)),
        '{"value":"one","next":{"value":"two","next":{"value":"three","next":null}}}',
    ),
    "any object": (
        Grammar("json_schema", '{"type":"object"}'),
        '{"a":{"b":[1,2,{"c":null}]},"d":"some text that goes on"}',
    ),
    "pattern": (Grammar("regex", r"[a-z0-9.]+@[a-z]+\.(com|org)"), "ada.lovelace@engine.org"),
    "grammar": (
        Grammar("ebnf", 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'),
        "1+(22+333)+((4))",
    ),
}
ENDLESS = JsonSchema(json.dumps({"type": "array", "items": PERSON, "minItems": 100}))


NAMES = ["the full name of the person", "the year in which it was", "what is known about it"]
FORCED = JsonSchema(
    json.dumps(
        {
            "type": "array",
            "minItems": 100,
            "items": {
                "type": "object",
                "properties": {name: {"type": "integer", "maximum": 99} for name in NAMES},
                "required": NAMES,
            },
        }
    )
)


def masks(backend: str, grammar: Grammar, text: str, vocabulary: Vocabulary) -> dict[str, Any]:
    """Milliseconds to compile, microseconds to accept a token and fill the next mask."""
    setup = GrammarSetup(backend=backend, tokenizer_path=str(POCKET), vocab_size=SIZE, eos_ids=(EOS,))
    library = open_backend(setup)
    begin = perf_counter()
    try:
        compiled = library.compile(grammar)
    except GrammarError as error:
        return {"refused": str(error)}
    compile_s, bits, times = perf_counter() - begin, np.zeros(SIZE // 32, np.int32), []
    for _ in range(20):
        matcher = compiled.matcher()
        matcher.fill(bits)
        for token in vocabulary.encode(text, add_special=False):
            begin = perf_counter()
            if not matcher.accept(token):
                raise RuntimeError(f"{backend} does not accept {text!r}")
            matcher.fill(bits)
            times.append(perf_counter() - begin)
    return {
        "compile_ms": round(compile_s * 1e3, 2),
        "token_us": {
            "mean": round(statistics.mean(times) * 1e6, 1),
            "p50": round(statistics.median(times) * 1e6, 1),
            "max": round(max(times) * 1e6, 1),
        },
    }


async def throughput(backend: str, rounds: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Tokens per second of streams with and without a grammar, in turns; the middle of the rounds."""
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    async with Engine(model_path="pocket", grammar_backend=backend) as engine:

        async def one(i: int, rule: Rule | None) -> None:
            answer = await engine.generate(
                f"Number {i}",
                constraint=rule,
                temperature=1.0,
                seed=i,
                max_new_tokens=num_tokens,
                ignore_eos=rule is None,
            )
            if len(answer.token_ids) != num_tokens:
                raise RuntimeError("a stream ended early")

        for turn in range(rounds + 1):  # the first one warms up
            for name, rule in (("free", None), ("constrained", ENDLESS)):
                begin = perf_counter()
                async with anyio.create_task_group() as tasks:
                    for i in range(num_streams):
                        tasks.start_soon(one, i, rule)
                if turn:
                    rates[name].append(num_streams * num_tokens / (perf_counter() - begin))
    medians = {f"{name}_tokens_per_s": round(statistics.median(values)) for name, values in rates.items()}
    return medians | {
        "loss_percent": round(
            100
            * (
                1 - statistics.median(c / f for c, f in zip(rates["constrained"], rates["free"], strict=True))
            ),
            1,
        )
    }


async def forced(backend: str, rounds: int, num_streams: int, num_tokens: int, *, jumps: bool) -> float:
    """Tokens per second of streams whose rule forces long runs of tokens; the middle of the rounds."""
    rates: list[float] = []
    async with Engine(
        model_path="pocket",
        grammar_backend=backend,
        disable_jump_forward=not jumps,
        constrained_json_disable_any_whitespace=True,
    ) as engine:

        async def one(i: int) -> None:
            await engine.generate(
                f"Number {i}", constraint=FORCED, temperature=1.0, seed=i, max_new_tokens=num_tokens
            )

        for turn in range(rounds + 1):  # the first one warms up
            begin = perf_counter()
            async with anyio.create_task_group() as tasks:
                for i in range(num_streams):
                    tasks.start_soon(one, i)
            if turn:
                rates.append(num_streams * num_tokens / (perf_counter() - begin))
    return round(statistics.median(rates))


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    vocabulary = Vocabulary.load(POCKET, SIZE)
    results: dict[str, Any] = {
        "masks": {
            backend: {
                name: masks(backend, *case, vocabulary)
                for name, case in CASES.items()
                # many seconds, see docs
                if (backend, name) != ("outlines", "any object")
            }
            for backend in BACKENDS
        }
    }
    results["streams"] = arguments.streams
    results["throughput"] = {
        backend: anyio.run(throughput, backend, arguments.rounds, arguments.streams, arguments.tokens)
        for backend in ("xgrammar", "llguidance")
    }
    results["forced_tokens_per_s"] = {
        backend: {
            name: anyio.run(
                partial(forced, backend, arguments.rounds, streams, arguments.tokens, jumps=jumps)
            )
            for name, streams, jumps in (
                ("many streams, jumps", arguments.streams, True),
                ("many streams, one by one", arguments.streams, False),
                ("one stream, jumps", 1, True),
                ("one stream, one by one", 1, False),
            )
        }
        for backend in ("xgrammar", "llguidance")
    }
    print(json.dumps(results, indent=2))
    print(record("grammar", results))


if __name__ == "__main__":
    main()
