"""Loads the draft model of a rank."""

from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.progress import Progress, without_progress
from runtime.errors import ModelError
from runtime.messages.memory import WeightOffload
from runtime.messages.ranks import CompileConfig, KeepWeights, StartRank
from runtime.messages.speculation import Speculation
from runtime.messages.stages import Stage
from runtime.models.base import Model, generative
from runtime.models.config.draft_config import read_draft_config
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.quantization_schemes import SCHEMES, require_supported
from runtime.models.config.recurrent_config import Recurrent
from runtime.models.draft_heads import DraftHead, NextTokenHeads, read_token_map
from runtime.models.hybrid import HybridDecoder
from runtime.models.llama import Llama
from runtime.ranks.drafting.head_network import HeadNetwork, HeadsInTurn, token_ids
from runtime.ranks.drafting.network import Network, OwnModel
from runtime.ranks.weights_loader import WeightsLoader

# of targets whose hidden states are what heads are made for
KNOWN_FORWARDS = (Llama.piecewise, HybridDecoder.piecewise)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, and the bytes that its weights take on the device."""

    network: Network
    num_bytes: int
    device: Device  # of its layers
    recurrent: Recurrent | None = None  # its recurrent layers; None: it has none


class DraftLoader:
    """Makes the draft model of one rank, as often as it is needed."""

    def __init__(
        self,
        device: Device,
        start: StartRank,
        speculation: Speculation,
        config: ModelConfig,
        dtype: torch.dtype,
        schemes: tuple[str, ...] = SCHEMES,
    ) -> None:
        """`config`: of the target; `schemes`: those that the device computes. Raises ModelError for a draft
        model that does not go with the target, or that the device does not compute; StartError likewise."""
        self.device = draft_device(device)
        self.target = config
        self.speculation = speculation
        self.dtype = dtype
        self.schemes = schemes
        self.start = _draft_start(start, speculation)
        self.config = read_draft_config(speculation, config, schemes)
        if self.device.for_drafts is not None:
            self.device = self.device.for_drafts(self.device, self.config.model)
        if (quantization := self.config.model.quantization) is not None:
            require_supported(quantization.schemes, schemes, device.facts.name)

    def of_target(self, start: StartRank) -> "DraftLoader":
        """The loader that goes with another checkpoint of the same target. Raises ModelError."""
        return DraftLoader(self.device, start, self.speculation, self.target, self.dtype, self.schemes)

    def load(self, target: Model, progress: Progress = without_progress) -> LoadedDraft:
        """Reads the weights. `target`: whose embedding and head it may share. Raises ModelError."""
        model, heads = self.config.model, self.config.heads
        if not heads:
            loaded = WeightsLoader(self.device, self.start, model, self.dtype, self.schemes).load(progress)
            network: Network = OwnModel(self.device, generative(loaded.model), model.windows)
            return LoadedDraft(network, loaded.num_bytes, self.device, model.recurrent)
        if not isinstance(target, Llama) or type(target).piecewise not in KNOWN_FORWARDS:
            raise ModelError(
                f"--speculative-algorithm {self.speculation.algorithm} does not know the hidden states of "
                f"{self.target.architecture}; take STANDALONE or NGRAM"
            )
        make = (
            partial(DraftHead, dtype=self.dtype, config=heads[0], target=target)
            if len(heads) == 1
            else partial(NextTokenHeads, dtype=self.dtype, config=heads, target=target)
        )
        loader = WeightsLoader(self.device, self.start, model, self.dtype, self.schemes, make)
        loaded = loader.load(progress)
        if isinstance(loaded.model, NextTokenHeads):
            return LoadedDraft(HeadsInTurn(loaded.model.heads), loaded.num_bytes, self.device)
        assert isinstance(loaded.model, DraftHead), "it was made here"
        self._check_output(loaded.model, target)
        network = HeadNetwork(loaded.model, self._token_ids(loaded.model, target))
        return LoadedDraft(network, loaded.num_bytes, self.device)

    def _check_output(self, head: DraftHead, target: Llama) -> None:
        """A pass of one attention group cannot end in a head that all groups share. Raises ModelError."""
        assert target.lm_head is not None, "it generates"
        if head.lm_head is None and target.lm_head.ranks.size > self.device.collectives.size:
            raise ModelError(
                f"--speculative-algorithm {self.speculation.algorithm}: this draft model has no output of "
                "its own, and the model's is divided over all attention groups; add --enable-dp-lm-head"
            )

    def _token_ids(self, head: DraftHead, target: Llama) -> Tensor | None:
        """The target's token for each of the head's; None: they have the same."""
        token_map = self.speculation.draft_model.token_map
        if token_map is None:
            return token_ids(head)
        assert target.lm_head is not None, "it generates"
        if head.lm_head is not None or target.lm_head.bias is not None or target.logit_cap:
            raise ModelError(
                "--speculative-token-map is for heads that use the model's own output, and this one does not "
                "use it as it is; leave it out"
            )
        numbers = read_token_map(Path(token_map), self.target.vocab_size)
        ids = torch.tensor(numbers, device=self.device.torch_device)
        with torch.inference_mode():
            head.keep_tokens(ids, target.lm_head)
        return ids


def with_aux_layers(
    device: Device, start: StartRank, config: ModelConfig, schemes: tuple[str, ...]
) -> Device:
    """The device, whose stage knows which hidden states of the model a head is given that drafts behind it.
    Raises ModelError."""
    if start.speculation is None or start.speculation.algorithm != "EAGLE3":
        return device
    (head,) = read_draft_config(start.speculation, config, schemes).heads
    return replace(device, stage=replace(device.stage, aux_layers=head.aux_layers))


def draft_device(device: Device) -> Device:
    """The device on which the draft model of a target is made: whole in one stage, with all tokens on each of
    its ranks. These are the ranks of one attention group: how many entries another group makes in a pass is
    known to its ranks alone, so groups could share a pass only behind an exchange."""
    alone = replace(device, layer_devices={}, kept_weights=None, stage=Stage(), links=None)
    whole = replace(alone, scatters_inputs=False, gathers_after_q=False, all_to_all=None, expert_places=None)
    if not device.has_groups:
        return whole
    group = device.group_ranks
    return replace(whole, collectives=group, attention=None, ep_size=gcd(device.ep_size, group.size))


def _draft_start(start: StartRank, speculation: Speculation) -> StartRank:
    """What loads the draft model, with nothing that is said of the target alone."""
    model = speculation.draft_model
    return structs.replace(
        start,
        model_path=model.path or start.model_path,
        load_format=model.load_format or start.load_format,
        quantization=None if model.quantization == "unquant" else model.quantization,
        config_overrides={},
        config_file=None,
        cache_scales=(),
        offload_setup=WeightOffload(),
        compiled=CompileConfig(),
        kept_weights=KeepWeights(),
        adapters=None,
        speculation=None,
    )


def open_draft_loader(
    device: Device, start: StartRank, config: ModelConfig, dtype: torch.dtype, schemes: tuple[str, ...]
) -> DraftLoader | None:
    """None: these ranks have no draft model, or are not those of the last stage. Raises ModelError."""
    if start.speculation is None or not start.speculation.is_own or not device.stage.is_last:
        return None
    return DraftLoader(device, start, start.speculation, config, dtype, schemes)
