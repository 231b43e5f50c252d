"""Texts before and behind the tokens of a file, which are tokenised with the text that they stand in."""

from collections.abc import Mapping, Sequence

from runtime.text.vocabulary import Vocabulary

Around = tuple[str, str] | tuple[()]


def with_texts_around(
    prompt_ids: list[int], texts: Mapping[int, Sequence[Around]], vocabulary: Vocabulary
) -> list[int]:
    """A prompt with texts before and behind its files, each of which is one text with what stands between it
    and the next special token. `texts`: by placeholder, those of each file that it stands for, in order.
    Raises InvalidRequest where texts have no tokens."""
    left = {token: iter(each) for token, each in texts.items()}
    ids: list[int] = []
    run: list[int] = []  # the tokens of text behind the last special one
    before = ""
    for token in prompt_ids:
        if token not in left and token not in vocabulary.special_ids:
            run.append(token)
            continue
        first, last = (next(left[token]) if token in left else ()) or ("", "")
        ids += [*_joined(before, run, first, vocabulary), token]
        run, before = [], last
    return ids + _joined(before, run, "", vocabulary)


def _joined(before: str, run: list[int], behind: str, vocabulary: Vocabulary) -> list[int]:
    """The tokens of a text with one before and one behind it."""
    if not before and not behind:
        return run
    text = vocabulary.decode(run)
    if vocabulary.encode(text, add_special=False) == run:
        return vocabulary.encode(before + text + behind, add_special=False)
    # a client sent tokens that no text is made into: they stay
    first, last = (vocabulary.encode(one, add_special=False) for one in (before, behind))
    return [*first, *run, *last]
