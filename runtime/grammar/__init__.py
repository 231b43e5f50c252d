"""Constrained decoding: from a grammar to the tokens that may come next. Runs in the compile process and on
rank 0, never in the event loop.

    json_schema.py       JSON Schema before any backend gets it: limits, unsupported keywords, objects closed
    backend.py           the protocols of a backend, and the table of backends
    open_backend.py      a backend over the vocabulary of a tokenizer
    xgrammar.py          llguidance.py    outlines.py
    compile_process.py   the compile process: a child for each grammar, killed when it takes too long
"""
