"""Rules on context parallelism: what goes with ranks that share prompts in attention."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule, first_of


def sparse_attention_is_asked_for(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Models whose tokens attend to some others have a switch of their own, and a choice of how prompts are
    split."""
    is_sparse = model.mla is not None and model.mla.indexer is not None
    is_on = plan.kernels.enable_nsa_prefill_context_parallel
    if is_on and not is_sparse:
        return (
            "--enable-nsa-prefill-context-parallel is of models whose tokens attend to some others "
            "(index_topk), and this one has none; leave it out"
        )
    if is_sparse and not is_on and plan.parallel.attention_context_parallel_size > 1:
        return (
            "--attention-context-parallel-size above 1: prompts of this model, whose tokens attend to some "
            "others (index_topk), are shared with --enable-nsa-prefill-context-parallel; add it"
        )
    return None


def prompts_can_be_shared(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What computes queries of all tokens on one rank, or in another way than the layers of a decoder."""
    if plan.parallel.attention_context_parallel_size == 1:
        return None
    speculation = plan.speculation.in_force
    reasons = {
        "a draft model (--speculative-algorithm) computes prompts on each rank; take NGRAM": (
            speculation is not None and speculation.is_own
        ),
        "adapters (--enable-lora) belong to all tokens of a step": plan.lora.enable_lora,
        "--enable-piecewise-cuda-graph captures no exchange of keys and values": (
            plan.graphs.enable_piecewise_cuda_graph
        ),
        "--enable-torch-compile makes one function of layers that know no parts": (
            plan.graphs.enable_torch_compile
        ),
        "layers that read the keys and values of an earlier one have projections of their own": bool(
            model.kv_sources
        ),
        "texts that are seen as a whole are computed without pages": model.pooling is not None
        and model.pooling.is_whole,
        "transformers' own code computes the model on one rank (--model-impl)": model.transformers_json
        is not None,
        f"operators of {device.name} write latents to the cache where they make them": device.name == "npu"
        and model.mla is not None
        and model.mla.indexer is None,
    }
    if (reason := first_of(reasons)) is None:
        return None
    return f"--attention-context-parallel-size above 1 is not possible: {reason}; leave one out"


PLAN_RULES: tuple[PlanRule, ...] = (sparse_attention_is_asked_for, prompts_can_be_shared)
