"""What is wrong with a value, in our words: one table from the validator's kinds of error.

Messages reach callers, operators and models alike, so they name what is wanted and speak of JSON
and not of Python. A rule of our own (`ValueError` in a validator) speaks for itself.
"""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import ValidationError

_SENTENCES: Mapping[str, str] = {
    "extra_forbidden": "there is no such field",
    "missing": "is missing",
    "missing_argument": "is missing",
    "unexpected_keyword_argument": "there is no such argument",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "none_required": "must be null",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_sub_type": "must be a text",
    "string_unicode": "must be valid Unicode",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} items",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "datetime_type": "must be a time, as in 2026-01-31T12:00:00Z",
    "datetime_parsing": "must be a time, as in 2026-01-31T12:00:00Z",
    "datetime_from_date_parsing": "must be a time, as in 2026-01-31T12:00:00Z",
    "timezone_aware": "must be a time with its offset, as in 2026-01-31T12:00:00Z",
    "date_type": "must be a date, as in 2026-01-31",
    "date_parsing": "must be a date, as in 2026-01-31",
    "date_from_datetime_parsing": "must be a date, as in 2026-01-31",
    "time_delta_type": "must be a time span: seconds, or as in PT1H30M",
    "time_delta_parsing": "must be a time span: seconds, or as in PT1H30M",
    "json_invalid": "is not JSON",
    "json_type": "is not JSON",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "{discriminator} is missing",
}

_ALTERNATIVES = re.compile(r"\^\((\w+(?:\|\w+)+)\)\$")
"""A pattern that only lists words."""
_OWN_RULES = ("Value error, ", "Assertion failed, ")


def sentence_of(problem: Mapping[str, object]) -> str:
    """Return what one error of a ValidationError says, without the place."""
    template = _SENTENCES.get(str(problem.get("type")))
    if template is not None:
        context = cast("Mapping[str, object]", problem.get("ctx") or {})
        words = _ALTERNATIVES.fullmatch(str(context.get("pattern", "")))
        if words is not None:
            return f"must be one of {', '.join(words[1].split('|'))}"
        try:
            return template.format_map(context)
        except (KeyError, IndexError):
            pass  # a context of another release of the validator: its own words will do
    text = str(problem.get("msg") or "is not valid")
    for prefix in _OWN_RULES:
        text = text.removeprefix(prefix)
    return text


def first_problem(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """Return where the first error stands, as a path, and what it says."""
    first = cast("Mapping[str, object]", error.errors(include_url=False, include_input=False)[0])
    place = cast("Sequence[object]", first.get("loc", ()))
    return tuple(str(part) for part in place), sentence_of(first)


def all_problems(error: ValidationError, problems_max: int = 5) -> str:
    """Return what is wrong with a value of a model, on one line: `Sleep: duration: is missing`."""
    found = error.errors(include_url=False, include_input=False)
    told = [
        f"{'.'.join(str(part) for part in item['loc'])}: {sentence_of(item)}".removeprefix(": ")
        for item in cast("Sequence[Mapping[str, Sequence[object]]]", found[:problems_max])
    ]
    more = f"; and {len(found) - problems_max} more" if len(found) > problems_max else ""
    return f"{error.title}: {'; '.join(told)}{more}"
