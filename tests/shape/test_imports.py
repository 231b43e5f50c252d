"""Who may import whom: arrows point down only, and torch stays on the rank side."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shape import source

# The layers, lowest first. A module may import modules of lower layers, and of its own package. Prefixes; the
# longest one counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("runtime.errors", "runtime.models.config.pooling", "runtime.parsing.events"),
    (
        "runtime.messages.codec",
        "runtime.messages.constraint",
        "runtime.messages.lora",
        "runtime.messages.memory",
    ),
    ("runtime.messages.sampling",),
    ("runtime.messages.requests",),
    ("runtime.messages.scheduler", "runtime.messages.steps"),
    ("runtime.messages.ranks",),
    ("runtime.scheduling.sequence",),
    ("runtime", "runtime.actors.child_environment"),
    ("runtime.adapters", "runtime.parsing"),
    (
        "runtime.cache",
        "runtime.actors.channels",
        "runtime.log",
        "runtime.models.config.checksums",
        "runtime.models.config.peft",
        "runtime.models.config.mla_config",
        "runtime.models.config.quantization_schemes",
        "runtime.models.config.moe_config",
        "runtime.models.config.tasks",
        "runtime.service",
        "runtime.text",
    ),
    ("runtime.models.config.encoder_config", "runtime.models.config.quantization_config", "runtime.models.config.rope_config"),
    ("runtime.models.config.registry",),
    ("runtime.models.config.model_config", "runtime.scheduling", "runtime.storage"),
    ("runtime.models.config.lora_targets",),
    ("runtime.devices.facts", "runtime.devices.options", "runtime.devices.rendezvous"),
    ("runtime.devices.attention_backends",),
    tuple(
        f"runtime.devices.{name}.{file}"
        for name in ("ascend", "cpu", "cuda", "null")
        for file in ("facts", "options")
    ),
    ("runtime.options", "runtime.pocket"),
    (
        "runtime.devices.attention_rows",
        "runtime.devices.single_rank",
        "runtime.devices.streams",
        "runtime.devices.torch_collectives",
        "runtime.ranks.benchmark_results",
        "runtime.ranks.ring",
        "runtime.devices.all_to_all",
        "runtime.devices.host_memory",
        "runtime.devices.lora",
        "runtime.devices.operands",
        "runtime.devices.attention_scores",
        "runtime.devices.page_copies",
        "runtime.admin.adapter_registry",
        "runtime.metrics",
        "runtime.actors.open_requests",
        "runtime.metrics.request_records",
    ),
    ("runtime.devices.base", "runtime.devices.executor", "runtime.grammar"),
    ("runtime.devices.torch_all_to_all",),
    ("runtime.layers",),
    ("runtime.models",),
    ("runtime.devices.ascend", "runtime.devices.cpu", "runtime.devices.cuda", "runtime.devices.null"),
    (
        "runtime.ranks.compile",
        "runtime.ranks.profiler",
        "runtime.ranks.sample_rows",
        "runtime.ranks.transfers",
        "runtime.ranks.weight_offload",
    ),
    ("runtime.ranks.expert_counts", "runtime.ranks.slot_lengths", "runtime.ranks.weights_loader"),
    ("runtime.ranks.slots",),
    ("runtime.ranks.decode_graphs", "runtime.ranks.prompt_logprobs", "runtime.ranks.step_inputs"),
    ("runtime.ranks.piecewise_graphs",),
    ("runtime.ranks.model_runner",),
    ("runtime.ranks.memory_saver", "runtime.ranks.profile_run"),
    ("runtime.ranks.torch_executor",),
    ("runtime.ranks.open_executor",),
    ("runtime.ranks.benchmark", "runtime.ranks.worker"),
    ("runtime.actors", "runtime.http"),
    (
        "runtime.actors.blocking",
        "runtime.metrics.heartbeat",
        "runtime.metrics.request_log",
        "runtime.rpc",
        "runtime.settings",
        "runtime.actors.supervisor",
        "runtime.http.embeddings.library",
        "runtime.admin.warmup",
    ),
    ("runtime.actors.rank_commands", "runtime.actors.text_pipeline"),
    ("runtime.actors.replica",),
    ("runtime.actors.replicas",),
    (
        "runtime.admin.expert_load",
        "runtime.admin.profiling",
        "runtime.admin.scheduler_commands",
        "runtime.admin.sessions",
        "runtime.admin.status",
    ),
    (
        "runtime.admin.intake",
        "runtime.admin.control",
        "runtime.admin.engine_controls",
        "runtime.admin.memory_saver",
    ),
    ("runtime.core",),
    ("runtime.engine", "runtime.server"),
    ("runtime.cli",),
    ("runtime.__main__",),
)
SIBLINGS = ("runtime.actors", "runtime.devices")  # their members never import each other
SHARED = {
    "runtime.actors": (
        "runtime.actors.channels",
        "runtime.actors.child_environment",
        "runtime.actors.fan_out",
        "runtime.actors.open_requests",
        "runtime.actors.rank_process",
        "runtime.actors.rank_replies",
        "runtime.actors.watchdog",
    ),
    "runtime.devices": tuple(
        f"runtime.devices.{name}"
        for name in (
            "all_to_all",
            "attention_backends",
            "attention_rows",
            "attention_scores",
            "base",
            "executor",
            "facts",
            "host_memory",
            "lora",
            "operands",
            "options",
            "page_copies",
            "rendezvous",
            "single_rank",
            "streams",
            "torch_all_to_all",
            "torch_collectives",
        )
    ),
}
COMPOSED = (  # put actors together, and are none themselves
    "runtime.actors.rank_commands",
    "runtime.actors.replica",
    "runtime.actors.replicas",
    "runtime.actors.supervisor",
    "runtime.actors.text_pipeline",
)
RANK_SIDE = (
    "runtime.ranks",
    "runtime.devices.ascend",
    "runtime.devices.cpu",
    "runtime.devices.cuda",
    "runtime.devices.torch_all_to_all",
    "runtime.devices.torch_collectives",
    "runtime.grammar.llguidance",
    "runtime.grammar.outlines",
    "runtime.grammar.xgrammar",
    "runtime.layers",
    "runtime.models",
)
TORCH_FREE = (
    *(
        f"runtime.devices.{name}.{file}"
        for name in ("ascend", "cpu", "cuda")
        for file in ("facts", "options")
    ),
    "runtime.ranks.benchmark_results",
    "runtime.ranks.open_executor",
    "runtime.ranks.ring",
    "runtime.ranks.worker",
    "runtime.models.config.lora_targets",
    "runtime.models.config.peft",
    "runtime.models.config.checksums",
    "runtime.models.config.model_config",
    "runtime.models.config.encoder_config",
    "runtime.models.config.mla_config",
    "runtime.models.config.quantization_config",
    "runtime.models.config.registry",
    "runtime.models.config.rope_config",
    "runtime.models.config.quantization_schemes",
    "runtime.models.config.moe_config",
    "runtime.models.config.tasks",
)
TORCH = {"torch", "torch_npu", "transformers"}

PATHS = pytest.mark.parametrize("path", source.files(), ids=str)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer(module: str) -> int:
    matches = [
        (len(prefix), level)
        for level, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or (prefix != "runtime" and module.startswith(prefix + "."))
    ]
    assert matches, f"{module} has no layer; give it one in LAYERS"
    return max(matches)[1]


def prefix_of(module: str) -> str:
    return max((prefix for prefixes in LAYERS for prefix in prefixes if within(module, (prefix,))), key=len)


@PATHS
def test_arrows_point_down(path: Path) -> None:
    module = source.module_name(path)
    for target in source.imports(path, lazy=True):
        if within(target, ("runtime",)) and prefix_of(target) != prefix_of(module):
            assert layer(target) < layer(module), (
                f"{module} imports {target}, which stands above or beside it"
            )


@PATHS
def test_siblings_do_not_know_each_other(path: Path) -> None:
    module = source.module_name(path)
    for family in SIBLINGS:
        if not module.startswith(family + ".") or module in COMPOSED:
            continue
        own = ".".join(module.split(".")[:3])
        strangers = [
            target
            for target in source.imports(path, lazy=True)
            if target.startswith(family + ".") and not within(target, (own, *SHARED[family]))
        ]
        assert not strangers, f"{module} imports {strangers}: members of {family} are linked by messages only"


@PATHS
def test_torch_stays_on_the_rank_side(path: Path) -> None:
    module = source.module_name(path)
    if within(module, RANK_SIDE) and not within(module, TORCH_FREE):
        return
    roots = {target.split(".")[0] for target in source.imports(path, lazy=True)}
    assert not roots & TORCH, (
        f"{module} belongs to the event-loop process, which never imports {roots & TORCH}"
    )


def test_event_loop_modules_load_no_torch() -> None:
    """Follows what is imported in fact, third parties included."""
    modules = [source.module_name(path) for path in source.files()]
    chosen = [
        m for m in modules if (not within(m, RANK_SIDE) or within(m, TORCH_FREE)) and m != "runtime.__main__"
    ]
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted({'torch', 'torch_npu', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *chosen], cwd=source.ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_reader_of_imports_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    (tmp_path / "x.py").write_text("import a.b\ndef f():\n    from torch import nn\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert source.imports(Path("x.py"), lazy=True) == {"a.b", "torch"}
    assert source.imports(Path("x.py"), lazy=False) == {"a.b"}
    assert isinstance(source.tree(Path("x.py")), ast.Module)
