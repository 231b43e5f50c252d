"""Grammars of a few bytes that keep a library busy for ever, fill the memory or end the process: each is
refused in the compile process, or compiled and followed with bounds."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event

import anyio
import msgspec
import numpy as np
import pytest

import runtime
from runtime.actors.grammars import Grammars
from runtime.errors import InvalidRequest
from runtime.grammar import forced_bytes, guard, trial
from runtime.grammar.backend import GrammarError
from runtime.grammar.open_backend import open_backend, token_bytes
from runtime.layers.sampling import compiled_grammars
from runtime.layers.sampling.grammar_masks import GrammarMasks, SlotGrammar
from runtime.layers.sampling.verify import DraftRows
from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.messages.requests import GrammarConstraint
from runtime.messages.steps import Admit
from runtime.text.vocabulary import Vocabulary
from tests.devices.drive import sampling

LIMIT_S = 10.0  # --grammar-timeout
SETUP = GrammarSetup(
    backend="xgrammar",
    tokenizer_path=str(Path(runtime.__file__).parent / "pocket"),
    vocab_size=2560,
    eos_ids=(2,),
)

VOCABULARY = Vocabulary.load(Path(SETUP.tokenizer_path), SETUP.vocab_size)


def nested(depth: int, times: str, inner: str = "a") -> str:
    for _ in range(depth):
        inner = f"({inner}){times}"
    return inner


def schema(**fields: object) -> Grammar:
    return Grammar("json_schema", json.dumps(fields))


def doubling(last: str) -> Grammar:
    """2^60 times `last`."""
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    return Grammar("ebnf", f"root ::= r0\n{rules}\nr60 ::= {last}")


# what must be refused by each backend
REFUSED = {
    "counted repetitions within each other": Grammar("regex", nested(8, "{1,100}")),
    "repetitions within each other": Grammar("regex", nested(40, "+")),
    "optional repetitions within each other": Grammar("regex", nested(100, "{0,9}")),
    "optional parts in a row": Grammar("regex", "(a?){1000}" * 50),
    "repetitions in a row": Grammar("regex", "(a*)*" * 500),
    "optional doublings": doubling("[a-z]?"),
    "a thousand counted alternatives": Grammar(
        "ebnf", "root ::= " + " | ".join(f'[a-z]{{1,{k + 1}}} "x{k}"' for k in range(1000))
    ),
    "a schema nested deeply": Grammar("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "a schema that is no object": Grammar("json_schema", "5"),
    "a number of 5,000 digits": Grammar("json_schema", '{"maxLength": ' + "9" * 5000 + "}"),
    "a count of 5,000 digits": Grammar("regex", "a{" + "9" * 5000 + "}"),
    "rules that need each other": Grammar("ebnf", "root ::= a\na ::= b\nb ::= a"),
    "parentheses nested deeply": Grammar("ebnf", "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "half a rule": Grammar("ebnf", "root ::= ("),
    "a rule that is missing": Grammar("ebnf", "root ::= x"),
    "tags of a kind that is none": Grammar(
        "structural_tag", '{"type":"structural_tag","format":{"type":"x"}}'
    ),
    "tags nested deeply": Grammar(
        "structural_tag",
        '{"type":"structural_tag","format":' + '{"type":"or","elements":[' * 900 + "5" + "]}" * 900 + "}",
    ),
}
# what may be refused; what is compiled does no harm
BOUNDED = {
    # a trial may end the text before it becomes slow: the rank gives the sequence up
    "a pattern in a schema": schema(type="string", pattern=nested(8, "{1,100}")),
    "a pattern of names": schema(type="object", patternProperties={nested(40, "+"): {}}),
    "a text without an end": Grammar("ebnf", 'root ::= "a" root'),
    "a text without an end after a letter": Grammar("ebnf", 'root ::= [a-z] x\nx ::= "a" x'),
    "a forced text of 10^16 letters": Grammar("regex", nested(8, "{100}")),
    "a forced text of 2^60 letters": doubling('"a"'),
    "a million items": schema(type="array", minItems=10**6),
    "ambiguous rules": Grammar("ebnf", 'root ::= s\ns ::= s s s | s s | "a" | ""'),
    "rules that begin with themselves": Grammar("ebnf", 'root ::= root "a" | "a"'),
}
GOOD = {
    "addresses": Grammar("regex", r"(\d{1,3}\.){3}\d{1,3}"),
    "words": Grammar("regex", r"(([a-z]+ )+\. )+"),
    "a long constant": schema(const="x" * 20_000),
    "many names": schema(
        type="object", properties={f"a_rather_long_name_{i}": {"type": "string"} for i in range(200)}
    ),
    "recursion": schema(type="object", properties={"a": {"$ref": "#"}}),
    "lists in lists": schema(
        type="array", items={"type": "array", "minItems": 5, "items": {"type": "number"}}
    ),
    "arithmetic": Grammar("ebnf", 'root ::= t ("+" t)*\nt ::= [0-9]+ | "(" root ")"'),
}


async def prepared(grammar: Grammar | None) -> None:
    """What ranks do that have compiled it already."""


@pytest.fixture(params=["xgrammar", "llguidance"])
async def grammars(request: pytest.FixtureRequest) -> AsyncIterator[Grammars]:
    made = Grammars(msgspec.structs.replace(SETUP, backend=request.param), LIMIT_S, prepared)
    yield made
    made.stop()


async def outcome(grammars: Grammars, grammar: Grammar) -> str:
    try:
        await grammars.check(grammar)
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.full  # some take LIMIT_S
@pytest.mark.anyio
@pytest.mark.usefixtures("forked_children")
async def test_bad_grammars_are_refused_and_good_ones_are_not(
    grammars: Grammars, request: pytest.FixtureRequest
) -> None:
    outcomes: dict[str, str] = {}

    async def check(name: str, grammar: Grammar) -> None:
        outcomes[name] = await outcome(grammars, grammar)

    async with anyio.create_task_group() as tasks:
        for name, grammar in (REFUSED | BOUNDED | GOOD).items():
            tasks.start_soon(check, name, grammar)
    assert outcomes["a schema that is no object"]
    assert [name for name in GOOD if outcomes[name]] == []
    # llguidance follows repetitions within repetitions in linear time
    accepted = [name for name in REFUSED if not outcomes[name]]
    assert not accepted or grammars._setup.backend == "llguidance", accepted
    assert all("repetitions" in name or "pattern" in name or "optional" in name for name in accepted), (
        accepted
    )


QUICK = ("counted repetitions within each other", "a schema nested deeply", "rules that need each other")


@pytest.mark.parametrize("name", QUICK)
def test_a_bad_grammar_is_refused_when_it_is_tried(name: str) -> None:
    with pytest.raises(GrammarError):
        trial.try_grammar(open_backend(SETUP).compile(REFUSED[name]).matcher(), SETUP.vocab_size, (2,))


@pytest.mark.parametrize("name", GOOD)
def test_a_good_grammar_passes_its_trial(name: str) -> None:
    trial.try_grammar(open_backend(SETUP).compile(GOOD[name]).matcher(), SETUP.vocab_size, (2,))


def test_forced_texts_have_a_bound() -> None:
    backend = open_backend(SETUP)
    for name in ("a text without an end", "a forced text of 10^16 letters", "a forced text of 2^60 letters"):
        run = backend.compile(BOUNDED[name]).matcher().jump_forward()
        assert 0 < len(run) <= forced_bytes.MAX_BYTES, name


class SlowMatcher:
    """A matcher that takes a while from some token on."""

    def __init__(self, seconds: float, num_tokens: int = 0) -> None:
        self.seconds = seconds
        self.num_tokens = num_tokens

    def accept(self, token: int) -> bool:
        """Takes all of it in time of the processor."""
        self.num_tokens += 1
        end = time.thread_time() + (self.seconds if self.num_tokens > 4 else 0.0)
        while time.thread_time() < end:
            pass
        return True

    def fill(self, bits: np.ndarray) -> bool:
        bits.fill(-1)
        return True

    def fork(self) -> "SlowMatcher":
        return SlowMatcher(self.seconds, self.num_tokens)

    def jump_forward(self) -> list[int]:
        return []

    def matcher(self) -> "SlowMatcher":
        return self.fork()


@pytest.mark.parametrize(
    ("seconds", "num_tokens"), [(0.0, 20), (1.1 * trial.SLOW_S, 6), (1.1 * trial.MAX_STEP_S, 4)]
)
def test_a_sequence_that_becomes_slow_is_given_up(seconds: float, num_tokens: int) -> None:
    constraint = GrammarConstraint(BOUNDED["ambiguous rules"], after_ids=(), stop_ids=(2,))
    slot = SlotGrammar(constraint, SlowMatcher(seconds))
    taken = 0
    while taken < 20 and not slot.is_lost:
        slot.advance(5, taken + 1)
        taken += not slot.is_lost
    assert taken == num_tokens


def test_a_trial_ends_at_a_slow_token() -> None:
    trial.try_grammar(SlowMatcher(0.0), 64, (2,))
    with pytest.raises(GrammarError, match="too long to follow"):
        trial.try_grammar(SlowMatcher(1.1 * trial.MAX_STEP_S), 64, (2,))


def letters_then(rules: str) -> Grammar:
    """What follows 300 free letters: no trial comes so far."""
    return Grammar("ebnf", f'root ::= [a-z]{{300}} "#" x\n{rules}')


def ambiguous(count: int) -> Grammar:
    names = [f"r{i}" for i in range(count)]
    rules = "\n".join(f'{name} ::= [a-z]* "q{i}"?' for i, name in enumerate(names))
    return letters_then(f"x ::= ({' | '.join(names)})*\n{rules}")


def masks_of(*grammars: Grammar) -> GrammarMasks:
    """Slots 0, 1, ... with these grammars."""
    masks = GrammarMasks(SETUP, SETUP.vocab_size)
    for slot, grammar in enumerate(grammars):
        constraint = GrammarConstraint(grammar, after_ids=(), stop_ids=(2,))
        masks.admit(Admit(slot, sampling(), 1, np.array([5], np.int32), constraint))
    return masks


def draft(token: int) -> DraftRows:
    """A row of one draft."""
    return DraftRows(
        first=np.array([0]),
        counts=np.array([2]),
        tokens=np.array([[-1, token]]),
        parents=np.array([[-1, 0]]),
        is_chain=True,
    )


@pytest.mark.parametrize("way", ["sampled", "drafted", "sampled behind a draft"])
def test_an_operation_that_does_not_end_ends_its_sequence_alone(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 bytes that are compiled in a moment, whose trial ends well, and whose 301st mask takes seconds, and
    minutes with twice the rules: the step goes on without the sequence, and the other one follows its
    grammar."""
    monkeypatch.setattr(guard, "LIMIT_S", 0.3)
    bad = ambiguous(100)
    trial.try_grammar(open_backend(SETUP).compile(bad).matcher(), SETUP.vocab_size, (2,))
    masks, tokens = masks_of(bad, GOOD["words"]), token_bytes(VOCABULARY.token_table, SETUP)
    letter, mark = tokens.index(b"a"), tokens.index(b"#")
    for length in range(2, 300):
        masks.took([0, 1], [letter, letter])
        masks.masks([0, 1], [length, length])
    masks.took([0, 1], [letter, letter])
    masks.masks([0, 0, 1], [300, 301, 300], draft(letter))  # the 299th letter, and a draft of the last one
    masks.accepted(0, [0, 1] if way == "sampled behind a draft" else [0], mark)
    if way != "sampled behind a draft":
        masks.took([0, 1], [letter, letter])
        masks.masks([0, 1], [301, 301])
    masks.took([1], [letter])
    if way == "drafted":
        places, bits = masks.masks([0, 0, 1], [301, 302, 302], draft(mark))
        assert places == [0, 2], "a draft behind a lost one is not accepted"
    else:
        masks.took([0], [mark])
        places, bits = masks.masks([0, 1], [302, 302])
        assert places == [0, 1]
    assert masks.slots[0].is_lost and not masks.slots[1].is_lost
    assert np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist() == [2]
    assert np.bitwise_count(bits[-1].view(np.uint32)).sum() > 26, "the other one has its letters"
    assert masks.unconstrained([0, 1]) == [0] and len(masks._guard._left) == 1
    masks.took([1], [letter])
    assert masks.masks([0, 1], [303, 303])[0] == [0, 1]


