"""A process that downloads a part of a model, and reports in lines of JSON on standard output.

`python -m runtime.hub.child '{"model": {"repo": "org/name"}, "part": "weights"}'`

Hub libraries bring an HTTP client and threads of their own, and cannot be interrupted: in a process of its
own a download costs the server no memory and can be ended at any moment. What was downloaded stays, and the
next start goes on behind it.
"""

import ctypes
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.hub.gguf_files import gguf_names, wanted_gguf
from runtime.hub.source import HubModel, RemoteFile
from runtime.models.config.checksums import digest
from runtime.models.config.weight_files import NO_WEIGHTS

Part = Literal["config", "weights", "gguf"]

PATTERNS: dict[Part, tuple[str, ...]] = {
    "config": (
        *("*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken"),
        *("1_Pooling/*", "2_Dense/config.json"),
    ),
    "weights": ("*.safetensors",),
    "gguf": ("*.gguf",),
}
# forms of the weights, those that are preferred first -> their files
FORMS: dict[str, tuple[str, ...]] = {
    "safetensors": ("*.safetensors",),
    "pt": ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth"),
    "mistral": ("consolidated*.safetensors",),
    "sharded_state": ("model-rank-*.safetensors",),
}
READ_AS = {"npcache": "pt", "fastsafetensors": "safetensors", "runai_streamer": "safetensors"}
# the same weights in other forms
IGNORED = ("original/*", "onnx/*", "openvino/*", "gguf/*", "*/.*", ".*")
OTHER_FORMATS = {".gguf", ".bin", ".pt", ".pth", ".onnx"}
WORKERS = 4
REPORT_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Job(Struct, frozen=True):
    """What to download."""

    model: HubModel
    part: Part
    checks: bool = False  # files that are stored already are compared with the hub's checksums, too


class Report(Struct, frozen=True, omit_defaults=True):
    """A line on standard output. The last one has a folder, or the path of a GGUF file, or an error."""

    done: int = 0  # bytes here so far, of all files of this part
    total: int = 0
    folder: str = ""
    error: str = ""


def wanted(files: list[RemoteFile], part: Part, load_format: str = "auto") -> list[RemoteFile]:
    """The files of a part, of the weights in one form. Raises ModelError when the model is in no format that
    is read here."""
    known = [file for file in files if not any(fnmatch(file.name, pattern) for pattern in IGNORED)]
    if part == "weights":
        form = READ_AS.get(load_format, load_format)
        patterns = FORMS[form] if form in FORMS else tuple(one for all in FORMS.values() for one in all)
        chosen = _first_form(known, patterns)
    else:
        chosen = [file for file in known if any(fnmatch(file.name, pattern) for pattern in PATTERNS[part])]
    kinds = sorted({Path(file.name).suffix for file in files} & OTHER_FORMATS)
    others = f" (it has {', '.join(kinds)})" if kinds else ""
    if (names := gguf_names(files)) and part == "config":
        others += f"; of its GGUF files give one, as ORG/NAME/{names[0]}"
    missing = {"weights": "safetensors or *.bin", "config": "config.json"}[part]
    configs = ("config.json", "params.json")
    is_there = bool(chosen) if part == "weights" else any(file.name in configs for file in chosen)
    if not is_there:
        raise ModelError(
            f"the model has no {missing}, which is what is read here{others}; look for the same model in "
            "Hugging Face layout"
        )
    return chosen


def _first_form(files: list[RemoteFile], patterns: tuple[str, ...]) -> list[RemoteFile]:
    """The files of the first pattern that any has; consolidated files only where they are asked for."""
    for pattern in patterns:
        chosen = [
            file
            for file in files
            if fnmatch(file.name, pattern)
            and (pattern.startswith("consolidated") or not file.name.startswith("consolidated"))
            and not any(fnmatch(file.name, name) for name in NO_WEIGHTS)
        ]
        if chosen:
            return chosen
    return []


