"""Options + facts → Plan. Nothing is overwritten.

Read `resolve` top to bottom: a value that another one depends on stands above it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from runtime.devices.facts import DeviceFacts
from runtime.errors import OptionsError
from runtime.models.config import read_config
from runtime.options import derive
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.declare import Group
from runtime.options.derive import Derived
from runtime.options.facts import MachineFacts, ModelFacts, device_facts, this_machine
from runtime.options.parse import ParsedOptions
from runtime.options.plan import Plan, Provenance
from runtime.options.rules.checks import plan_problems
from runtime.options.table import rows


class Choice:
    """Collects the plan's values by name: what the user said stands, "auto" is derived, and each keeps its
    source and reason."""

    def __init__(self, given: ParsedOptions) -> None:
        self.why: dict[str, Provenance] = {}
        for row in rows():
            if row.status == "works":
                value = getattr(getattr(given.options, row.group), row.name)
                self.why[row.name] = Provenance(
                    value, given.sources.get(row.name, "default"), given.reasons.get(row.name, "")
                )

    def __getitem__(self, name: str) -> Any:
        return self.why[name].value

    def auto(self, name: str, derivation: Callable[..., Derived], *dependencies: Any) -> None:
        """Derives `name` if it was left to the runtime; an unknown name is a value that only the plan has."""
        if name not in self.why or self[name] == "auto":
            derived = derivation(*dependencies)
            self.why[name] = Provenance(derived.value, "derived", derived.reason)

    def means(self, name: str, words: Mapping[Any, Derived]) -> None:
        """Replaces a word by what it means; the source stays who said it."""
        if self[name] in words:
            meaning = words[self[name]]
            self.why[name] = Provenance(meaning.value, self.why[name].source, meaning.reason)


def resolve(given: ParsedOptions, model: ModelFacts, device: DeviceFacts, machine: MachineFacts) -> Plan:
    """The plan that `given` means for this model, device and machine. Raises OptionsError with a sentence for
    every broken rule."""
    c = Choice(given)
    c.auto("served_model_name", derive.served_model_name, c["model_path"])
    c.means("model_path", derive.EMBEDDED_MODEL)
    c.auto("tokenizer_path", derive.tokenizer_path, c["model_path"])
    c.auto("device", derive.device, device)
    c.means("dtype", derive.DTYPE_WORDS)
    c.auto("dtype", derive.dtype, model, device)
    c.means("kv_cache_dtype", derive.KV_DTYPE_WORDS)
    c.auto("kv_cache_dtype", derive.kv_cache_dtype, c["dtype"])
    c.means("hicache_mem_layout", derive.LAYOUT_WORDS)
    c.auto("pooling", derive.pooling, model)
    c.auto("context_length", derive.context_length, model)
    c.means("expert_parallel_size", derive.expert_spread(c["moe_a2a_backend"], c["tensor_parallel_size"]))
    c.auto("num_ranks", derive.num_ranks, c["tensor_parallel_size"])
    c.auto("num_threads", derive.num_threads, machine, c["tensor_parallel_size"])
    c.auto("mem_fraction_static", derive.mem_fraction_static, device)
    c.auto("max_total_tokens", derive.max_total_tokens)
    c.auto("page_size", derive.page_size, device)
    c.auto(
        "mamba_scheduler_strategy", derive.mamba_scheduler_strategy, c["mamba_track_interval"], c["page_size"]
    )
    c.auto("max_running_requests", derive.max_running_requests, device)
    c.auto("max_queued_requests", derive.max_queued_requests)
    c.auto("chunked_prefill_size", derive.chunked_prefill_size, device, model)
    c.auto(
        "max_step_tokens",
        derive.max_step_tokens,
        c["chunked_prefill_size"],
        c["max_prefill_tokens"],
        c["context_length"],
        device,
        model,
    )
    c.auto("attention_backend", derive.attention_backend, device)
    for phase in ("prefill", "decode"):
        c.auto(f"{phase}_attention_backend", derive.phase_backend, c["attention_backend"])
    c.auto("sampling_backend", derive.sampling_backend, device)
    c.auto("fp8_gemm_backend", derive.fp8_gemm_backend, device)
    c.auto("moe_runner_backend", derive.moe_runner_backend, device)
    c.auto("grammar_backend", derive.grammar_backend, device, machine, model)
    c.auto(
        "cuda_graph_max_bs",
        derive.graph_max_running,
        device,
        c["max_running_requests"],
        c["disable_cuda_graph"],
        c["moe_a2a_backend"] != "none" and c["deepep_mode"] == "normal",
        c["decode_attention_backend"],
    )
    c.auto("cuda_graph_bs", derive.graph_sizes, c["cuda_graph_max_bs"])
    c.auto(
        "piecewise_cuda_graph_max_tokens",
        derive.piecewise_max_tokens,
        c["enable_piecewise_cuda_graph"],
        c["max_step_tokens"] + c["max_running_requests"],
    )
    c.auto("piecewise_cuda_graph_tokens", derive.piecewise_sizes, c["piecewise_cuda_graph_max_tokens"])
    c.auto("enable_lora", derive.enable_lora, c["lora_paths"])
    c.auto("lora_backend", derive.lora_backend)
    c.auto("random_seed", derive.random_seed, machine)
    for name in RANK_VARIABLES:
        c.auto(name, derive.rank_variable, name, device, machine)
    c.auto("null_vocab_size", derive.null_vocab_size, model)
    groups = {
        field.name: _group(field.type, c)
        for field in structs.fields(Plan)
        if field.name not in ("why", "notices")
    }
    plan = Plan(**groups, why=c.why, notices=given.notices)
    if problems := plan_problems(plan, model, device):
        raise OptionsError(problems)
    return plan


def _group(kind: type[Group], choice: Choice) -> Group:
    """One group of the plan; an option that is not implemented keeps its default."""
    names = kind.__struct_fields__
    return kind(**{name: choice[name] for name in names if name in choice.why})


def plan_for(given: ParsedOptions, machine: MachineFacts | None = None) -> Plan:
    """`resolve` with the facts of the given model folder, device and, unless told otherwise, this machine.

    Raises ModelError for a folder that holds no servable config.json, OptionsError for options that cannot
    work.
    """
    said = given.options.model.model_path
    folder = derive.EMBEDDED_MODEL[said].value if said in derive.EMBEDDED_MODEL else said
    device = device_facts(given.options.parallel.device)
    config = read_config(
        folder,
        is_embedding=given.options.model.is_embedding,
        pooling=given.options.model.pooling,
        quantization=given.options.precision.quantization,
        overrides=given.options.model.json_model_override_args,
    )
    return resolve(given, config, device, machine or this_machine())
