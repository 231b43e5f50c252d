"""config.json of models whose images and sounds transformers' own code encodes. Torch-free.

Their encoder is that part of the model of transformers that makes embeddings of a prompt with images or
sounds. So each token that transformers' processor has in place of a placeholder takes a row: those of the
image, and the marks among them.
"""

import re
from pathlib import Path

from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.media_kind import MediaKind
from runtime.models.config.config_files import decode
from runtime.models.config.transformers_source import config_defaults, part_defaults, source_of
from runtime.regular_file import read_regular

# fields of the whole file that hold for the text model, where its own part does not say
SHARED = ("bos_token_id", "dtype", "eos_token_id", "torch_dtype", "tie_word_embeddings")
# fields that name the token of a kind's rows, and how processors call the placeholder
TOKENS: dict[MediaKind, tuple[str, tuple[str, ...]]] = {
    MediaKind.IMAGE: ("image_token", ("image_token_id", "image_token_index")),
    MediaKind.AUDIO: ("audio_token", ("audio_token_id", "audio_token_index")),
}
DEFAULT_RATE = 16000  # samples a second, where the model's files name none
PROMPT_WIDE = ("paligemma",)  # model types whose prompt attends to all of itself
DECODES = "it is an encoder and a decoder that cross-attends to it"
SEEN = "tokens of an image attend to those behind them"
CROSS = "layers of its text model cross-attend to images"
# classes whose media cannot be rows of embeddings over pages, where their source has none of SIGNS
UNSERVED_MEDIA = {
    "BlipForConditionalGeneration": CROSS,
    "DiffusionGemmaForBlockDiffusion": "it writes blocks by diffusion",
    "EvollaForProteinText2Text": "it takes proteins",
    "Florence2ForConditionalGeneration": DECODES,
    "GlmImageForConditionalGeneration": "it makes images",
    "GraniteSpeechForConditionalGeneration": "prompts with sounds have an adapter of their own",
    "GraniteSpeechPlusForConditionalGeneration": "prompts with sounds have an adapter of their own",
    "HunYuanVLForConditionalGeneration": "rotary positions name the number of an image in its prompt",
    "IdeficsForVisionText2Text": CROSS,
    "InstructBlipForConditionalGeneration": "what it makes of an image depends on the prompt",
    "InstructBlipVideoForConditionalGeneration": "what it makes of a video depends on the prompt",
    "MllamaForConditionalGeneration": CROSS,
    "PI0ForConditionalGeneration": "it answers with movements of a robot",
    "PPFormulaNetForConditionalGeneration": DECODES,
    "Pix2StructForConditionalGeneration": DECODES,
    "T5Gemma2ForConditionalGeneration": DECODES,
    "UdopForConditionalGeneration": DECODES,
    "VisionEncoderDecoderModel": DECODES,
}
ROTARY = "get_rope_index"  # what makes rotary positions of three numbers, in the source of a model type
# what the source of a model type has, as a pattern, and what it means
SIGNS = {
    "moe_mm_token_type_ids": "experts of images are apart from those of text",
    "(?<!mm_)token_type_ids": SEEN,
    "cross_attention_states": CROSS,
    "visual_pos_masks": "features of images are added behind its first layers",
    "deepstack": "features of images are added behind its first layers",
    "per_layer_inputs": "each layer has embeddings of its own, which follow from ids of tokens",
}


class TransformersEncoder(Struct, frozen=True, kw_only=True):
    """The part of a model of transformers that encodes images and sounds."""

    model_type: str
    row_ids: tuple[tuple[MediaKind, int], ...]  # the tokens that stand for rows, by kind
    output_size: int  # hidden size of the text model
    num_weights: int  # numbers in its towers, about
    is_prompt_wide: bool = False  # all tokens of a prompt see each other
    has_token_grids: bool = False  # its tokens have positions of frame, row and column

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """What it takes."""
        return frozenset(kind for kind, _ in self.row_ids)


