"""What one stage of a pipeline holds of a model."""

from msgspec import structs

from runtime.messages.stages import Stage
from runtime.models.config.model_config import ModelConfig
from runtime.options.model_sizes import layer_count, weight_count
from runtime.options.quantized_sizes import Ranks, layer_saved_bytes, saved_bytes


def config_of_stage(model: ModelConfig, stage: Stage) -> ModelConfig:
    """A config of the stage's layers alone, of which sizes are counted. Nothing is loaded by it: it counts
    layers from 0."""
    if stage.count == 1:
        return model
    own = stage.layers(model.num_layers)
    part = slice(own.start, own.stop)
    changed = structs.replace(model, num_layers=len(own), windows=model.windows[part])
    if model.moe is not None:
        changed = structs.replace(changed, moe=structs.replace(model.moe, layers=model.moe.layers[part]))
    if model.recurrent is not None:
        recurrent = structs.replace(model.recurrent, kinds=model.recurrent.kinds[part])
        changed = structs.replace(changed, recurrent=recurrent)
    return changed


def stage_weight_count(model: ModelConfig, sizes: Ranks, stage: Stage) -> int:
    """As `weight_count`, of one rank of a stage: its layers, the embedding in the first stage, the last norm
    and the head in the last one. A head that is tied to the embedding has a copy of it; so have heads that
    draft, in the last stage."""
    if stage.count == 1:
        return weight_count(model, *sizes)
    counts = [layer_count(model, i, *sizes[:6]) for i in range(model.num_layers)]
    embedding = -(-model.vocab_size // sizes.of_group) * model.hidden_size
    end = weight_count(model, *sizes) - sum(counts) - embedding
    if model.is_tied or stage.has_draft_heads:
        end += embedding
    own = sum(counts[i] for i in stage.layers(model.num_layers))
    return own + embedding * stage.is_first + end * stage.is_last


def stage_saved_bytes(model: ModelConfig, sizes: Ranks, item: int, stage: Stage) -> int:
    """As `saved_bytes`, of one rank of a stage."""
    if stage.count == 1:
        return saved_bytes(model, sizes, item)
    return sum(layer_saved_bytes(model, i, sizes, item) for i in stage.layers(model.num_layers))
