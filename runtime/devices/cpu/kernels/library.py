"""The compiled kernels, as functions. The names and types here are those of library.cpp."""

import ctypes
from collections.abc import Sequence

from runtime.devices.cpu.kernels.levels import Level

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[object, Sequence[object]]] = {
    "kernels_lanes": (_INT, ()),
    "kernels_outputs": (_INT, ()),
    "kernels_packing": (_LONG, ()),
    "kernels_input_form": (_INT, (_INT,)),
    "kernels_start": (_POINTER, (_INT,)),
    "kernels_stop": (None, (_POINTER,)),
    "kernels_read": (_LONG, (_POINTER, _POINTER, _LONG)),
    "kernels_digest": (_LONG, (_POINTER, _POINTER, _LONG, _LONG)),
    "kernels_packed_bytes": (_LONG, (_INT, _INT, _INT, _INT)),
    "kernels_matrix": (_POINTER, (_INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER)),
    "kernels_free_matrix": (None, (_POINTER,)),
    "kernels_move_matrix": (None, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_pack": (None, (_POINTER, _POINTER, _POINTER)),
    "kernels_join": (_POINTER, (_POINTER, _INT)),
    "kernels_pack_ggml": (None, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER)),
    "kernels_pack_int4": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_quantize": (None, (_POINTER, _INT, _POINTER, _LONG, _INT, _INT, _POINTER, _POINTER)),
    "kernels_pack_float8": (None, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_screen": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)),
    "kernels_unpack": (None, (_POINTER, _POINTER, _LONG, _POINTER)),
    "kernels_product": (_POINTER, ()),
    "kernels_free_product": (None, (_POINTER,)),
    "kernels_multiply": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_try_multiply": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_attention": (_POINTER, (_POINTER,)),
    "kernels_free_attention": (None, (_POINTER,)),
    "kernels_attend": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_experts": (_POINTER, (_INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_move_experts": (None, (_POINTER, _POINTER, _POINTER)),
    "kernels_free_experts": (None, (_POINTER,)),
    "kernels_experts_call": (_POINTER, ()),
    "kernels_free_experts_call": (None, (_POINTER,)),
    "kernels_apply_experts": (_INT, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER)),
    "kernels_latent": (_POINTER, (_POINTER, _POINTER)),
    "kernels_free_latent": (None, (_POINTER,)),
    "kernels_attend_latents": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "program_keep_latents": (None, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "program_latent_attention": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "kernels_recurrent": (_POINTER, (_POINTER,)),
    "kernels_free_recurrent": (None, (_POINTER,)),
    "kernels_recur": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    "kernels_program": (_POINTER, (_POINTER,)),
    "kernels_free_program": (None, (_POINTER,)),
    "program_buffer": (_POINTER, (_POINTER, _INT, _INT)),
    "program_rotary": (_POINTER, (_POINTER,)),
    "program_set_rotary": (None, (_POINTER, _POINTER, _POINTER)),
    "program_embed": (None, (_POINTER, _POINTER, _POINTER, _INT, _FLOAT, _POINTER)),
    "program_output": (None, (_POINTER, _POINTER)),
    "program_prepare": (None, (_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _INT)),
    "program_head": (None, (_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER)),
    "program_screened_head": (_POINTER, (*(_POINTER,) * 3, _FLOAT, *(_POINTER,) * 3)),
    "program_set_screen": (None, (_POINTER, _POINTER, _POINTER, _FLOAT)),
    "program_screened_blocks": (_LONG, (_POINTER,)),
    "program_linear": (None, (*(_POINTER,) * 5, _INT, _FLOAT)),
    "program_act": (None, (_POINTER, _POINTER, _POINTER, _INT, _FLOAT)),
    "program_columns": (None, (_POINTER, _POINTER, _POINTER, _INT, _POINTER)),
    "program_multiply": (None, (_POINTER, _POINTER, _POINTER, _INT, _POINTER)),
    "program_recurrent": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    "program_lora": (None, (_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER)),
    "program_attention": (None, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "program_pair_buffer": (_POINTER, (_POINTER, _INT, _INT, _INT)),
    "program_assignment": (_POINTER, (_POINTER, _INT, _INT)),
    "program_counter": (_POINTER, (_POINTER,)),
    "program_set_counter": (None, (_POINTER, _POINTER)),
    "program_route": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "program_experts": (None, (*(_POINTER,) * 9, _INT)),
    "program_weigh": (None, (_POINTER, _POINTER, _POINTER)),
    "program_size": (_INT, (_POINTER,)),
    "program_run": (_INT, (_POINTER, _POINTER, _INT, _INT)),
    "kernels_sampler": (_POINTER, (_POINTER,)),
    "kernels_free_sampler": (None, (_POINTER,)),
    "kernels_sample": (None, (_POINTER,) * 6),
    "kernels_mask": (None, (_POINTER, _POINTER, _POINTER)),
    "kernels_penalise": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER)),
    "kernels_logprobs": (None, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER)),
}


