"""Routes of the record of expert load, in SGLang's words, except that a dump is a safetensors file, and its
answer tells the counts."""

from typing import Any

from msgspec import Struct
from starlette.routing import Route

from runtime.http.admin.control import EITHER, NoBody
from runtime.http.json_routes import taking
from runtime.http.native.native_response import ExpertRecord
from runtime.http.settings import HttpSettings
from runtime.service import Service


class DumpBody(Struct, frozen=True):
    """/dump_expert_distribution_record"""

    output_dir: str | None = None  # None: a fresh one


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    experts = service.control.experts

    async def start(_: NoBody) -> Any:
        await experts.count("start")
        return {"message": "Start recording the expert distribution."}

    async def stop(_: NoBody) -> Any:
        found = await experts.count("stop")
        return {"message": "Stop recording the expert distribution.", "num_steps": found.num_steps}

    async def dump(body: DumpBody) -> Any:
        found = await experts.count("dump", body.output_dir or "")
        counts = found.counts.reshape(len(found.layers), -1).tolist()
        return {
            "message": "Dump expert distribution record.",
            "num_steps": found.num_steps,
            "file": found.file,
            "layers": found.layers,
            "total_count": counts,
        }

    size = settings.max_body_bytes
    return [
        Route(f"/{word}_expert_distribution_record", taking(kind, ExpertRecord, serve, size), methods=EITHER)
        for word, kind, serve in (("start", NoBody, start), ("stop", NoBody, stop), ("dump", DumpBody, dump))
    ]
