"""What the oracle rank (oracle.py) samples: hashes of the tokens that are seen, and so what must come out of
any schedule."""

from hashlib import blake2b

import numpy as np

from runtime.cache.block import Block
from runtime.scheduling.diffusion.algorithms import Diffusion

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    return blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


def find(tokens: list[int], size: int) -> tuple[list[int], list[float]]:
    """A token for each of the last `size` places and how likely it is, by all of `tokens`."""
    digest = blake2b(np.array(tokens, np.int32).tobytes(), digest_size=2 * size).digest()
    return [byte % VOCAB for byte in digest[:size]], [byte / 256 for byte in digest[size:]]


def generate_blocks(prompt: list[int], diffusion: Diffusion, stop_ids: set[int], max_len: int) -> list[int]:
    """What must come out of a diffusion model, whatever the schedule. The algorithms themselves are compared
    elsewhere."""
    tokens, size = list(prompt), diffusion.size
    while len(tokens) < max_len and not stop_ids & set(tokens[len(prompt) :]):
        known = len(tokens) - len(tokens) % size
        block = Block.begin(tokens[known:], size, diffusion.mask_id)
        while not diffusion.algorithm.fill(
            block, diffusion.mask_id, *find([*tokens[:known], *block.tokens], size)
        ):
            pass
        tokens[known:] = block.tokens
    answer = tokens[len(prompt) : max_len]
    ends = [i + 1 for i, token in enumerate(answer) if token in stop_ids]
    return answer[: ends[0]] if ends else answer


def generate(prompt: list[int], stop_ids: set[int], max_len: int) -> list[int]:
    """What must come out, whatever the schedule."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
