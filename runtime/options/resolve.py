"""Options + facts → Plan. Nothing is overwritten.

`resolve` derives values in an order in which each stands below those that it depends on.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, structs

from runtime.devices.facts import DeviceFacts
from runtime.errors import ModelError, OptionsError
from runtime.hub.source import HubModel, hub_model
from runtime.models.config.gguf.container import find_gguf, is_gguf
from runtime.models.config.model_config import read_config
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.declare import Derived, Group, Value
from runtime.options.facts import MachineFacts, ModelFacts, device_facts, this_machine
from runtime.options.groups import (
    ascend,
    experts,
    graphs,
    http,
    kernels,
    lora,
    memory,
    null,
    parallel,
    precision,
    schedule,
    speculation,
    states,
    tiers,
    weights,
)
from runtime.options.groups import model as model_options
from runtime.options.parse import ParsedOptions
from runtime.options.plan import Plan, Provenance
from runtime.options.rules.checks import plan_problems
from runtime.options.table import rows
from runtime.options.tree import Options

# a folder that has one of these is not taken as one with a GGUF file
AUTO_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")


class Choices:
    """The plan's values by option name, each with source and reason: given values stand, "auto" is
    derived."""

    def __init__(self, parsed: ParsedOptions) -> None:
        self.why: dict[str, Provenance] = {}
        for row in rows():
            if row.acts:
                value = getattr(getattr(parsed.options, row.group), row.name)
                self.why[row.name] = Provenance(
                    value, parsed.sources.get(row.name, "default"), parsed.reasons.get(row.name, "")
                )

    def __getitem__(self, name: str) -> Value:
        return self.why[name].value

    def auto(self, derivation: Callable[..., Derived], *dependencies: object, name: str = "") -> None:
        """Derives the value of the option that the function is named after, or of `name`, if it is "auto". A
        name that is no option is a value that only the plan has."""
        name = name or derivation.__name__
        if name not in self.why or self[name] == "auto":
            derived = derivation(*dependencies)
            self.why[name] = Provenance(derived.value, "derived", derived.reason)

    def expand(self, name: str, aliases: Mapping[Value, Derived]) -> None:
        """Replaces a value that stands for another one; its source stays."""
        if self[name] in aliases:
            meaning = aliases[self[name]]
            self.why[name] = Provenance(meaning.value, self.why[name].source, meaning.reason)


class Folders(Struct, frozen=True):
    """Where the model and its tokenizer lie on this machine."""

    model: Derived
    tokenizer: Derived | None = None  # None: as --tokenizer-path says
    hub_model: HubModel | None = None  # whose weights are still to be downloaded to the model's folder


def resolve(
    parsed: ParsedOptions,
    model: ModelFacts,
    device: DeviceFacts,
    machine: MachineFacts,
    folders: Folders | None = None,
) -> Plan:
    """The plan of the given options for this model, device and machine. `folders` None: as the options name
    them. Raises OptionsError with a sentence for every broken rule."""
    c = Choices(parsed)
    c.auto(http.served_model_name, c["model_path"])
    _choose_folders(c, folders)
    c.auto(model_options.tokenizer_path, c["model_path"])
    c.auto(parallel.device, device)
    c.expand("dtype", precision.DTYPE_ALIASES)
    c.auto(precision.dtype, model, device)
    c.expand("kv_cache_dtype", precision.KV_DTYPE_ALIASES)
    c.auto(precision.kv_cache_dtype, c["dtype"])
    _choose_tiers(c)
    _choose_model(c, model)
    c.expand(
        "expert_parallel_size",
        experts.expert_parallel_aliases(c["moe_a2a_backend"], c["tensor_parallel_size"]),
    )
    c.auto(parallel.num_ranks, c["tensor_parallel_size"], c["pipeline_parallel_size"])
    c.auto(parallel.load_balance_method)
    replicas = 1 if parsed.options.parallel.enable_dp_attention else c["data_parallel_size"]
    c.auto(parallel.num_threads, machine, c["num_ranks"], c["nnodes"], replicas)
    _choose_http_limits(c, machine)
    c.auto(parallel.standby_ranks, device, machine, c["num_ranks"], c["nnodes"], replicas)
    c.auto(memory.mem_fraction_static, device)
    c.auto(memory.max_total_tokens)
    c.auto(memory.page_size, device, model)
    c.auto(states.mamba_scheduler_strategy, c["mamba_track_interval"], c["page_size"])
    c.auto(states.mamba_backend, device)
    c.auto(schedule.max_running_requests, device, model)
    c.auto(schedule.max_queued_requests)
    c.auto(schedule.chunked_prefill_size, device, model)
    c.auto(schedule.max_step_ms, c["chunked_prefill_size"], device)
    c.auto(
        schedule.max_step_tokens,
        c["chunked_prefill_size"],
        c["max_prefill_tokens"],
        c["context_length"],
        device,
        model,
    )
    _choose_kernels(c, model, device, machine)
    _choose_graph_sizes(c, model, device)
    _choose_drafts(c)
    c.auto(weights.packed_weights_dir, machine)
    c.auto(lora.enable_lora, c["lora_paths"])
    c.auto(lora.lora_backend, device)
    c.auto(schedule.random_seed, machine)
    _choose_rank_variables(c, model, device, machine)
    c.auto(null.null_vocab_size, model)
    groups: dict[str, Value] = {  # by the names of Plan's fields, each of that field's type
        field.name: _group(field.type, c)
        for field in structs.fields(Plan)
        if field.name not in ("why", "notices")
    }
    plan = Plan(**groups, why=c.why, notices=parsed.notices)
    if problems := plan_problems(plan, model, device):
        raise OptionsError(problems)
    return plan


def _choose_model(c: Choices, model: ModelFacts) -> None:
    c.auto(model_options.pooling, model)
    c.auto(model_options.context_length, model)


def _choose_http_limits(c: Choices, machine: MachineFacts) -> None:
    c.auto(http.max_total_body_bytes, c["max_body_bytes"])
    c.auto(http.max_connections, machine.open_files, c["num_ranks"])
    c.auto(http.allowed_hosts, c["host"], bool(c["api_key"] or c["api_key_file"]))


def _choose_folders(c: Choices, folders: Folders | None) -> None:
    if c["speculative_algorithm"] in ("EAGLE", "NEXTN"):
        c.expand("speculative_draft_model_path", speculation.own_checkpoints(c["model_path"]))
    if folders is None:
        c.expand("model_path", model_options.EMBEDDED_MODEL)
    else:
        if folders.model.value != c["model_path"]:
            c.expand("model_path", {c["model_path"]: folders.model})
        if folders.tokenizer is not None:
            c.expand("tokenizer_path", {c["tokenizer_path"]: folders.tokenizer})
        if folders.hub_model is not None:
            c.auto(Derived, folders.hub_model, "its weights are on the hub", name="hub_model")


def _choose_kernels(c: Choices, model: ModelFacts, device: DeviceFacts, machine: MachineFacts) -> None:
    c.auto(kernels.attention_backend, device)
    for phase in ("prefill", "decode"):
        c.auto(kernels.phase_backend, c["attention_backend"], name=f"{phase}_attention_backend")
    c.auto(model_options.enable_multimodal, model)
    c.auto(kernels.sampling_backend, device)
    c.auto(kernels.mm_attention_backend, device)
    c.auto(kernels.fp8_gemm_backend, device)
    overlaps = c["enable_two_batch_overlap"]
    c.auto(parallel.enable_torch_symm_mem, device, c["num_ranks"], c["nnodes"], overlaps)
    c.auto(experts.moe_runner_backend, device)
    c.auto(kernels.grammar_backend, device, machine, model, c["skip_tokenizer_init"])


def _choose_graph_sizes(c: Choices, model: ModelFacts, device: DeviceFacts) -> None:
    c.auto(
        graphs.cuda_graph_max_bs,
        device,
        c["max_running_requests"],
        c["disable_cuda_graph"],
        c["moe_a2a_backend"] != "none" and c["deepep_mode"] == "normal",
        c["decode_attention_backend"],
        c["pipeline_parallel_size"],
        device.scores_in_torch and (model.scores.cap > 0 or model.scores.is_biased),
    )
    c.auto(graphs.cuda_graph_bs, c["cuda_graph_max_bs"])
    c.auto(
        graphs.enable_piecewise_cuda_graph,
        device,
        model,
        c["disable_cuda_graph"],
        {
            "--pipeline-parallel-size": c["pipeline_parallel_size"] > 1,
            "--enable-dp-attention": c["enable_dp_attention"],
            "--attention-context-parallel-size": c["attention_context_parallel_size"] > 1,
            "--moe-a2a-backend": c["moe_a2a_backend"] != "none",
            "--enable-two-batch-overlap": c["enable_two_batch_overlap"],
        },
    )
    c.auto(
        graphs.piecewise_cuda_graph_max_tokens,
        c["enable_piecewise_cuda_graph"],
        c["max_step_tokens"] + c["max_running_requests"],
    )
    c.auto(graphs.piecewise_cuda_graph_tokens, c["piecewise_cuda_graph_max_tokens"])


def _choose_tiers(c: Choices) -> None:
    c.expand("hicache_mem_layout", tiers.LAYOUT_ALIASES)
    of_all = [tiers.OF_HALVES] if c["disaggregation_mode"] != "null" else []
    of_all += [tiers.OF_LMCACHE] if c["enable_lmcache"] else []
    for name, meanings in (pair for each in of_all for pair in each.items()):
        if c.why[name].source == "default":
            c.expand(name, meanings)


def _choose_rank_variables(c: Choices, model: ModelFacts, device: DeviceFacts, machine: MachineFacts) -> None:
    groups = c["data_parallel_size"] if c["enable_dp_attention"] else 1
    drafts = c["speculative_num_draft_tokens"] or 1
    c.auto(
        ascend.npu_exchange_buffer_mb,
        device,
        model,
        c["npu_soc"],
        c["moe_a2a_backend"],
        c["deepep_mode"],
        c["tensor_parallel_size"],
        # sequences of a rank, each with a token and its drafts
        -(-c["max_running_requests"] * drafts * groups // c["tensor_parallel_size"]),
    )
    for name in RANK_VARIABLES:
        c.auto(ascend.rank_variable, name, device, machine, name=name)


def _choose_drafts(c: Choices) -> None:
    algorithm, source = c["speculative_algorithm"], c.why["speculative_algorithm"].source
    if algorithm is None and source == "default":
        c.why["speculative_algorithm"] = Provenance(None, source, speculation.ADVICE)
    c.auto(speculation.speculative_num_steps, algorithm, c["speculative_num_draft_tokens"])
    c.auto(speculation.speculative_eagle_topk, algorithm, c["speculative_ngram_max_bfs_breadth"])
    c.auto(
        speculation.speculative_num_draft_tokens,
        algorithm,
        c["speculative_num_steps"],
        c["speculative_ngram_max_match_window_size"],
    )


def _group(kind: type[Group], choices: Choices) -> Group:
    """One group of the plan; an option that is not implemented keeps its default."""
    names = kind.__struct_fields__
    return kind(**{name: choices[name] for name in names if name in choices.why})


def plan_for(parsed: ParsedOptions, machine: MachineFacts | None = None) -> Plan:
    """The plan of the given options, with facts of their model folder and device. `machine` None: this
    machine. Of a model on a hub, the small files are downloaded here.

    Raises ModelError for a folder that holds no servable config.json or a model that cannot be downloaded,
    OptionsError for options that cannot work.
    """
    machine = machine or this_machine()
    folders = find_folders(parsed.options, machine)
    device = device_facts(parsed.options.parallel.device)
    config = read_config(
        folders.model.value,
        is_embedding=parsed.options.model.is_embedding,
        pooling=parsed.options.model.pooling,
        quantization=precision.requested_quantization(parsed.options.precision),
        overrides=parsed.options.model.json_model_override_args,
        config_file=parsed.options.weights.decrypted_config_file,
        model_impl=parsed.options.model.model_impl,
        takes_media=parsed.options.model.enable_multimodal is not False,
    )
    return resolve(parsed, config, device, machine, folders)


def _local_model(path: str, load_format: str) -> Derived:
    """The model of a path of this machine: its folder, or its GGUF file. Raises ModelError."""
    folder = Path(path)
    if is_gguf(folder):
        if load_format not in ("auto", "gguf", "dummy"):
            raise ModelError(f"{path} is a GGUF file; leave --load-format {load_format} out")
        return Derived(path, "")
    needed = {"auto": AUTO_FILES, "dummy": ("config.json", "params.json")}.get(load_format)
    wants = load_format == "gguf" or (
        needed is not None and not any(path for name in needed for path in folder.glob(name))
    )
    found = find_gguf(folder) if wants else None
    if found is None and load_format == "gguf":
        raise ModelError(f"{path} has no GGUF file; leave --load-format gguf out, or give the file")
    return Derived(path, "") if found is None else Derived(str(found), "the GGUF file of the folder")


def _downloaded_gguf(model: HubModel, load_format: str) -> Derived:
    """A GGUF file of a hub, which is downloaded as a whole: all is in it. Raises ModelError."""
    from runtime.hub.download import fetch_gguf  # here, for the same reason

    path = str(fetch_gguf(model))
    return structs.replace(_local_model(path, load_format), reason="downloaded from the hub")


def find_folders(given: Options, machine: MachineFacts) -> Folders:
    """The folders of model and tokenizer; small files of those on a hub are downloaded, and a tokenizer in
    another form than tokenizer.json is converted. Raises ModelError."""
    from runtime.hub.tokenizer import converted_tokenizer, tokenizer_source  # here, for the same reason

    options = given.model
    seed = seed_model(options, given.weights)
    found = _find_folders(options) if seed is None else _folders_of_seed(seed, given.api.admin_api_key)
    if options.skip_tokenizer_init:
        return found
    folder = Path((found.tokenizer or found.model).value)
    source = tokenizer_source(folder, prefers_slow=options.tokenizer_mode == "slow")
    if source is None:
        return found
    converted = converted_tokenizer(folder, source, Path(machine.cache_folder))
    return structs.replace(found, tokenizer=Derived(str(converted), f"converted from {source.name}"))


def seed_model(options: model_options.Model, given: weights.Weights) -> HubModel | None:
    """The server that the model's files come from; None: none does."""
    ip, port = (
        given.remote_instance_weight_loader_seed_instance_ip,
        given.remote_instance_weight_loader_seed_instance_service_port,
    )
    if options.load_format != "remote_instance":
        return None
    host = f"[{ip}]" if ip is not None and ":" in ip else ip
    return HubModel(repo=f"http://{host}:{port}", cache_dir=options.download_dir, hub="seed")


