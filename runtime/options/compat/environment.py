"""Environment variables and system settings of the tuning guide for Ascend, and the counterpart of each here.

Three kinds of counterpart: an option; a variable that the ranks' libraries read, which an option sets in
their environment (a value in the environment of the server stays, unless the option is given); and a setting
of the machine, which `runtime check doctor` compares with the value that the guide recommends.
"""

from typing import Literal

from msgspec import Struct

Kind = Literal["option", "rank", "machine", "read"]


class EnvironmentSetting(Struct, frozen=True, kw_only=True):
    """One variable or setting. `probe` is the file that shows a machine setting's value."""

    name: str
    kind: Kind
    counterpart: str
    about: str
    recommended: str | None = None
    probe: str = ""


# option -> the variable that Ascend's libraries read, what ranks get where neither option nor environment
# says otherwise, and why
RANK_VARIABLES: dict[str, tuple[str, str | None, str]] = {
    "npu_alloc_conf": (
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments:True",
        "segments that grow waste less memory",
    ),
    "npu_streams": ("STREAMS_PER_DEVICE", "32", "copies and collectives have streams of their own"),
    "npu_task_queue": ("TASK_QUEUE_ENABLE", "1", "kernels that no graph replays are launched from a queue"),
    "hccl_buffer_mb": ("HCCL_BUFFSIZE", "400", "enough for decodes; the profiles of prompts take more"),
    "hccl_expansion_mode": ("HCCL_OP_EXPANSION_MODE", "AIV", "vector cores start small collectives fastest"),
}


def _rank(name: str, about: str, recommended: str | None) -> EnvironmentSetting:
    """A variable of the rank's libraries, which an option sets."""
    option = next(option for option, (variable, _, _) in RANK_VARIABLES.items() if variable == name)
    return EnvironmentSetting(
        name=name,
        kind="rank",
        counterpart="--" + option.replace("_", "-"),
        about=about,
        recommended=recommended,
    )


def _option(name: str, counterpart: str, about: str, recommended: str | None = None) -> EnvironmentSetting:
    return EnvironmentSetting(
        name=name, kind="option", counterpart=counterpart, about=about, recommended=recommended
    )


def _sysctl(name: str, about: str, recommended: str) -> EnvironmentSetting:
    return EnvironmentSetting(
        name=f"sysctl: {name}",
        kind="machine",
        counterpart="runtime check doctor",
        about=about,
        recommended=recommended,
        probe="/proc/sys/" + name.replace(".", "/"),
    )


ENVIRONMENT: tuple[EnvironmentSetting, ...] = (
    _rank("PYTORCH_NPU_ALLOC_CONF", "allocator whose segments grow", "expandable_segments:True"),
    _rank("STREAMS_PER_DEVICE", "most streams of a device", "32"),
    _rank(
        "HCCL_BUFFSIZE",
        "megabytes of a collective's buffer: more for prompts than for decodes",
        "1200 or 400",
    ),
    EnvironmentSetting(
        name="HCCL_SOCKET_IFNAME",
        kind="read",
        counterpart="the interface by which --dist-init-addr is reached, unless it is set",
        about="network interface of HCCL",
    ),
    EnvironmentSetting(
        name="GLOO_SOCKET_IFNAME",
        kind="read",
        counterpart="the interface by which --dist-init-addr is reached, unless it is set; the loopback "
        "interface on one node",
        about="network interface of gloo",
    ),
    _rank("HCCL_OP_EXPANSION_MODE", "where collectives are scheduled", "AIV"),
    _option(
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        "derived from --npu-exchange-buffer-mb, the model and the generation of the NPU",
        "most tokens that a rank sends to experts at once",
    ),
    _option(
        "DEEP_NORMAL_MODE_USE_INT8_QUANT",
        "always so, where experts round activations to int8",
        "int8 on the way to experts",
        "1",
    ),
    *(
        _option(
            name,
            "none: an exchange of a prompt has the tokens that --chunked-prefill-size gives a step",
            "long prompts are exchanged in rounds",
        )
        for name in (
            "DEEPEP_NORMAL_LONG_SEQ_ROUND",
            "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS",
            "DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ",
        )
    ),
    _rank(
        "TASK_QUEUE_ENABLE", "how kernels are queued: 2 for prompts, 0 where graphs are replayed", "2 or 0"
    ),
    _option("SGLANG_SET_CPU_AFFINITY", "--numa-node", "bind ranks to cores", "1"),
    _option(
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER",
        "always so: one process plans for all replicas",
        "no agreement at each step",
        "1",
    ),
    _option(
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        "always so: steps are planned ahead",
        "plan drafts during verification",
        "1",
    ),
    _option(
        "SGLANG_ENABLE_SPEC_V2",
        "always so: verify steps are steps like others",
        "speculation with steps in flight",
        "1",
    ),
    _option(
        "ASCEND_MF_STORE_URL",
        "none: there is no store of MemFabric, and --disaggregation-transfer-backend tcp needs none",
        "where both halves find pages",
    ),
    _option(
        "ASCEND_MF_TRANSFER_PROTOCOL",
        "none: there is no MemFabric; --disaggregation-transfer-backend chooses how pages travel",
        "how MemFabric carries pages",
    ),
    _option(
        "SGLANG_NPU_FUSED_MOE_MODE",
        "always fused as far as the operators go; --moe-a2a-backend chooses the exchange",
        "how much of the experts' work is fused",
        "1 or 2",
    ),
    _option("SGLANG_NPU_USE_MLAPO", "--npu-mla-prolog", "fused preparation of MLA", "1"),
    _option(
        "SGLANG_USE_FIA_NZ",
        "--npu-nz-cache",
        "cache in the NZ layout, together with the fused preparation",
        "1",
    ),
    _option(
        "SGLANG_NPU_USE_MULTI_STREAM", "--npu-multi-stream", "shared and routed experts on two streams", "1"
    ),
    _option(
        "SGLANG_USE_AG_AFTER_QLORA",
        "--npu-gather-after-q",
        "gather after the low-rank projection of queries",
        "1",
    ),
    EnvironmentSetting(
        name="kernel: cpufreq scaling_governor",
        kind="machine",
        counterpart="runtime check doctor",
        about="keep the cores at full speed",
        recommended="performance",
        probe="/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    ),
    _sysctl("vm.swappiness", "keep memory out of swap", "0"),
    _sysctl("kernel.numa_balancing", "leave pages where they are", "0"),
    _sysctl("kernel.sched_migration_cost_ns", "keep threads on their cores", "50000"),
    EnvironmentSetting(
        name="ASCEND_HOME_PATH",
        kind="read",
        counterpart="read, to find CANN",
        about="where CANN is installed",
    ),
)
