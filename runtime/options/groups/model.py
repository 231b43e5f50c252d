"""Which weights are served, and how they and their tokenizer are read."""

from pathlib import Path
from typing import Annotated as A
from typing import Literal

import runtime
from runtime.hub.source import HubModel
from runtime.models.config.transformers_config import ModelImpl
from runtime.options.declare import Amount, Auto, Count, Derived, Group, Json, option, superseded
from runtime.options.facts import ModelFacts

LoadFormat = Literal[
    "auto",
    "pt",
    "safetensors",
    "npcache",
    "dummy",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "layered",
    "flash_rl",
    "remote",
    "remote_instance",
    "fastsafetensors",
    "runai_streamer",
    "mistral",
    "private",
]
THREAD_SETTINGS = ("num_threads", "concurrency")  # of --model-loader-extra-config
MAX_THREADS = 64
# choices of --load-format that are refused -> what to take instead
NO_LOADER = {
    "flash_rl": "reads weights that a trainer quantizes by a profile of FlashRL; take auto, with "
    "--quantization for weights that are quantized while they are loaded",
    "private": "stands for loaders that are not part of any release; take auto, or the format that the "
    "folder has",
}


class Model(Group, frozen=True, kw_only=True):
    """Model and tokenizer"""

    model_path: A[
        str,
        option(
            "Folder with weights in Hugging Face layout, GGUF file, or org/name on the hub; pocket is "
            "inside this package.",
            aliases=("--model", "-m"),
            note="the reference requires it; here a server without one answers with the embedded model",
        ),
    ] = "pocket"
    tokenizer_path: A[
        str, option("Folder of the tokenizer, or org/name on the hub; auto takes the model's own.")
    ] = "auto"
    tokenizer_mode: A[
        Literal["auto", "slow"],
        option(
            "Which tokenizer: tokenizer.json, or what that was made from.",
            note="auto takes tokenizer.json, slow tokenizer.model, tekken.json or *.tiktoken if there is "
            "one; those are converted by transformers, once, in a process of its own; see models.md",
        ),
    ] = "auto"
    tokenizer_worker_num: A[
        Count,
        superseded(
            "Processes that tokenize.",
            "one tokenizer actor encodes in the server, long texts in worker threads.",
        ),
    ] = 1
    skip_tokenizer_init: A[
        bool,
        option(
            "Serve token ids only, without loading a tokenizer.",
            note="prompts are token ids, answers have output_ids and no text; what needs text (chats, stop "
            "strings, grammars) is refused",
        ),
    ] = False
    load_format: A[
        LoadFormat,
        option(
            "What the weights are stored as; dummy makes random ones, auto takes what the folder has.",
            note="pickles (pt, npcache) are read as tensors alone; fastsafetensors and runai_streamer are "
            "read by this runtime's own parallel reader, and layered is how every format is read; models.md "
            "has the formats; remote_instance takes all files from a running server of this kind, and "
            "--model-path is then only the name of the model",
            missing="flash_rl and private, each of which is refused with what to take instead",
        ),
    ] = "auto"
    model_loader_extra_config: A[
        Json,
        option(
            "Settings of the loader, as JSON.",
            note='{"num_threads": 8} (also "concurrency"): threads that read one tensor, of 4 otherwise; '
            '"enable_multithread_load" is always on',
        ),
    ] = {}
    trust_remote_code: A[
        bool,
        superseded(
            "Run Python code that comes with a model.",
            "no code of a model folder is ever run, and no family here needs it.",
        ),
    ] = False
    context_length: A[
        Count | Auto,
        option("Longest sequence in tokens, prompt and output together; auto reads config.json."),
    ] = "auto"
    is_embedding: A[
        bool, option("Let a model that generates make embeddings instead; one made for them does so anyway.")
    ] = False
    pooling: A[
        Literal["auto", "last", "mean", "cls"],
        option(
            "Which tokens an embedding is made of: the last, all, the first; auto: as the model's "
            "1_Pooling/config.json says."
        ),
    ] = "auto"
    enable_multimodal: A[
        bool | Auto,
        option(
            "Serve the images of a model that takes some; else its text alone.",
            note="auto: where this runtime has the model's encoder (docs/multimodal_models.md)",
        ),
    ] = "auto"
    revision: A[str | None, option("Branch, tag or commit of a model that is fetched from the hub.")] = None
    model_impl: A[
        ModelImpl,
        option(
            "Whose code computes the model: the runtime's own, or that of transformers over paged attention.",
            note="auto: that of transformers for models that this runtime does not have",
        ),
    ] = "auto"
    download_dir: A[
        str | None,
        option(
            "Folder for models that are fetched from the hub.",
            note="none: the hub library's own (HF_HOME); models.md has the variables that count",
        ),
    ] = None
    model_checksum: A[
        str | None,
        option(
            "Check the files of the model against a list of SHA-256 checksums before they are loaded.",
            note="a file as sha256sum writes it, or JSON of names and checksums; every weight file must be "
            "in it; without a value, the list of the hub that the model is from; see models.md",
            missing="the checksums of another repository of a hub, by its name",
            bare="",
        ),
    ] = None
    json_model_override_args: A[
        Json, option("Values that replace those at the top of config.json, as JSON.")
    ] = {}
    profile: A[
        str | None,
        option(
            "Settings for a known model on known hardware, by name or as a YAML file; --config and flags "
            "win over it."
        ),
    ] = None
    config: A[str | None, option("YAML file of options, one `name: value` a line; flags win over it.")] = None
    enable_tokenizer_batch_encode: A[
        bool,
        superseded(
            "Encode the prompts of a batch request together.",
            "prompts are encoded as they come, and long ones in parallel in worker threads.",
        ),
    ] = False
    disable_tokenizer_batch_decode: A[
        bool,
        superseded(
            "Turn each sequence's tokens to text on their own.",
            "text is made incrementally for each sequence, all sequences of a step in one pass.",
        ),
    ] = False
    disable_tokenizer_batch_encode: A[
        bool,
        superseded(
            "Encode the prompts of a batch request one by one.",
            "prompts are encoded one by one as they come.",
        ),
    ] = False
    enable_dynamic_batch_tokenizer: A[
        bool,
        superseded(
            "Collect single requests for a moment and encode them together.",
            "short prompts are encoded at once, which is faster than waiting for company.",
        ),
    ] = False
    dynamic_batch_tokenizer_batch_size: A[
        Count,
        superseded(
            "Most requests that the collecting tokenizer takes together.",
            "short prompts are encoded at once, which is faster than waiting for company.",
        ),
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: A[
        Amount,
        superseded(
            "Seconds that the collecting tokenizer waits for company.",
            "short prompts are encoded at once, which is faster than waiting for company.",
        ),
    ] = 0.002


class ModelPlan(Model, frozen=True, kw_only=True):
    """Model and tokenizer in force."""

    context_length: int  # tokens, prompt and output together
    enable_multimodal: bool
    pooling: str  # last, mean or cls; none: the model generates text
    hub_model: HubModel | None = None  # whose weights are downloaded at start; None: a folder of this machine


EMBEDDED_MODEL = {
    "pocket": Derived(
        str(Path(runtime.__file__).parent / "pocket"), "pocket is the model inside this package"
    )
}


def tokenizer_path(model_path: str) -> Derived:
    """The tokenizer's folder is the model's."""
    return Derived(model_path, "the tokenizer lies with the model")


def context_length(model: ModelFacts) -> Derived:
    """The context length is that of config.json, in tokens."""
    return Derived(model.context_len, "config.json says so")


def enable_multimodal(model: ModelFacts) -> Derived:
    """Images are taken where there is an encoder for them."""
    if model.media is None:
        return Derived(False, "this runtime has no encoder of the model")
    return Derived(True, "the model has an encoder")


def pooling(model: ModelFacts) -> Derived:
    """Pooling is that of the model's folder or head; "none" for a model that generates text."""
    if model.pooling is None:
        return Derived("none", "the model generates text")
    return Derived(
        model.pooling.mode,
        "the model's folder says so" if model.pooling.task == "embed" else "the model's head takes it",
    )