class HuggingFace:
    """A model on the hub of Hugging Face, through huggingface_hub: HF_TOKEN, HF_ENDPOINT, HF_HOME and
    HF_HUB_OFFLINE mean what they mean there."""

    def __init__(self, model: HubModel) -> None:
        from huggingface_hub import HfApi

        self.model = model
        self.api = HfApi(library_name="runtime-serve")
        self.commit = model.revision

    def files(self) -> list[RemoteFile] | None:
        """All files at the revision; None when only what is stored here can be used."""
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

        if constants.HF_HUB_OFFLINE:
            return None
        name = self.model.repo
        try:
            info = self.api.model_info(name, revision=self.model.revision, files_metadata=True)
        except GatedRepoError:
            raise ModelError(
                f"{name} is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
            ) from None
        except RepositoryNotFoundError:
            raise ModelError(
                f"{name} is neither a folder here nor a model on the hub that this account may see; for a "
                "private model set HF_TOKEN"
            ) from None
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == 404:
                raise ModelError(
                    f"{name} has no revision {self.model.revision}; leave --revision out, or name another"
                ) from None
            return None
        except OSError:  # no network; the HTTP client's errors are not OSErrors in all versions
            return None
        except Exception as error:
            # httpx2 since huggingface_hub 2
            if type(error).__module__.partition(".")[0].rstrip("2") not in ("httpx", "httpcore", "requests"):
                raise
            return None
        self.commit = info.sha
        return [
            RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
            for file in info.siblings or ()
        ]

    def fetch(self, name: str) -> Path:
        """Downloads a file, or what is missing of it, and returns where it is."""
        from huggingface_hub import hf_hub_download

        # with the branch's name, its commit is stored too: a later start finds it without the hub
        revision = self.model.revision if name == "config.json" else self.commit
        return Path(
            hf_hub_download(
                self.model.repo,
                name,
                revision=revision,
                cache_dir=self.model.cache_dir,
                library_name="runtime-serve",
            )
        )

    def forget(self, stored: Path) -> None:
        """Removes a stored file that is damaged."""
        stored.resolve().unlink(missing_ok=True)
        stored.unlink(missing_ok=True)

    def stored_folder(self) -> Path | None:
        """The folder of this revision as it was downloaded before, or the GGUF file; None: it was not."""
        from huggingface_hub import constants, try_to_load_from_cache

        if self.model.gguf:
            cache = Path(self.model.cache_dir or constants.HF_HUB_CACHE)
            snapshots = cache / f"models--{self.model.repo.replace('/', '--')}" / "snapshots"
            stored = {str(path.relative_to(snapshots)): path for path in snapshots.rglob("*.gguf")}
            names = {name.partition("/")[2]: path for name, path in sorted(stored.items())}
            files = [RemoteFile(name, 0, None) for name in names]
            return names[wanted_gguf(files, self.model.gguf)[0].name] if files else None
        found = try_to_load_from_cache(
            self.model.repo, "config.json", cache_dir=self.model.cache_dir, revision=self.model.revision
        )
        return Path(found).parent if isinstance(found, str) else None

    def is_stored(self, file: RemoteFile) -> bool:
        """Whether the file is here already, as a whole."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.model.repo, file.name, cache_dir=self.model.cache_dir, revision=self.commit
        )
        return isinstance(found, str)

    def num_bytes(self, files: list[RemoteFile]) -> int:
        """Bytes of these files that are stored here, finished or not."""
        from huggingface_hub import constants

        cache = Path(self.model.cache_dir or constants.HF_HUB_CACHE)
        blobs = cache / f"models--{self.model.repo.replace('/', '--')}" / "blobs"
        return sum(
            max((path.stat().st_size for path in blobs.glob(f"{file.sha256}*")), default=0)
            for file in files
            if file.sha256 is not None
        )


class Source(Protocol):
    """Where a model's files come from."""

    model: HubModel

    def files(self) -> list[RemoteFile] | None:
        """All files of the model; None when only what is stored here can be used."""
        ...

    def fetch(self, name: str) -> Path:
        """Brings a file here and returns where it is."""
        ...

    def forget(self, stored: Path) -> None:
        """Removes a stored file that is damaged."""
        ...

    def stored_folder(self) -> Path | None:
        """The model as it was brought here before; None: it was not."""
        ...

    def is_stored(self, file: RemoteFile) -> bool:
        """Whether the file is here already, as a whole."""
        ...

    def num_bytes(self, files: list[RemoteFile]) -> int:
        """Bytes of these files that are here, finished or not."""
        ...


