"""Requests that are small or cheap to send and cost the server much: what each must get. They are data for
tests/hostile/test_costs.py and for bench/loop_gaps.py.

Bodies go up to 16 MB, the default of --max-body-bytes, so they are made when they are sent.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.hostile.case import CHAT, NATIVE, OK, RESPONSES, TEXT, Case, chat, dump, native, text

OLLAMA = "/api/chat"
REFUSED, TOO_LARGE = (400,), (413,)
MB = 2**20
FULL = 15 * MB  # of a body that --max-body-bytes takes


def filled(before: str, piece: str, after: str, size: int = FULL) -> bytes:
    """`before`, `piece` again and again with commas between, and `after`: about `size` bytes."""
    return (before + ",".join([piece] * (size // (len(piece) + 1))) + after).encode()


_MESSAGES = '"messages":[{"role":"user","content":"Hi"}]'
_TOOLS = (
    f'{{{_MESSAGES},"max_tokens":2,"tools":[{{"type":"function","function":{{"name":"f","parameters":'
    '{"enum":['
)


def _case(
    name: str,
    path: str,
    body: bytes | Callable[[], bytes],
    status: tuple[int, ...] = REFUSED,
    param: str | None = None,
) -> Case:
    return Case(f"costly-{name}", path, body, status, param)


def _native(sampling: Mapping[str, Any], **more: Any) -> bytes:
    return dump({"input_ids": [5] * 200, "sampling_params": dict(sampling), **more})


# Answers of megabytes to bodies of a hundred bytes.
ANSWERS = (
    _case(
        "n-top-1024", CHAT, chat(n=128, logprobs=True, top_logprobs=1024, max_tokens=16), param="top_logprobs"
    ),
    _case(
        "n-top-20", CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=400), param="top_logprobs"
    ),
    _case("n-top-20-open", CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=None), OK),
    _case(
        "n-top-20-stream", CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=64, stream=True), OK
    ),
    _case("n-top-20-whole", CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=256), OK),
    _case("text-logprobs-1024", TEXT, text(n=64, logprobs=1024), param="logprobs"),
    _case("text-logprobs-20", TEXT, text(n=128, logprobs=20, max_tokens=200), OK),
    _case(
        "prompt-logprobs-1024", TEXT, text(prompt=[7] * 3000, prompt_logprobs=1024), param="prompt_logprobs"
    ),
    _case("prompt-logprobs-20", TEXT, text(prompt=[7] * 30_000, prompt_logprobs=20), OK),
    _case("echo-of-many", TEXT, text(prompt=[[7] * 900] * 64, echo=True, logprobs=20), param="logprobs"),
    _case("echo", TEXT, text(prompt=[[7] * 900] * 16, echo=True, logprobs=20, stream=True), OK),
    _case(
        "native-top",
        NATIVE,
        _native({"n": 128, "max_new_tokens": 400}, return_logprob=True, top_logprobs_num=20),
        param="top_logprobs_num",
    ),
    _case(
        "native-ids",
        NATIVE,
        _native({"n": 128, "max_new_tokens": 64}, return_logprob=True, token_ids_logprob=[*range(256)]),
        param="token_ids_logprob",
    ),
    _case(
        "native-prompt-stream",
        NATIVE,
        _native(
            {"max_new_tokens": 400},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=20,
            stream=True,
        ),
        param="top_logprobs_num",
    ),
    _case(
        "native-prompt",
        NATIVE,
        _native(
            {"n": 32, "max_new_tokens": 8}, return_logprob=True, logprob_start_len=0, top_logprobs_num=20
        ),
        OK,
    ),
    _case(
        "responses-top",
        RESPONSES,
        dump({"input": "Hi", "top_logprobs": 1024, "store": False}),
        param="top_logprobs",
    ),
    _case(
        "ollama-top",
        OLLAMA,
        dump(
            {
                "model": "pocket",
                "messages": [{"role": "user", "content": "Hi"}],
                "logprobs": True,
                "top_logprobs": 500,
            }
        ),
        param=None,
    ),
)

# Bodies whose decoding makes millions of objects.
BODIES = (
    _case("tools-of-lists", CHAT, partial(filled, _TOOLS, "[]", "]}}}]}"), TOO_LARGE),
    _case("tools-of-objects", CHAT, partial(filled, _TOOLS, '{"a":1}', "]}}}]}"), TOO_LARGE),
    _case(
        "tools-of-texts", CHAT, partial(filled, _TOOLS, '"abcdefghijklmnopqrstuvwxyz"', "]}}}]}"), TOO_LARGE
    ),
    _case("tools", CHAT, partial(filled, _TOOLS, '"' + "a" * 4000 + '"', "]}}}]}"), REFUSED),
    _case(
        "biases",
        CHAT,
        lambda: dump(
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "logit_bias": {str(i): 1 for i in range(100_000)},
            }
        ),
        REFUSED,
    ),
    _case("unknown-in-message", CHAT, partial(filled, '{"messages":[{"x":[', "[]", "]}]}"), TOO_LARGE),
    _case(
        "messages", CHAT, partial(filled, '{"messages":[', '{"role":"user","content":"x"}', "]}"), TOO_LARGE
    ),
    _case(
        "16-thousand-messages",
        CHAT,
        partial(filled, '{"messages":[', '{"role":"user","content":"x"}', "]}", 16_000 * 30),
        REFUSED,
    ),
    _case("ids", TEXT, partial(filled, '{"prompt":[', "7", "]}"), TOO_LARGE),
    _case("a-million-ids", TEXT, partial(filled, '{"prompt":[', "7", "]}", 2_000_000), REFUSED, "prompt"),
    _case(
        "native-id-lists",
        NATIVE,
        partial(filled, '{"input_ids":[', "7", "]}", 2_000_000),
        REFUSED,
        "input_ids",
    ),
    _case("native-lists", NATIVE, partial(filled, '{"input_ids":[', "[7]", "]}"), TOO_LARGE),
    _case("prompts", TEXT, partial(filled, '{"prompt":[', '"a"', "]}"), TOO_LARGE),
    _case("text", TEXT, lambda: text(prompt="Once upon a time. " * (FULL // 18)), REFUSED, "prompt"),
    _case("escapes", TEXT, lambda: b'{"prompt":"' + b"\\n" * (FULL // 2) + b'"}', REFUSED, "prompt"),
    _case("spaces", TEXT, lambda: b" " * FULL + b'{"prompt":""}', REFUSED, "prompt"),
    _case("embeds", NATIVE, partial(filled, '{"input_embeds":[', "[0.12345678901]", "]}"), TOO_LARGE),
)

# Texts to tokens and back.
TEXTS = (
    _case("detokenize", "/detokenize", partial(filled, '{"tokens":[', "7", "]}"), TOO_LARGE),
    _case("detokenize-a-million", "/detokenize", partial(filled, '{"tokens":[', "7", "]}", 2_000_000), OK),
    _case("detokenize-more", "/detokenize", partial(filled, '{"tokens":[', "77", "]}", 3_500_000), TOO_LARGE),
    _case("detokenize-lists", "/detokenize", partial(filled, '{"tokens":[', "[7]", "]}", 700_000), OK),
    _case("tokenize-texts", "/tokenize", lambda: dump({"prompt": ["Once upon a time. " * 200] * 1024}), OK),
    _case(
        "tokenize-text",
        "/tokenize",
        lambda: dump({"prompt": "Once upon a time. " * 800_000}),
        REFUSED,
        "prompt",
    ),
    _case(
        "tokenize-names",
        "/tokenize",
        lambda: dump({"prompt": "a b c d " * 500, "return_token_strs": True}),
        OK,
    ),
    _case(
        "parse",
        "/parse_function_call",
        lambda: dump({"text": "<tool_call>" * 200_000, "tools": [], "tool_call_parser": "hermes"}),
        OK,
    ),
    _case(
        "prompts-1024", TEXT, lambda: text(prompt=["Once upon a time. " * 200] * 1024, n=16), (200, 400, 429)
    ),
    _case("prompts-1024-n", TEXT, text(prompt=["Hi"] * 1024, n=128, max_tokens=1), param="n"),
    _case("native-1024", NATIVE, native(text=["Once upon a time."] * 1024), (200, 429)),
)

COSTLY = (*ANSWERS, *BODIES, *TEXTS)
