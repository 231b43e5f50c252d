"""The first stage of a start: everything that can be refused before anything acts.

    options ──plan_for──► plan ──prepare──► Prepared ──► actors, ranks, sockets, folders

`runtime serve`, the library, `runtime check explain` and `runtime check memory` go through `prepare`; a check
ends behind it. It reads files, and it writes, sends and starts nothing.
"""

import ast
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

from msgspec import Struct, structs

from runtime.actors.events import require_zmq
from runtime.admin import warmup
from runtime.devices.cpu.kernels.choice import usable_levels
from runtime.devices.numa import cores_of
from runtime.diffusion_settings import diffusion
from runtime.errors import OptionsError, StartError, install_line
from runtime.messages.memory import offloaded_layers
from runtime.model_card import model_card
from runtime.models.config.checksums import read_list
from runtime.models.config.draft_check import check_draft_model
from runtime.models.config.dual_config import DualImages
from runtime.models.config.family import LLAMA
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import class_path
from runtime.models.config.weight_files import check_weight_files
from runtime.nodes.addresses import parse_address
from runtime.nodes.secret import NODES_SECRET
from runtime.options.facts import GRAMMAR_PACKAGES
from runtime.options.plan import Plan
from runtime.pdmux_settings import multiplexing
from runtime.regular_file import check_regular, check_writable
from runtime.scheduling.expert_location import places_at_start
from runtime.service import ModelCard
from runtime.settings import TextSetup, model_config, open_text
from runtime.storage.buffers import PACKAGES, missing
from runtime.storage.settings import backend_settings
from runtime.text.open_media import open_transcription
from runtime.transfer.engines import check_backend
from runtime.transfer.key import SERVERS_KEY
from runtime.transfer.open_encoders import check_encoders
from runtime.weight_settings import cache_scales

# classes of models whose ranks may have shards of the tokens between attentions
SCATTERED = (
    LLAMA,
    "runtime.models.deepseek:DeepSeek",
    "runtime.models.deepseek_sparse:SparseDeepSeek",
    "runtime.models.hybrid:HybridDecoder",
    "runtime.models.hybrid:GraniteHybrid",
)


class Prepared(Struct, frozen=True):
    """What a start has read and checked."""

    model: ModelConfig
    text: TextSetup
    card: ModelCard  # without adapters
    warmups: list[str]


def prepare(plan: Plan, begin: Callable[[ModelConfig], None] | None = None) -> Prepared:
    """Reads the model's configuration, tokenizer, templates and the headers of its weights, and checks what
    else the options name. `begin` is called before the tokenizer is read, which takes longest: the rest was
    checked then. Raises StartError (ModelError, OptionsError) for what cannot be served."""
    warmups = warmup.parse(plan.http.warmups)
    model = prepare_ranks(plan)
    check_folders(plan)
    check_classes(plan)
    check_grammars(plan)
    if plan.observe.kv_events_config is not None and plan.observe.kv_events_config.is_on:
        require_zmq()
    if begin is not None:
        begin(model)
    text = open_text(plan, model)
    card = structs.replace(
        model_card(plan, model, text.formats),
        transcription=open_transcription(Path(plan.model.model_path), text.media),
    )
    return Prepared(model, text, card, warmups)


def prepare_ranks(plan: Plan) -> ModelConfig:
    """Reads and checks what the ranks of this node need, whichever node it is. Raises StartError."""
    model = model_config(plan)
    check_weights(plan)
    check_draft_model(plan.speculation.in_force, plan.model.model_path, model, plan.model.load_format)
    cache_scales(plan, model)
    places_at_start(plan.experts, model.moe, plan.parallel.nodes_of_stage)
    multiplexing(plan)
    diffusion(plan, model)
    check_offload(plan, model)
    check_host_tier(plan, model)
    check_machine(plan)
    check_nodes(plan)
    check_encoders(plan, model)
    check_groups(plan, model)
    check_scattered(plan, model)
    return model


