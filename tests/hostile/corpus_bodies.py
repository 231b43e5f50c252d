"""Hostile bodies: JSON that is none, and values at and beyond their limits."""

import gzip
from functools import partial

from tests.hostile.case import (
    BAD,
    CHAT,
    DEEP,
    FORM,
    MESSAGES,
    NATIVE,
    OK,
    OK_OR_BAD,
    RESPONSES,
    TEXT,
    TRAVERSAL,
    Case,
    chat,
    content,
    dump,
    inside,
    named,
    native,
    nested,
    sampling,
    text,
    with_depth,
)

# Bodies that are no JSON object, or one that no client would send.
SHAPES = (
    *(
        Case(f"body-{name}", CHAT, body)
        for name, body in {
            "empty": b"",
            "null": b"null",
            "array": b"[]",
            "text": b'"x"',
            "unfinished": b'{"messages": [',
            "trailing": chat() + b"x",
            "two": chat() + chat(),
            "bom": b"\xef\xbb\xbf" + chat(),
            "utf-16": chat().decode().encode("utf-16"),
            "no-utf-8": chat(user="@").replace(b"@", b"\xff\xfe\xc0\xaf"),
            "overlong-utf-8": chat(messages="@").replace(b"@", b"\xc0\x80"),
            "control-characters": chat(user="@").replace(b"@", b"\x00\x07"),
            "nan": inside(chat(temperature="@"), "NaN"),
            "infinity": inside(chat(temperature="@"), "-Infinity"),
            "hexadecimal": inside(chat(seed="@"), "0x10"),
            "comments": b"/* x */" + chat(),
            "unknown-field": chat(temprature=1),
            "prototype": chat(__proto__={"max_tokens": 9}),
        }.items()
    ),
    Case("body-gzip", CHAT, gzip.compress(chat()), (400, 415), headers={"content-encoding": "gzip"}),
    Case(
        "body-gzip-bomb",
        CHAT,
        lambda: gzip.compress(bytes(2**26)),
        (400, 415),
        headers={"content-encoding": "gzip"},
    ),
    Case("body-too-large", CHAT, lambda: chat(user="x" * 2**21), (413,)),
    Case("body-as-form", CHAT, chat(), OK_OR_BAD + (415,), headers={"content-type": FORM}),
    Case(
        "body-charset",
        CHAT,
        chat(),
        OK_OR_BAD + (415,),
        headers={"content-type": "application/json; charset=utf-7"},
    ),
    Case("body-twice-a-field", CHAT, b'{"max_tokens":1,' + chat()[1:], OK_OR_BAD),
    Case("body-50000-fields", CHAT, lambda: chat(**{f"x{i}": i for i in range(50_000)})),
    Case("body-long-field-name", CHAT, lambda: chat(**{"x" * 10**6: 1})),
    Case("deep-body", CHAT, lambda: nested(DEEP).encode()),
    Case("deep-objects", CHAT, lambda: nested(DEEP, '{"a":', "1", "}").encode()),
    *(
        Case(f"deep-{name}-{levels}", path, partial(with_depth, body, levels), OK_OR_BAD)
        for levels in (1_100, DEEP)
        for name, path, body in (
            ("metadata", CHAT, chat(metadata={"a": "@"})),
            ("ignored", CHAT, chat(messages=[{"role": "user", "content": "Hi", "x": "@"}])),
            (
                "tools",
                CHAT,
                chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": "@"}}}]),
            ),
            ("template-variables", CHAT, chat(chat_template_kwargs={"a": "@"})),
            ("documents", CHAT, chat(documents=[{"a": "@"}])),
            ("response-input", RESPONSES, dump({"input": "@", "store": False})),
            ("blocks", MESSAGES, named({"max_tokens": 1, "messages": [{"role": "user", "content": "@"}]})),
            ("custom-params", NATIVE, sampling(custom_params={"a": "@"})),
            ("embeddings-of-tokens", NATIVE, dump({"input_embeds": "@"})),
            (
                "ollama-tools",
                "/api/chat",
                named(
                    {
                        "messages": [{"role": "user", "content": "Hi"}],
                        "tools": "@",
                        "options": {"num_predict": 1},
                    }
                ),
            ),
        )
    ),
)

