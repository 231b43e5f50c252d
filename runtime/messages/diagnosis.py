"""What ranks look at while they compute, to find out what is wrong with a model."""

from msgspec import Struct

from runtime.json_value import JsonDict


class LayerHook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that sees, and may replace, what layers compute: an entry of --forward-hooks, whose fields
    are SGLang's."""

    target_modules: tuple[str, ...]  # patterns of names of layers, as layers.*.mlp
    hook_factory: str  # package.module:function
    config: JsonDict = {}  # what the factory is called with
    name: str = ""  # in the log


class TensorDump(Struct, frozen=True, array_like=True):
    """Files of what layers compute."""

    folder: str
    layers: tuple[int, ...] | None = None  # None: all, and what is outside of layers
    prompts_only: bool = False  # no steps in which every row decodes
    recorded: str = ""  # a file of another run; empty: none
    injects: bool = False  # layers get the inputs of that run, where it had the same tokens


class Diagnosis(Struct, frozen=True, array_like=True):
    """What a rank is asked to look at."""

    finds_nan: bool = False  # a request whose logits have a NaN ends with an error
    hooks: tuple[LayerHook, ...] = ()
    dump: TensorDump | None = None

    @property
    def watches_layers(self) -> bool:
        """Whether layers are computed one by one, in no graph and no program of the device."""
        return bool(self.hooks) or self.dump is not None


NOTHING = Diagnosis()
