"""What encoders of images give to layers of the text model besides the embeddings (DeepStack; Meng et al.,
2024)."""

import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.layers.parallel.sequence_parallel import SequenceParallel


def deepstack_features(
    batch: ForwardBatch, hidden_size: int, dtype: torch.dtype, sequence_parallel: SequenceParallel | None
) -> list[Tensor]:
    """What is added to hidden states behind each of the first layers, [T, hidden] or this rank's shard of it:
    what encoded rows have beyond their embeddings, else zeros. Nothing for a step without such rows."""
    if batch.embeds is None:
        return []
    places, rows = batch.embeds
    found = []
    for part in rows.to(dtype).split(hidden_size, dim=1)[1:]:
        x = part.new_zeros(len(batch.token_ids), hidden_size).index_copy(0, places, part)
        found.append(x if sequence_parallel is None else sequence_parallel.shard(x))
    return found