def _folders_of_seed(seed: HubModel, key: str | None) -> Folders:
    from runtime.hub.download import fetch_config  # here, for the same reason

    folder = fetch_config(seed, key)
    seed = structs.replace(seed, revision=folder.name.removeprefix("seed-"))
    return Folders(Derived(str(folder), f"copied from {seed.repo}"), None, seed)


def _find_folders(options: model_options.Model) -> Folders:
    from runtime.hub.download import fetch_config  # here, so that --help and a wrong option answer at once

    path = options.model_path
    tokenizer = None
    if options.tokenizer_path != "auto":
        on_hub = hub_model(options.tokenizer_path, None, options.download_dir)
        if on_hub is not None:
            tokenizer = Derived(str(fetch_config(on_hub)), "downloaded from the hub")
    if path in model_options.EMBEDDED_MODEL:
        return Folders(model_options.EMBEDDED_MODEL[path], tokenizer)
    model = hub_model(path, options.revision, options.download_dir)
    if options.load_format == "remote" and (model is None or model.hub != "url"):
        raise ModelError(
            f"--load-format remote wants the URL of a folder as --model-path, and {path} is none"
        )
    if model is None:
        return Folders(_local_model(path, options.load_format), tokenizer)
    if model.gguf:
        return Folders(_downloaded_gguf(model, options.load_format), tokenizer)
    model = structs.replace(model, load_format=options.load_format)
    folder = fetch_config(model)
    if model.hub == "huggingface":  # a snapshot is named by its commit: the weights are of the same one
        model = structs.replace(model, revision=folder.name)
    is_needed = options.load_format != "dummy"
    return Folders(Derived(str(folder), "downloaded from the hub"), tokenizer, model if is_needed else None)
