"""`docker run ... IMAGE ...` (podman, nerdctl): the command that runs in the container, and what the options
in front of the image mean outside one."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from runtime.options.declare import Value

System = Literal["sglang", "rtp_llm", "vllm", "llama_cpp", "ollama", "tgi", "lmdeploy"]


class Image(Struct, frozen=True, kw_only=True):
    """A published image. `command` are the words that its entry point puts before those of the command line;
    `environment` what it sets itself."""

    pattern: str  # of its name without registry
    command: tuple[str, ...]
    port: int | None = None  # where it differs from the engine's own default
    # a pattern of folders in the container -> the variable that names such a folder of models here
    caches: Mapping[str, str] = {}


# of whichever user the image runs as
_HUB = {r".*/\.cache/huggingface": "HF_HOME", r".*/\.cache/huggingface/hub": "HF_HUB_CACHE"}

# images whose command line may begin with the engine's options; all others name their command
IMAGES: tuple[Image, ...] = (
    Image(pattern=r"vllm/vllm-openai(-rocm)?", command=("vllm", "serve"), caches=_HUB),
    Image(
        pattern=r"huggingface/text-generation-inference",
        command=("text-generation-launcher",),
        port=80,
        caches={"/data": "HF_HUB_CACHE"},
    ),
    Image(pattern=r"(ggml-org|ggerganov)/llama\.cpp:light.*", command=("llama-cli",)),
    Image(pattern=r"(ggml-org|ggerganov)/llama\.cpp:.*", command=("llama-server",)),
    Image(pattern=r"ollama/ollama", command=("ollama",)),
)
OTHER = Image(pattern="", command=(), caches=_HUB)
PROGRAMS = re.compile(r"(.*/)?(docker|podman|nerdctl)")
# options of `docker run` without a value; every other takes one
SWITCHES = frozenset(
    {
        *(
            "-d",
            "--detach",
            "-i",
            "--interactive",
            "-t",
            "--tty",
            "--rm",
            "--privileged",
            "--init",
            "--read-only",
        ),
        *("-P", "--publish-all", "--no-healthcheck", "--oom-kill-disable", "--sig-proxy", "--quiet", "-q"),
        *("--disable-content-trust", "--replace", "--tls-verify"),
    }
)
_SHORT_SWITCHES = re.compile(r"-[ditPq]+")
_ADDRESS = re.compile(r"(?:(?P<host>\[[^\]]*\]|[^:]*):)?(?P<outside>\d+):(?P<inside>\d+)(?:/tcp)?")
_HOME_CACHE = re.compile(r"(~|\$HOME|\$\{HOME\}|/home/[^/]+)/\.cache/huggingface(/hub)?/?")


class Container(Struct, frozen=True, kw_only=True):
    """What a `docker run` says: the words of the command in the container, and its surroundings."""

    image: Image
    name: str
    command: list[str]
    variables: dict[str, str]
    mounts: dict[str, str]  # folder in the container -> folder of the machine
    ports: list[str]  # as -p has them
    devices: str = ""  # as --gpus has them


def read(words: Sequence[str]) -> Container | None:
    """The container that `words` run; None where they run none."""
    start = next((i for i, word in enumerate(words) if PROGRAMS.fullmatch(word)), None)
    if start is None or "run" not in words[start + 1 : start + 3]:
        return None
    left = list(reversed(words[words.index("run", start) + 1 :]))
    given: dict[str, list[str]] = {}
    while left and left[-1].startswith("-"):
        flag, equals, inline = left.pop().partition("=")
        if flag in SWITCHES or _SHORT_SWITCHES.fullmatch(flag):
            continue
        if re.match(r"-[evp].", flag):  # -p8000:8000
            flag, inline, equals = flag[:2], flag[2:] + equals + inline, "="
        given.setdefault(flag, []).append(inline if equals else left.pop() if left else "")
    if not left:
        return None
    name = left.pop()
    return _container(name, [*given.get("--entrypoint", []), *reversed(left)], given)


def _container(name: str, command: list[str], given: Mapping[str, list[str]]) -> Container:
    def all_of(*flags: str) -> list[str]:
        return [value for flag in flags for value in given.get(flag, [])]

    image = image_of(name)
    return Container(
        image=image,
        name=name,
        command=command if "--entrypoint" in given else entered(image, command),
        variables=dict(_pair(one) for one in all_of("-e", "--env")),
        mounts=dict(mount for one in all_of("-v", "--volume", "--mount") if (mount := _mount(one))),
        ports=[] if "host" in all_of("--network", "--net") else all_of("-p", "--publish"),
        devices="".join(all_of("--gpus")),
    )


def image_of(name: str) -> Image:
    """The image of that name, with or without a registry and a tag."""
    path = name.partition("@")[0]
    first, slash, rest = path.partition("/")
    path = rest if slash and ("." in first or ":" in first) else path
    named = (
        image
        for image in IMAGES
        if re.fullmatch(image.pattern, path) or re.fullmatch(image.pattern, path.rpartition(":")[0] or path)
    )
    return next(named, OTHER)


def entered(image: Image, command: list[str]) -> list[str]:
    """The words that run: behind those of the image's entry point, where it has one."""
    if image.command == ("ollama",) and not command:
        return ["ollama", "serve"]
    if image.command == ("llama-server",) and command[:1] in (["--server"], ["-s"]):
        command = command[1:]
    return [*image.command, *command]


