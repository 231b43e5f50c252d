"""PD multiplexing (--enable-pdmux): the decodes and the prompts of a step are computed at the same time, on
some of the multiprocessors (SMs) of one card each. How many follows from the number of decode rows."""

from typing import NamedTuple

from msgspec import Struct

LEAST_DECODE_SMS = 16  # decodes read memory faster with more


class Division(NamedTuple):
    """How many multiprocessors prompts and decodes have."""

    prompts: int
    decodes: int


class Multiplexing(Struct, frozen=True, kw_only=True):
    """The divisions of a card."""

    num_divisions: int = 6
    # prompts, decodes, and the fewest decode rows for which it is taken; (): `divisions` makes them up
    manual: tuple[tuple[int, int, int], ...] = ()
    rows_divisor: int = 36  # decode rows from which on the last one is taken, where none are given

    def divisions(self, num_sms: int, unit: int) -> list[Division]:
        """The divisions of a card with `num_sms` multiprocessors, the most for prompts first; `unit`: the
        part of prompts is a multiple of it. Raises ValueError for a card that cannot be divided so."""
        if self.manual:
            for prompts, decodes, _ in self.manual:
                if prompts + decodes != num_sms:
                    raise ValueError(
                        f"[{prompts}, {decodes}] of manual_divisions adds up to {prompts + decodes}, and the "
                        f"card has {num_sms} multiprocessors; give divisions of these"
                    )
                if prompts % unit:
                    raise ValueError(
                        f"[{prompts}, {decodes}] of manual_divisions: the first number must be a multiple of "
                        f"{unit} on this card; choose another"
                    )
            return [Division(prompts, decodes) for prompts, decodes, _ in self.manual]
        most, least = (num_sms - LEAST_DECODE_SMS) // unit, -(-num_sms // 2 // unit)
        if most < least:
            raise ValueError(f"{num_sms} multiprocessors are too few for two parts")
        count = min(self.num_divisions, most - least + 1)
        places = [round(i * (most - least) / max(count - 1, 1)) for i in range(count)]
        return [Division(unit * (most - place), num_sms - unit * (most - place)) for place in places]

    def least_rows(self, count: int) -> list[int]:
        """The fewest decode rows for which each of `count` divisions is taken. Those of fewer rows have the
        first one."""
        if self.manual:
            return [rows for _, _, rows in self.manual]
        return [0, *(-(-place * self.rows_divisor // count) for place in range(2, count + 1))]

    def choose(self, num_rows: int, count: int) -> int:
        """The number of the division, of `count`, for steps with so many decode rows."""
        taken = [place for place, rows in enumerate(self.least_rows(count)) if num_rows >= rows]
        return taken[-1] if taken else 0
