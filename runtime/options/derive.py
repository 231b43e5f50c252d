"""One pure function for each value that "auto" stands for. Its parameters are its dependencies; it returns
value and reason."""

from pathlib import Path
from typing import Any

from msgspec import Struct

import runtime
from runtime.devices.facts import DeviceFacts
from runtime.options.attention_backends import BACKENDS
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.facts import MachineFacts, ModelFacts

# of a step whose kernels a device of today finishes before the host has launched them, by a small model
MOST_PIECE_TOKENS = 2048
TEXTS_TOGETHER = 2  # times the chunk of a prompt: no decodes wait for a step of texts


class Derived(Struct, frozen=True):
    """A value that the runtime chose, and why: a clause that completes "because"."""

    value: Any
    reason: str


EMBEDDED_MODEL = {
    "pocket": Derived(
        str(Path(runtime.__file__).parent / "pocket"), "pocket is the model inside this package"
    )
}
DTYPE_WORDS = {"half": Derived("float16", "half is float16"), "float": Derived("float32", "float is float32")}
KV_DTYPE_WORDS = {"bf16": Derived("bfloat16", "bf16 is bfloat16")}
LAYOUT_WORDS = {"page_first_direct": Derived("page_first", "a page is one piece in both")}


def kv_cache_dtype(dtype: str) -> Derived:
    return Derived(dtype, "that of the activations")


def tokenizer_path(model_path: str) -> Derived:
    return Derived(model_path, "the tokenizer lies with the model")


def served_model_name(said: str) -> Derived:
    return Derived(said, "clients name the model as --model-path does")


def device(facts: DeviceFacts) -> Derived:
    return Derived(facts.name, "it is the best device that this machine has")


def dtype(model: ModelFacts, device: DeviceFacts) -> Derived:
    if model.dtype is None:
        return Derived("auto", "config.json names none; each rank takes the type of the weights")
    if model.dtype in device.dtypes:
        return Derived(model.dtype, "the checkpoint is in it")
    return Derived(device.dtypes[0], f"{device.name} has no {model.dtype}")


def context_length(model: ModelFacts) -> Derived:
    return Derived(model.context_len, "config.json says so")


def num_threads(machine: MachineFacts, tensor_parallel_size: int) -> Derived:
    """One core stays with the event loop where there are enough."""
    spare = 1 if machine.cores > 2 * tensor_parallel_size else 0
    return Derived(
        max(1, (machine.cores - spare) // tensor_parallel_size),
        f"{machine.cores} cores for {tensor_parallel_size} rank{'s' if tensor_parallel_size > 1 else ''}"
        + (", one left to the event loop" if spare else ""),
    )


def mem_fraction_static(device: DeviceFacts) -> Derived:
    return Derived(device.memory_fraction, device.memory_reason)


def max_total_tokens() -> Derived:
    return Derived(None, "each rank measures its memory and takes what --mem-fraction-static allows")


def page_size(device: DeviceFacts) -> Derived:
    return Derived(device.page_size, f"it suits the kernels of {device.name}")


def mamba_scheduler_strategy(mamba_track_interval: int, page_size: int) -> Derived:
    """A second state costs nothing that anybody else wants: newcomers take it."""
    if mamba_track_interval % page_size:
        return Derived("no_buffer", "--mamba-track-interval is no multiple of --page-size")
    return Derived(
        "extra_buffer",
        "conversations go on from their answers, and newcomers take the second states where slots are short",
    )


def attention_backend(device: DeviceFacts) -> Derived:
    return Derived(device.attention_backend, f"it is the attention of {device.name}")


def phase_backend(attention_backend: str) -> Derived:
    return Derived(attention_backend, "--attention-backend is for both phases")


def enable_lora(paths: tuple[str, ...] | None) -> Derived:
    return Derived(bool(paths), "--lora-paths names adapters" if paths else "no --lora-paths")


def lora_backend() -> Derived:
    return Derived("torch_native", "it runs on every device")


def sampling_backend(device: DeviceFacts) -> Derived:
    return Derived(device.sampling_backends[0], f"it is the sampling of {device.name}")


def fp8_gemm_backend(device: DeviceFacts) -> Derived:
    if device.name == "cuda":
        return Derived("by_rows", "Triton's for few rows, torch's for many")
    return Derived("own", f"{device.name} has one way")


def moe_runner_backend(device: DeviceFacts) -> Derived:
    return Derived("triton" if device.name == "cuda" else "own", f"they are the kernels of {device.name}")


def num_ranks(tensor_parallel_size: int) -> Derived:
    return Derived(tensor_parallel_size, "one process for each part of the model")


def expert_spread(moe_a2a_backend: str, tensor_parallel_size: int) -> dict[int, Derived]:
    """What not to say --expert-parallel-size means."""
    if moe_a2a_backend == "none":
        return {}
    return {
        1: Derived(
            tensor_parallel_size, f"--moe-a2a-backend {moe_a2a_backend} spreads whole experts over all ranks"
        )
    }


def graph_max_running(
    device: DeviceFacts,
    max_running_requests: int,
    disable_cuda_graph: bool,
    counts_on_host: bool,
    decode_backend: str,
) -> Derived:
    if disable_cuda_graph:
        return Derived(0, "--disable-cuda-graph")
    if counts_on_host:
        return Derived(0, "--deepep-mode normal counts tokens on the host, which no graph can hold")
    if device.graph_max_running == 0:
        return Derived(0, f"{device.name} captures no graphs")
    if (
        decode_backend != device.attention_backend
        and decode_backend in BACKENDS
        and not BACKENDS[decode_backend].has_graphs
    ):
        return Derived(0, f"decodes of --attention-backend {decode_backend} are not captured")
    return Derived(
        min(device.graph_max_running, max_running_requests),
        f"the fewer of --max-running-requests and what {device.name} gains from",
    )


def graph_sizes(cuda_graph_max_bs: int) -> Derived:
    """Numbers of sequences for which decode steps are captured: dense where a padded row costs much of the
    step, sparse above."""
    if cuda_graph_max_bs == 0:
        return Derived((), "there are no graphs")
    sizes = [
        size
        for size in (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 4097, 32))
        if size < cuda_graph_max_bs
    ]
    return Derived(
        (*sizes, cuda_graph_max_bs), "up to --cuda-graph-max-bs, dense where padding costs much of a step"
    )


