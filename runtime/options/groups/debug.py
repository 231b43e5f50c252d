"""Debugging of the runtime or of a model."""

from typing import Annotated as A

from runtime.messages.diagnosis import Diagnosis, LayerHook, TensorDump
from runtime.options.declare import Group, Whole, on_device, option, superseded


class Debug(Group, frozen=True, kw_only=True):
    """Debugging"""

    enable_nan_detection: A[
        bool,
        option(
            "End requests whose logits have a NaN with an error. Without it NaN counts as minus infinity."
        ),
    ] = False
    enable_layerwise_nvtx_marker: A[bool, on_device("cuda", "Mark layers in profiles.")] = False
    debug_tensor_dump_output_folder: A[
        str | None,
        option("Folder for what each layer computes, a safetensors file for each step; docs/debugging.md."),
    ] = None
    debug_tensor_dump_layers: A[
        tuple[Whole, ...] | None, option("Layers to write; all others are left out.")
    ] = None
    debug_tensor_dump_input_file: A[str | None, option("A file of another run, for ...-inject.")] = None
    debug_tensor_dump_inject: A[
        bool, option("Give each layer the input that the file has, in steps with the same tokens.")
    ] = False
    debug_tensor_dump_prefill_only: A[bool, option("Write no steps in which every sequence decodes.")] = False
    forward_hooks: A[
        tuple[LayerHook, ...] | None,
        option("Functions that see and may replace what layers compute, as JSON; docs/debugging.md."),
    ] = None
    disable_outlines_disk_cache: A[
        bool, superseded("Don't keep compiled grammars on disk.", "nothing is kept on disk.")
    ] = False

    @property
    def in_force(self) -> Diagnosis:
        """What ranks look at."""
        dump = None
        if self.debug_tensor_dump_output_folder is not None:
            dump = TensorDump(
                self.debug_tensor_dump_output_folder,
                self.debug_tensor_dump_layers,
                self.debug_tensor_dump_prefill_only,
                self.debug_tensor_dump_input_file or "",
                self.debug_tensor_dump_inject,
            )
        return Diagnosis(self.enable_nan_detection, self.forward_hooks or (), dump)
