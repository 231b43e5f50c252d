"""An option that acts is read: its value goes from the plan to code that does something with it, or it is one
of which only one value is possible. Found in the syntax trees of the package."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from msgspec import Struct, structs

import runtime
from runtime.cache.host import HostConfig
from runtime.cache.kv import CacheConfig
from runtime.cache.states import StateConfig
from runtime.cache.window import WindowConfig
from runtime.devices.ascend.options import AscendOptions
from runtime.devices.cuda.options import CudaOptions
from runtime.devices.null.options import NullOptions
from runtime.http.settings import HttpSettings
from runtime.messages.constraint import GrammarSetup
from runtime.messages.lora import AdapterSetup
from runtime.messages.ranks import CompileConfig, StartRank
from runtime.messages.sampling import Limits
from runtime.metrics.table import Buckets
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.groups.observe import KVEvents
from runtime.options.table import Row, rows
from runtime.parsing.detect import AnswerFormats
from runtime.scheduling.admission import Admission
from runtime.scheduling.lora_slots import LoraSlotConfig
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.scheduling.waiting import OrderConfig
from runtime.service import ModelCard
from runtime.storage.settings import FileSettings, TierSettings

ROOT = Path(runtime.__file__).parent
OPTIONS = "options/"
SIZES = "options/captures.py"  # sizes of captures, for the settings and for estimates of memory
# read where options are parsed, before there is a plan
PARSED = {"config", "profile"}
# read of the options, to find the model and its tokenizer: resolve.py
MODEL = {
    "download_dir",
    "revision",
    "tokenizer_mode",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port",
}
# a check at the start is all that they ask for (options/rules/)
CHECKED = {"enable_deterministic_inference"}
# read by requested_quantization of groups/precision.py, whose result settings.py hands on
PRECISION = {"quantization", "modelopt_quant", "quantize_and_serve", "torchao_config"}


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


@cache
def reads() -> dict[tuple[str, str], set[str]]:
    """Files in which `base.name` is read, by base and name."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                found[name, node.attr].add(file)
    return found


@cache
def properties() -> dict[str, list[ast.FunctionDef]]:
    """Methods of the plan and of its groups, by name."""
    found: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for file, tree in trees().items():
        if file == "options/plan.py" or file.startswith("options/groups/"):
            for kind in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
                for method in [node for node in kind.body if isinstance(node, ast.FunctionDef)]:
                    found[method.name].append(method)
    return found


def is_read(name: str, group: str) -> bool:
    """Whether code outside of the options reads `group.name`, or a property of the plan that reads it."""
    is_direct = any(not file.startswith(OPTIONS) or file == SIZES for file in reads()[group, name])
    return is_direct or any(is_used(user) or is_read(user, "") for user in users(name))


def is_used(name: str) -> bool:
    """Whether code outside of the options reads an attribute of this name of anything."""
    return any(
        attribute == name and any(not file.startswith(OPTIONS) for file in files)
        for (_, attribute), files in reads().items()
    )


def users(name: str) -> list[str]:
    """Methods of the plan and its groups that read an attribute of this name."""
    return [
        user
        for user, methods in properties().items()
        if user != name
        for method in methods
        if any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(method))
    ]


def derives(name: str) -> bool:
    """Whether another value of the plan is derived from it."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "c"
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == name
        for node in ast.walk(trees()["options/resolve.py"])
    )


def is_only_choice(row: Row) -> bool:
    """Whether at most one thing can be chosen: `auto` and the one value that it stands for, values that the
    table says to be the same, or the one that is left of those whose reason against them it says."""
    now = {choice for choice in row.choices or () if not row.missing.startswith(f"{choice}:")}
    now -= {*row.later, "auto"}
    alike = "whatever is chosen", "device's own", "values above 1"
    return row.status == "partial" and (len(now) == 1 or any(words in row.missing for words in alike))


@pytest.mark.parametrize("row", [row for row in rows() if row.acts], ids=lambda row: row.flag)
def test_an_option_that_acts_is_read(row: Row) -> None:
    if row.name in PARSED | MODEL | PRECISION | CHECKED | set(RANK_VARIABLES) or is_only_choice(row):
        return
    assert is_read(row.name, row.group) or derives(row.name), (
        f"nothing outside of options/ reads {row.group}.{row.name}: it is no option that works"
    )


@pytest.mark.parametrize(
    ("kind", "folders"),
    [
        (StartRank, ("ranks/", "devices/", "layers/", "models/", "cache/", "actors/", "messages/")),
        (CudaOptions, ("devices/cuda/",)),
        (AscendOptions, ("devices/ascend/",)),
        (NullOptions, ("devices/null/",)),
        (SchedulerConfig, ("scheduling/", "cache/", "actors/")),
        (HttpSettings, ("http/",)),
        (GrammarSetup, ("grammar/", "layers/", "actors/", "ranks/")),
        (CompileConfig, ("ranks/",)),
        (AdapterSetup, ("ranks/", "layers/")),
        (Limits, ("messages/", "actors/", "http/", "text/", "admin/")),
        (ModelCard, ("http/", "rpc/", "actors/", "admin/", "service.py")),
        (AnswerFormats, ("http/", "parsing/")),
        (CacheConfig, ("cache/",)),
        (HostConfig, ("cache/",)),
        (WindowConfig, ("cache/",)),
        (StateConfig, ("cache/",)),
        (OrderConfig, ("scheduling/",)),
        (Admission, ("scheduling/",)),
        (LoraSlotConfig, ("scheduling/",)),
        (Buckets, ("metrics/",)),
        (TierSettings, ("actors/", "storage/")),
        (FileSettings, ("storage/",)),
        (KVEvents, ("actors/", "options/groups/")),
    ],
)
def test_settings_are_read(kind: type[Struct], folders: tuple[str, ...]) -> None:
    """A value that goes on from the plan in a message or in settings has a reader there."""
    unread = [
        field.name
        for field in structs.fields(kind)
        if not any(
            attribute == field.name and any(file.startswith(folders) for file in files)
            for (_, attribute), files in reads().items()
        )
    ]
    assert not unread, f"{kind.__name__}: nothing reads {unread}"
