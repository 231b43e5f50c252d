"""Random schemas, and random walks through their masks: whatever may be written to its end is what the schema
allows."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import runtime
from runtime.grammar.backend import Backend
from runtime.grammar.open_backend import open_backend, token_bytes
from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.text.vocabulary import Vocabulary

POCKET = Path(runtime.__file__).parent / "pocket"
SIZE, EOS = 2560, 2
MAX_TOKENS = 150


@cache
def backend(name: str) -> tuple[Backend, list[bytes]]:
    setup = GrammarSetup(
        backend=name, tokenizer_path=str(POCKET), vocab_size=SIZE, eos_ids=(EOS,), is_compact=True
    )
    return open_backend(setup), token_bytes(Vocabulary.load(POCKET, SIZE).token_table, setup)


names = st.sampled_from(["a", "b c", "näme", 'q"', "$x"])
bounds = st.integers(-30, 30).flatmap(lambda low: st.integers(low, low + 40).map(lambda high: (low, high)))
leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
    bounds.map(lambda b: {"type": "integer", "exclusiveMinimum": b[0] - 1, "exclusiveMaximum": b[1] + 1}),
    st.integers(0, 3).flatmap(
        lambda low: st.integers(low, 5).map(
            lambda high: {"type": "string", "minLength": low, "maxLength": high}
        )
    ),
    st.sampled_from(["^[a-c]{1,3}$", "^x(y|zz)?$", "^[0-9]{2}-[A-Z]$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    st.lists(
        st.one_of(st.text(max_size=3), st.integers(-5, 5), st.booleans(), st.none()), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.one_of(st.text(max_size=4), st.integers(0, 100)).map(lambda v: {"const": v}),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def an_object(properties: dict[str, Any], mask: int, is_open: bool | None) -> dict[str, Any]:
        required = [name for i, name in enumerate(properties) if mask >> i & 1]
        schema = {"type": "object", "properties": properties, "required": required}
        return schema if is_open is None else schema | {"additionalProperties": is_open}

    choices = [
        st.builds(
            an_object,
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.integers(0, 7),
            st.sampled_from([None, False]),
        ),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    ]
    return st.one_of(choices)


@st.composite
def schemas(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """With a definition that others refer to, and that refers to itself where it may end."""
    schema = draw(st.recursive(leaves, nested, max_leaves=5))
    if not draw(st.booleans()):
        return schema
    node = {
        "type": "object",
        "properties": {"v": draw(leaves), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["v", "next"],
    }
    return {
        "type": "object",
        "properties": {"x": schema, "n": {"$ref": "#/$defs/node"}},
        "required": ["x"],
        "$defs": {"node": node},
    }


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_what_is_written_is_allowed(name: str, schema: dict[str, Any], seed: int) -> None:
    library, tokens = backend(name)
    matcher = library.compile(Grammar("json_schema", json.dumps(schema))).matcher()
    draw, text, bits = random.Random(seed), b"", np.zeros(SIZE // 32, np.int32)
    for _ in range(MAX_TOKENS):
        assert matcher.fill(bits)
        found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        assert len(found), text
        token = EOS if EOS in found else int(draw.choice(found))
        if token == EOS:
            try:
                answer = text.decode()
            # xgrammar allows some bytes that are no UTF-8; clients get U+FFFD for them, as always
            except UnicodeDecodeError:
                return
            jsonschema.validate(json.loads(answer), schema, jsonschema.Draft202012Validator)
            return
        assert matcher.accept(token)
        text += tokens[token]
    assume(False)
