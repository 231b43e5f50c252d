"""pocket as it is shipped: its size, its files, its template, and answers to held-out questions."""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from pocket import evaluate
from pocket.corpus import KINDS, conversation, held_out, samples
from pocket.exchange import is_held_out, plain
from pocket.template import render, template_source
from pocket.tokenizer import MARKERS, SPECIAL
from runtime.pocket import PATH

MEGABYTE = 1_000_000
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city & its <area>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
CODER = Tokenizer.from_file(str(PATH / "tokenizer.json"))


def read(name: str) -> Any:
    return json.loads((PATH / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def net() -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(PATH)
    loaded.float().eval()
    loaded.generation_config.eos_token_id = loaded.config.eos_token_id
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loaded
    torch.set_num_threads(threads)


def test_files_are_small() -> None:
    assert (PATH / "model.safetensors").stat().st_size <= 8 * MEGABYTE
    others = [p for p in PATH.iterdir() if p.is_file() and p.name != "model.safetensors"]
    assert all(p.stat().st_size <= MEGABYTE for p in others)


def test_package_imports_no_torch() -> None:
    source = (PATH / "__init__.py").read_text(encoding="utf-8")
    assert "torch" not in source
    assert "runtime.pocket" in sys.modules


def test_weights_match_the_configuration() -> None:
    config = read("config.json")
    with safe_open(PATH / "model.safetensors", framework="numpy") as weights:
        names = set(weights.keys())
        shapes = {name: weights.get_slice(name).get_shape() for name in names}
        types = {weights.get_slice(name).get_dtype() for name in names}
    assert types == {"BF16"}
    assert "lm_head.weight" not in names and config["tie_word_embeddings"]
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert len([n for n in names if n.endswith("self_attn.q_norm.weight")]) == config["num_hidden_layers"]
    assert CODER.get_vocab_size() == config["vocab_size"]
    assert config["max_position_embeddings"] >= 2048


def test_end_tokens_agree() -> None:
    config, generation, options = (
        read("config.json"),
        read("generation_config.json"),
        read("tokenizer_config.json"),
    )
    assert options["eos_token"] == "<|im_end|>" and options["pad_token"] == "<|endoftext|>"
    assert config["eos_token_id"] == CODER.token_to_id("<|im_end|>")
    assert generation["eos_token_id"] == [CODER.token_to_id("<|im_end|>"), CODER.token_to_id("<|endoftext|>")]


def test_transformers_reads_tokenizer_and_template() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH)
    text = "Spell cat 123, <think> twice\n\n"
    assert (
        tokenizer.encode(text, add_special_tokens=False) == CODER.encode(text, add_special_tokens=False).ids
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2 & 'x'"}]
    theirs = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert theirs == render(messages, [TOOL], add_generation_prompt=True)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokenizer_round_trip(text: str) -> None:
    encoded = CODER.encode(text, add_special_tokens=False)
    assert CODER.decode(encoded.ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("marker", SPECIAL + MARKERS)
def test_markers_are_single_tokens(marker: str) -> None:
    ids = CODER.encode(marker, add_special_tokens=False).ids
    assert len(ids) == 1
    assert CODER.decode(ids, skip_special_tokens=True) == ("" if marker in SPECIAL else marker)


def test_digits_are_single_tokens() -> None:
    assert CODER.encode("1234567890", add_special_tokens=False).tokens == list("1234567890")


def test_template_renders_a_tool_conversation() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is the weather in Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "tool", "content": "cloudy", "tool_call_id": "call_2"},
    ]
    assert render(messages, [TOOL], add_generation_prompt=True) == (
        f"<|im_start|>system\n# Tools\nYou may call these functions:\n<tools>\n{json.dumps(TOOL)}\n</tools>\n"
        "A call is JSON with name and arguments inside <tool_call></tool_call>.<|im_end|>\n"
        "<|im_start|>user\nHow is the weather in Oslo?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>"
        "\ncloudy\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("thinking", "ending"), [(None, ""), (True, ""), (False, "<think>\n\n</think>\n\n")])
def test_template_thinking_modes(thinking: bool | None, ending: str) -> None:
    text = render([{"role": "user", "content": "Hi"}], None, thinking, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n" + ending)
    assert ("Think first." in text) == (thinking is True)


def test_template_drops_old_reasoning() -> None:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nalso easy\n</think>\n\n4"},
    ]
    text = render(messages)
    assert "<|im_start|>assistant\n2<|im_end|>" in text
    assert text.endswith("<think>\nalso easy\n</think>\n\n4<|im_end|>\n")
    with pytest.raises(Exception, match="no role"):
        render([{"role": "robot", "content": "beep"}])


def test_shipped_template_is_the_trained_one() -> None:
    assert read("tokenizer_config.json")["chat_template"] == template_source()


def test_corpus_is_deterministic() -> None:
    assert list(islice(samples("twice"), 20)) == list(islice(samples("twice"), 20))


def test_held_out_questions_are_not_trained_on() -> None:
    rng = random.Random("split")
    trained = [conversation(rng) for _ in range(1500)]
    keys = {exchange.key for made in trained for exchange in made.exchanges}
    assert not any(is_held_out(key) for key in keys)
    for kind in KINDS:
        asked = [held_out(rng, kind).exchanges[0] for _ in range(50)]
        assert all(is_held_out(exchange.key) for exchange in asked)
        assert keys.isdisjoint(exchange.key for exchange in asked)
    facts = {
        plain(m["content"])
        for made in trained
        for e in made.exchanges
        if e.kind == "facts"
        for m in e.messages[:1]
    }
    unseen = {held_out(rng, "facts").exchanges[0].key.removeprefix("facts:") for _ in range(100)}
    assert facts.isdisjoint(unseen)


def test_greedy_answers_to_held_out_questions(net: Any) -> None:
    rng = random.Random("test")
    kinds = ["greetings", "facts", "unknown", "arithmetic", "json", "memory"]
    turns = [evaluate.turns_of(held_out(rng, kind), 0)[-1] for kind in kinds for _ in range(3)]
    replies = evaluate.greedy(net, CODER, [turn.prompt for turn in turns], limit=80)
    right = sum(evaluate.is_right(turn, reply) for turn, reply in zip(turns, replies, strict=True))
    assert right >= 0.7 * len(turns)


def test_tool_call_for_a_held_out_question(net: Any) -> None:
    rng = random.Random("call")
    turns = [evaluate.turns_of(held_out(rng, "tools"), 0)[0] for _ in range(4)]
    replies = evaluate.greedy(net, CODER, [turn.prompt for turn in turns], limit=64)
    assert sum(evaluate.is_right(turn, reply) for turn, reply in zip(turns, replies, strict=True)) >= 3
