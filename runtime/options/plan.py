"""The values in force, in the groups of the options, each with its source and reason; see resolve.py.

A group without "auto" is in force as it was given. The others have a Plan class next to the options of the
group, which narrows what "auto" stood for, and may add values of its own.
"""

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from runtime.devices.ascend.options import AscendOptions
from runtime.devices.cuda.options import CudaOptions, SymmetricMemory
from runtime.devices.null.options import NullOptions
from runtime.messages.prompt_split import PromptSplit
from runtime.models.config.recurrent_config import draft_nodes
from runtime.options.declare import Value
from runtime.options.groups.ascend import AscendPlan
from runtime.options.groups.debug import Debug
from runtime.options.groups.disaggregation import Disaggregation
from runtime.options.groups.experts import ExpertsPlan
from runtime.options.groups.graphs import GraphsPlan
from runtime.options.groups.http import Api, HttpPlan
from runtime.options.groups.kernels import KernelsPlan
from runtime.options.groups.logs import Logs
from runtime.options.groups.lora import LoraPlan
from runtime.options.groups.memory import MemoryPlan
from runtime.options.groups.model import ModelPlan
from runtime.options.groups.multimodal import Multimodal
from runtime.options.groups.null import NullPlan
from runtime.options.groups.observe import Observe
from runtime.options.groups.parallel import ParallelPlan
from runtime.options.groups.precision import PrecisionPlan
from runtime.options.groups.schedule import SchedulePlan
from runtime.options.groups.speculation import SpeculationPlan
from runtime.options.groups.states import StatesPlan
from runtime.options.groups.tiers import Tiers
from runtime.options.groups.weights import Weights
from runtime.options.table import rows

if TYPE_CHECKING:  # it imports numpy, which `runtime serve --help` need not wait for
    from runtime.messages.ranks import DeviceOption, Encoding


class Provenance(Struct, frozen=True):
    """A value with its source (`default`, `flag --x`, `file server.yaml`, `argument` or `derived`) and the
    reason for it."""

    value: Value
    source: str
    reason: str = ""