def check_nodes(plan: Plan) -> None:
    """Several nodes have an address, and a secret. Raises StartError."""
    if plan.parallel.nnodes > 1:
        parse_address(plan.parallel.dist_init_addr or "")
        NODES_SECRET.read(plan.parallel.dist_secret_file)
    if plan.disaggregation.disaggregation_mode != "null":
        SERVERS_KEY.read(plan.disaggregation.disaggregation_key_file)
        check_backend(
            plan.disaggregation.disaggregation_transfer_backend, plan.disaggregation.disaggregation_ib_device
        )


def check_groups(plan: Plan, model: ModelConfig) -> None:
    """The model's layers can be divided among attention groups, if there are any. Raises OptionsError."""
    if not plan.parallel.enable_dp_attention or plan.parallel.device == "null":
        return
    pooling, remedy = model.pooling, "take replicas: --data-parallel-size without it"
    problem = ""
    if model.transformers_json is not None:
        problem = f"divides layers, and transformers' code computes this model on one rank; {remedy}"
    elif model.encoder is not None or model.is_bidirectional or isinstance(model.media, DualImages):
        problem = f"is for decoders, and this model sees whole texts; {remedy}"
    elif pooling is not None and pooling.judge_ids and not (model.is_tied or plan.parallel.enable_dp_lm_head):
        problem = "divides the head that judges over all groups; add --enable-dp-lm-head"
    if problem:
        raise OptionsError([f"--enable-dp-attention {problem}"])


def check_scattered(plan: Plan, model: ModelConfig) -> None:
    """The model's layers are computed of shards, if ranks have these. Raises OptionsError."""
    if plan.parallel.enable_attn_tp_input_scattered and (path := class_path(model)) not in SCATTERED:
        raise OptionsError(
            [
                "--enable-attn-tp-input-scattered computes plain decoders, hybrids and those of DeepSeek, "
                f"not {path.partition(':')[2]}; leave it out"
            ]
        )


def check_weights(plan: Plan) -> None:
    """The weights are in the folder, in whole files; those of a hub are downloaded later. Raises
    StartError."""
    if plan.model.load_format != "dummy" and plan.parallel.device != "null" and plan.model.hub_model is None:
        check_weight_files(Path(plan.model.model_path), plan.model.load_format)
    if plan.model.model_checksum:
        read_list(Path(plan.model.model_checksum))


def check_offload(plan: Plan, model: ModelConfig) -> None:
    """Groups of layers whose weights stay in host memory save some of the device's; --cpu-offload-gb is
    checked by the ranks, which know the bytes of layers. Raises StartError."""
    spec = plan.memory.offload
    if spec is not None and not spec.num_bytes:
        offloaded_layers(spec, [0] * model.num_layers)


def check_host_tier(plan: Plan, model: ModelConfig) -> None:
    """A host tier keeps pages of keys and values, of which a model without attention has none. Raises
    StartError."""
    if plan.tiers.enable_hierarchical_cache and not model.has_attention:
        raise StartError(
            "--enable-hierarchical-cache keeps keys and values, and no layer of this model attends; leave it "
            "out"
        )


def check_machine(plan: Plan) -> None:
    """The NUMA nodes exist, and have cores for this process; a level of CPU kernels that the environment
    names is there. Raises StartError."""
    for node in dict.fromkeys(plan.parallel.numa_node or ()):
        cores_of(node)
    if plan.parallel.device == "cpu":
        usable_levels()


def check_folders(plan: Plan) -> None:
    """The folders that will be written to are none that can't be. Raises StartError."""
    logs, files = plan.logs, plan.api.file_storage_path
    folders = [logs.crash_dump_folder, plan.observe.export_metrics_to_file_dir]
    if logs.log_requests:
        folders += [target for target in logs.log_requests_target or () if target not in ("stdout", "stderr")]
    for folder in filter(None, folders):
        try:
            check_writable(Path(folder))
        except OSError as error:
            raise StartError(
                f"{folder} cannot be written to: {error.strerror}; choose another folder"
            ) from None
    if files is not None:
        try:
            check_writable(Path(files))
        except OSError as error:
            raise StartError(
                f"--file-storage-path {files} can't be used ({error}); name a folder that can be written"
            ) from None


