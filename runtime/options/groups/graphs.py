"""Captured graphs of accelerators, and torch.compile."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Auto, Count, Group, option


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
        bool, option("Capture steps with prompts too, in pieces between attentions.", devices=("cuda", "npu"))
    ] = False
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

    cuda_graph_max_bs: int  # sequences; 0: no decode step is captured
    cuda_graph_bs: tuple[int, ...]  # numbers of sequences that decode steps are captured for
    piecewise_cuda_graph_tokens: tuple[int, ...]  # numbers of tokens that piecewise graphs are captured for
    piecewise_cuda_graph_max_tokens: int  # 0: no piecewise graphs
