"""Stop strings in a text that arrives in pieces.

Text leaves as soon as it cannot be part of a stop string: what is held back is the longest end of the text
that begins one. Of several stop strings the one that is complete first wins, so the result does not depend on
how the text was cut; of those complete at the same character, the longest.

Each stop string is followed by its own Knuth-Morris-Pratt automaton (SIAM J. Comput. 6 (2), 1977): a
character costs O(1) amortised for each, whatever the strings are. The failure tables grow only as far as a
text has matched, so long stop strings cost nothing up front.
"""

from collections.abc import Sequence


class Pattern:
    """A stop string and its failure table: `_borders[k]` is the length of the longest proper border of the
    first k + 1 characters."""

    __slots__ = ("text", "_borders")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]

    def border(self, matched: int) -> int:
        """Longest proper prefix of text[:matched] that also ends it; `matched` >= 1."""
        text, borders = self.text, self._borders
        while len(borders) < matched:
            char = text[len(borders)]
            k = borders[-1]
            while k and text[k] != char:
                k = borders[k - 1]
            borders.append(k + (text[k] == char))
        return borders[matched - 1]

    def advance(self, matched: int, piece: str, limit: int) -> tuple[int, int]:
        """Reads piece[:limit] with `matched` characters matched before. -> characters matched after, end of
        the match or -1"""
        text = self.text
        i = 0
        while i < limit:
            if not matched:
                i = piece.find(text[0], i, limit)
                if i < 0:
                    return 0, -1
            char = piece[i]
            while matched and text[matched] != char:
                matched = self.border(matched)
            matched += text[matched] == char
            i += 1
            if matched == len(text):
                return matched, i
        return matched, -1


class StopStrings:
    """The stop strings of a request; its sequences share them."""

    __slots__ = ("patterns", "firsts")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: at least one, none of them empty."""
        self.patterns = [Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self.firsts = frozenset(stop[0] for stop in stops)


class StopSearch:
    """The text of one sequence on its way through the stop strings. `matched` is the one that ended it."""

    __slots__ = ("matched", "_stops", "_states", "_held")

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._states = [0] * len(stops.patterns)  # characters matched, of each pattern
        self._held = ""

    def feed(self, piece: str, keep_match: bool = False) -> str:
        """Text that may leave now. When this sets `matched`, it is the last: up to the match, or with it if
        `keep_match`."""
        if not self._held and self._stops.firsts.isdisjoint(piece):
            return piece
        end = len(piece)
        found: Pattern | None = None
        # longest first, so that it wins when two end together
        for j, pattern in enumerate(self._stops.patterns):
            state, match_end = pattern.advance(self._states[j], piece, end)
            self._states[j] = state
            if match_end >= 0 and (found is None or match_end < end):
                end, found = match_end, pattern
        text = self._held + piece
        if found is None:
            held = max(self._states)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        self.matched = found.text
        text = text[: len(self._held) + end]
        self._held = ""
        return text if keep_match else text[: len(text) - len(found.text)]

    def flush(self) -> str:
        """What was held back: at the end of the sequence no stop string can complete any more."""
        held, self._held = self._held, ""
        return held
