"""Stop strings in a text that arrives in deltas.

Text is sent as soon as it cannot be part of a stop string: the longest end of the text that begins a stop
string is held back. Of several stop strings the one that is complete first wins, so the result does not
depend on how the text was cut; of those complete at the same character, the longest.

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
        """The length of the longest proper prefix of text[:matched] that also ends it; `matched` >= 1."""
        text, borders = self.text, self._borders
        while len(borders) < matched:
            char = text[len(borders)]
            k = borders[-1]
            while k and text[k] != char:
                k = borders[k - 1]
            borders.append(k + (text[k] == char))
        return borders[matched - 1]

    def advance(self, matched: int, delta: str, limit: int) -> tuple[int, int]:
        """Reads delta[:limit] with `matched` characters matched before. -> characters matched after, and the
        end of the match or -1"""
        text = self.text
        i = 0
        while i < limit:
            if not matched:
                i = delta.find(text[0], i, limit)
                if i < 0:
                    return 0, -1
            char = delta[i]
            while matched and text[matched] != char:
                matched = self.border(matched)
            matched += text[matched] == char
            i += 1
            if matched == len(text):
                return matched, i
        return matched, -1


class StopStrings:
    """The stop strings of a request; all its sequences share them."""

    __slots__ = ("patterns", "firsts")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: at least one, none of them empty."""
        self.patterns = [Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self.firsts = frozenset(stop[0] for stop in stops)


class StopSearch:
    """Searches the text of one sequence. `matched`: the stop string that ended it."""

    __slots__ = ("matched", "_stops", "_states", "_held")

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._states = [0] * len(stops.patterns)  # characters matched, of each pattern
        self._held = ""

    def feed(self, delta: str, keep_match: bool = False) -> str:
        """The text that may be sent now. When this sets `matched`, it is the last text: up to the match, or
        with it if `keep_match`."""
        if not self._held and self._stops.firsts.isdisjoint(delta):
            return delta
        end = len(delta)
        match: Pattern | None = None
        # longest first, so that it wins when two end together
        for j, pattern in enumerate(self._stops.patterns):
            state, match_end = pattern.advance(self._states[j], delta, end)
            self._states[j] = state
            if match_end >= 0 and (match is None or match_end < end):
                end, match = match_end, pattern
        text = self._held + delta
        if match is None:
            held = max(self._states)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        self.matched = match.text
        text = text[: len(self._held) + end]
        self._held = ""
        return text if keep_match else text[: len(text) - len(match.text)]

    def flush(self) -> str:
        """The text that was held back: at the end of the sequence no stop string can be completed any
        more."""
        held, self._held = self._held, ""
        return held
