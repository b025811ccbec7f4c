"""The bounds of times that authors and callers give: none is negative, endless or not a number."""

from datetime import timedelta

WAIT_S_MAX = 366 * 86_400.0
"""The longest wait for somebody or something outside."""

WORK_S_MAX = 86_400.0
"""The longest time that one piece of work is given, and the longest wait before a retry."""

WAIT_MAX = timedelta(seconds=WAIT_S_MAX)


def checked_s(what: str, seconds: float, most_s: float, *, may_be_zero: bool = False) -> float:
    """Return a time in seconds; raise ValueError, with the bounds in words, for one outside."""
    if 0 < seconds <= most_s or (may_be_zero and seconds == 0):
        return seconds
    least = "at least 0 s" if may_be_zero else "more than 0 s"
    most = f"{most_s / 86_400:g} days" if most_s > WORK_S_MAX else f"{most_s:g} s"
    raise ValueError(f"{what} is {least} and at most {most}, not {seconds:g} s")
