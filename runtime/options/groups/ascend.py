"""What Ascend's libraries read from a rank's environment, as options; environment.py has the names of the
variables."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.ascend.soc import SOCS, expert_layout
from runtime.devices.ascend.soc import Name as SocName
from runtime.devices.facts import DeviceFacts
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.declare import Auto, Count, Derived, Group, Whole, option
from runtime.options.facts import MachineFacts, ModelFacts


class Ascend(Group, frozen=True, kw_only=True):
    """Ascend"""

    npu_alloc_conf: A[
        str | Auto,
        option("Settings of torch_npu's allocator, such as expandable_segments:True.", devices=("npu",)),
    ] = "auto"
    npu_streams: A[Count | Auto, option("Most streams of one device.", devices=("npu",))] = "auto"
    npu_task_queue: A[
        Literal[0, 1, 2] | Auto,
        option(
            "How kernels wait for their launch: 0 not at all, 1 in a queue, 2 in a queue that merges work, "
            "for prompts.",
            devices=("npu",),
        ),
    ] = "auto"
    hccl_buffer_mb: A[
        Count | Auto,
        option("Megabytes of a collective's buffer: more for prompts than for decodes.", devices=("npu",)),
    ] = "auto"
    npu_exchange_buffer_mb: A[
        Count | Auto,
        option(
            "Megabytes of the buffer of the experts' exchange (--moe-a2a-backend), which has a group of "
            "ranks of its own.",
            devices=("npu",),
        ),
    ] = "auto"
    hccl_expansion_mode: A[
        Literal["AIV", "AI_CPU", "HOST"] | Auto,
        option(
            "What schedules collectives: vector cores, the device's own CPU, or the host.", devices=("npu",)
        ),
    ] = "auto"
    npu_soc: A[
        Literal["a2", "a3"] | Auto,
        option(
            "Generation to plan for where there is no NPU, Atlas A2 or A3; a rank on another one refuses to "
            "start.",
            devices=("npu",),
        ),
    ] = "auto"
    npu_mla_prolog: A[
        bool,
        option(
            "Prepare queries and latents of MLA in one fused operator, in steps whose rows are few tokens "
            "each.",
            devices=("npu",),
        ),
    ] = False
    npu_nz_cache: A[
        bool,
        option(
            "Keep pages in the NZ layout: of latents, or of heads of 64 or 128; saves launches.",
            devices=("npu",),
        ),
    ] = False
    npu_int8_index: A[
        bool,
        option(
            "Keep index keys of sparse latent attention (DeepSeek V3.2) in 8 bits, with a scale for each.",
            devices=("npu",),
        ),
    ] = False
    npu_prefetch_mb: A[
        Whole,
        option(
            "Megabytes of the next weight that go to the L2 cache while ranks exchange; 0: none.",
            devices=("npu",),
        ),
    ] = 0
    npu_multi_stream: A[
        bool, option("Compute shared and routed experts on two streams.", devices=("npu",))
    ] = False
    npu_gather_after_q: A[
        bool,
        option(
            "Gather behind the low-rank projections of MLA, which sends fewer bytes; with --moe-a2a-backend.",
            devices=("npu",),
        ),
    ] = False


class AscendPlan(Ascend, frozen=True, kw_only=True):
    """Settings of Ascend in force. All but the last are environment variables of the ranks; None: not set."""

    npu_alloc_conf: str | None
    npu_streams: str | int | None
    npu_task_queue: str | int | None
    hccl_buffer_mb: str | int | None
    hccl_expansion_mode: str | None
    npu_exchange_buffer_mb: int | None  # None: a rank computes it, where it has an exchange

    @property
    def rank_environment(self) -> dict[str, str]:
        """Environment variables that the libraries of a rank read, by name."""
        values = {variable: getattr(self, option) for option, (variable, _, _) in RANK_VARIABLES.items()}
        return {variable: str(value) for variable, value in values.items() if value is not None}


def npu_exchange_buffer_mb(
    device: DeviceFacts,
    model: ModelFacts,
    npu_soc: SocName | Literal["auto"],
    moe_a2a_backend: str,
    deepep_mode: str,
    num_ranks: int,
    num_tokens: int,
) -> Derived:
    """Megabytes of the buffer of the experts' exchange: enough for decode steps, whose ranks have
    `num_tokens` tokens each. None: there is no exchange, or each rank computes it for its NPU."""
    exchanges = moe_a2a_backend != "none" and deepep_mode != "normal" and num_ranks > 1
    if device.name != "npu" or not exchanges or model.moe is None:
        return Derived(None, "there is no fused exchange of experts on npu devices")
    if npu_soc == "auto":
        return Derived(None, "a rank computes it for its NPU; with --npu-soc it is computed here")
    soc = SOCS[npu_soc]
    layout = expert_layout(model.moe, model.hidden_size, num_ranks)
    if not soc.takes(layout):
        return Derived(None, f"{soc.title} has no fused exchange of such experts")
    buffer_mb = soc.buffer_mb(layout, num_tokens)
    return Derived(
        buffer_mb,
        f"the experts' exchange on {soc.title} holds {soc.dispatched(layout, buffer_mb)} tokens of a rank in "
        f"it, and decode steps have {num_tokens}; steps with more take the plain exchange",
    )


def rank_variable(option: str, device: DeviceFacts, machine: MachineFacts) -> Derived:
    """One environment variable of the ranks: that of this environment, else the usual value; None: not
    set."""
    variable, usual, reason = RANK_VARIABLES[option]
    if device.name != "npu":
        return Derived(None, "ranks on npu devices read it")
    if variable in machine.environment:
        return Derived(machine.environment[variable], f"the environment sets {variable}")
    return Derived(usual, reason)
