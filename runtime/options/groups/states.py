"""Models whose sequences keep a state in addition to keys and values."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.facts import DeviceFacts
from runtime.json_value import Fields
from runtime.options.declare import Amount, Auto, Count, Derived, Group, option


class States(Group, frozen=True, kw_only=True):
    """State-space and diffusion models"""

    max_mamba_cache_size: A[
        Count | None, option("Sequence states that the cache holds; overrides --mamba-full-memory-ratio.")
    ] = None
    mamba_ssm_dtype: A[
        Literal["float32", "bfloat16", "float16"] | None,
        option(
            "Type of recurrent states; without it float32, in which tokens do not depend on chunks.",
            note="states of convolutions have the type of the activations",
        ),
    ] = None
    mamba_full_memory_ratio: A[
        Amount,
        option(
            "Memory of states in relation to that of keys and values.",
            note="models without attention layers have states alone",
        ),
    ] = 0.9
    mamba_scheduler_strategy: A[
        Literal["auto", "no_buffer", "extra_buffer"],
        option(
            "Where states are kept for prefixes: in prompts only, or with a second one of each sequence "
            "also while it decodes.",
            note="both go with overlap and with pages of any size",
        ),
    ] = "auto"
    mamba_track_interval: A[Count, option("Tokens between two kept states while a sequence decodes.")] = 256
    mamba_backend: A[
        Literal["triton", "flashinfer", "cpu", "torch_native"] | Auto,
        option(
            "Kernels of recurrent layers: cpu on the CPU, triton and flashinfer for decodes on cuda, "
            "torch_native (torch's) anywhere.",
            note="Mamba 1 is torch's in any case, and Kimi's delta rule on the CPU; triton has been run in "
            "its interpreter and compiled, flashinfer (Mamba 2 alone; delta rules are then triton's) on a "
            "double of its package, neither on a card, and they are not the default",
        ),
    ] = "auto"
    dllm_algorithm: A[
        Literal["LowConfidence", "JointThreshold"] | None,
        option(
            "How a diffusion model fills in blocks: likely tokens first, or with edits of tokens as well.",
            note="such a model needs one; see diffusion.md",
            missing="pipelines, attention groups and NPUs, all of which are refused",
        ),
    ] = None
    dllm_algorithm_config: A[
        str | None, option("YAML file with settings of --dllm-algorithm: thresholds and the size of blocks.")
    ] = None


class StatesPlan(States, frozen=True, kw_only=True):
    """Sequence states in force."""

    mamba_scheduler_strategy: Literal["no_buffer", "extra_buffer"]
    mamba_backend: str

    @property
    def state_dtype(self) -> str:
        """Type of recurrent states."""
        return self.mamba_ssm_dtype or "float32"

    @property
    def of_ranks(self) -> Fields:
        """Fields of StartRank."""
        return {
            "state_ratio": self.mamba_full_memory_ratio,
            "num_states": self.max_mamba_cache_size,
            "state_dtype": self.state_dtype,
            "recurrent_backend": self.mamba_backend,
        }

    @property
    def state_interval(self) -> int:
        """Tokens between two kept states while a sequence decodes; 0: decoding keeps none."""
        return self.mamba_track_interval if self.mamba_scheduler_strategy == "extra_buffer" else 0


def mamba_backend(device: DeviceFacts) -> Derived:
    """The device's own kernels, where it has some."""
    own = device.recurrent_backends[0]
    return Derived(
        own,
        f"{device.name} has no kernels for recurrent layers"
        if own == "torch_native"
        else f"they are the kernels of {device.name}",
    )


def mamba_scheduler_strategy(mamba_track_interval: int, page_size: int) -> Derived:
    """Second states are kept, as newly admitted sequences can take them when slots are short. They need
    states at page boundaries."""
    if mamba_track_interval % page_size:
        return Derived("no_buffer", "--mamba-track-interval is no multiple of --page-size")
    return Derived(
        "extra_buffer",
        "conversations go on from their answers, and newcomers take the second states where slots are short",
    )
