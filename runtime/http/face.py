"""What the options say about the HTTP face."""

from msgspec import Struct

from runtime.options.plan import Plan


class Face(Struct, frozen=True, kw_only=True):
    """How requests are taken and answers given."""

    max_body_bytes: int = 16 * 2**20  # larger bodies are refused with 413
    tenant_is: str = "off"  # what makes a tenant: see origin.py
    stream_interval: int = 1  # tokens between two events of a sequence
    stream_output: bool = False  # native streams carry new text only


DEFAULT = Face()


def face_of(plan: Plan) -> Face:
    return Face(max_body_bytes=plan.max_body_bytes, tenant_is=plan.fair_share, stream_interval=plan.stream_interval,
                stream_output=plan.stream_output)
