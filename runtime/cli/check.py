"""`runtime check`: what would happen, before anything does.

aspects:
    explain   every value in force with its source and reason; refuses what serve would refuse; and how to
              divide the model over the devices
    memory    what each rank will hold, from config.json and file headers
    doctor    what this machine has, and what it should have
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.cli.doctor.bench import bench
from runtime.cli.doctor.machine import examine
from runtime.cli.doctor.record import record
from runtime.cli.local_devices import devices_of, positive, seen_by_ranks
from runtime.errors import OptionsError
from runtime.options.draft_advice import draft_advice
from runtime.options.facts import MachineFacts, device_facts, this_machine
from runtime.options.footprint import (
    Footprint,
    Stored,
    footprint,
    loading_notice,
    stage_footprints,
    stored_weights,
)
from runtime.options.parse import from_argv, from_values
from runtime.options.plan import Plan
from runtime.options.resolve import plan_for
from runtime.options.split_advice import Advice, Devices, split_advice

if TYPE_CHECKING:
    from runtime.server import Checked

USAGE = (
    "runtime check [explain [--diff] [--devices N] | memory | doctor [--bench [--shrink N]] [--record FILE]] "
    "[--device-memory GIB] [--json] [OPTION of runtime serve ...]"
)


def run(argv: Sequence[str]) -> int:
    """0: all is well. 1: doctor found a problem, or the model does not fit. Raises StartError for options
    that cannot work."""
    words = list(argv)
    is_named = bool(words) and not words[0].startswith("-") and words[:2] != ["runtime", "serve"]
    if is_named and words[0] not in ASPECTS:
        raise OptionsError([f"{words[0]} is none of {', '.join(ASPECTS)}; give one of them, or none"])
    aspect = words.pop(0) if is_named else "explain"
    if words[:2] == ["runtime", "serve"]:  # a whole command was pasted
        words = words[2:]
    parser = argparse.ArgumentParser(
        prog="runtime check",
        usage=USAGE,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--bench",
        action="store_true",
        help="doctor: measure what the device reaches; send us the --json of it",
    )
    parser.add_argument(
        "--shrink",
        type=int,
        metavar="N",
        help="doctor: --bench in sizes divided by N, for what is slow or simulated",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="doctor: write what this NPU answers to right and wrong calls of operators; send us the file",
    )
    parser.add_argument(
        "--devices",
        type=positive(int),
        metavar="N",
        help="explain: say how to divide the model over so many devices on each node, which this machine "
        "need not have",
    )
    parser.add_argument(
        "--device-memory",
        type=positive(float),
        metavar="GIB",
        help="explain, memory: of each device; without it, that of this machine's",
    )
    parser.add_argument("--diff", action="store_true", help="explain: only what differs from the defaults")
    arguments, options = parser.parse_known_args(words)
    return ASPECTS[aspect](options, arguments)


def explain(options: Sequence[str], arguments: argparse.Namespace) -> int:
    """Prints every value in force with source and reason. Returns 0."""
    parsed = from_argv(options)
    machine = this_machine()
    plan = plan_for(parsed, machine)
    devices = devices_of(plan, arguments.devices, arguments.device_memory)
    checked = _check(plan)
    shown = plan.public()
    notices = [*plan.notices, *checked.notes]
    if drafts := draft_advice(plan, checked.prepared.model):
        shown["speculative_algorithm"]["reason"] = drafts
    notices += filter(None, [loading_notice(plan, checked.prepared.model)])
    notices += filter(None, [plan.speculation.notice])
    if plan.memory.max_total_tokens is not None:
        seen = seen_by_ranks(plan, machine, devices)
        notices += filter(None, [plan.memory.pool_notice(_footprint(plan, checked, seen)[0].pool_tokens)])
    split = None if devices is None else _split_advice(options, plan, checked, machine, devices)
    if split is not None:
        notices.append(split.shown)
    if arguments.diff:
        options_given = parsed.options
        basics = {"model_path": options_given.model.model_path, "device": options_given.parallel.device}
        usual = plan_for(from_values(basics), machine).why
        shown = {
            name: value
            for name, value in shown.items()
            if value["source"] not in ("default", "derived") or plan.why[name].value != usual[name].value
        }
    if arguments.json:
        print(_json({"values": shown, "notices": notices, "split": split}))
        return 0
    print("\n".join(_explain_lines(shown)) or "nothing differs from the defaults")
    for notice in notices:
        print(f"note: {notice}")
    return 0


def _explain_lines(shown: dict[str, dict[str, object]]) -> list[str]:
    cells = [
        (name.replace("_", "-"), _shown(value["value"]), str(value["source"]), str(value["reason"]))
        for name, value in shown.items()
    ]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    return [
        f"{name:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {source:<{widths[2]}}  {reason}".rstrip()
        for name, value, source, reason in cells
    ]


def memory(options: Sequence[str], arguments: argparse.Namespace) -> int:
    """Prints the memory of one rank. Returns 0 if it fits, else 1."""
    machine = this_machine()
    plan = plan_for(from_argv(options), machine)
    devices = devices_of(plan, arguments.devices, arguments.device_memory)
    machine = seen_by_ranks(plan, machine, devices)
    checked = _check(plan)
    rank, stored = _footprint(plan, checked, machine)
    notices = list(filter(None, [loading_notice(plan, checked.prepared.model, stored.dtype)]))
    if devices is None and device_facts(plan.parallel.device).is_numbered:
        notices.append(
            f"the memory of {plan.parallel.device} devices is not known here, and that of this host stands "
            "in its place; give --device-memory"
        )
    fits = rank.num_pages > 1 and rank.total_bytes * plan.parallel.processes_on_node <= machine.memory_bytes
    stages = _stages(plan, checked, machine, stored)
    if arguments.json:
        print(
            _json(
                {
                    "rank": _as_object(rank),
                    "ranks": plan.parallel.num_ranks,
                    "stages": [_as_object(one) for one in stages],
                    "split": _split(plan),
                    "stored": stored,
                    "available_bytes": machine.memory_bytes,
                    "fits": fits,
                    "notices": notices,
                }
            )
        )
    else:
        print("\n".join(memory_lines(plan, rank, stored, machine.memory_bytes, fits, stages)))
        for notice in notices:
            print(f"note: {notice}")
    return 0 if fits else 1


def _check(plan: Plan) -> "Checked":
    """Raises StartError for what `runtime serve` would refuse."""
    from runtime.server import check  # imports numpy and the HTTP server, which --help need not wait for

    return check(plan)


def _split_advice(
    options: Sequence[str], plan: Plan, checked: "Checked", machine: MachineFacts, devices: Devices
) -> Advice:
    stored = stored_weights(Path(plan.model.model_path))

    def attempt(flags: tuple[str, ...]) -> tuple[Plan, Footprint]:
        tried = plan_for(from_argv([*options, *flags]), machine)
        return tried, _footprint(tried, checked, seen_by_ranks(tried, machine, devices), stored)[0]

    return split_advice(attempt, devices, plan, checked.prepared.model)


def _split(plan: Plan) -> dict[str, int]:
    """How the model is divided."""
    return {
        "tensor_parallel_size": plan.parallel.tensor_parallel_size,
        "pipeline_parallel_size": plan.parallel.pipeline_parallel_size,
        "expert_parallel_size": plan.experts.expert_parallel_size,
        "data_parallel_size": plan.parallel.data_parallel_size,
        "nnodes": plan.parallel.nnodes,
    }


def _footprint(
    plan: Plan, checked: "Checked", machine: MachineFacts, stored: Stored | None = None
) -> tuple[Footprint, Stored]:
    stored = stored or stored_weights(Path(plan.model.model_path))
    setup = None if checked.adapters is None else checked.adapters.setup()
    return footprint(plan, checked.prepared.model, machine, stored, setup), stored


def _as_object(rank: Footprint) -> dict[str, object]:
    """A footprint for JSON, with its sum."""
    plain: dict[str, object] = msgspec.to_builtins(rank)
    return plain | {"total_bytes": rank.total_bytes}


def _stages(plan: Plan, checked: "Checked", machine: MachineFacts, stored: Stored) -> list[Footprint]:
    """The memory of a rank of each stage."""
    setup = None if checked.adapters is None else checked.adapters.setup()
    return stage_footprints(plan, checked.prepared.model, machine, stored, setup)


def memory_lines(
    plan: Plan,
    rank: Footprint,
    stored: Stored,
    available_bytes: int,
    fits: bool,
    stages: Sequence[Footprint] = (),
) -> list[str]:
    """The table of `runtime check memory`. `stages`: a rank of each, of which `rank` takes most."""
    ranks, stored_as = plan.parallel.processes_on_node, stored.dtype or "nothing"
    windows = f", {rank.num_window_pages} for layers with a window" if rank.num_window_pages else ""
    rows = [
        (
            "weights",
            rank.weights_bytes,
            f"{plan.precision.dtype}; {stored.files} files hold {_size(stored.num_bytes)} of {stored_as}",
        ),
        (
            "pages",
            rank.pages_bytes,
            f"{rank.num_pages} of {plan.memory.page_size} tokens{windows}, {rank.token_bytes} bytes a token; "
            f"bounded by {rank.bound}",
        ),
        (
            "activations",
            rank.activations_bytes,
            f"at most, for a step of {plan.schedule.max_step_tokens} tokens",
        ),
        (
            "graphs",
            rank.graphs_bytes,
            "about: of the largest captured step, which all share; taken while it runs"
            if rank.graphs_bytes
            else "none are captured",
        ),
        *_optional_rows(plan, rank),
        (
            "in all",
            rank.total_bytes,
            f"of {_size(available_bytes // ranks)} available to each of {ranks} ranks"
            + (" on this node" if plan.parallel.nnodes > 1 else ""),
        ),
    ]
    lines = [f"{name:<12} {_size(size):>10}  {about}" for name, size, about in rows]
    lines += [*_stage_lines(stages), *_other_lines(plan, rank)]
    lines.append(f"room for {rank.pool_tokens} tokens; the longest sequence has {rank.longest_tokens}")
    if not fits:
        lines.append(
            "this does not fit: raise --mem-fraction-static, take a smaller model or --dtype, or raise "
            "--tensor-parallel-size"
        )
    return lines


def _stage_lines(stages: Sequence[Footprint]) -> list[str]:
    """A line for each of several stages."""
    return [
        f"{f'stage {i}':<12} {_size(stage.total_bytes):>10}  {_size(stage.weights_bytes)} of weights, room "
        f"for {stage.pool_tokens} tokens"
        for i, stage in enumerate(stages if len(stages) > 1 else ())
    ]


def _other_lines(plan: Plan, rank: Footprint) -> list[str]:
    """Lines for host memory, and for what can be released."""
    lines = []
    if rank.host_bytes:
        when = (
            "of weights, while the device's memory is released"
            if plan.memory.offload is None
            else "of weights, page-locked"
        )
        lines.append(f"{'host memory':<12} {_size(rank.host_bytes):>10}  {when}")
    if rank.ngram_bytes:
        tokens = plan.speculation.speculative_ngram_capacity
        lines.append(
            f"{'n-grams':<12} {_size(rank.ngram_bytes):>10}  of host memory in each replica's process, when "
            f"{tokens} tokens are remembered (--speculative-ngram-capacity)"
        )
    if plan.weights.enable_memory_saver:
        lines.append(
            f"{'releasable':<12} {_size(rank.releasable_bytes):>10}  weights, pages and graphs, by "
            "/release_memory_occupation"
        )
    return lines


def _optional_rows(plan: Plan, rank: Footprint) -> list[tuple[str, int, str]]:
    """Rows of the table for what only some models and options take."""
    rows = []
    if rank.num_states:
        about = f"{rank.num_states} of sequences and prefixes, in recurrent layers"
        rows.append(("states", rank.states_bytes, about))
    if rank.draft_weights_bytes:
        about = f"of the weights above; {rank.draft_token_bytes} of the bytes of a token are its as well"
        rows.append(("draft model", rank.draft_weights_bytes, about))
    if rank.encodings_bytes:
        rows.append(
            ("media", rank.encodings_bytes, "encoded ones that are kept; the encoder is in the weights")
        )
    if rank.adapters_bytes:
        rows.append(("adapters", rank.adapters_bytes, f"{plan.lora.max_loras_per_batch} LoRA slots"))
    return rows


def doctor(options: Sequence[str], arguments: argparse.Namespace) -> int:
    """Prints what this machine has and lacks. Returns 1 if a server could not run, else 0."""
    parsed = from_argv(options)
    findings = examine(host=parsed.options.http.host, port=parsed.options.http.port)
    measured = None
    if arguments.record is not None:
        record(plan_for(parsed).parallel.device, arguments.record)
    if arguments.bench:
        plan = plan_for(parsed)
        measured = bench(
            plan.parallel.device, plan.parallel.num_ranks, plan.rank_environment, arguments.shrink
        )
    if arguments.json:
        print(_json({"findings": findings, "measured": measured} if arguments.bench else findings))
    else:
        for finding in findings:
            print(
                f"{finding.verdict:<8} {finding.name:<52} {finding.value}"
                + (f"   {finding.advice}" if finding.advice else "")
            )
        for figure in measured.figures if measured is not None else ():
            print(f"measured {figure.name:<52} {figure.value:g} {figure.unit}")
        problems = [finding.name for finding in findings if finding.verdict == "problem"]
        print(
            f"verdict: {len(problems)} in the way: {', '.join(problems)}"
            if problems
            else "verdict: nothing is in the way"
        )
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _shown(value: object) -> str:
    return "none" if value is None else ("on" if value else "off") if isinstance(value, bool) else str(value)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


ASPECTS: dict[str, Callable[[Sequence[str], argparse.Namespace], int]] = {
    "explain": explain,
    "memory": memory,
    "doctor": doctor,
}
