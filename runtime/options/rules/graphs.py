"""Rules on captured graphs and torch.compile."""

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule, flag
from runtime.options.table import rows


def graphs_have_a_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Graph sizes that the user gave can be captured. Those of a profile are ignored where there are no
    graphs."""
    given = [
        flag(name)
        for name in ("cuda_graph_max_bs", "cuda_graph_bs", "disable_cuda_graph_padding")
        if not plan.why[name].source.startswith(("default", "derived", "profile"))
    ]
    if not given:
        return None
    if device.graph_max_running == 0:
        return f"{' and '.join(given)}: {device.name} captures no graphs; leave out what says how"
    if plan.graphs.disable_cuda_graph:
        return f"{' and '.join(given)} and --disable-cuda-graph contradict each other; leave one out"
    if (
        plan.kernels.decode_attention_backend != device.attention_backend
        and not BACKENDS[plan.kernels.decode_attention_backend].has_graphs
    ):
        return (
            f"{' and '.join(given)}: decodes of --attention-backend "
            f"{plan.kernels.decode_attention_backend} are not captured; "
            "take --decode-attention-backend triton, or leave out what says how"
        )
    if plan.parallel.pipeline_parallel_size > 1:
        return (
            f"{' and '.join(given)}: the exchange between stages of --pipeline-parallel-size is in no graph; "
            "leave one out"
        )
    if plan.experts.uses_all_to_all and plan.experts.deepep_mode == "normal":
        return (
            f"{' and '.join(given)}: no graph can hold the exchange of --deepep-mode normal; take auto or "
            "low_latency"
        )
    return None


def launches_of_graphs_are_not_merged(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """torch_npu's queue that merges launches cannot be captured."""
    captures = plan.graphs.cuda_graph_max_bs > 0 or plan.graphs.enable_piecewise_cuda_graph
    if device.name != "npu" or str(plan.ascend.npu_task_queue) != "2" or not captures:
        return None
    given = "TASK_QUEUE_ENABLE=2" if plan.why["npu_task_queue"].source == "derived" else "--npu-task-queue 2"
    return (
        f"{given} merges launches, which no graph can capture; give --npu-task-queue 1, or add "
        "--disable-cuda-graph where a server computes prompts only"
    )


def piecewise_graphs_can_be_captured(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Piecewise graphs go with the other options, and are no larger than a step."""
    if not plan.graphs.enable_piecewise_cuda_graph:
        names = (row.name for row in rows() if row.name.startswith("piecewise_cuda_graph_"))
        given = [flag(name) for name in names if plan.why[name].source not in ("default", "derived")]
        reason = plan.why["enable_piecewise_cuda_graph"].reason or "--no-enable-piecewise-cuda-graph"
        return (
            f"{' and '.join(given)}: there are no piecewise graphs ({reason}); add "
            "--enable-piecewise-cuda-graph where they are possible, or leave it out"
            if given
            else None
        )
    if plan.graphs.disable_cuda_graph:
        return "--enable-piecewise-cuda-graph and --disable-cuda-graph contradict each other; leave one out"
    if plan.experts.uses_all_to_all:
        return (
            "--enable-piecewise-cuda-graph: in steps with prompts --moe-a2a-backend counts on the host how "
            "many tokens travel, which "
            "no graph can hold; leave one out"
        )
    largest, most = (
        plan.schedule.max_step_tokens + plan.schedule.max_running_requests,
        max(plan.graphs.piecewise_cuda_graph_tokens),
    )
    if most > largest:
        return (
            f"--piecewise-cuda-graph-tokens {most} is more than any step has ({largest}: "
            "--chunked-prefill-size, and a token for each "
            "of --max-running-requests); take fewer"
        )
    return None


def compiled_steps_are_dense(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """torch.compile is supported for dense, unquantized models on one rank without adapters."""
    is_piecewise = plan.graphs.piecewise_cuda_graph_compiler == "inductor"
    if not plan.graphs.enable_torch_compile and not is_piecewise:
        return None
    given = (
        "--enable-torch-compile"
        if plan.graphs.enable_torch_compile
        else "--piecewise-cuda-graph-compiler inductor"
    )
    if plan.graphs.disable_cuda_graph:
        return (
            f"{given} and --disable-cuda-graph contradict each other, as only captured steps are compiled; "
            "leave one out"
        )
    lacks = {
        "experts": model.moe is not None,
        "layers that share keys and values": bool(model.kv_sources),
        "weights in few bits": model.quantization is not None,
        "adapters": plan.lora.enable_lora,
        "several ranks": plan.parallel.num_ranks > 1,
    }
    if any(lacks.values()):
        return (
            f"{given} is not possible with {' and '.join(name for name, has in lacks.items() if has)}; "
            "leave it out"
        )
    return None


PLAN_RULES: tuple[PlanRule, ...] = (
    graphs_have_a_device,
    launches_of_graphs_are_not_merged,
    piecewise_graphs_can_be_captured,
    compiled_steps_are_dense,
)
