"""Topics of a thread, and who subscribes to them (R-4.8).

A run publishes to the topics of its root's thread. What is published is an event of that run; each
subscriber gets a run of its own for it, created in the transaction of the event.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import Field

from perdure.protocol.base import Model
from perdure.protocol.policies import Budget, Timeouts
from perdure.protocol.runs import PRIORITY_MAX, QUEUE_DEFAULT, Caller, QueueName

PUBLISHED_EVENT_NAME = "perdure.published"
"""Name of the custom event that says what was published: `topic` and `value`."""

SUBSCRIPTIONS_MAX = 100
"""How many subscriptions a thread has at most."""

TOPIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}$"
Topic = Annotated[str, Field(pattern=TOPIC_PATTERN)]


class SubscriptionTerms(Model):
    """What the runs of a subscription are given."""

    agent_version: str | None = Field(
        default=None, min_length=1, max_length=50, description="by default the newest"
    )
    budget: Budget = Budget()
    timeouts: Timeouts = Timeouts()
    max_steps: int | None = Field(default=None, ge=1, le=100_000)
    max_attempts: int | None = Field(default=None, ge=1, le=100)
    queue: QueueName = QUEUE_DEFAULT
    priority: int = Field(default=0, ge=-PRIORITY_MAX, le=PRIORITY_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionRow:
    """An agent subscribes to a topic of a thread, under the name of who asked for it.

    Its runs follow one another in `inbox_thread_id`, so that it has one at a time and knows those
    before.
    """

    tenant_id: str
    thread_id: str
    topic: str
    agent_id: str
    inbox_thread_id: str
    terms: SubscriptionTerms
    caller: Caller
    created_at: datetime
