"""`perdure interrupts`: what waits for people, all of a question, and answering it."""

from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError

from perdure.cli.options import (
    LIMIT_DEFAULT,
    AfterInterrupt,
    Db,
    Json,
    Limit,
    Reason,
    json_of,
    on_service,
    print_object,
    print_page,
    request_of,
    usage_error,
)
from perdure.ops.output import json_text, note, print_fields, print_json, print_value
from perdure.protocol.base import format_time
from perdure.protocol.states import Answer, InterruptStatus
from perdure.protocol.values import BlobRef
from perdure.service import interrupts as service_interrupts
from perdure.service.base import Service, Slice
from perdure.service.interrupts import Answered, AnswerRequest, DelegateRequest
from perdure.service.principal import LOCAL
from perdure.service.views import InterruptView

app = typer.Typer()


@app.command("list")
def list_(
    run: Annotated[
        str | None, typer.Option("--run", help="Only those of this run.", show_default=False)
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Answered, expired and cancelled ones too.")
    ] = False,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterInterrupt = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List what waits for an answer, oldest first."""

    async def work(service: Service) -> Slice[InterruptView]:
        return await service_interrupts.list_interrupts(
            service,
            LOCAL,
            status=None if all_ else InterruptStatus.PENDING,
            run_id=run,
            after=after,
            limit=limit,
        )

    print_page(
        on_service(db, work),
        ("INTERRUPT", "RUN", "KIND", "STATUS", "ASKS"),
        lambda item: (item.interrupt_id, item.run_id, item.kind, item.status, _asks(item)),
        json=json,
    )


@app.command()
def show(
    interrupt: Annotated[str, typer.Argument(metavar="ID", help="Id of the interrupt.")],
    db: Db = None,
    json: Json = False,
) -> None:
    """Show all that is asked: a call's arguments, or what a question comes with, in full."""

    async def work(service: Service) -> InterruptView:
        return await service_interrupts.get_interrupt(service, LOCAL, interrupt)

    found = on_service(db, work)
    if json:
        print_json(found)
        return
    print_fields(_all_fields_of(found))
    if found.action is not None:
        print_value("arguments", found.action.args)
    if found.payload is not None:
        print_value("payload", found.payload)
    if found.effective_args is not None:
        print_value("edited arguments", found.effective_args)


Edit = Annotated[
    str | None,
    typer.Option(
        "--edit", metavar="JSON", help="Let it run with these arguments.", show_default=False
    ),
]
Respond = Annotated[
    str | None,
    typer.Option("--respond", metavar="JSON", help="Answer with a value.", show_default=False),
]
Happened = Annotated[
    str | None,
    typer.Option(
        "--happened", metavar="REF", help="It took effect, under this id.", show_default=False
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="JSON", help="With --happened: what the call gave.", show_default=False
    ),
]


@app.command()
def resolve(
    interrupt: Annotated[str, typer.Argument(metavar="ID", help="Id of the interrupt.")],
    approve: Annotated[bool, typer.Option("--approve", help="Let the call run as asked.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Do not let it run.")] = False,
    edit: Edit = None,
    respond: Respond = None,
    happened: Happened = None,
    output: Output = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run it again.")] = False,
    skip: Annotated[
        bool, typer.Option("--skip", help="Go on without knowing what became of it.")
    ] = False,
    reason: Reason = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Answer an interrupt, with exactly one of the answers.

    Approvals take approve, edit, respond and reject; questions respond and reject; calls whose
    outcome is not known happened, retry and skip. JSON may be text, @file, or - for stdin.
    """
    answers = {
        Answer.APPROVE: approve,
        Answer.REJECT: reject,
        Answer.EDIT: edit is not None,
        Answer.RESPOND: respond is not None,
        Answer.HAPPENED: happened is not None,
        Answer.RETRY: retry,
        Answer.SKIP: skip,
    }
    answer = _the_one(answers)
    if output is not None and answer != Answer.HAPPENED:
        raise typer.BadParameter("--output goes with --happened alone")
    value, of = (respond, "--respond") if output is None else (output, "--output")
    request = request_of(
        AnswerRequest,
        answer=answer,
        args=None if edit is None else json_of(edit, "--edit"),
        value=None if value is None else json_of(value, of),
        external_ref=happened,
        reason=reason,
    )

    async def work(service: Service) -> Answered:
        return await service_interrupts.resolve(service, LOCAL, interrupt, request)

    answered = on_service(db, work)
    document = {"interrupt": answered.interrupt, "replayed": answered.replayed}
    print_object(document, _fields_of(answered.interrupt), json=json)
    if answered.replayed:
        note("the same answer was given before")


def _fields_of(view: InterruptView) -> list[tuple[str, object]]:
    return [
        ("interrupt", view.interrupt_id),
        ("run", view.run_id),
        ("status", view.status),
        ("answer", view.answer),
        ("by", view.answered_by),
    ]


def _all_fields_of(view: InterruptView) -> list[tuple[str, object]]:
    action = view.action
    return [
        ("interrupt", view.interrupt_id),
        ("run", view.run_id),
        ("agent", view.agent_id),
        ("kind", view.kind),
        ("status", view.status),
        ("title", view.title),
        ("reason", view.reason),
        ("risk", view.risk),
        ("tool", None if action is None else f"{action.tool} {action.version or ''}".strip()),
        ("side effect", None if action is None else action.side_effect),
        ("artifact", view.artifact_ref),
        ("requested", view.requested_actions),
        ("approvers", ", ".join(view.approvers)),
        ("answers", ", ".join(view.answers)),
        ("fits", view.answer_schema),
        ("expires", None if view.expires_at is None else format_time(view.expires_at)),
        ("on expiry", None if view.expires_at is None else view.on_expiry),
        ("answer", view.answer),
        ("value", None if view.value is None else json_text(view.value)),
        ("why", view.answer_reason),
        ("by", view.answered_by),
    ]


@app.command("delegate")
def delegate_(
    interrupt: Annotated[str, typer.Argument(metavar="ID", help="Id of the approval.")],
    to: Annotated[list[str], typer.Option("--to", help="Who is to decide; may be repeated.")],
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why; kept in the log.", show_default=False)
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Hand an approval on to others."""
    try:
        request = DelegateRequest(to=tuple(to), reason=reason)
    except ValidationError as error:
        raise usage_error(error) from None

    async def work(service: Service) -> Answered:
        return await service_interrupts.delegate_approval(service, LOCAL, interrupt, request)

    view = on_service(db, work).interrupt
    approvers = ", ".join(view.approvers)
    print_object(view, [("interrupt", view.interrupt_id), ("approvers", approvers)], json=json)


def _the_one(answers: dict[Answer, bool]) -> Answer:
    """Return the answer that was given; a usage error when it is not exactly one."""
    given = [answer for answer, is_given in answers.items() if is_given]
    if len(given) != 1:
        names = ", ".join(f"--{answer}" for answer in answers)
        raise typer.BadParameter(f"give exactly one of {names}")
    return given[0]


def _asks(item: InterruptView) -> str:
    """Return what is asked, as a line: of what is large its beginning, `show` has it all."""
    if item.action is not None:
        return f"{item.action.tool}({_begin(item.action.args, item.action.args_ref)})"
    with_it = _begin(item.payload, item.payload_ref)
    return item.title if with_it == "null" else f"{item.title} {with_it}".strip()


def _begin(value: JsonValue, ref: BlobRef | None) -> str:
    return json_text(value) if ref is None else f"{ref.preview}…"
