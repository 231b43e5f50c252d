"""Files as the encoder takes them, prepared in processes of low priority.

    tokenizer's thread ── pixels or samples ──► preparation process ── fork ──► child ── arrays ──► tokenizer

A picture of 3840 x 2160 is a tenth of a second of a core for resizing alone. In a thread of the server it had
the event loop's priority, and ran beside it for the cores and for the interpreter.
"""
