"""`perdure topics`: who subscribes to the topics of a thread."""

from typing import Annotated

import typer

from perdure.cli.options import Db, Json, on_service, print_page, request_of
from perdure.ops.output import note, print_json
from perdure.protocol.topics import SubscriptionTerms
from perdure.service import topics as service_topics
from perdure.service.base import Service, Slice
from perdure.service.principal import LOCAL
from perdure.service.topics import Subscribed
from perdure.service.views import SubscriptionView

app = typer.Typer()

ThreadId = Annotated[str, typer.Argument(metavar="THREAD", help="Id of the thread.")]
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
AgentId = Annotated[str, typer.Argument(metavar="AGENT", help="Id of the agent.")]


@app.command()
def subscribe(
    thread: ThreadId,
    topic: TopicName,
    agent: AgentId,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Its version; by default the newest.", show_default=False),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Give an agent a run for each publication to a topic of a thread."""
    terms = request_of(SubscriptionTerms, agent_version=version)

    async def work(service: Service) -> Subscribed:
        return await service_topics.subscribe(service, LOCAL, thread, topic, agent, terms)

    made = on_service(db, work)
    if json:
        print_json(made.subscription)
        return
    note(f"{agent} subscribes to {topic}; its runs are in {made.subscription.inbox_thread_id}")


@app.command()
def unsubscribe(
    thread: ThreadId, topic: TopicName, agent: AgentId, db: Db = None, json: Json = False
) -> None:
    """Deliver nothing more to an agent."""

    async def work(service: Service) -> None:
        await service_topics.unsubscribe(service, LOCAL, thread, topic, agent)

    on_service(db, work)
    if json:
        print_json({"thread_id": thread, "topic": topic, "agent_id": agent})
        return
    note(f"{agent} does not subscribe to {topic}")


@app.command("list")
def list_(thread: ThreadId, db: Db = None, json: Json = False) -> None:
    """List who subscribes to what on a thread."""

    async def work(service: Service) -> list[SubscriptionView]:
        return await service_topics.list_subscriptions(service, LOCAL, thread)

    found = on_service(db, work)
    print_page(
        Slice(found, None),
        ("TOPIC", "AGENT", "VERSION", "INBOX"),
        lambda item: (
            item.topic,
            item.agent_id,
            item.terms.agent_version or "newest",
            item.inbox_thread_id,
        ),
        json=json,
    )
