"""The logit processor that a request names."""

from typing import Any

from runtime.errors import InvalidRequest
from runtime.messages.sampling import Processor


def processor_of(name: str, params: dict[str, Any] | None) -> Processor:
    """The processor's name with its parameters. Raises InvalidRequest for a pickled one, as SGLang's clients
    send."""
    if name.lstrip().startswith("{"):
        raise InvalidRequest(
            "code that comes with a request is not run here; the operator names processors with "
            "--logit-processors, and requests choose one by its class name",
            param="custom_logit_processor",
        )
    return Processor(name, params or {})
