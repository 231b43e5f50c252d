"""Rules on pipelines: what goes with several stages of layers."""

from runtime.devices.facts import DeviceFacts
from runtime.models.config.media_config import num_deepstack
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule, first_of


def stages_have_layers(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Each stage has a layer."""
    stages, layers = plan.parallel.pipeline_parallel_size, len(model.windows)
    if stages > max(layers, 1) and device.name != "null":
        return (
            f"--pipeline-parallel-size {stages} is more than the model's {layers} layers; give each stage "
            "one at least"
        )
    return None


def stages_compute_all(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What needs all layers on one rank, or another order of the exchange than hidden states forward."""
    if plan.parallel.pipeline_parallel_size == 1:
        return None
    reasons = {
        "layers that read the keys and values of an earlier one may be in another stage": bool(
            model.kv_sources
        ),
        "blocks that layers share are given the embeddings, which the first stage alone has": (
            model.shares_blocks
        ),
        "what experts return is added behind the next layer, which may be in another stage": (
            model.moe is not None and model.moe.is_shortcut
        ),
        "texts that are seen as a whole are computed without pages, in one step": model.pooling is not None
        and model.pooling.is_whole,
        "transformers' own code computes the model as a whole (--model-impl)": model.transformers_json
        is not None,
        "--cpu-offload-gb and --offload-group-size count the layers of the whole model": plan.memory.offload
        is not None,
        "expert counts, and experts that move by them (--expert-distribution-recorder-mode, "
        "--enable-expert-distribution-metrics, --enable-eplb), are those of all layers "
        "together": plan.expert_steps is not None,
    }
    if (reason := first_of(reasons)) is None:
        return None
    return f"--pipeline-parallel-size above 1 is not possible: {reason}; leave one out"


def first_stage_adds_features(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The first stage, which has the encoder, has the layers behind which its features are added."""
    stages, layers = plan.parallel.pipeline_parallel_size, len(model.windows)
    needed = num_deepstack(model.media)
    if stages == 1 or not plan.model.enable_multimodal or -(-layers // stages) >= min(needed, layers):
        return None
    return (
        f"--pipeline-parallel-size {stages}: the first stage must have the model's first {needed} layers, to "
        "which features of images are added (DeepStack); take fewer stages, or --enable-multimodal false"
    )


PLAN_RULES: tuple[PlanRule, ...] = (stages_have_layers, stages_compute_all, first_stage_adds_features)