def download(source: Source, part: Part, *, checks: bool = False) -> Path:
    """Downloads a part with reports on the way, checks it, and returns the folder. `checks`: see Job. Raises
    ModelError."""
    if checks and source.model.hub in ("url", "seed"):
        raise ModelError(
            f"{source.model.repo} has no checksums of a hub; give --model-checksum a file, or leave it out"
        )
    files = source.files()
    if files is None and checks:
        raise ModelError(
            f"the checksums of {source.model.repo} are on the hub, which cannot be reached (or "
            "HF_HUB_OFFLINE is set); give --model-checksum a file, or leave it out"
        )
    if files is None:
        folder = source.stored_folder()
        if folder is None:
            raise ModelError(
                f"{source.model.repo} is not stored here, and the hub cannot be reached (or HF_HUB_OFFLINE "
                "is set); download it first, or give a folder"
            )
        return folder
    given = source.model.gguf
    chosen = wanted_gguf(files, given) if given else wanted(files, part, source.model.load_format)
    total = sum(file.size for file in chosen)
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_S):
            _print(Report(done=min(total, source.num_bytes(chosen)), total=total))

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    with ThreadPoolExecutor(WORKERS) as pool:
        stored = list(pool.map(lambda file: _fetch(source, file, checks), chosen))
    ended.set()
    reporter.join()
    _print(Report(done=total, total=total))
    name = chosen[0].name
    return stored[0] if given else stored[0].parents[name.count("/")]


def _fetch(source: Source, file: RemoteFile, checks: bool) -> Path:
    """One file, whose bytes are those that the hub's list promises: one that arrives damaged, or is stored
    damaged and `checks`, is downloaded once more."""
    is_trusted = source.is_stored(file) and not checks
    for _ in range(2):
        stored = source.fetch(file.name)
        if is_trusted or (stored.stat().st_size == file.size and file.sha256 in (None, digest(stored))):
            return stored
        source.forget(stored)
    raise ModelError(
        f"{file.name} arrived damaged twice: its size or SHA-256 is not what the hub says; try again later"
    )


def _print(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


def main(argv: list[str]) -> int:
    """Downloads what the argument says; 0 if the last line has a folder."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no download without its server
    job = msgspec.json.decode(argv[1], type=Job)
    try:
        folder = (
            _modelscope(job)
            if job.model.hub == "modelscope"
            else download(_source(job.model), job.part, checks=job.checks)
        )
        _print(Report(folder=str(folder)))
    except ModelError as error:
        _print(Report(error=str(error)))
    except Exception as error:  # of a library's many; the parent turns it into one line
        _print(Report(error=f"{job.model.repo} cannot be downloaded: {type(error).__name__}: {error}"))
    else:
        return 0
    return 1


def _source(model: HubModel) -> Source:
    """Raises ModelError where a library that it needs is not installed."""
    if model.hub == "url":
        from runtime.hub.remote import RemoteFolder

        return RemoteFolder(model)
    if model.hub == "seed":
        from runtime.hub.seed import KEY_VARIABLE, SeedServer

        return SeedServer(model, os.environ.get(KEY_VARIABLE))
    return HuggingFace(model)


def _modelscope(job: Job) -> Path:
    """Downloads a part from ModelScope through its own library, which resumes and checks by itself."""
    if job.checks:
        raise ModelError(
            "--model-checksum without a value takes the checksums of Hugging Face's hub; give a file for a "
            "model of ModelScope"
        )
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ModelError(
            "downloading from ModelScope needs its library: pip install modelscope; or unset "
            "SGLANG_USE_MODELSCOPE"
        ) from None
    options: dict[str, object] = {"cache_dir": job.model.cache_dir, "revision": job.model.revision}
    return Path(
        snapshot_download(
            job.model.repo,
            allow_patterns=list(PATTERNS[job.part]),
            ignore_patterns=list(IGNORED),
            **{name: value for name, value in options.items() if value is not None},
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
