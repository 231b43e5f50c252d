"""The slots of a rank, as its start asks for them."""

from runtime.devices.base import Device
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.sampling.grammar_masks import GrammarMasks
from runtime.layers.sampling.processors import Processors
from runtime.layers.sampling.thresholds import EXACT, Thresholds
from runtime.messages.ranks import StartRank
from runtime.models.config.model_config import ModelConfig
from runtime.ranks.cross_cache import CrossCache
from runtime.ranks.slots import Slots


def open_slots(
    rank: int, device: Device, start: StartRank, config: ModelConfig, num_pools: int, cross: CrossCache | None
) -> Slots:
    """State of the slots. One rank alone samples, so it alone has grammars and logits processors."""
    samples = rank in start.samplers
    return Slots(
        start.max_slots,
        -(-start.max_len // start.page_size),
        config.vocab_size,
        device.torch_device,
        num_pools,
        GrammarMasks(start.grammar if samples else None, config.vocab_size, samples=samples),
        Processors(start.processors if samples else []),
        fused_ops_of(device).penalise,
        EXACT
        if start.speculation is None
        else Thresholds(start.speculation.accept_single, start.speculation.accept_acc),
        cross,
    )
