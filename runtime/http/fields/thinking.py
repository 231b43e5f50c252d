"""Budgets of reasoning: the fields of all APIs that limit how many tokens an answer may reason."""

from runtime.errors import InvalidRequest
from runtime.messages.sampling import ThinkingLimit
from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.detect import AnswerFormats

UNLIMITED = -1  # vLLM's word for no budget


def has_budgets(formats: AnswerFormats) -> bool:
    """Whether the model's reasoning can have a budget: its format says what ends it."""
    channels = CHANNEL_FORMATS.get(formats.reasoning or "")
    return formats.reasoning_format is not None or (channels is not None and channels.thinking is not None)


def thinking_limit(
    formats: AnswerFormats, budget: int | None, field: str, *, is_continued: bool = False
) -> ThinkingLimit | None:
    """The limit of an answer's reasoning. `field`: the client's name of the budget. Raises InvalidRequest
    where the server knows no reasoning of the model."""
    if budget is None or budget == UNLIMITED:
        return None
    if budget < UNLIMITED:
        raise InvalidRequest(f"{field} must be 0 or more, or -1 for no budget", param=field)
    channels = CHANNEL_FORMATS.get(formats.reasoning or "")
    if channels is not None and channels.thinking is not None:
        return ThinkingLimit(min(budget, 2**31 - 1), (channels.thinking,), is_anywhere=True)
    if (reasoning := formats.reasoning_format) is None:
        raise InvalidRequest(
            f"{field} needs a reasoning parser that says what ends the model's reasoning, and "
            f"{formats.reasoning or 'none'} does not; leave it out, or start the server with "
            "--reasoning-parser",
            param=field,
        )
    return ThinkingLimit(
        min(budget, 2**31 - 1), reasoning.pairs, is_forced=reasoning.is_forced, is_continued=is_continued
    )
