"""What Ascend's libraries read from a rank's environment, as options; environment.py has the names of the
variables."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.facts import DeviceFacts
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.declare import Auto, Count, Derived, Group, option
from runtime.options.facts import MachineFacts


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
    hccl_expansion_mode: A[
        Literal["AIV", "AI_CPU", "HOST"] | Auto,
        option(
            "What schedules collectives: vector cores, the device's own CPU, or the host.", devices=("npu",)
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
        bool, option("Keep latents in the NZ layout; goes with --npu-mla-prolog.", devices=("npu",))
    ] = False
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
    """Settings of Ascend in force. The first five are environment variables of the ranks; None: not set."""

    npu_alloc_conf: str | None
    npu_streams: str | int | None
    npu_task_queue: str | int | None
    hccl_buffer_mb: str | int | None
    hccl_expansion_mode: str | None

    @property
    def rank_environment(self) -> dict[str, str]:
        """Environment variables that the libraries of a rank read, by name."""
        values = {variable: getattr(self, option) for option, (variable, _, _) in RANK_VARIABLES.items()}
        return {variable: str(value) for variable, value in values.items() if value is not None}


def rank_variable(option: str, device: DeviceFacts, machine: MachineFacts) -> Derived:
    """One environment variable of the ranks: that of this environment, else the usual value; None: not
    set."""
    variable, usual, reason = RANK_VARIABLES[option]
    if device.name != "npu":
        return Derived(None, "ranks on npu devices read it")
    if variable in machine.environment:
        return Derived(machine.environment[variable], f"the environment sets {variable}")
    return Derived(usual, reason)
