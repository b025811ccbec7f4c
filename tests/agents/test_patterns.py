"""What patterns refuse when they are put together."""

from dataclasses import dataclass, field

import pytest

from perdure.agents.patterns.conversation import TURNS_MAX, Participant, Talk, conversation
from perdure.protocol.errors import Invalid

ADA = Participant(name="ada", agent_id="ada")


@dataclass
class Choice:
    """A selector with a state of its own, which has no hash."""

    names: list[str] = field(default_factory=list[str])

    def __call__(self, talk: Talk) -> str | None:
        """Return the name at this place of the talk."""
        return self.names[len(talk.speeches)]


def test_any_callable_selects() -> None:
    assert conversation("talk", "1", [ADA], select=Choice(["ada"])).card.agent_id == "talk"


def test_a_stop_word_that_every_answer_contains_is_refused() -> None:
    with pytest.raises(Invalid, match="every answer"):
        conversation("talk", "1", [ADA], stop_word="")


def test_nobody_speaks_so_often_that_the_task_is_out_of_sight() -> None:
    with pytest.raises(Invalid, match=f"1 to {TURNS_MAX}"):
        conversation("talk", "1", [ADA], turns_max=TURNS_MAX + 1)
