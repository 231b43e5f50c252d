"""Debugging of the runtime or of a model."""

from typing import Annotated as A

from runtime.options.declare import Group, Json, Whole, on_device, planned, superseded

LAYERS = "layers are functions in captured steps, no modules that hooks or dumps could be attached to"


class Debug(Group, frozen=True, kw_only=True):
    """Debugging"""

    enable_nan_detection: A[
        bool,
        planned(
            "Report numbers that are none.",
            note="logits that are not finite stop no rank and no other request, and are not reported",
        ),
    ] = False
    enable_layerwise_nvtx_marker: A[bool, on_device("cuda", "Mark layers in profiles.")] = False
    debug_tensor_dump_output_folder: A[
        str | None, planned("Folder for the tensors of each layer.", note=LAYERS)
    ] = None
    debug_tensor_dump_layers: A[tuple[Whole, ...] | None, planned("Layers to write.", note=LAYERS)] = None
    debug_tensor_dump_input_file: A[str | None, planned("File with input for the model.", note=LAYERS)] = None
    debug_tensor_dump_inject: A[
        bool, planned("Replace each layer's input by the recorded one.", note=LAYERS)
    ] = False
    debug_tensor_dump_prefill_only: A[bool, planned("Write the tensors of prompts only.", note=LAYERS)] = (
        False
    )
    forward_hooks: A[tuple[Json, ...] | None, planned("Hooks to attach to layers, as JSON.", note=LAYERS)] = (
        None
    )
    disable_outlines_disk_cache: A[
        bool, superseded("Don't keep compiled grammars on disk.", "nothing is kept on disk.")
    ] = False
