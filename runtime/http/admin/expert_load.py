"""Routes of the expert load record, in SGLang's form, except that a dump is a safetensors file and its answer
has the counts."""

from msgspec import Struct

from runtime.http.operation import EmptyBody, Operation
from runtime.service import Service


class DumpBody(Struct, frozen=True):
    """The body of /dump_expert_distribution_record."""

    output_dir: str | None = None  # null: a new folder


class ExpertRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The state of the expert load record."""

    message: str
    num_steps: int | None = None  # steps in the record
    file: str | None = None  # the file written
    layers: list[int] | None = None  # layers with experts
    # [layers][experts]: tokens since the ranks started
    total_count: list[list[int]] | None = None


async def start(service: Service, _: EmptyBody) -> dict[str, object]:
    """Starts counting the tokens of each expert."""
    await service.control.experts.count("start")
    return {"message": "Start recording the expert distribution."}


async def stop(service: Service, _: EmptyBody) -> dict[str, object]:
    """Stops counting."""
    counts = await service.control.experts.count("stop")
    return {"message": "Stop recording the expert distribution.", "num_steps": counts.num_steps}


async def dump(service: Service, body: DumpBody) -> dict[str, object]:
    """Writes the counts to a file, resets them, and answers with them."""
    counts = await service.control.experts.count("dump", body.output_dir or "")
    return {
        "message": "Dump expert distribution record.",
        "num_steps": counts.num_steps,
        "file": counts.file,
        "layers": counts.layers,
        "total_count": counts.counts.reshape(len(counts.layers), -1).tolist(),
    }


OPERATIONS = (
    Operation(
        "GET POST",
        "/start_expert_distribution_record",
        "Record how tokens spread over experts",
        answers=(ExpertRecord,),
        call=start,
    ),
    Operation(
        "GET POST",
        "/stop_expert_distribution_record",
        "Stop recording that",
        answers=(ExpertRecord,),
        call=stop,
    ),
    Operation(
        "GET POST",
        "/dump_expert_distribution_record",
        "Write what was recorded of experts, and forget it",
        body=DumpBody,
        answers=(ExpertRecord,),
        call=dump,
    ),
)
