"""Which speculative algorithm suits a model and a machine, where the options name none."""

from runtime.models.config.model_config import ModelConfig
from runtime.models.config.next_token_layers import block_kinds, next_token_layout
from runtime.options.plan import Plan

FEW = 16  # sequences at once up to which drafts paid in all runs of docs/speculation.md


def draft_advice(plan: Plan, model: ModelConfig) -> str | None:
    """One line: an algorithm to try, and why; None: the user chose one, or the model makes vectors."""
    if plan.why["speculative_algorithm"].source != "default" or model.pooling is not None:
        return None
    layout = next_token_layout(model)
    if layout is not None and block_kinds(model) and model.draft_layers:
        algorithm = "NEXTN"
        reason = "config.json tells of next-token layers in the checkpoint, which make drafts of any text"
    else:
        algorithm = "NGRAM"
        reason = "it takes no further model, and makes answers faster that repeat prompts or earlier answers"
    running = plan.schedule.max_running_requests
    limit = "" if running <= FEW else f"; drafts pay while few of the {running} sequences that may run do"
    unproven = "" if plan.parallel.device == "cpu" else f"; no run on {plan.parallel.device} has shown it yet"
    return f"--speculative-algorithm {algorithm} is worth a try: {reason}{limit}{unproven}"
