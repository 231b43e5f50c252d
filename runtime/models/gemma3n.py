"""Gemma 3n: alternating updates, low-rank residuals, per-layer embeddings, sparse gates, and layers that read
the keys and values of earlier ones (models/config/altup_config.py)."""

from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import gelu

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.feed_forward import FeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, replicated_weight
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer, CompiledLayer, Pieces
from runtime.models.config.altup_config import AltUp
from runtime.models.config.model_config import ModelConfig
from runtime.models.feed_forwards import dense_reduction, shared_tokens
from runtime.models.layer_embeddings import GatedEmbedding, LayerEmbeddedLlama

SMALLEST_SQUARE = 1e-5  # of magnitudes that are divided by


def altup_of(config: ModelConfig) -> AltUp:
    """The configuration's alternating updates, which it has."""
    assert config.altup is not None, "Gemma 3n without alternating updates"
    return config.altup


class SparseGate(FeedForward):
    """A feed-forward of which only the gates far above their mean pass."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, cutoff: float | None) -> None:
        super().__init__(
            device,
            dtype,
            config.hidden_size,
            config.intermediate_size,
            reduction=dense_reduction(device, has_bias=False),
            activation="gelu_tanh",
        )
        self.cutoff = cutoff  # in standard deviations; None: all gates pass
        self.ranks = device.collectives

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self.cutoff is None:
            return super().forward(x)
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=1)
        mean = self._mean(gate)
        deviation = self._mean((gate.float() - mean).square()).sqrt()
        gate = torch.relu(gate - (mean + deviation * self.cutoff).to(gate.dtype))
        return self.down_proj.forward(gelu(gate, approximate="tanh") * up)

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over all ranks' numbers of a token, float32 [T, 1]."""
        mean = values.float().mean(1, keepdim=True)
        return mean if self.ranks.size == 1 else self.ranks.all_reduce(mean) / self.ranks.size


class AlternatingUpdates(Layer):
    """Predicts all states of a token before a layer, and corrects them by what it computed of one."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        self.config = altup = altup_of(config)
        hidden, count = config.hidden_size, altup.num_states
        self.scale = 1 / hidden
        self.correct_output_scale = replicated_weight(device, dtype, hidden)
        self.correction_coefs = ReplicatedLinear(device, dtype, count, count, bias=False)
        self.prediction_coefs = ReplicatedLinear(device, dtype, count, count * count, bias=False)
        self.modality_router = ReplicatedLinear(device, dtype, hidden, count, bias=False)
        self.router_norm = RMSNorm(device, dtype, hidden, config.rms_norm_eps, may_have_bias=False)

    def _routed(self, state: Tensor) -> Tensor:
        """[T, hidden] -> [T, states]."""
        routed = self.modality_router.forward(self.router_norm.forward(state) * self.scale)
        return torch.tanh(routed.float()).to(state.dtype)

    def predict(self, states: Tensor) -> Tensor:
        """[states, T, hidden] -> the same, before the layer."""
        count = self.config.num_states
        mixing = self.prediction_coefs.forward(self._routed(states[self.config.active]))
        return states + torch.einsum("sth,tps->pth", states, mixing.unflatten(1, (count, count)))

    def correct(self, predictions: Tensor, computed: Tensor) -> Tensor:
        """[states, T, hidden] and what the layer made of the active one, [T, hidden] -> [states, T,
        hidden]."""
        weights = self.correction_coefs.forward(self._routed(computed)) + 1
        return predictions + (computed - predictions[self.config.active]) * weights.t().unsqueeze(2)

    def output(self, state: Tensor) -> Tensor:
        """The active state, as the layer's own embedding multiplies it."""
        return state * self.correct_output_scale.tensor if self.config.scales_output else state


class LowRankResidual(Layer):
    """x + norm(right(left(x))): LAuReL (Menghani et al., 2024)."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        hidden, rank = config.hidden_size, altup_of(config).residual_rank
        self.linear_left = ReplicatedLinear(device, dtype, hidden, rank, bias=False)
        self.linear_right = ReplicatedLinear(device, dtype, rank, hidden, bias=False)
        self.post_laurel_norm = RMSNorm(device, dtype, hidden, config.rms_norm_eps, may_have_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return x + self.post_laurel_norm.forward(self.linear_right.forward(self.linear_left.forward(x)))


class Gemma3nDecoderLayer(Layer):
    """One block."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        altup, hidden = altup_of(config), config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(device, dtype, hidden, config.rms_norm_eps)

        self.input_layernorm = norm()
        self.self_attn = attention_class(device, dtype, config, index)
        self.attention_output_norm = norm()
        self.post_attention_layernorm = norm()
        self.mlp = SparseGate(device, dtype, config, altup.cutoffs[index])
        self.mlp_output_norm = norm()
        self.shared = shared_tokens(device, config, self.mlp, has_experts=False)
        self.altup = AlternatingUpdates(device, dtype, config)
        self.laurel = LowRankResidual(device, dtype, config)
        self.own = GatedEmbedding(device, dtype, config)
        self.active = altup.active

    def piecewise(
        self, states: Tensor, own: Tensor, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Pieces:
        """[states, T, hidden] and the layer's own embeddings [T, width] -> [states, T, hidden]; yields where
        the layer attends."""
        predictions = self.altup.predict(states)
        active = predictions[self.active]
        x = self.input_layernorm.forward(active)
        attended = yield self.self_attn, self.self_attn.project(x, *tables, batch)
        attended = self.attention_output_norm.forward(self.self_attn.o_proj.forward(attended))
        active = (active + attended + self.laurel.forward(x)) / sqrt(2)
        given = self.shared.join(self.post_attention_layernorm.forward(active), batch)
        inner = self.shared.divide(self.mlp.forward(given), batch)
        corrected = self.altup.correct(predictions, active + self.mlp_output_norm.forward(inner))
        corrected[1:] += self.own.forward(self.altup.output(corrected[self.active]), own)
        return corrected


class Gemma3n(LayerEmbeddedLlama):
    """Gemma 3n. See GenerativeModel."""

    layer_class = Gemma3nDecoderLayer

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        hidden, count = config.hidden_size, altup_of(config).num_states - 1

        def projections() -> list[ReplicatedLinear]:
            return [ReplicatedLinear(device, dtype, hidden, hidden, bias=False) for _ in range(count)]

        self.altup_projections, self.altup_unembed_projections = projections(), projections()

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        tables = [rotary.tables(batch.positions) for rotary in self.rotaries]
        x, own = self.inputs(batch)
        assert own is not None, "Gemma 3n without embeddings of layers"
        states = torch.stack([x, *(as_large(one.forward(x), x) for one in self.altup_projections)])
        for i, (layer, kind) in enumerate(zip(self.layers, self.rotary_of_layer, strict=True)):
            states = yield from layer.piecewise(states, own[i], tables[kind], batch)
        first, *others = states.unbind()
        ends = [
            as_large(one.forward(state), first)
            for one, state in zip(self.altup_unembed_projections, others, strict=True)
        ]
        return torch.stack([first, *ends]).mean(0)


def as_large(x: Tensor, other: Tensor) -> Tensor:
    """x [T, hidden], scaled to the root mean square of `other`."""
    size = x.square().mean(1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()
    return x * other.square().mean(1, keepdim=True).sqrt() / size
