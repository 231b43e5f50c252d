"""How prompts get into steps, as options say."""

from msgspec import Struct


class Admission(Struct, frozen=True, kw_only=True):
    """How known tokens get into steps."""

    max_step_tokens: int  # known tokens that one step may compute
    max_prompts: int | None = None  # of one step
    has_chunks: bool = True  # False: a prompt is computed in one step, or waits for the next
    has_dynamic_chunks: bool = False
    max_step_s: float = 0.0  # of a step in which sequences decode and prompts are computed; 0: no bound
    long_share: float = 0.5  # of a step's known tokens that long prompts get together while others have some
    decode_steps: int = 1  # from one step that admits to the next, while sequences decode
    # for which newcomers are held back at most, until they fill a step (delayer.py); 0: none
    delay_steps: int = 0
    delay_watermark: float | None = None  # share of used pages below which no prompt is held back
