"""Rules on drafts of speculative decoding."""

from runtime.options.rules.base import OptionRule, Values, flag


def drafts_are_fully_described(options: Values) -> str | None:
    """The three numbers that describe a draft are given together, or all left to the runtime."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    numbers = [options[name] for name in names]
    if (
        options["speculative_algorithm"] not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
        or numbers.count("auto") == 3
    ):
        return None
    if "auto" in numbers:
        return f"{', '.join(map(flag, names))} are chosen together; give all three, or none of them"
    steps, branches, tokens = numbers
    if branches == 1 and tokens != steps + 1:
        return (
            f"--speculative-num-draft-tokens {tokens} does not go with one branch and "
            f"--speculative-num-steps {steps}; "
            f"it must be {steps + 1}"
        )
    return None


def drafts_have_a_model(options: Values) -> str | None:
    """Algorithms with a separate draft model have its folder."""
    if (
        options["speculative_algorithm"] in ("EAGLE3", "STANDALONE")
        and options["speculative_draft_model_path"] is None
    ):
        return (
            f"--speculative-algorithm {options['speculative_algorithm']} needs a draft model; give "
            "--speculative-draft-model-path"
        )
    return None


def branches_need_kernels(options: Values) -> str | None:
    """Branches of a draft share pages, which only some attention kernels support."""
    branches, page, kernels = (
        options["speculative_eagle_topk"],
        options["page_size"],
        options["attention_backend"],
    )
    if (
        "auto" not in (branches, page)
        and branches > 1
        and page > 1
        and kernels not in ("auto", "flashinfer", "fa3")
    ):
        return (
            f"--speculative-eagle-topk {branches} with --page-size {page} does not go with "
            f"--attention-backend {kernels}; "
            "take flashinfer or fa3"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (
    drafts_are_fully_described,
    drafts_have_a_model,
    branches_need_kernels,
)
