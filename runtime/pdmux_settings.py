"""Reads --pdmux-config-path: how a card is divided between prompts and decodes, in SGLang's form."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from runtime.errors import OptionsError
from runtime.messages.multiplexing import Multiplexing
from runtime.options.plan import Plan
from runtime.regular_file import read_text

Count = Annotated[int, Meta(ge=1)]
OPTION = "--pdmux-config-path"
OWN_GROUPS = 2  # all of the card for steps of prompts alone, and all of it for decodes alone


class PdmuxFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the file."""

    sm_group_num: Annotated[int, Meta(ge=3)] | None = None  # divisions, and the whole card twice
    manual_divisions: tuple[tuple[Count, Count, Count], ...] = ()  # see Multiplexing.manual
    decode_bs_divisor: Count = 36
    # layers of a prompt between two decode steps there; steps have chunks of prompts here
    split_forward_token_budget: Count = 65536


def multiplexing(plan: Plan) -> Multiplexing | None:
    """The divisions that the options ask for; None: none. Raises OptionsError."""
    if not plan.disaggregation.enable_pdmux:
        return None
    path, groups = plan.disaggregation.pdmux_config_path, plan.disaggregation.sm_group_num
    found = PdmuxFile() if path is None else read_pdmux(path)
    if found.sm_group_num is not None:
        if plan.why["sm_group_num"].source != "default" and groups != found.sm_group_num:
            raise OptionsError(
                [
                    f"--sm-group-num {groups} and sm_group_num: {found.sm_group_num} of {OPTION} {path} "
                    "contradict each other; leave one out"
                ]
            )
        groups = found.sm_group_num
    count, manual = groups - OWN_GROUPS, found.manual_divisions
    if manual and len(manual) != count:
        raise OptionsError(
            [
                f"{OPTION} {path}: {len(manual)} manual_divisions, where sm_group_num {groups} asks for "
                f"{count}, two fewer; change one of them"
            ]
        )
    rows = [least for _, _, least in manual]
    if rows != sorted(set(rows)):
        raise OptionsError(
            [
                f"{OPTION} {path}: the third numbers of manual_divisions must rise, as the fewest decodes "
                "for each"
            ]
        )
    return Multiplexing(num_divisions=count, manual=manual, rows_divisor=found.decode_bs_divisor)


def read_pdmux(path: str) -> PdmuxFile:
    """The file. Raises OptionsError."""
    import yaml  # slow to import, and needed for files only

    try:
        return msgspec.convert(yaml.safe_load(read_text(path)) or {}, PdmuxFile)
    except OSError as error:
        raise OptionsError([f"{OPTION} {path} cannot be read: {error.strerror or error}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError(
            [f"{OPTION} {path} says no divisions: {' '.join(str(error).split())}; see docs/cuda.md"]
        ) from None