class Plan(Struct, frozen=True, kw_only=True):
    """The values in force, by group of options. Options that are not implemented keep their defaults."""

    model: ModelPlan
    weights: Weights
    http: HttpPlan
    api: Api
    multimodal: Multimodal
    precision: PrecisionPlan
    memory: MemoryPlan
    schedule: SchedulePlan
    parallel: ParallelPlan
    logs: Logs
    observe: Observe
    lora: LoraPlan
    kernels: KernelsPlan
    graphs: GraphsPlan
    experts: ExpertsPlan
    speculation: SpeculationPlan
    states: StatesPlan
    tiers: Tiers
    disaggregation: Disaggregation
    debug: Debug
    ascend: AscendPlan
    null: NullPlan
    why: dict[str, Provenance]  # by option name
    notices: list[str]  # for the log at start: options that were accepted without effect

    def public(self) -> dict[str, dict[str, object]]:
        """Every value by option name, with source and reason, ready for JSON; secrets are hidden."""
        secrets = {row.name for row in rows() if row.secret}
        return {
            name: {
                "value": "(hidden)" if name in secrets and origin.value else origin.value,
                "source": origin.source,
                "reason": origin.reason,
            }
            for name, origin in self.why.items()
        }

    @property
    def expert_steps(self) -> int | None:
        """Steps that the record of expert load holds, 0 for metrics only; None: nothing is counted."""
        if self.experts.expert_distribution_recorder_mode is not None:
            return self.experts.expert_distribution_recorder_buffer_size
        is_counted = self.observe.enable_expert_distribution_metrics or self.experts.enable_eplb
        return 0 if is_counted else None

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are submitted before the result of the first of them: one for each stage, and with
        overlap one more, which lies in the ring. What a step finds for a block changes the next one, so there
        is no overlap in a diffusion model."""
        is_serial = self.schedule.disable_overlap_schedule or self.states.dllm_algorithm is not None
        return self.parallel.micro_batches + (not is_serial)

    @property
    def encoding(self) -> "Encoding":
        """How much of a step's images each rank encodes."""
        if not self.model.enable_multimodal:
            return "none"
        if self.disaggregation.encoder_only:
            return "alone"
        if self.disaggregation.language_only:
            return "elsewhere"
        return "shared" if self.multimodal.mm_enable_dp_encoder else "whole"

    @property
    def prompt_split(self) -> PromptSplit | None:
        """How ranks with the same heads divide prompts; None: no ranks have the same heads."""
        if self.parallel.attention_context_parallel_size == 1:
            return None
        is_sparse = self.kernels.enable_nsa_prefill_context_parallel
        return self.kernels.nsa_prefill_cp_mode if is_sparse else "in-seq-split"

    @property
    def has_group_heads(self) -> bool:
        """Whether each attention group has a language model head of its own: as asked for, or because its
        draft model ends in the target's head, in passes that other groups know nothing of."""
        speculation = self.speculation.in_force
        ends_in_head = speculation is not None and speculation.ends_in_target
        return self.parallel.enable_dp_lm_head or (self.parallel.attention_groups > 1 and ends_in_head)

    @property
    def replicates_dense(self) -> bool:
        """Whether dense layers of a model with experts are whole on each rank."""
        return self.experts.moe_dense_tp_size == 1 < self.parallel.tensor_parallel_size

    @property
    def delay_steps(self) -> int:
        """Steps for which new prompts may wait for more of them; 0: they do not."""
        schedule = self.schedule
        return schedule.prefill_delayer_max_delay_passes if schedule.enable_prefill_delayer else 0

    @property
    def draft_nodes(self) -> int:
        """Tokens in a step's rows of drafts, of a model with recurrent layers."""
        return draft_nodes(self.schedule.max_running_requests)

    @property
    def rank_environment(self) -> dict[str, str]:
        """Environment variables that the libraries of a rank read, by name."""
        nvls = {"NCCL_NVLS_ENABLE": "1"} if self.parallel.enable_nccl_nvls else {}
        return self.ascend.rank_environment | nvls

    @property
    def device_options(self) -> dict[str, "DeviceOption"]:
        """Options that only the chosen device has, as StartRank.device_options."""
        options: CudaOptions | AscendOptions | NullOptions
        match self.parallel.device:
            case "cuda":
                options = self._cuda_options()
            case "npu":
                options = self._npu_options()
            case "null":
                options = self._null_options()
            case _:
                return {}
        plain: dict[str, DeviceOption] = msgspec.to_builtins(options)
        return plain

    def _cuda_options(self) -> CudaOptions:
        return CudaOptions(
            base_gpu_id=self.parallel.base_gpu_id,
            gpu_id_step=self.parallel.gpu_id_step,
            cudagraph_gc=self.graphs.enable_cudagraph_gc,
            symm_mem=self._symmetric_memory(),
            nccl_window=self.parallel.enable_symm_mem,
            checks_peers=self.parallel.enable_p2p_check,
            kernel_fusion=self.kernels.kernel_fusion,
            gemv_rows=self.kernels.gemv_max_rows,
            lists_work=self.kernels.enable_decode_work_list,
            starts_early=self.kernels.enable_pdl,
            fp8_gemm_backend=self.kernels.fp8_gemm_backend,
            prefill_attention_backend=self.kernels.prefill_attention_backend,
            decode_attention_backend=self.kernels.decode_attention_backend,
            tower_attention=self.kernels.mm_attention_backend,
        )

    def _symmetric_memory(self) -> SymmetricMemory:
        """What was asked for must work, and what was derived may, unless NCCL's was asked for."""
        if not self.parallel.enable_torch_symm_mem:
            return "off"
        if self.why["enable_torch_symm_mem"].source != "derived":
            return "on"
        return "off" if self.parallel.enable_symm_mem else "try"

    def _npu_options(self) -> AscendOptions:
        return AscendOptions(
            base_gpu_id=self.parallel.base_gpu_id,
            gpu_id_step=self.parallel.gpu_id_step,
            mla_prolog=self.ascend.npu_mla_prolog,
            requires_mla_prolog=not self.why["npu_mla_prolog"].source.startswith("profile"),
            nz_cache=self.ascend.npu_nz_cache,
            int8_index=self.ascend.npu_int8_index,
            prefetch_mb=self.ascend.npu_prefetch_mb,
            batches_copies=self.tiers.hicache_io_backend == "kernel_ascend",
            multi_stream=self.ascend.npu_multi_stream,
            gather_after_q=self.ascend.npu_gather_after_q,
            sampling_backend=self.kernels.sampling_backend,
            soc=None if self.ascend.npu_soc == "auto" else self.ascend.npu_soc,
            exchange_buffer_mb=self.ascend.npu_exchange_buffer_mb,
        )

    def _null_options(self) -> NullOptions:
        return NullOptions(
            step_s=self.null.null_step_s,
            token_s=self.null.null_token_s,
            vocab_size=self.null.null_vocab_size,
            first_token=self.null.null_first_token,
            poison_token=self.null.null_poison_token,
            poison=self.null.null_poison,
        )