# Values at and beyond their limits.
VALUES = (
    *(
        Case(f"{name}-{str(value)[:24]}", CHAT, chat(**{name: value}), BAD, name)
        for name, values in {
            "temperature": (-1, 1e308, "hot", [1]),
            "top_p": (2, -0.1, 0),
            "top_k": (-2, 2**63, 1.5),
            "min_p": (-1, 2),
            "n": (0, -1, 129, 2**63),
            "top_logprobs": (-1, 2**31),
            "frequency_penalty": (99, -99),
            "repetition_penalty": (0, -1),
            "seed": (2**70, "x"),
            "stop": ([""] * 65, ["x"] * 10_000, {"a": 1}),
            "stop_token_ids": (list(range(100_000)),),
            "allowed_token_ids": ([], [-1], [2**31], ["x"], [0] * 300_000),
            "bad_words": ([""], "x", [1], ["x" * 257], ["x"] * 1025),
            "logit_bias": ({"x": 1}, {"-1": 1}, {str(2**70): 1}, {"5": 1e9}),
            "priority": (2**70,),
            "stream_interval": (0, -1),
        }.items()
        for value in values
    ),
    Case("presence_penalty-infinite", CHAT, chat(presence_penalty=1e999)),
    *(
        Case(f"stop_token_ids-{value}", CHAT, chat(stop_token_ids=[value]), BAD, "stop_token_ids[0]")
        for value in (-1, 2**63)
    ),
    *(Case(f"max_tokens-{value}", CHAT, chat(max_tokens=value), BAD) for value in (-1, 2**70, "9", 1.5)),
    Case("max_tokens-huge", CHAT, chat(max_tokens=2**31 - 1, stop=["e", "t", "a", "o"]), OK),
    Case("number-of-400-digits", CHAT, inside(chat(seed="@"), "9" * 400)),
    Case("number-of-a-million-digits", CHAT, lambda: inside(chat(seed="@"), "9" * 10**6)),
    Case("number-of-deep-exponent", CHAT, inside(chat(temperature="@"), "1e" + "9" * 5000)),
    Case("prompt-empty", TEXT, text(prompt=""), OK_OR_BAD),
    Case("prompt-empty-list", TEXT, text(prompt=[])),
    Case("prompt-mixed", TEXT, text(prompt=[1, "x", [2]])),
    Case("prompt-token-negative", TEXT, text(prompt=[-1])),
    Case("prompt-token-beyond-vocabulary", TEXT, text(prompt=[2**31 - 1])),
    Case("prompt-token-of-70-bits", TEXT, text(prompt=[2**70])),
    Case("prompts-50000", TEXT, lambda: text(prompt=["x"] * 50_000), (400, 429, 503)),
    Case("prompt-too-long", TEXT, lambda: text(prompt=[5] * 200_000)),
    Case("prompt-too-long-text", TEXT, lambda: text(prompt="x" * 900_000)),
    Case("prompt-lone-surrogates", TEXT, text(prompt="\ud800\udfff \udc00"), OK_OR_BAD),
    Case("prompt-nul", TEXT, text(prompt="\0" * 100), OK),
    Case("prompt-one-combining-pile", TEXT, lambda: text(prompt="e" + "\u0301" * 300), OK_OR_BAD),
    Case(
        "prompt-special-tokens-as-text",
        CHAT,
        content({"type": "text", "text": "<|im_end|><|endoftext|>"}),
        OK,
    ),
    Case("best_of-below-n", TEXT, text(n=4, best_of=2)),
    Case("native-batch-ragged", NATIVE, native(text=["a", "b"], rid=["1"])),
    Case("native-embeddings-of-no-shape", NATIVE, dump({"input_embeds": [[1, 2], [3]]})),
    Case("native-embeddings-of-words", NATIVE, dump({"input_embeds": [["x"]]})),
    Case(
        "native-session-junk", NATIVE, native(session_params={"id": TRAVERSAL, "offset": 2**70}), (400, 404)
    ),
    Case("messages-100000", CHAT, lambda: chat(messages=[{"role": "user", "content": "x"}] * 30_000), BAD),
    Case("messages-none", CHAT, chat(messages=[])),
    Case("role-junk", CHAT, chat(messages=[{"role": "__class__", "content": "x"}])),
    Case("detokenize-negative", "/detokenize", dump({"tokens": [-1, 2**31]})),
    Case("detokenize-ragged", "/detokenize", dump({"tokens": [[1], 2]})),
    Case("tokenize-number", "/tokenize", dump({"prompt": 5})),
    Case(
        "response-unknown-previous",
        RESPONSES,
        dump({"input": "x", "previous_response_id": TRAVERSAL}),
        (400, 404),
    ),
    Case(
        "anthropic-no-tokens",
        MESSAGES,
        named({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}),
    ),
    Case("ollama-options-junk", "/api/generate", named({"prompt": "x", "options": {"num_predict": "many"}})),
)
