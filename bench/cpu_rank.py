"""A rank of the cpu device in the process of a bench: one thread, float32, and what its plans admit."""

from pathlib import Path

from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.progress import without_progress
from runtime.messages.constraint import GrammarSetup
from runtime.messages.ranks import StartRank
from runtime.messages.steps import SlotSampling
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor

PAGE = 16  # tokens
GREEDY = SlotSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    seed=0,
    bias_ids=[],
    bias_values=[],
    stop_ids=[],
    min_len=0,
    top_logprobs=-1,
    prompt_logprobs=-1,
)


def start_rank(
    model: Path, rows: int, *, max_len: int, load_format: str = "auto", grammar: GrammarSetup | None = None
) -> TorchExecutor:
    """A rank with `rows` slots for sequences of up to `max_len` tokens. Raises what the start of a rank
    raises."""
    message = StartRank(
        device="cpu",
        model_path=str(model),
        dtype="float32",
        load_format=load_format,
        tp_size=1,
        page_size=PAGE,
        max_slots=rows,
        max_len=max_len,
        max_step_tokens=rows * 32,
        memory_fraction=0.5,
        max_total_tokens=rows * 512,
        num_threads=1,
        rendezvous="",
        seed=0,
        grammar=grammar,
    )
    return TorchExecutor(start_torch_rank(0, message, without_progress, open_device, FACTS))
