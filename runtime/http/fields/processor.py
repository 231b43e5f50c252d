"""The logit processor that a request chooses."""

from typing import Any

from runtime.errors import InvalidRequest
from runtime.messages.sampling import Processor


def processor_of(name: str, params: dict[str, Any] | None) -> Processor:
    """Raises InvalidRequest for code: SGLang's clients send the processor itself, pickled."""
    if name.lstrip().startswith("{"):
        raise InvalidRequest(
            "code that comes with a request is not run here; the operator names processors with --logit-processors, "
            "and requests choose one by its class name",
            param="custom_logit_processor",
        )
    return Processor(name, params or {})