def check_grammars(plan: Plan) -> None:
    """The library of --grammar-backend is installed. Raises OptionsError."""
    package = GRAMMAR_PACKAGES.get(plan.kernels.grammar_backend)
    if package is not None and class_problem(package, ""):
        raise OptionsError(
            [
                f"--grammar-backend {plan.kernels.grammar_backend} needs the package {package}: "
                f"{install_line('grammar')}"
            ]
        )


def check_classes(plan: Plan) -> None:
    """The classes of logit processors and of the storage backend `dynamic` are found, as far as can be seen
    without running their modules. Raises StartError."""
    for path in plan.api.logit_processors if plan.api.enable_custom_logit_processor else ():
        _check_object("--logit-processors", path, "Class")
    for path in plan.weights.custom_weight_loader or ():
        _check_object("--custom-weight-loader", path, "function")
    if (recorded := plan.debug.debug_tensor_dump_input_file) is not None:
        try:
            check_regular(recorded)
        except OSError as error:
            raise StartError(f"--debug-tensor-dump-input-file {recorded} can't be read ({error})") from None
    for hook in plan.debug.forward_hooks or ():
        _check_object("--forward-hooks:", hook.hook_factory, "function")
    _check_storage_classes(plan)


def _check_object(option: str, path: str, kind: str) -> None:
    """Raises StartError where `path`, package.module:NAME, names no object that can be had; `kind`: what it
    should be, a Class or a function."""
    module, _, name = path.partition(":")
    if problem := class_problem(module, name or " "):
        raise StartError(
            f"{option} {path} can't be loaded ({problem}); give package.module:{kind} of a module that "
            "Python finds (for your own file set PYTHONPATH=FOLDER)"
        )


def _check_storage_classes(plan: Plan) -> None:
    """The package of the storage backend, and the class of `dynamic`, are found. Raises StartError."""
    package = PACKAGES.get(plan.tiers.hicache_storage_backend or "")
    if package is not None and all(class_problem(module, "") for module in package.modules):
        raise StartError(
            missing(str(plan.tiers.hicache_storage_backend), class_problem(package.modules[0], ""))
        )
    if plan.tiers.hicache_storage_backend == "dynamic":
        path = str(backend_settings(plan.tiers.hicache_storage_backend_extra_config)["module"])
        module, _, name = path.partition(":")
        if problem := class_problem(module, name):
            raise StartError(
                f'the storage backend {path} ("module" in --hicache-storage-backend-extra-config) cannot be '
                f"opened ({problem}); repair or leave it out"
            )


def class_problem(module: str, name: str) -> str:
    """Why `name` cannot be had from a module that is not run for it; empty: it may be there. An empty name
    stands for the module itself."""
    try:
        spec = find_module(module)
    except Exception:  # of an importer that another package has installed: it knows better
        return ""
    if spec is None:
        return f"ModuleNotFoundError: No module named {module!r}"
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    if name and is_source and not may_bind(Path(str(spec.origin)), name):
        return f"AttributeError: module {module!r} has no attribute {name!r}"
    return ""


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is, without importing it or its packages; None: nowhere."""
    folders: list[str] | None = None
    spec, whole = None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        found = (finder.find_spec(whole, folders) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def may_bind(file: Path, name: str) -> bool:
    """Whether a Python file may bind a name, by its syntax alone: False where it plainly does not."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return True  # an import of it will say
    bound: set[str] = set()
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                bound.add(node.name)
            case ast.Import() | ast.ImportFrom():
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                bound |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            case ast.Expr():
                pass
            case _:
                return True
    return bool(bound & {name, "*", "__getattr__"})
