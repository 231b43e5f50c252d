"""Captured graphs of accelerators, and torch.compile."""

from collections.abc import Mapping
from typing import Annotated as A
from typing import Literal

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.facts import DeviceFacts
from runtime.options.declare import Auto, Count, Derived, Group, option
from runtime.options.facts import ModelFacts

# a larger piecewise step of a small model keeps a device busy for longer than the host takes to launch it
MAX_PIECEWISE_TOKENS = 2048


class Graphs(Group, frozen=True, kw_only=True):
    """Graphs and compilation"""

    disable_cuda_graph: A[bool, option("Launch the kernels of every step one by one.")] = False
    cuda_graph_max_bs: A[Count | Auto, option("Most sequences of a captured decode step.")] = "auto"
    cuda_graph_bs: A[
        tuple[Count, ...] | Auto,
        option(
            "Numbers of sequences to capture decode steps for, the most used ones first, while nothing "
            "else is to do."
        ),
    ] = "auto"
    disable_cuda_graph_padding: A[bool, option("Use a graph only for exactly its number of sequences.")] = (
        False
    )
    enable_profile_cuda_graph: A[
        bool,
        option(
            "Trace each capture with torch's profiler; the log names the folder.", devices=("cuda", "npu")
        ),
    ] = False
    enable_cudagraph_gc: A[
        bool, option("Let the garbage collector run during capture.", devices=("cuda",))
    ] = False
    enable_piecewise_cuda_graph: A[
        bool | Auto,
        option(
            "Capture steps with prompts too, as piecewise graphs between attention layers.",
            devices=("cuda", "npu"),
            note="auto: on cuda, where nothing speaks against it",
        ),
    ] = "auto"
    piecewise_cuda_graph_tokens: A[
        tuple[Count, ...] | Auto,
        option(
            "Numbers of tokens to capture such steps for, the most used ones first, while nothing else is "
            "to do.",
            devices=("cuda", "npu"),
        ),
    ] = "auto"
    piecewise_cuda_graph_compiler: A[
        Literal["eager", "inductor"],
        option("What compiles them: nothing, or torch.compile.", devices=("cuda",)),
    ] = "eager"
    piecewise_cuda_graph_max_tokens: A[
        Count | Auto,
        option(
            "Most tokens of such a step; larger ones keep the device busy for longer than their launch "
            "takes.",
            devices=("cuda", "npu"),
        ),
    ] = "auto"
    enable_torch_compile: A[
        bool,
        option(
            "Pass captured decode steps through torch.compile; starting takes minutes longer.",
            devices=("cuda",),
        ),
    ] = False
    enable_torch_compile_debug_mode: A[
        bool, option("Log what torch.compile compiles anew, and why.", devices=("cuda",))
    ] = False
    torch_compile_max_bs: A[Count, option("Most sequences of a compiled decode step.", devices=("cuda",))] = (
        32
    )


class GraphsPlan(Graphs, frozen=True, kw_only=True):
    """Captured graphs and compilation in force."""

    enable_piecewise_cuda_graph: bool
    cuda_graph_max_bs: int  # sequences; 0: no decode step is captured
    cuda_graph_bs: tuple[int, ...]  # numbers of sequences that decode steps are captured for
    piecewise_cuda_graph_tokens: tuple[int, ...]  # numbers of tokens that piecewise graphs are captured for
    piecewise_cuda_graph_max_tokens: int  # 0: no piecewise graphs


def cuda_graph_max_bs(
    device: DeviceFacts,
    max_running_requests: int,
    disable_cuda_graph: bool,
    counts_on_host: bool,
    decode_backend: str,
    num_stages: int,
    has_torch_attention: bool = False,
) -> Derived:
    """Most sequences of a captured decode step; 0: no graphs. `has_torch_attention`: torch computes the
    model's attention, with scores that no operator of the device has."""
    if disable_cuda_graph:
        return Derived(0, "--disable-cuda-graph")
    if num_stages > 1:
        return Derived(0, "steps of a pipeline are launched one by one, with exchange between its stages")
    if counts_on_host:
        return Derived(0, "--deepep-mode normal counts tokens on the host, which no graph can hold")
    if device.graph_max_running == 0:
        return Derived(0, f"{device.name} captures no graphs")
    if has_torch_attention:
        return Derived(0, f"no operator of {device.name} has this model's attention scores; torch has")
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


def cuda_graph_bs(cuda_graph_max_bs: int) -> Derived:
    """Numbers of sequences that decode steps are captured for: dense where a padded row costs much of the
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


def enable_piecewise_cuda_graph(
    device: DeviceFacts, model: ModelFacts, disable_cuda_graph: bool, obstacles: Mapping[str, bool]
) -> Derived:
    """Whether steps with prompts are captured; `obstacles`: flag -> whether it is in force and keeps such
    steps from being captured."""
    if not device.captures_prompts:
        return Derived(False, "only where they are asked for")
    if disable_cuda_graph:
        return Derived(False, "--disable-cuda-graph")
    if model.pooling is not None or model.transformers_json is not None:
        return Derived(False, "this model is computed in one piece")
    for name, is_in_force in obstacles.items():
        if is_in_force:
            return Derived(False, f"{name} keeps steps with prompts from being captured")
    return Derived(True, "short steps with prompts take less time as graphs than their launches take")


def piecewise_cuda_graph_max_tokens(is_enabled: bool, largest_step: int) -> Derived:
    """Most tokens of a piecewise graph; 0: no piecewise graphs."""
    if not is_enabled:
        return Derived(0, "there are no piecewise graphs")
    return Derived(
        min(MAX_PIECEWISE_TOKENS, largest_step),
        "larger steps keep the device busy for longer than their launch takes",
    )


def piecewise_cuda_graph_tokens(piecewise_cuda_graph_max_tokens: int) -> Derived:
    """Numbers of tokens of piecewise graphs: dense enough that at most a fifth of a step is padding, where
    padding costs time."""
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
