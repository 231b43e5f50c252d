"""Routes by which other servers copy this server's model (--load-format remote_instance)."""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from runtime.errors import InvalidRequest, ModelError, NotFound
from runtime.http.operation import Operation
from runtime.hub.seed_files import SeedFiles, SeedReader, seed_files
from runtime.service import Service


def _folder(service: Service) -> Path:
    options = service.server_info()["options"]
    return Path(options["model_path"]["value"])


def _files(service: Service) -> SeedFiles:
    """Raises InvalidRequest for a model that is one GGUF file."""
    try:
        return seed_files(_folder(service))
    except ModelError as error:
        raise InvalidRequest(str(error)) from None


def list_files(service: Service, _: Request) -> object:
    """The files of the model. Raises InvalidRequest for a model that is one GGUF file."""
    return msgspec.to_builtins(_files(service))


def send_file(service: Service, request: Request) -> Response:
    """The bytes of a file from `offset` on, and the SHA-256 of the whole file. Raises NotFound,
    InvalidRequest."""
    name, offset = request.path_params["name"], request.query_params.get("offset", "0")
    if not offset.isdecimal():
        raise InvalidRequest(f"offset {offset} is no number of bytes", param="offset")
    if name not in {file.name for file in _files(service).files}:
        raise NotFound(f"the model has no file {name}; GET /model_files lists them")
    reader = SeedReader(_folder(service) / name, int(offset))
    return StreamingResponse(
        reader.parts(),
        headers={"content-length": str(reader.num_bytes)},
        media_type="application/octet-stream",
    )


OPERATIONS = (
    Operation(
        "GET",
        "/model_files",
        "The files of the model, for a server that copies them",
        answers=(SeedFiles,),
        show=list_files,
    ),
    Operation(
        "GET",
        "/model_files/{name}",
        "The bytes of a file of the model, and its SHA-256 behind them",
        media="binary",
        query=("offset",),
        show=send_file,
        pattern="/model_files/{name:path}",
    ),
)
