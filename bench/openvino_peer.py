"""OpenVINO GenAI's figures for one GGUF file, as JSON: run by an interpreter that has `openvino-genai`,
which need not have this project.

    python bench/openvino_peer.py FILE.gguf BATCHES CONTEXT STEPS PROMPT
"""

import json
import sys
from time import perf_counter

import numpy as np
import openvino
import openvino_genai


def config(count: int) -> openvino_genai.GenerationConfig:
    """Exactly `count` greedy tokens."""
    made = openvino_genai.GenerationConfig()
    made.max_new_tokens = made.min_new_tokens = count
    made.ignore_eos, made.do_sample = True, False
    return made


def main() -> None:
    """Measures and prints."""
    path, batches = sys.argv[1], [int(batch) for batch in sys.argv[2].split(",")]
    context, steps, prompt = (int(word) for word in sys.argv[3:6])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 2, 4096
    scheduler.enable_prefix_caching = False
    begin = perf_counter()
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {})
    start_s, random = perf_counter() - begin, np.random.default_rng(0)

    def seconds(batch: int, length: int, count: int) -> float:
        inputs = [openvino.Tensor(random.integers(300, 15000, (1, length))) for _ in range(batch)]
        begin = perf_counter()
        pipeline.generate(inputs, [config(count)] * batch)
        return perf_counter() - begin

    step_ms = {}
    for batch in batches:
        seconds(batch, context, 2)  # compiles what this batch needs
        alone = min(seconds(batch, context, 1) for _ in range(2))
        whole = min(seconds(batch, context, 1 + steps) for _ in range(2))
        step_ms[str(batch)] = round(1000 * (whole - alone) / steps, 2)
    seconds(1, prompt, 1)
    prefill = prompt / min(seconds(1, prompt, 1) for _ in range(2))
    print(
        json.dumps({"start_s": round(start_s, 2), "step_ms": step_ms, "prefill_tokens_s": round(prefill, 1)})
    )


if __name__ == "__main__":
    main()
