"""Containers of a Kubernetes manifest or a compose file, each as the words of a `docker run`."""

import re
import shlex
from collections.abc import Iterator

from runtime.errors import OptionsError
from runtime.json_value import Fields

IS_YAML = re.compile(r"^(apiVersion|kind|spec|services|containers):", re.MULTILINE)
MOST_BYTES = 1 << 20


def containers(text: str) -> list[list[str]]:
    """The words of a `docker run` for each container in YAML `text`. Raises OptionsError for broken YAML."""
    import yaml  # slow to import, and needed for files only

    try:
        if len(text) > MOST_BYTES:
            raise ValueError("it is too long")
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
        return [words for one in documents for words in _containers(one)]
    # AttributeError, TypeError, KeyError: values of a type that such files do not have there
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        problem = " ".join(str(error).split())
        raise OptionsError(
            [f"the file on standard input is no manifest that can be read: {problem}"]
        ) from None


def _containers(tree: Fields) -> Iterator[list[str]]:
    """Containers anywhere in a manifest, with the volumes of their pod; services of a compose file."""
    for name, value in tree.items():
        if name == "services" and isinstance(value, dict):
            yield from (_of_compose(service) for service in value.values() if "image" in service)
        elif name == "containers":
            folders = {
                volume["name"]: volume["hostPath"]["path"]
                for volume in tree.get("volumes", [])
                if "hostPath" in volume
            }
            yield from (_of_pod(one, folders) for one in value if "image" in one)
        elif isinstance(value, dict):
            yield from _containers(value)
        elif isinstance(value, list):
            yield from (words for one in value if isinstance(one, dict) for words in _containers(one))


def _of_pod(container: Fields, folders: Fields) -> list[str]:
    words = _run(container["image"], container.get("command", []), container.get("args", []))
    variables = [(one["name"], one.get("value", "")) for one in container.get("env", [])]
    mounts = [
        f"{folders[one['name']]}:{one['mountPath']}"
        for one in container.get("volumeMounts", [])
        if one["name"] in folders
    ]
    return _with(words, variables, mounts, [])


def _of_compose(service: Fields) -> list[str]:
    words = _run(service["image"], _words(service.get("entrypoint")), _words(service.get("command")))
    given = service.get("environment", {})
    pairs = [one.partition("=")[::2] for one in given] if isinstance(given, list) else list(given.items())
    strings = [[one for one in service.get(key, []) if isinstance(one, str)] for key in ("volumes", "ports")]
    if service.get("network_mode") == "host":
        strings[1] = []
    return _with(words, pairs, *strings)


def _run(image: str, entry: list[str], command: list[str]) -> list[str]:
    """IMAGE COMMAND, with an entry point in the place that `docker run` has for it."""
    return [*(["--entrypoint", entry[0]] if entry else []), image, *entry[1:], *command]


def _with(
    words: list[str], variables: list[tuple[str, object]], mounts: list[str], ports: list[str]
) -> list[str]:
    given = [("-e", f"{name}={value}") for name, value in variables]
    given += [("-v", mount) for mount in mounts] + [("-p", port) for port in ports]
    return ["docker", "run", *(word for pair in given for word in pair), *map(str, words)]


def _words(value: object) -> list[str]:
    """A command of a compose file, which is a list or a line."""
    if isinstance(value, str):
        return shlex.split(value)
    return [str(word) for word in value] if isinstance(value, list) else []
