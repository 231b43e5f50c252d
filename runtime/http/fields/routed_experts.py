"""Routed experts as SGLang writes them: base64 of int32, in the byte order of this machine, of shape [tokens,
layers, experts of a token]. Layers without experts have zeros."""

from base64 import b64encode

import numpy as np

from runtime.json_value import Fields


def as_base64(parts: list[np.ndarray]) -> str:
    """`parts`, each [tokens, layers * experts of a token], as one array; empty without parts."""
    return b64encode(np.concatenate(parts).tobytes()).decode() if parts else ""


def extension(parts: list[np.ndarray] | None) -> Fields:
    """SGLang's extension of OpenAI's answers, a field next to `choices`; no field without parts."""
    return {"sglext": {"routed_experts": as_base64(parts)}} if parts else {}
