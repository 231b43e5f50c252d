"""How a diffusion model fills in its blocks, by --dllm-algorithm-config in SGLang's form, and which of its
sampling defaults it takes."""

import msgspec

from runtime.errors import OptionsError
from runtime.json_value import Fields
from runtime.messages.sampling import IN_ORDER
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.regular_file import read_text
from runtime.scheduling.diffusion.algorithms import ALGORITHMS, Algorithm, Diffusion

OPTION = "--dllm-algorithm-config"


def model_defaults(model: ModelConfig) -> Fields:
    """Sampling values of generation_config.json, as far as the model takes them."""
    left_out = IN_ORDER if model.diffusion is not None else ()
    return {name: value for name, value in model.sampling_defaults.items() if name not in left_out}


def diffusion(plan: Plan, model: ModelConfig) -> Diffusion | None:
    """How the model's blocks are filled in; None: it has none. Raises OptionsError."""
    name, path = plan.states.dllm_algorithm, plan.states.dllm_algorithm_config
    if model.diffusion is None or name is None:
        return None
    algorithm = ALGORITHMS[name]() if path is None else read_algorithm(name, path)
    size = algorithm.block_size or model.diffusion.block_size
    if plan.memory.page_size % size:
        raise OptionsError(
            [
                f"--page-size {plan.memory.page_size} is no multiple of the blocks of {size} tokens; choose "
                f"--page-size {max(1, plan.memory.page_size // size) * size}"
            ]
        )
    if plan.schedule.max_step_tokens < size:
        raise OptionsError(
            [
                f"--chunked-prefill-size {plan.schedule.max_step_tokens} is less than a block of {size} "
                "tokens; choose more"
            ]
        )
    return Diffusion(algorithm=algorithm, size=size, mask_id=model.diffusion.mask_id)


def read_algorithm(name: str, path: str) -> Algorithm:
    """The algorithm with the settings of a file. Raises OptionsError."""
    import yaml  # slow to import, and needed for files only

    try:
        found: Algorithm = msgspec.convert(yaml.safe_load(read_text(path)) or {}, ALGORITHMS[name])
    except OSError as error:
        raise OptionsError([f"{OPTION} {path} cannot be read: {error.strerror or error}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError(
            [f"{OPTION} {path} is none of {name}: {' '.join(str(error).split())}; see docs/diffusion.md"]
        ) from None
    return found
