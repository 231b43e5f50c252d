"""Profiles: what they set is in force with its reason, what they leave for later is not here yet, and
everything wins over them."""

from pathlib import Path

import msgspec
import pytest

from runtime.devices.facts import DeviceFacts
from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.profile import names, read_profile
from runtime.options.resolve import plan_for, resolve
from runtime.options.rules.tables import NEEDS
from runtime.options.table import by_name

MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
NPU = DEVICES["npu"]


def plan(words: str, device: DeviceFacts, machine: MachineFacts = MACHINE) -> Plan:
    folder = str(Path(__file__).parents[2] / "runtime" / "pocket")
    return resolve(from_argv(words.split()), read_config(folder), device, machine)


@pytest.mark.parametrize("name", names())
def test_what_a_profile_sets_works_and_what_it_leaves_is_not_here(name: str) -> None:
    profile = read_profile(name)
    assert profile.about and profile.source and profile.options
    for option, line in profile.options.items():
        row = by_name()[option]
        assert row.acts, f"{name}: {row.flag} is {row.status}: move it to `later`"
        assert line.why
    for option, line in profile.later.items():
        row = by_name()[option]
        needed = [name for prefix, names in NEEDS if option.startswith(prefix) for name in names]
        is_later = line.value in row.later or any(name in profile.later for name in needed)
        # decode steps of attention groups are in no graph yet, and these profiles live on graphs
        of_groups = option in ("enable_dp_attention", "data_parallel_size", "load_balance_method")
        is_attention = of_groups and "enable_dp_attention" in profile.later
        is_addressed = option == "nnodes"  # nodes need an address, which no profile knows
        works = row.acts and not any((is_later, is_attention, is_addressed))
        assert not works, f"{name}: {row.flag} works now: move it to `options`"
        assert msgspec.convert(line.value, row.convert, strict=False) == line.value or isinstance(
            line.value, list
        )


def test_a_profile_sets_values_with_their_reasons() -> None:
    found = plan_for(from_argv("--profile cpu-edge".split()), MACHINE)
    assert found.schedule.max_running_requests == 8
    assert found.public()["max_running_requests"] == {
        "value": 8,
        "source": "profile cpu-edge",
        "reason": "a core computes few sequences at once",
    }


def test_a_file_wins_over_a_profile_and_flags_over_both(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("profile: cpu-edge\nmax-running-requests: 3\nmax-queued-requests: 5\n")
    found = plan_for(from_argv(["--config", str(tmp_path / "a.yaml"), "--max-queued-requests", "6"]), MACHINE)
    assert (
        found.schedule.max_running_requests,
        found.schedule.max_queued_requests,
        found.schedule.chunked_prefill_size,
    ) == (3, 6, 128)
    assert (
        found.why["max_running_requests"].source == "file a.yaml"
        and found.why["max_running_requests"].reason == ""
    )


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "about: mine\noptions:\n  tp: {value: 1, why: one is enough}\nlater:\n  attn-cp-size: "
        "{value: 2, why: two are more}\n"
    )
    parsed = from_argv(["--profile", str(path)])
    assert parsed.reasons["tensor_parallel_size"] == "one is enough"
    left_out = "attention_context_parallel_size"
    assert parsed.notices == [f"profile {path} leaves out what is not here yet: {left_out}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "about: x\noptions:\n  no-such: {value: 1, why: x}\n",
            "no-such is no option that a profile can set",
        ),
        ("about: x\noptions:\n  config: {value: a.yaml, why: x}\n", "config is no option"),
        ("about: x\noptions:\n  page-size: 3\n", "is no profile: Expected `object`, got `int`"),
        ("about: x\noptions:\n  page-size: {value: none, why: x}\n", "page_size of profile"),
        ("about: [\n", "is no profile"),
        ("- a\n", "is no profile"),
    ],
)
def test_a_broken_profile_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(OptionsError) as error:
        from_argv(["--profile", str(path)])
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["no-such", "no-such.yaml"])
def test_an_unknown_profile_is_refused(name: str) -> None:
    with pytest.raises(OptionsError, match=f"--profile {name}"):
        from_argv(["--profile", name])


def test_ranks_on_npu_devices_get_the_variables_of_their_libraries() -> None:
    usual = {variable: value for variable, value, _ in RANK_VARIABLES.values()}
    assert plan("", NPU).ascend.rank_environment == usual
    assert plan("", DEVICES["cpu"]).ascend.rank_environment == {}
    machine = msgspec.structs.replace(MACHINE, environment={"HCCL_BUFFSIZE": "123"})
    assert plan("", NPU, machine).ascend.rank_environment == usual | {"HCCL_BUFFSIZE": "123"}
    assert plan("--hccl-buffer-mb 1600", NPU, machine).ascend.rank_environment == usual | {
        "HCCL_BUFFSIZE": "1600"
    }


def test_options_of_one_device_are_refused_on_others() -> None:
    with pytest.raises(
        OptionsError,
        match="--hccl-buffer-mb does nothing on --device cpu; leave it out, or take --device npu",
    ):
        plan("--hccl-buffer-mb 1600", DEVICES["cpu"])
