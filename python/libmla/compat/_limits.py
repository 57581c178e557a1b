"""How much a plan object of a compatible interface is made to hold."""

from .._records import Limits

NOTHING = Limits(max_rows=0, max_tokens=0, max_listed_pages=0)


def limits_for(
    num_rows: int, num_tokens: int, num_listed_pages: int, old: Limits = NOTHING
) -> Limits:
    """Powers of two that hold a plan, and what the old limits held: they seldom change."""
    return Limits(
        max_rows=max(old.max_rows, _power_of_two(num_rows)),
        max_tokens=max(old.max_tokens, _power_of_two(num_tokens)),
        max_listed_pages=max(old.max_listed_pages, _power_of_two(num_listed_pages)),
    )


def _power_of_two(number: int) -> int:
    return max(64, 1 << (number - 1).bit_length())
