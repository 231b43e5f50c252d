"""Grammars: from a rule to the tokens that may come next. Runs in the compile process and on rank 0, never in
the event loop.

    schema.py      JSON Schema before any backend sees it: limits, what a backend cannot keep, objects closed
    backend.py     what a backend is, and the table of them
    xgrammar.py    llguidance.py    outlines.py
    process.py     the compile process: a child for each grammar, killed when it takes too long
"""
