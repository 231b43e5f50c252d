"""Which server a command line starts: its words, its variables, and the container that it runs in."""

import re
import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.options.compat import container
from runtime.options.compat.container import Container, System
from runtime.options.compat.engines import llama_cpp, lmdeploy, ollama, tgi
from runtime.options.compat.engines.table import Engine

ENGINES: Mapping[System, Engine] = {
    "sglang": Engine(title="SGLang", port=30000),
    "vllm": Engine(title="vLLM", port=8000, everywhere=True, takes_model=True),
    "rtp_llm": Engine(title="RTP-LLM", port=8088, everywhere=True),
    "llama_cpp": llama_cpp.ENGINE,
    "ollama": ollama.ENGINE,
    "tgi": tgi.ENGINE,
    "lmdeploy": lmdeploy.ENGINE,
}

# what the command of each system contains; the words that may follow it, and start a server
COMMANDS: tuple[tuple[str, System, tuple[str, ...]], ...] = (
    (r"sglang_router\.launch_server|sglang\..*", "sglang", ()),
    (r"(.*/)?sglang", "sglang", ("serve",)),
    (r"(rtp_llm|maga_transformer)[./].*|(.*/)?rtp_llm", "rtp_llm", ()),
    (r"vllm\..*", "vllm", ()),
    (r"(.*/)?vllm", "vllm", ("serve",)),
    (r"(.*/)?llama-(server|cli)(\.exe)?", "llama_cpp", ()),
    (r"(.*/)?ollama", "ollama", ("serve", "run")),
    (r"(.*/)?text-generation-launcher", "tgi", ()),
    (r"(.*/)?lmdeploy", "lmdeploy", ("serve",)),
)
ROUTERS = r"sglang_router\.launch_router|(.*/)?(sglang-router|vllm-router|smg)|vllm_router(\..*)?"
NO_ROUTER = (
    "spreads requests over several servers, and starts none: translate the command of each server, and put "
    "nginx in front of them (docs/deploy.md has its configuration)"
)
ROUTER_NOTE = "sglang_router's own options are left out: one process serves HTTP and plans for all ranks"
SHELL = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "2>"}  # what ends a command


class Invocation(Struct, frozen=True, kw_only=True):
    """A command that starts a server: the words behind the program's name, and what stands around it."""

    system: System
    words: list[str]
    variables: dict[str, str]
    container: Container | None = None
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> Engine:
        """What is known of the server."""
        return ENGINES[self.system]


def find(words: Sequence[str]) -> Invocation:
    """The command among `words` that starts a server. Raises OptionsError if there is none, or one that
    starts no server."""
    clean = _apart([word for word in words if not word or word.strip() not in ("", "\\")])
    clean = _substituted(clean)
    inside = container.read(clean)
    if inside is not None:
        clean = [*(f"{name}={value}" for name, value in inside.variables.items()), *inside.command]
    clean = _apart(_unwrapped(clean))
    start, system, subcommands = _command(clean)
    after = clean[start + 1 :]
    after = after[: next((i for i, word in enumerate(after) if word in SHELL), len(after))]
    return Invocation(
        system=system,
        words=_behind_subcommand(clean[start], system, subcommands, after),
        variables=_variables(clean[:start]),
        container=inside,
        notes=(ROUTER_NOTE,) if clean[start].startswith("sglang_router") else (),
    )


def _apart(words: list[str]) -> list[str]:
    """The words, with a `;` at the end of one as a word of its own, as a shell has it: `export A=1;`."""
    return [
        part
        for word in words
        for part in ([word[:-1], ";"] if len(word) > 1 and word.endswith(";") else [word])
    ]


def _substituted(words: list[str]) -> list[str]:
    """The words of a script with the values of its variables in place of $NAME, and without the assignments
    of those."""
    values: dict[str, str] = {}
    out: list[str] = []
    for word in words:
        for name, value in values.items():
            plain = value.replace("\\", r"\\")
            word = re.sub(rf"\${name}\b", plain, word.replace(f"${{{name}}}", value))
        name, equals, given = word.partition("=")
        if equals and name.isidentifier() and any(re.search(rf"\${{?{name}\b", one) for one in words):
            values[name] = given
        else:
            out.append(word)
    return out


def _unwrapped(words: list[str]) -> list[str]:
    """The words with those that a shell gets in one (`bash -c "vllm serve ..."`) in its place. Raises
    OptionsError for a quotation without end."""
    for i, word in enumerate(words[:-2]):
        if re.fullmatch(r"(.*/)?(ba|da)?sh", word) and re.fullmatch(r"-[el]*c", words[i + 1]):
            try:
                return [*words[:i], *shlex.split(words[i + 2].replace("\\\n", " ")), *words[i + 3 :]]
            except ValueError:
                raise OptionsError(
                    [f"the words of {word} {words[i + 1]} have a quotation without end"]
                ) from None
    return words


def _command(words: list[str]) -> tuple[int, System, tuple[str, ...]]:
    """Where the command is, whose it is, and its subcommands."""
    router = next((word for word in words if re.fullmatch(ROUTERS, word)), None)
    if router is not None:
        raise OptionsError([f"{router} {NO_ROUTER}"])
    found = [
        (i, system, subcommands)
        for i, word in enumerate(words)
        for pattern, system, subcommands in COMMANDS
        if re.fullmatch(pattern, word)
    ]
    if not found:
        raise OptionsError(
            [
                "no command of SGLang, vLLM, llama.cpp, Ollama, TGI, LMDeploy or RTP-LLM is among the words; "
                "write runtime translate python -m sglang.launch_server ..., or vllm serve MODEL ..."
            ]
        )
    # A folder or a container may have the name as well: the module that Python runs is the command, or the
    # program with a word that starts a server.
    return next(
        (
            one
            for one in found
            if words[one[0] - 1] == "-m" or words[one[0] + 1 : one[0] + 2] in [[word] for word in one[2]]
        ),
        found[0],
    )


def _behind_subcommand(
    program: str, system: System, subcommands: tuple[str, ...], after: list[str]
) -> list[str]:
    """The words behind `serve`; all of them where the program has no subcommands, or none is given."""
    if not subcommands or not after or after[0].startswith("-"):
        return after
    if after[0] not in subcommands:
        raise OptionsError(
            [
                f"{shlex.join([program, after[0]])} starts no server; give the command with "
                f"{' or '.join(subcommands)}"
            ]
        )
    if system != "lmdeploy":
        return after[1:]
    if after[1:2] == ["proxy"]:
        raise OptionsError([f"lmdeploy serve proxy {NO_ROUTER}"])
    return after[2:]


def _variables(words: Sequence[str]) -> dict[str, str]:
    """NAME=value words in front of a command, also of sysctl."""
    pairs = [word.partition("=") for word in words]
    return {name: value for name, equals, value in pairs if equals and name.replace(".", "_").isidentifier()}