class Step(ctypes.Structure):
    """step::Step of step.h: the tokens of a step in one line, row after row. Pointers are addresses."""

    _fields_ = [
        ("num_tokens", _LONG),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("locations", _POINTER * 2),
        ("num_rows", _LONG),
        ("slots", _POINTER),
        ("starts", _POINTER),
        ("counts", _POINTER),
        ("page_tables", _POINTER * 2),
        ("pages_per_slot", _LONG),
        ("page_size", _LONG),
        ("input", _POINTER),
        ("output", _POINTER),
        ("lora_slots", _POINTER),
        ("num_embeds", _LONG),
        ("embed_places", _POINTER),
        ("embeds", _POINTER),
        ("num_samples", _LONG),
        ("sample_places", _POINTER),
        ("logits", _POINTER),
        ("states", _POINTER),
        ("block", _LONG),
        ("largest_only", _LONG),
    ]


class Heads(ctypes.Structure):
    """layers::Heads of layers.h: what a layer's attention is made of."""

    _fields_ = [
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("dim", _INT),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("eps", _FLOAT),
        ("rotary", _POINTER),
        ("k_cache", _POINTER),
        ("v_cache", _POINTER),
        ("kind", _INT),
        ("pool", _INT),
        ("scale", _FLOAT),
        ("cap", _FLOAT),
        ("window", _INT),
        ("sinks", _POINTER),
        ("slopes", _POINTER),
        ("k_scale", _FLOAT),
        ("v_scale", _FLOAT),
    ]


class AdapterWeights(ctypes.Structure):
    """lora::Weights of lora.h: the adapters of one layer."""

    _fields_ = [
        ("a", _POINTER),
        ("b", _POINTER),
        ("kind", _INT),
        ("num_parts", _INT),
        ("rank", _INT),
        ("inputs", _INT),
        ("columns", _INT),
        ("offsets", _INT * 8),
        ("sizes", _INT * 8),
    ]


class Routing(ctypes.Structure):
    """experts::Routing of experts.h: how scores of a router become experts and weights."""

    _fields_ = [
        ("top_k", _INT),
        ("is_sigmoid", _INT),
        ("num_groups", _INT),
        ("top_groups", _INT),
        ("best_of_group", _INT),
        ("normalizes", _INT),
        ("scale", _FLOAT),
    ]


class Logits(ctypes.Structure):
    """sampling::Logits of logits.h: float32 rows [num_rows, vocabulary]."""

    _fields_ = [("num_rows", _LONG), ("vocabulary", _LONG), ("numbers", _POINTER)]


class Masks(ctypes.Structure):
    """sampling::Masks of logits.h: bits of the tokens that may be chosen in some rows of logits."""

    _fields_ = [("rows", _POINTER), ("count", _LONG), ("bits", _POINTER)]


class Choices(ctypes.Structure):
    """sampling::Sampler::Choices of sampling.h: how to sample from each row."""

    _fields_ = [
        ("temperatures", _POINTER),
        ("top_p", _POINTER),
        ("min_p", _POINTER),
        ("top_k", _POINTER),
        ("uniform", _POINTER),
    ]


class SeenTokens(ctypes.Structure):
    """sampling::Seen of logits.h: tokens that sequences have seen, and their penalties."""

    _fields_ = [("generated", _POINTER), ("in_prompt", _POINTER), ("penalties", _POINTER)]


