"""Agents as they are discovered (R-1.7): a card that says what an agent is and may do."""

from pydantic import Field, JsonValue

from perdure.protocol.base import Model, Time, read_known


class Skill(Model):
    """Something the agent is good at."""

    id: str = Field(max_length=200)
    name: str = Field(max_length=200)
    description: str = Field(default="", max_length=5000)


class AgentCard(Model):
    """Identity, abilities and needs of one agent version."""

    agent_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    version: str = Field(min_length=1, max_length=50)
    name: str = Field(default="", max_length=200)
    description: str = Field(default="", max_length=10_000)
    owner: str | None = Field(default=None, max_length=200)
    skills: tuple[Skill, ...] = ()
    input_schema: dict[str, JsonValue] | None = None
    output_schema: dict[str, JsonValue] | None = None
    tools: tuple[str, ...] = ()
    permissions: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ("native",)
    code_digest: str | None = Field(
        default=None, description="SHA-256 of a code agent's source, to tell when it was changed"
    )


class AgentView(Model):
    """An agent as it is listed: its newest card and the versions that are registered."""

    agent_id: str
    name: str
    description: str
    owner: str | None
    latest_version: str
    versions: list[str]
    registered_at: Time


def read_card(stored: JsonValue) -> AgentCard | None:
    """Return a registered card; None for one that this release cannot read."""
    return read_known(AgentCard, stored)
