"""Which steps the ranks may capture as graphs, by a plan of options."""

from runtime.messages.ranks import CaptureUnit, CompileConfig
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan


def capture_sizes(plan: Plan, model: ModelConfig) -> dict[CaptureUnit, list[int]]:
    """The sizes of each kind of graph."""
    return {
        "sequences": graph_sizes(plan, model),
        "verifies": verify_sizes(plan, model),
        "tokens": piecewise_sizes(plan),
    }


def graph_sizes(plan: Plan, model: ModelConfig) -> list[int]:
    """Batch sizes whose decode steps are captured; none for a model that pools, nor for attention groups in a
    pipeline, nor where layers are watched."""
    parallel = plan.parallel
    has_group_stages = parallel.attention_groups > 1 and parallel.pipeline_parallel_size > 1
    is_watched = plan.debug.in_force.watches_layers
    if plan.graphs.disable_cuda_graph or model.pooling is not None or has_group_stages or is_watched:
        return []
    return list(plan.graphs.cuda_graph_bs)


def verify_sizes(plan: Plan, model: ModelConfig) -> list[int]:
    """Batch sizes whose steps that verify drafts are captured; none for models with recurrent layers, whose
    states move on outside of graphs."""
    if plan.speculation.in_force is None or model.num_recurrent_layers or plan.debug.enable_nan_detection:
        return []
    return plan.speculation.in_force.captured_sizes(graph_sizes(plan, model))


def piecewise_sizes(plan: Plan) -> list[int]:
    """Numbers of tokens for which steps with prompts are captured as piecewise graphs."""
    is_possible = plan.graphs.enable_piecewise_cuda_graph and not plan.debug.in_force.watches_layers
    return list(plan.graphs.piecewise_cuda_graph_tokens) if is_possible else []


def compiled(plan: Plan) -> CompileConfig:
    """Which captured steps run through torch.compile."""
    return CompileConfig(
        max_rows=plan.graphs.torch_compile_max_bs if plan.graphs.enable_torch_compile else 0,
        is_piecewise=plan.graphs.enable_piecewise_cuda_graph
        and plan.graphs.piecewise_cuda_graph_compiler == "inductor",
        explains=plan.graphs.enable_torch_compile_debug_mode,
    )
