"""Types of JSON that other programs have written: config.json and the files beside it. Torch-free.

What such a file holds is checked where it is read: by msgspec for fields that have a type, by the reader of a
quantization method or task for the others.
"""

from typing import Any

JsonValue = Any  # msgspec decodes no recursive type, so the type of an unchecked value is not narrower
JsonObject = dict[str, JsonValue]
