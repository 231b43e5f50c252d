"""The YAML file of --config: its options by name. An option that is given twice is refused, since YAML's
readers would take one of the values silently."""

from collections import Counter
from pathlib import Path

from runtime.errors import OptionsError
from runtime.regular_file import read_text

MAX_BYTES = 1 << 20


def read_config(path: Path) -> dict[str, object]:
    """-> the values by their names as they stand in the file. Raises OptionsError for what can't be read, is
    no mapping, or names an option twice."""
    import yaml  # slow to import, and needed for files only

    try:
        loader = yaml.SafeLoader(read_text(path, MAX_BYTES))
        root = loader.get_single_node()
        tree = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise OptionsError([f"--config {path} cannot be read: {error.strerror or error}"]) from None
    # ValueError: bytes that are no UTF-8, a thirteenth month
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError([f"--config {path} is not YAML: {' '.join(str(error).split())}"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise OptionsError([f"--config {path} must be a mapping of options, such as `port: 30000`"])
    counts = Counter(str(key.value) for key, _ in root.value)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise OptionsError(
            [f"{name} is in {path.name} more than once; keep one of its lines" for name in twice]
        )
    return {str(key): value for key, value in tree.items()}
