"""Makes a model runner ready for captures."""

from typing import TYPE_CHECKING

from runtime.models.base import is_generative, is_piecewise
from runtime.ranks.captured_forward import CapturedForward
from runtime.ranks.decode_graphs import DecodeGraphs
from runtime.ranks.piecewise_graphs import PiecewiseGraphs
from runtime.ranks.verify_graphs import VerifyGraphs

if TYPE_CHECKING:
    from runtime.ranks.model_runner import ModelRunner


def open_graphs(
    runner: "ModelRunner",
) -> tuple[DecodeGraphs | None, VerifyGraphs | None, PiecewiseGraphs | None]:
    """Graphs of decode steps, of steps that verify drafts, and of what lies between the attentions of other
    steps, none of them captured yet. None where the device has no graphs, the setup no sizes, or the model
    decodes nothing or attends to sounds; of verify steps also where the model or its draft model has
    recurrent layers, several heads draft in turn, or attention groups share a language model head.
    """
    device, setup = runner.device, runner.graph_setup
    if device.graphs is None or not (runner.kv or runner.states) or not is_generative(runner.model):
        return None, None, None
    if runner.slots.cross is not None:
        return None, None, None
    decode_graphs = verify_graphs = piecewise_graphs = None
    if setup.sizes and runner.pooling is None:
        forward = CapturedForward(
            device,
            device.graphs,
            runner.model,
            runner.slots,
            runner.slots.lengths.reserve(),
            runner.kv,
            runner.page_size,
            runner.windows,
            masks=runner.load is not None,
            adapters=runner.adapters,
            compiled=runner.compiled,
            compiled_rows=setup.compiled_rows,
            states=runner.states,
            shifts=runner.slots.grids.reserve() if getattr(runner.model, "has_token_grids", False) else None,
        )
        # else the head is shared with other attention groups, or NaN is looked for in logits
        samples = runner.logits.groups is None and not runner.finds_nan
        decode_graphs = DecodeGraphs(forward, runner.transfers, setup.sizes, pads=setup.pads, samples=samples)
        sizes = (
            [] if not samples or setup.speculation is None else setup.speculation.captured_sizes(setup.sizes)
        )
        drafts = runner.drafts
        is_captured = drafts is None or not (drafts.network.num_remade or drafts.recurrent is not None)
        if setup.speculation is not None and sizes and runner.states is None and is_captured:
            verify_graphs = VerifyGraphs(
                forward, runner.transfers, setup.speculation, sizes, runner.drafts, pads=setup.pads
            )
    if setup.piecewise_sizes and is_piecewise(runner.model):
        piecewise_graphs = PiecewiseGraphs(
            device,
            device.graphs,
            runner.model,
            runner.slots,
            runner.kv,
            runner.page_size,
            runner.windows,
            setup.piecewise_sizes,
            masks=runner.load is not None,
            compiled=runner.compiled if setup.compiles_piecewise else None,
            states=runner.states,
            given=None if runner.pipeline is None else runner.pipeline.given_form,
            adapters=runner.adapters,
            offload=runner.offload,
        )
    return decode_graphs, verify_graphs, piecewise_graphs