def published(container: Container, port: int) -> tuple[list[tuple[str, Value]], list[str]]:
    """Settings of address and port by which clients reach the server outside as they did before, and notes.
    `port`: where it listens in the container."""
    settings: list[tuple[str, Value]] = []
    notes: list[str] = []
    for one in container.ports:
        match = _ADDRESS.fullmatch(one)
        if match is None or int(match["inside"]) != port:
            notes.append(f"-p {one} is left out: the server listens on one port")
            continue
        host = (match["host"] or "0.0.0.0").strip("[]")
        settings = [("--host", host), ("--port", match["outside"])]
        notes.append(f"-p {one} is --host {host} --port {match['outside']} without a container")
    return settings, notes


def outside(container: Container, value: Value) -> Value:
    """A value with a path of the container as the path that is mounted there."""
    if isinstance(value, list | tuple):
        return [outside(container, one) for one in value]
    if not isinstance(value, str):
        return value
    name, equals, path = value.rpartition("=") if re.match(r"[\w.-]+=/", value) else ("", "", value)
    for inside, folder in sorted(container.mounts.items(), key=lambda mount: -len(mount[0])):
        if path == inside or path.startswith(inside.rstrip("/") + "/"):
            return name + equals + folder.rstrip("/") + path[len(inside.rstrip("/")) :]
    return value


def caches(container: Container) -> dict[str, str]:
    """Variables that name the folders of models which are mounted, except where those are the usual ones."""
    return {
        variable: folder
        for pattern, variable in container.image.caches.items()
        for inside, folder in container.mounts.items()
        if re.fullmatch(pattern, inside) and not _HOME_CACHE.fullmatch(folder)
    }


def devices(container: Container) -> tuple[dict[str, str], list[str]]:
    """Variables and notes for --gpus."""
    chosen = re.search(r"device=([\d,]+)", container.devices)
    if chosen:
        return {"CUDA_VISIBLE_DEVICES": chosen[1]}, []
    if container.devices in ("", "all"):
        return {}, []
    return {}, [f"--gpus {container.devices} is left out: CUDA_VISIBLE_DEVICES chooses devices"]


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _mount(word: str) -> tuple[str, str] | None:
    """(folder in the container, folder of the machine) of -v and --mount; None for an unnamed volume."""
    if "=" in word and "target" in word or "dst=" in word:
        fields = dict(_pair(part) for part in word.split(","))
        inside = fields.get("target") or fields.get("dst") or fields.get("destination") or ""
        folder = fields.get("source") or fields.get("src") or ""
        return (inside.rstrip("/") or "/", folder) if inside and folder else None
    parts = word.split(":")
    if len(parts) < 2 or not re.match(r"[/.~$]", parts[0]):  # a volume by name is no folder here
        return None
    return parts[1].rstrip("/") or "/", parts[0]
