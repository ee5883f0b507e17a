"""Divisions of integers that round up."""


def ceil_divide(number: int, divisor: int) -> int:
    """Return a quotient, rounded up to an integer."""
    # Floor division rounds down; of the negated number, it rounds the quotient up.
    return -(-number // divisor)


def round_up(number: int, multiple_of: int) -> int:
    """Return the smallest multiple that is not below a number."""
    return ceil_divide(number, multiple_of) * multiple_of