def text_fields(fields: JsonDict) -> JsonDict:
    """config.json of the text model in that of a model that takes images or sounds, with the defaults of
    transformers. Raises ModelError."""
    model_type = str(fields.get("model_type", ""))
    kind, defaults = part_defaults(model_type, "text_config")
    text = fields.get("text_config")
    if not isinstance(text, dict):
        text = {} if text is None and kind else fields
    own = text.get("model_type")
    if isinstance(own, str) and own != kind:
        defaults = config_defaults(own)
    found = defaults | text
    shared = {name: fields[name] for name in SHARED if name in fields and text.get(name) is None}
    return found | shared


def read_transformers_media(architecture: str, fields: JsonDict, hidden_size: int) -> TransformersEncoder:
    """Raises ModelError for a model whose files name no token of images or sounds, or whose text model takes
    more of these than rows of embeddings."""
    model_type = str(fields.get("model_type", ""))
    if why := _sign(model_type):
        raise ModelError(
            f"--model-impl transformers does not serve {architecture} with images or sounds: {why}; take one "
            "of the models in docs/multimodal_models.md, or set --enable-multimodal false to serve text alone"
        )
    known = config_defaults(model_type) | fields
    rows = [
        (kind, next((id for name in names if isinstance(id := known.get(name), int)), None))
        for kind, (_, names) in TOKENS.items()
    ]
    row_ids = tuple((kind, id) for kind, id in rows if id is not None)
    if not row_ids:
        names = [name for _, (_, names) in TOKENS.items() for name in names]
        raise ModelError(
            f"--model-impl transformers: config.json has no model_type, or none of {', '.join(names)}, so "
            "what stands for an image or sound in a prompt is not known; restore it from the model's source, "
            "or set --enable-multimodal false to serve text alone"
        )
    return TransformersEncoder(
        model_type=model_type,
        row_ids=row_ids,
        output_size=hidden_size,
        num_weights=sum(_tower_weights(part) for part in known.values() if isinstance(part, dict)),
        is_prompt_wide=model_type in PROMPT_WIDE,
        has_token_grids=ROTARY in source_of(model_type, "modeling"),
    )


def _sign(model_type: str) -> str:
    """Why the media of a model type are no rows of embeddings; empty: they are."""
    if model_type in PROMPT_WIDE:
        return ""
    source = source_of(model_type, "modeling")
    if why := next((why for sign, why in SIGNS.items() if re.search(sign, source)), ""):
        return why
    has_types = "mm_token_type_ids" in source  # which tokens are of images
    if has_types == (ROTARY in source):
        return ""
    return SEEN if has_types else "its rotary positions know the rows and columns of images"


def _tower_weights(part: Fields) -> int:
    """Numbers in the layers of a tower, about; 0: the part of config.json is that of no tower."""
    kind = str(part.get("model_type", ""))
    if not re.search(r"vision|visual|audio|siglip|clip|vit|encoder|whisper", kind):
        return 0
    known = config_defaults(kind) | part
    sizes = [known.get(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes):
        return 0
    width, inner, layers = numbers
    return layers * (4 * width * width + 2 * width * inner)


def placeholder_texts(
    folder: Path, encoder: TransformersEncoder, named: Fields
) -> dict[MediaKind, list[str]]:
    """Texts that may stand for an image or sound in a prompt, the likeliest first: those of
    processor_config.json, of the tokenizer's `named` tokens, and of the processor's source. Raises
    ModelError."""
    found = {}
    path = folder / "processor_config.json"
    settings = decode(read_regular(path), JsonDict, path.name) if path.is_file() else {}
    source = source_of(encoder.model_type, "processing")
    for kind in encoder.kinds:
        name = TOKENS[kind][0]
        texts = [settings.get(name), named.get(name)]
        texts += re.findall(rf'(?i)\b{name}(?:: str)?\s*=\s*(?:AddedToken\()?"([^"]+)"', source)
        found[kind] = [text for text in texts if isinstance(text, str)]
    return found


def sampling_rate(folder: Path) -> int:
    """Samples a second of sounds, as the files of a model's processor say. Raises ModelError."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        fields = decode(read_regular(path), JsonDict, name) if path.is_file() else {}
        for part in (fields, *(one for one in fields.values() if isinstance(one, dict))):
            if isinstance(rate := part.get("sampling_rate"), int) and rate > 0:
                return rate
    return DEFAULT_RATE
