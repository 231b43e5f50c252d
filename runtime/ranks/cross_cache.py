"""Keys and values of the sounds that slots attend to, in every layer of the decoder."""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import Device
from runtime.devices.cross_batch import CrossBatch
from runtime.layers.upload import upload_int64
from runtime.messages.steps import StepPlan
from runtime.models.base import Model
from runtime.models.config.media_config import MediaConfig, kept_bytes
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.whisper_config import WhisperEncoder


class CrossCache:
    """Pages that belong to slots for good: a slot's sound has as many positions as any other. A sound comes
    with the first token of its sequence, whose step is the first of the slot."""

    def __init__(
        self,
        device: Device,
        num_layers: int,
        heads: tuple[int, int],
        num_positions: int,
        page_size: int,
        max_slots: int,
        dtype: torch.dtype,
    ) -> None:
        """`heads`: key/value heads of this rank, and their size."""
        self.device, self.num_positions, self.page_size = device, num_positions, page_size
        pages = -(-num_positions // page_size)
        # a slot more for padding rows; page 0 stands for padding on every device
        num_tokens = ((max_slots + 1) * pages + 1) * page_size
        self.kv = [
            (
                device.memory.allocate_cache(num_tokens, *heads, dtype),
                device.memory.allocate_cache(num_tokens, *heads, dtype),
            )
            for _ in range(num_layers)
        ]
        table = 1 + torch.arange((max_slots + 1) * pages, dtype=torch.int32, device=device.torch_device)
        self.page_tables = table.view(1, max_slots + 1, pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(cache.nbytes for pair in self.kv for cache in pair)

    def batch(self, plan: StepPlan, media: tuple[Tensor, Tensor] | None) -> CrossBatch:
        """What a step needs. `media`: places of the tokens with which sounds come, int64 [N], and the
        encodings of these, [N, positions * hidden]; None: no sound is new."""
        counts = plan.counts.astype(np.int64)
        slots = np.repeat(plan.slots, counts)
        starts = np.full(len(slots), self.num_positions - 1, np.int64)
        rows = AttentionRows(len(slots), slots, starts, np.ones(len(slots), np.int32))
        attention = self.device.ops.plan_attention(rows, self.page_tables, self.page_size, (0,))
        if media is None or plan.media is None:
            return CrossBatch(attention, self.kv)
        sounds = media[1].view(len(media[1]), self.num_positions, -1)
        return CrossBatch(attention, self.kv, sounds, self._locations(slots[plan.media.places]))

    def _locations(self, slots: np.ndarray) -> Tensor:
        """Where the positions of the sounds of slots are in the cache, int64 [N * positions]."""
        first = 1 + slots.astype(np.int64) * self.page_tables.shape[2]
        places = first[:, None] * self.page_size + np.arange(self.num_positions)
        return upload_int64(places.ravel(), self.device.torch_device)


def media_bytes(encoder: MediaConfig | None, cross: CrossCache | None, item: int) -> int:
    """Bytes of what a rank keeps of encoded media, of `item` bytes a number."""
    return kept_bytes(encoder, item) + (0 if cross is None else cross.num_bytes)


def open_cross(
    device: Device, model: Model, config: ModelConfig, page_size: int, max_slots: int, dtype: torch.dtype
) -> CrossCache | None:
    """The cache of a model that attends to sounds; None: it does not."""
    if not isinstance(config.media, WhisperEncoder):
        return None
    heads = model.attentions[0].num_kv_heads, config.head_dim
    return CrossCache(
        device, config.num_layers, heads, config.media.num_positions, page_size, max_slots, dtype
    )
