"""Whole numbers as English words."""

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def number_words(number: int) -> str:
    """A number from 0 to 999,999: "one hundred and twenty-eight"."""
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest)
    joint = " and " if 0 < rest < 100 else ", "
    return _below_thousand(thousands) + " thousand" + (joint + _below_thousand(rest) if rest else "")


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    return ONES[hundreds] + " hundred" + (" and " + _below_hundred(rest) if rest else "")


def _below_hundred(number: int) -> str:
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
