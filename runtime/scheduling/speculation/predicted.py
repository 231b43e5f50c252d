"""Drafts from an answer that the client predicts (OpenAI's `prediction`): the prediction is followed from
token to token, and where the answer leaves it, it is taken up again behind the last tokens that both have.
"""

from array import array

from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import Draft
from runtime.scheduling.speculation.pace import Chances, Pace, Record

WINDOW = 4  # tokens that answer and prediction must have in common to go on together
AT_FIRST = 8  # the beginning of a prediction counts as if so many tokens before it agreed
MOST = 16  # drafts of a row


class Followed:
    """The prediction of one sequence's answer, and how far the two go together."""

    __slots__ = ("at", "bytes", "matched", "record", "seen", "tokens")

    def __init__(self, tokens: list[int], seen: int) -> None:
        """`seen`: tokens of the sequence before its answer."""
        self.tokens = array("i", tokens)
        self.bytes = self.tokens.tobytes()
        self.seen = seen  # tokens of the sequence that were compared
        self.at = 0  # the predicted token that is to come next; -1: the two do not go together
        self.matched = AT_FIRST  # tokens that agreed before it
        self.record = Record()

    def find(self, window: "array[int]", begin: int) -> int:
        """Where the first occurrence of `window` from `begin` on ends; -1: there is none."""
        wanted, size = window.tobytes(), window.itemsize
        found = self.bytes.find(wanted, begin * size)
        while found >= 0 and found % size:
            found = self.bytes.find(wanted, found + 1)
        return -1 if found < 0 else found // size + len(window)


class PredictedDrafter:
    """Drafts of all sequences whose requests have a prediction."""

    def __init__(self, max_drafts: int, pace: Pace | None = None) -> None:
        """`max_drafts`: of a step, its other rows among them."""
        self.max_drafts = max_drafts
        self.pace = pace or Pace()
        self.chances = Chances()
        self._followed: dict[int, Followed] = {}
        self._left = max_drafts  # drafts that this step may still have

    def __bool__(self) -> bool:
        """Whether a running sequence has a prediction."""
        return bool(self._followed)

    def add(self, sequence: Sequence) -> None:
        """A sequence begins whose request has a prediction."""
        self._followed[sequence.id] = Followed(sequence.request.prediction, sequence.prompt_len)

    def begin(self, rows: int) -> None:
        """A step is planned in which so many sequences may have drafts."""
        self.pace.begin(rows)
        self._left = max(MOST, self.max_drafts - rows)

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A step without prompts, of so many rows and drafts, took `seconds`."""
        self.pace.learn(rows, drafts, seconds)

    def propose(self, sequence: Sequence, last: int, most: int) -> Draft | None:
        """At most `most` tokens of the prediction behind the token at position `last`, as far as they pay;
        tokens in flight are taken to be predicted ones. None: the sequence has no prediction, or left it."""
        followed = self._followed.get(sequence.id)
        if followed is None:
            return None
        if followed.seen < len(sequence.tokens):
            self._compare(followed, sequence.tokens)
        if followed.at < 0:
            return None
        skipped = last + 1 - len(sequence.tokens)
        begin = followed.at + skipped
        most = min(most, MOST, self._left, len(followed.tokens) - begin)
        count = self.pace.count(self.chances.of(followed.matched, followed.record), skipped, most)
        if count <= 0:
            return None
        self._left -= count
        return Draft(followed.tokens[begin : begin + count].tolist())

    def ended(self, sequence: Sequence) -> None:
        """Forgets the sequence."""
        self._followed.pop(sequence.id, None)

    def _compare(self, followed: Followed, tokens: "array[int]") -> None:
        """Follows the prediction along the tokens that have come, and looks for them where it was left."""
        come = tokens[followed.seen :]
        followed.seen = len(tokens)
        num_right = 0
        if followed.at >= 0:
            guesses = followed.tokens[followed.at : followed.at + len(come)]
            pairs = enumerate(zip(guesses, come, strict=False))
            num_right = next((i for i, (guess, token) in pairs if guess != token), len(guesses))
            is_wrong = num_right < len(guesses)
            followed.record.add(num_right, is_wrong)
            self.chances.add(followed.matched, num_right, is_wrong)
            left = followed.at + num_right
            followed.at = left if num_right == len(come) else -1
            followed.matched += num_right
        if followed.at < 0 and len(tokens) >= WINDOW:
            window = tokens[-WINDOW:]
            followed.at = followed.find(window, 0)
            followed.matched = WINDOW
