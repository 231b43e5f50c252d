"""Rules on drafts of speculative decoding."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag


def drafts_are_fully_described(options: Values) -> str | None:
    """The numbers of a draft agree; a tree needs all three, of a chain one says the others."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    numbers = [options[name] for name in names]
    if (
        options["speculative_algorithm"] not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
        or numbers.count("auto") == 3
    ):
        return None
    steps, branches, tokens = numbers
    if branches not in ("auto", 1):
        if "auto" in numbers:
            return f"{', '.join(map(flag, names))} are chosen together; give all three, or one branch"
        return None
    if "auto" not in (steps, tokens) and tokens != steps + 1:
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


def layers_draft_in_turn(options: Values) -> str | None:
    """Several next-token layers make one chain, each a draft of it."""
    algorithm, branches = options["speculative_algorithm"], options["speculative_eagle_topk"]
    if not options["enable_multi_layer_eagle"]:
        return None
    if algorithm not in ("NEXTN", "EAGLE") or options["speculative_token_map"] is not None:
        return (
            "--enable-multi-layer-eagle requires next-token layers of a model with its own output; take "
            "--speculative-algorithm NEXTN without --speculative-token-map, or leave it out"
        )
    if algorithm == "EAGLE" and options["speculative_draft_model_path"] is not None:
        return (
            "--enable-multi-layer-eagle is of the next-token layers in the model's own checkpoint; leave "
            "--speculative-draft-model-path out, or take --speculative-algorithm NEXTN"
        )
    if branches not in ("auto", 1):
        return (
            f"--enable-multi-layer-eagle makes chains, and --speculative-eagle-topk {branches} asks for "
            "trees; take 1"
        )
    return None


def backups_are_of_draft_models(options: Values) -> str | None:
    """Drafts that are looked up have no weights."""
    if not options["enable_draft_weights_cpu_backup"] or options["speculative_algorithm"] != "NGRAM":
        return None
    return "--enable-draft-weights-cpu-backup is of draft models, and NGRAM has none; leave it out"


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


def ngram_drafts_have_no_passes(options: Values) -> str | None:
    """Numbers of a draft model say nothing of drafts that are looked up."""
    given = [n for n in ("speculative_num_steps", "speculative_eagle_topk") if options[n] != "auto"]
    if options["speculative_algorithm"] != "NGRAM" or not given:
        return None
    return (
        f"{', '.join(map(flag, given))} is of draft models, and NGRAM has none; leave it out, or give "
        "--speculative-num-draft-tokens and --speculative-ngram-max-bfs-breadth"
    )


def ngram_bounds_are_in_order(options: Values) -> str | None:
    """The smallest of something is not larger than the largest."""
    for kind in ("match_window_size", "bfs_breadth"):
        low, high = (f"speculative_ngram_{bound}_{kind}" for bound in ("min", "max"))
        if options[low] > options[high]:
            return f"{flag(low)} {options[low]} is above {flag(high)} {options[high]}; lower it"
    return None


def drafts_are_of_tokens(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """A model that makes vectors has no tokens to guess."""
    if plan.speculation.speculative_algorithm is not None and model.pooling is not None:
        return "--speculative-algorithm has nothing to guess with a model that makes vectors; leave it out"
    return None


def trees_need_attention(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Recurrent layers go from one token to the next, so they compute no trees."""
    branches, algorithm = plan.speculation.speculative_eagle_topk, plan.speculation.speculative_algorithm
    if algorithm in (None, "NGRAM") or branches == 1 or not model.num_recurrent_layers:
        return None
    return (
        f"--speculative-eagle-topk {branches} asks for trees of drafts, and the recurrent layers of this "
        "model compute chains only; take 1"
    )


OPTION_RULES: tuple[OptionRule, ...] = (
    drafts_are_fully_described,
    drafts_have_a_model,
    layers_draft_in_turn,
    backups_are_of_draft_models,
    branches_need_kernels,
    ngram_drafts_have_no_passes,
    ngram_bounds_are_in_order,
)

PLAN_RULES: tuple[PlanRule, ...] = (drafts_are_of_tokens, trees_need_attention)
