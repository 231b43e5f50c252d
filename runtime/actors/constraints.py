"""What answers must follow: the rules of requests, or the tree of tokens of a server, as ranks take them."""

from collections.abc import Sequence

from msgspec import structs

from runtime.errors import InvalidRequest
from runtime.messages.constraint import Grammar, TreeRule, grammar_of
from runtime.messages.requests import GenerateRequest, GrammarConstraint, Request, Thinking
from runtime.messages.sampling import SamplingParams, ThinkingLimit
from runtime.text.vocabulary import Vocabulary

TAIL_TOKENS = 32  # last tokens of a prompt, which show whether its answer begins with reasoning


class Constraints:
    """Thread-safe: it has no state."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: tuple[int, ...], tree: TreeRule | None) -> None:
        """`tree`: what all answers follow; None: what their requests say."""
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._tree = tree

    def within(self, request: GenerateRequest, params: SamplingParams) -> SamplingParams:
        """The parameters of an answer. One that follows the server's tree ends where that does, and has no
        reasoning before it. Raises InvalidRequest for one that has a constraint of its own besides."""
        if self._tree is None or request.pools:
            return params
        if params.constraint is not None:
            raise InvalidRequest(
                "constraint: all answers of this server follow --tree-decode-config; leave it out",
                param="constraint",
            )
        ends = tuple(dict.fromkeys((*params.stop_token_ids, self._tree.end_id)))
        return structs.replace(
            params, stop_token_ids=ends, ignore_eos=False, thinking=None, constraint_after=()
        )

    def grammar(self, request: GenerateRequest, tokenized: Request) -> Grammar | None:
        """What the answer must follow; None: any text will do."""
        if self._tree is not None and not request.pools:
            return self._tree.grammar
        rule = tokenized.params.constraint
        return None if rule is None else grammar_of(rule)

    def of(self, tokenized: Request, grammar: Grammar | None) -> GrammarConstraint:
        """The constraint of a request whose answer follows `grammar`; None: any text, within the budget of
        its reasoning."""
        if self._tree is not None and grammar is not None:
            return GrammarConstraint(grammar, (), (self._tree.end_id,))
        thinking = self._thinking(tokenized)
        # reasoning that cannot begin does not end either
        has_none = thinking is not None and thinking.is_never
        after_ids = () if has_none or grammar is None else self._after_ids(tokenized)
        stop_ids = (*self._eos_ids, *tokenized.params.stop_token_ids)
        return GrammarConstraint(grammar, after_ids, stop_ids, thinking)

    def _thinking(self, request: Request) -> Thinking | None:
        """The budget of the request's reasoning, with its markers as tokens."""
        limit = request.params.thinking
        if limit is None:
            return None
        tail = self._vocabulary.decode(request.prompt_ids[-TAIL_TOKENS:], skip_special=False)
        begins, ends = zip(*limit.marks, strict=True)

        def tokens(texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
            return tuple([tuple(self._vocabulary.encode(text, add_special=False)) for text in texts])

        return Thinking(
            limit.budget, tokens(begins), tokens(ends), open_marks(limit, tail), limit.is_anywhere
        )

    def _after_ids(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Token ids of the texts after which the constraint holds; () where the prompt shows that it holds
        from the first token on."""
        if not (free := request.params.free):
            return ()
        tail = self._vocabulary.decode(request.prompt_ids[-TAIL_TOKENS:], skip_special=False).rstrip()
        if any([tail.endswith(one.end.rstrip()) for one in free]):
            return ()
        begun = [one for one in free if one.begin and tail.endswith(one.begin.rstrip())]
        ends = dict.fromkeys([one.end for one in begun or free if begun or not one.begin])
        return tuple([tuple(self._vocabulary.encode(end, add_special=False)) for end in ends])


def open_marks(limit: ThinkingLimit, tail: str) -> int:
    """Place of the markers of the reasoning in which an answer begins behind a prompt with this end; -1: it
    begins with none."""
    if limit.is_continued:
        at = max(range(len(limit.marks)), key=lambda place: tail.rfind(limit.marks[place][0]))
        is_open = tail.rfind(limit.marks[at][0]) > max([tail.rfind(end) for _, end in limit.marks])
        return at if is_open else -1
    tail = tail.rstrip()
    for at, (begin, _) in enumerate(limit.marks):
        if tail.endswith(begin.rstrip()):
            return at
    is_over = tail.endswith(tuple([end.rstrip() for _, end in limit.marks]))
    return 0 if limit.is_forced and not is_over else -1
