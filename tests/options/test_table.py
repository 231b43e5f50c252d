"""The table against the reference systems: every flag is known, under every name, with the same default and
choices or a reason.

reference.json holds facts only: for SGLang flag, aliases, type, default and choices; for RTP-LLM flag and
default.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import OptionsError
from runtime.options.docs import note
from runtime.options.parse import from_argv
from runtime.options.table import Row, by_flag, by_name, canonical, foreign_rows, rows

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())
SGLANG = pytest.mark.parametrize(
    ("flag", "aliases", "kind", "default", "choices"), REFERENCE["sglang"], ids=lambda x: str(x)[:40]
)
EVERY = pytest.mark.parametrize("row", [*rows(), *foreign_rows()], ids=lambda row: row.flag)


def same_default(theirs: Any, ours: Any) -> bool:
    """Equal, or the same value written differently: None for auto, None or nothing for off and empty, a
    product for a number."""
    if isinstance(theirs, str) and isinstance(ours, int):
        return theirs == "10 * 1000 * 1000" and ours == 10_000_000
    if not ours:
        return not theirs or theirs == "{}"
    return bool(theirs == ours or (ours == "auto" and theirs is None))


@SGLANG
def test_flag_of_sglang(
    flag: str, aliases: list[str], kind: str, default: Any, choices: list[str] | None
) -> None:
    row = by_flag()[flag]
    assert all(by_flag()[alias] is row for alias in aliases)
    assert same_default(default, row.default) or row.note or flag in row.aliases or row.means, (
        f"default {row.default} is not {default}"
    )
    if choices and not row.means:
        ours = set(row.choices or ())
        assert set(map(str, choices)) - {"None"} <= ours, "choices are missing"
        own = {"auto", "none", "int8", "int4", "mistral", "runai_streamer", "prefix_aware"}
        own |= {"cpu", "torch_native", "tcp", "shm", "quark", "torchao", "fbgemm_fp8", "simm", "lmcache"} | {
            "cudnn"
        }
        assert ours - set(map(str, choices)) <= own, "choices of our own"


@pytest.mark.parametrize(("flag", "default"), REFERENCE["rtp_llm"], ids=lambda x: str(x)[:40])
def test_flag_of_rtp_llm(flag: str, default: str) -> None:
    row = by_flag()[canonical(flag)]
    if row.group == "rtp_llm":
        assert row.flag == flag and str(row.default) == default.strip('"')


def test_the_reference_is_whole() -> None:
    assert (len(REFERENCE["sglang"]), len(REFERENCE["rtp_llm"])) == (345, 92)


@EVERY
def test_each_row_is_complete(row: Row) -> None:
    assert row.help.endswith(".") and len(row.help) <= 120 and row.help[0].isupper()
    assert row.flag.startswith("--") and all(alias.startswith("-") for alias in row.aliases)
    assert bool(row.device) == (row.status == "other-device")
    assert row.note or row.status != "superseded", "who does its job?"
    assert not set(row.later) - set(row.choices or ())
    assert bool(row.later or row.missing) == (row.status == "partial")
    assert (
        row.default in (row.choices or (row.default,))
        or row.default is None
        or str(row.default) in (row.choices or ())
    )


def sample(row: Row) -> list[str]:
    """A value that the row takes, other than its default."""
    match row:
        case Row(takes="switch"):
            return []
        case Row(choices=(_, *_)):
            assert row.choices
            now = [word for word in row.choices if word not in row.later]
            return [next((word for word in now if word != row.default), now[0])]
        case Row(name="forward_hooks"):
            return ["[]"]
        case Row(takes="json"):
            return ["{}"]
        case Row(name="node_rank"):
            return ["0"]
        case Row(name="sp_type"):
            return ["deterministic"]
        case Row(name="sp_quantization"):
            return ["fp8"]
        case Row(name="tokenizer_metrics_allowed_custom_labels"):
            return ["team"]
        case Row(name="sm_group_num"):
            return ["4"]
        case Row(name="fastapi_root_path"):
            return ["/1"]
        case Row(name="cors_origins"):
            return ["https://app.example"]
        case _:
            return ["1"]


@EVERY
def test_each_status_is_kept(row: Row) -> None:
    """Works and superseded are accepted, the others refused by name, unless they ask for the default: nothing
    is accepted and ignored in silence."""
    argv = [row.flag, *sample(row)]
    try:
        parsed = from_argv(argv)
    except OptionsError as error:
        text = "\n".join(error.problems)
        if row.status == "refused":
            assert f"{row.flag} is refused: {row.note}" in text
        elif row.status == "other-device":
            assert row.device in text
        else:
            # what an option lacks may be a value, which is named first
            is_missing = row.missing.partition(":")[0] in argv
            is_later = row.means and any(f"{word} is not here yet" in text for word in row.values.values())
            assert (
                row.name in ("config", "profile")
                or row.name.startswith("null_")
                or is_later
                or is_missing
                or any(words in text for words in ("does nothing without", "requires", "it goes with"))
            ), text
        return
    means_default = any(
        words in line
        for line in parsed.notices
        for words in ("asks for what is the default", "it is what happens anyway")
    )
    assert row.acts or row.status == "superseded" or means_default
    assert row.acts or any(row.flag in line for line in parsed.notices)
    if row.acts:
        assert parsed.sources[row.name] == f"flag {row.flag}"


@pytest.mark.parametrize(
    ("name", "type", "takes", "choices"),
    [
        ("page_size", "int >=1|auto", "one", None),
        ("mem_fraction_static", "float >0 <=1|auto", "one", None),
        ("port", "int >=0 <=65535", "one", None),
        ("disable_radix_cache", "bool", "switch", None),
        ("enable_lora", "bool|auto", "switch", None),
        ("log_format", "json|text", "one", ("json", "text")),
        ("bucket_inter_token_latency", "float >=0 ...", "many", None),
        ("json_model_override_args", "json", "json", None),
        ("forward_hooks", "json", "json", None),
        ("host", "str", "one", None),
        (
            "speculative_algorithm",
            "EAGLE|EAGLE3|NEXTN|NGRAM|STANDALONE",
            "one",
            ("EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE"),
        ),
    ],
)
def test_types_are_read_from_the_declarations(
    name: str, type: str, takes: str, choices: tuple[str, ...] | None
) -> None:
    row = by_name()[name]
    assert (row.type, row.takes, row.choices) == (type, takes, choices)


def test_a_note_says_why_or_what_is_missing() -> None:
    assert "whole pages gather faster" in note(by_name()["page_size"])
    assert "missing: flash_rl" in note(by_name()["load_format"])
    assert "not here yet" in note(by_name()["moe_a2a_backend"])
    assert note(by_name()["nsa_decode_backend"]) == "for cuda devices"