def piecewise_max_tokens(is_enabled: bool, largest_step: int) -> Derived:
    if not is_enabled:
        return Derived(0, "no --enable-piecewise-cuda-graph")
    return Derived(
        min(MOST_PIECE_TOKENS, largest_step),
        "larger steps keep the device busy for longer than their launch takes",
    )


def piecewise_sizes(piecewise_cuda_graph_max_tokens: int) -> Derived:
    """Numbers of tokens: dense enough that a fifth of a step at most is padding, where padding costs time."""
    if piecewise_cuda_graph_max_tokens == 0:
        return Derived((), "there are no such graphs")
    sizes = [
        size
        for size in (
            16,
            32,
            64,
            96,
            128,
            *(eighth * 2**power for power in range(5, 17) for eighth in (5, 6, 7, 8)),
        )
        if size < piecewise_cuda_graph_max_tokens
    ]
    return Derived(
        (*sizes, piecewise_cuda_graph_max_tokens),
        "up to --piecewise-cuda-graph-max-tokens, four for each doubling",
    )


def max_running_requests(device: DeviceFacts) -> Derived:
    return Derived(device.max_running, f"more make a step of {device.name} slower, not fuller")


def max_queued_requests() -> Derived:
    return Derived(16384, "enough for a benchmark that sends all at once, and a bound on memory")


def pooling(model: ModelFacts) -> Derived:
    if model.pooling is None:
        return Derived("none", "the model generates text")
    return Derived(
        model.pooling.mode,
        "the model's folder says so" if model.pooling.task == "embed" else "the model's head takes it",
    )


def chunked_prefill_size(device: DeviceFacts, model: ModelFacts) -> Derived:
    if model.pooling is not None and model.pooling.is_whole:
        return Derived(-1, "the model must see all of a text in one step")
    return Derived(
        device.chunk_tokens, f"it keeps {device.name} busy for one step without making decodes wait long"
    )


def rank_variable(option: str, device: DeviceFacts, machine: MachineFacts) -> Derived:
    """What the ranks' libraries find in their environment; None: nothing of ours."""
    variable, usual, reason = RANK_VARIABLES[option]
    if device.name != "npu":
        return Derived(None, "ranks on npu devices read it")
    if variable in machine.environment:
        return Derived(machine.environment[variable], f"the environment sets {variable}")
    return Derived(usual, reason)


def random_seed(machine: MachineFacts) -> Derived:
    return Derived(machine.entropy, "drawn at start")


def null_vocab_size(model: ModelFacts) -> Derived:
    return Derived(model.vocab_size, "the model's vocabulary")


def max_step_tokens(
    chunked_prefill_size: int,
    max_prefill_tokens: int,
    context_length: int,
    device: DeviceFacts,
    model: ModelFacts,
) -> Derived:
    """Known tokens that one step may compute."""
    if model.pooling is not None and model.pooling.is_whole:
        size = max(context_length, min(TEXTS_TOGETHER * device.chunk_tokens, max_prefill_tokens))
        return Derived(size, f"texts together keep {device.name} busy, and the longest one fits")
    if chunked_prefill_size > 0:
        return Derived(
            min(chunked_prefill_size, max_prefill_tokens),
            "the smaller of --chunked-prefill-size and --max-prefill-tokens",
        )
    return Derived(max(max_prefill_tokens, context_length), "without chunks the longest prompt fits one step")


def grammar_backend(device: DeviceFacts, machine: MachineFacts, model: ModelFacts) -> Derived:
    if model.pooling is not None:
        return Derived("none", "the model generates no text")
    if not device.has_logits:
        return Derived("none", f"{device.name} computes no logits that a grammar could mask")
    if not machine.grammar_backends:
        return Derived("none", "no library for grammars is installed")
    best = machine.grammar_backends[0]
    return Derived(
        best,
        "it has the fastest masks"
        if best == "xgrammar"
        else "of the libraries for grammars, it is installed",
    )
