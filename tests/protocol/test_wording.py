"""What does not fit is told in our words, with its place."""

from datetime import datetime
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from perdure.protocol.wording import first_problem, sentence_of


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: int = Field(default=1, ge=1, lt=10)
    kind: Literal["a", "b"] = "a"
    name: str = Field(default="n", min_length=1, max_length=2, pattern="^[a-z]+$")
    risk: str = Field(default="low", pattern="^(low|high)$")
    lines: Annotated[list[int], Field(max_length=1)] = Field(default_factory=list[int])
    at: datetime | None = None
    note: str | None = None
    asked: bool = False
    inner: "_Order | None" = None

    @field_validator("note")
    @classmethod
    def _is_kind(cls, value: str | None) -> str | None:
        if value == "rude":
            raise ValueError("a note is kind")
        return value


@pytest.mark.parametrize(
    ("value", "place", "text"),
    [
        ({"more": 1}, "more", "there is no such field"),
        ({"amount": 0}, "amount", "must be at least 1"),
        ({"amount": 10}, "amount", "must be less than 10"),
        ({"amount": "x"}, "amount", "must be a whole number"),
        ({"kind": "c"}, "kind", "must be 'a' or 'b'"),
        ({"name": ""}, "name", "must have at least 1 character(s)"),
        ({"name": "abc"}, "name", "must have at most 2 characters"),
        ({"name": "A"}, "name", "must match ^[a-z]+$"),
        ({"risk": "odd"}, "risk", "must be one of low, high"),
        ({"name": 1}, "name", "must be a text"),
        ({"lines": [1, 2]}, "lines", "must have at most 1 items"),
        ({"at": "soon"}, "at", "must be a time, as in 2026-01-31T12:00:00Z"),
        ({"asked": "maybe"}, "asked", "must be true or false"),
        ({"note": "rude"}, "note", "a note is kind"),
        ({"inner": {"amount": 0}}, "inner.amount", "must be at least 1"),
        ([], "", "must be an object"),
    ],
)
def test_what_does_not_fit_is_told_in_our_words(value: object, place: str, text: str) -> None:
    with pytest.raises(ValidationError) as raised:
        _Order.model_validate(value)
    assert first_problem(raised.value) == (tuple(place.split(".")) if place else (), text)


def test_a_kind_that_the_table_does_not_know_keeps_its_words() -> None:
    assert sentence_of({"type": "of_another_release", "msg": "is odd"}) == "is odd"
    assert sentence_of({"type": "too_long", "msg": "is long", "ctx": {}}) == "is long"
    assert sentence_of({}) == "is not valid"
