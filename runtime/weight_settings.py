"""What a plan says of weights: how files are read, what host memory has of them, and where packed ones are
kept."""

from pathlib import Path

from runtime.messages.memory import WeightOffload
from runtime.messages.ranks import KeepWeights, Reading
from runtime.models.config.cache_scales import read_cache_scales
from runtime.models.config.model_config import ModelConfig
from runtime.options.groups.model import THREAD_SETTINGS
from runtime.options.plan import Plan


def weight_offload(plan: Plan) -> WeightOffload:
    """Weights of which host memory has a part or a backup."""
    weights = plan.weights
    return WeightOffload(
        plan.memory.offload, weights.enable_weights_cpu_backup, weights.enable_draft_weights_cpu_backup
    )


def reading(plan: Plan) -> Reading:
    """How files of weights are read."""
    given = plan.model.model_loader_extra_config
    counts = [count for name in THREAD_SETTINGS if isinstance(count := given.get(name), int)]
    uses_mmap = not plan.weights.weight_loader_disable_mmap
    return Reading(counts[0], uses_mmap) if counts else Reading(uses_mmap=uses_mmap)


def cache_scales(plan: Plan, model: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """The scales of --quantization-param-path, by rank that shares the attention heads, and by layer. Raises
    ModelError."""
    path, ranks = plan.precision.quantization_param_path, plan.parallel.attention_layout.num_head_ranks
    if path is None:
        return ()
    return read_cache_scales(path, ranks, model.num_layers, plan.precision.kv_cache_dtype)


def keep_weights(plan: Plan) -> KeepWeights:
    """Where packed weights are kept; nowhere without room for any."""
    folder, max_bytes = plan.weights.packed_weights_dir, plan.weights.packed_weights_cache_bytes
    return KeepWeights(str(Path(folder).expanduser()), max_bytes) if max_bytes else KeepWeights()