def test_too_many_that_do_not_end_end_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """New ranks start without them; the others go on there."""
    monkeypatch.setattr(guard, "MAX_LEFT", 2)
    may_end, watched = Event(), guard.Guard[int](limit_s=0.0)

    def work() -> None:
        watched.enter(7)
        while not may_end.is_set():
            pass
        watched.enter(8)
        raise AssertionError("what was left behind goes on")

    try:
        for _ in range(2):
            with pytest.raises(guard.StuckError) as stuck:
                watched.run(work)
            assert stuck.value.culprit == 7
        with pytest.raises(RuntimeError, match="3 operations"):
            watched.run(work)
    finally:
        may_end.set()
    assert watched.run(lambda: 5) == 5, "another thread works"
    for thread in watched._left:
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_of_the_work_is_that_of_the_caller() -> None:
    watched = guard.Guard[int]()
    with pytest.raises(ZeroDivisionError):
        watched.run(lambda: 1 // 0)
    assert watched.run(lambda: "goes on") == "goes on"


def test_compiled_grammars_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = compiled_grammars.CompiledGrammars(SETUP)
    grammars = [Grammar("regex", f"[a-z]{{1,{100 + i}}}x") for i in range(6)]
    sizes = []
    for grammar in grammars:
        compiled = kept.find(grammar)
        assert compiled is not None and compiled.num_bytes > 50_000
        sizes.append(compiled.num_bytes)
    assert kept.num_bytes == sum(sizes)
    monkeypatch.setattr(compiled_grammars, "KEPT_BYTES", sum(sizes[-2:]) + 1000)
    kept.find(grammars[-1])
    assert [*kept._kept] == grammars[-2:]
    monkeypatch.setattr(compiled_grammars, "KEPT_BYTES", 1)
    assert kept.find(grammars[0]) is not None and [*kept._kept] == [grammars[0]], "the latest one stays"