def load_functions(level: Level) -> ctypes.CDLL:
    """The functions of one build, their types not yet declared. Raises OSError."""
    return ctypes.CDLL(str(level.path))


class Latents(ctypes.Structure):
    """latent::Latents of latent.h: what a layer's latent attention is made of."""

    _fields_ = [
        ("num_heads", _INT),
        ("nope_dim", _INT),
        ("rope_dim", _INT),
        ("rank", _INT),
        ("value_dim", _INT),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("norm", _POINTER),
        ("eps", _FLOAT),
        ("rotary", _POINTER),
        ("latents", _POINTER),
        ("ropes", _POINTER),
        ("kind", _INT),
        ("pool", _INT),
        ("scale", _FLOAT),
    ]


class LatentBuffers(ctypes.Structure):
    """latent::Buffers of latent.h: rows that the phases of latent attention hand on."""

    _fields_ = [("inputs", _POINTER), ("absorbed", _POINTER), ("attended", _POINTER), ("summed", _POINTER)]


class RecurrentLayer(ctypes.Structure):
    """recurrent::Layer of recurrent.h."""

    _fields_ = [
        *((name, _INT) for name in ("is_delta", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, _INT) for name in ("kernel", "activates")),
        *((name, _POINTER) for name in ("conv_weight", "conv_bias", "step_bias", "log_decay", "skip")),
        ("least_step", _FLOAT),
        ("most_step", _FLOAT),
        ("norm_weight", _POINTER),
        *((name, _INT) for name in ("norm", "norm_size", "norm_period")),
        ("eps", _FLOAT),
        ("conv_state", _POINTER),
        ("conv_kind", _INT),
        ("state", _POINTER),
        ("state_kind", _INT),
    ]


class TokenLines(ctypes.Structure):
    """recurrent::Lines of recurrent.h: lines of numbers, one for each token."""

    _fields_ = [("at", _POINTER), ("stride", _LONG), ("kind", _INT)]


class RecurrentRows(ctypes.Structure):
    """recurrent::Rows of recurrent.h; arrays of int64."""

    _fields_ = [
        ("count", _LONG),
        *((name, _POINTER) for name in ("slots", "targets", "begins", "counts", "by_blocks")),
    ]


class RecurrentTokens(ctypes.Structure):
    """recurrent::Tokens of recurrent.h."""

    _fields_ = [
        ("count", _LONG),
        *((name, TokenLines) for name in ("mixed", "gate", "rate", "step")),
        ("convolved", _POINTER),
        ("out", _POINTER),
        ("normed", TokenLines),
    ]


class Place(ctypes.Structure):
    """recurrent::Place of recurrent_phases.h: numbers of each token in the rows of a buffer."""

    _fields_ = [("buffer", _POINTER), ("first", _LONG)]


class Run(ctypes.Structure):
    """recurrent::Run of recurrent_phases.h: columns that go to others, times a factor."""

    _fields_ = [*((name, _INT) for name in ("start", "to", "count")), ("factor", _FLOAT)]


class Kept(ctypes.Structure):
    """recurrent::Kept of recurrent_phases.h: what rows of drafts bring to one layer."""

    _fields_ = [("count", _LONG), *((name, _POINTER) for name in ("tokens", "mixed", "rate", "step"))]


class Between(ctypes.Structure):
    """recurrent::Between of recurrent_phases.h: rows that the phases of a recurrent layer hand on."""

    _fields_ = [
        *((name, Place) for name in ("mixed", "gate", "rate", "step")),
        *((name, _POINTER) for name in ("convolved", "out", "normed")),
    ]


class Library:
    """The functions of one build, by their names in library.cpp without what precedes the first underscore
    being changed: `library.program_run(...)`."""

    def __init__(self, level: Level) -> None:
        """Raises OSError; AttributeError for a build of other sources."""
        self.level = level
        self.functions = load_functions(level)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, list(arguments)
        self.lanes = self.functions.kernels_lanes()
        self.packing: int = self.functions.kernels_packing()  # see build.packing_digest
        self.outputs = self.functions.kernels_outputs()
