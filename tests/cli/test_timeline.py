"""What `runs events` and `runs show` tell of each kind of event, in words for people."""

import re

from perdure.ops.exits import ExitCode
from perdure.ops.timeline import line_of
from perdure.protocol.event_views import EventView
from tests.cli.program import Program
from tests.cli.workshop import REFERENCE

HERE = ("--here", "--agents", REFERENCE, "--timeout", "15", "--json")


def _lines(perdure: Program, run_id: str) -> str:
    """Return what the events of a run say, without numbers, times and ids."""
    told = perdure("runs", "events", run_id).out
    bare = re.sub(r"^ *\d+  \S+  ", "", told, flags=re.MULTILINE)
    return re.sub(r"(run|tc|int)_[0-9a-f]{32}", r"\1_…", bare)


def test_a_code_agent_can_be_read(perdure: Program) -> None:
    """R-6.2: steps by their names, what code reported, sleeps, children; nothing of bookkeeping."""
    run_id = perdure("run", "researcher", *HERE).json["run_id"]
    lines = _lines(perdure, run_id)
    for line in (
        'step fetch("a")\nsucceeded: "A"\n',
        'writes seen (append): ["A"]\nreports progress: done=1\nsleeps until 2',
        "attempt 2 claimed: the run goes on\n",
        "child run_… of helper 1 started\n",
        'child run_… succeeded: "helped"\n',
        "artifact notes.txt (10 bytes)\n",
    ):
        assert line in lines
    assert "custom" not in lines
    assert "perdure." not in lines
    assert re.search(
        r"^0 +step fetch +succeeded", perdure("runs", "show", run_id).out, re.MULTILINE
    )


def test_sleeps_plans_undoing_and_handing_over_can_be_read(perdure: Program) -> None:
    """R-6.2: and a cancel with its reason."""
    run = perdure("run", "rests", *HERE).json
    (asked,) = run["open_interrupts"]
    perdure("interrupts", "resolve", asked, "--approve", "--reason", "tea is good")
    run_id = run["run_id"]
    assert perdure("runs", "wait", run_id, *HERE).code == ExitCode.WAITING_FOR_HUMAN
    perdure("runs", "cancel", run_id, "--compensate", "--reason", "no tea")
    assert perdure("runs", "wait", run_id, *HERE).json["state"] == "failed"
    lines = _lines(perdure, run_id)
    for line in (
        'plan revision 1: rest (in_progress)\nagent state: "rested"\nsleeps 0.01 s\n',
        'call order(name="tea") (ask)\n',
        "approve by local: tea is good\n",
        "cancel by local, undoing its effects: no tea\n",
        "undoing tc_… started\n",
        'undoing tc_… succeeded: undone="order 1"\n',
        "; in the world: order succeeded, undoing succeeded\n",
    ):
        assert line in lines
    shown = perdure("runs", "show", run_id).out
    assert re.search(r"^order +succeeded +- +succeeded +tc_", shown, re.MULTILINE)

    run_id = perdure("run", "hands_over", *HERE).json["run_id"]
    assert "hands_over hands over to helper 1: it knows better\n" in _lines(perdure, run_id)


def test_a_call_that_was_never_begun_is_not_told_as_left(perdure: Program) -> None:
    """R-9.4: the run was cancelled while a person was asked whether the call may run."""
    run_id = perdure("run", "rests", *HERE).json["run_id"]
    assert "call order" in _lines(perdure, run_id)
    perdure("runs", "cancel", run_id)
    assert "in the world" not in _lines(perdure, run_id)
    shown = perdure("runs", "show", run_id).out
    assert re.search(r"cancelled +0 +tc_", shown)
    assert "LEFT BY" not in shown


def test_a_tool_that_may_not_run_is_named_at_the_start_with_the_remedy(perdure: Program) -> None:
    """R-5.11."""
    done = perdure("run", "pokes", *HERE)
    assert done.code == 1
    assert "every call of agent pokes to poke will be denied" in done.err
    remedy = "poke changes something and does not say what live agents need to know: declare"
    assert done.json["error"]["reason"].startswith(remedy)
    assert re.search(
        r"denied +1? *0 +tc_\w+ +POLICY_DENIED: poke changes",
        perdure("runs", "show", done.json["run_id"]).out,
    )


def _line(kind: str, **data: object) -> str:
    values = {"event_id": "e", "run_id": "r", "seq": 1, "type": kind, "step_index": 0, "data": data}
    rest = {"schema_version": 1, "attempt": 1, "trace_id": "", "span_id": ""}
    return line_of(EventView.model_validate({**values, **rest, "time": "2026-01-01T00:00:00Z"}))


def test_failures_of_children_compensations_and_planners_say_why() -> None:
    failure = {"code": "TOOL_ERROR", "reason": "no luck"}
    assert _line("error", failure=failure) == "error TOOL_ERROR no luck, the planner is told"
    refused = _line("child", phase="refused", agent_id="helper", failure=failure)
    assert refused == "child of helper refused: TOOL_ERROR no luck"
    told = _line("child", phase="result", child_run_id="r1", state="failed", failure=failure)
    assert told == "child r1 failed: TOOL_ERROR no luck"
    by_call = _line("child", phase="result", child_run_id="r1", state="succeeded", tool_call_id="t")
    assert by_call == "child r1 succeeded"
    effects = [
        {"tool": "book", "status": "succeeded", "external_ref": "b-1", "compensation": "failed"},
        {"tool": "mail", "status": "unknown"},
    ]
    failure["reason"] = "long " * 100
    assert _line("state", state="failed", failure=failure, effects=effects).endswith(
        "…; in the world: book succeeded (external reference b-1), undoing failed; mail unknown"
    )
    never = [{"tool": "pay", "status": "cancelled"}, {"tool": "pay", "status": "denied"}]
    assert "in the world" not in _line("state", state="failed", failure=failure, effects=never)
    failure["reason"] = "no luck"
    undone = _line("compensation", tool_call_id="t", status="failed", again=True, error=failure)
    assert undone == "undoing t failed, is tried again: TOOL_ERROR no luck"


def test_objects_inside_of_objects_are_told_apart_from_their_fields() -> None:
    output = {"paid": {"cents": 300, "to": "ann"}, "ref": "p1"}
    told = _line("result", status="succeeded", output=output)
    assert told == 'succeeded: paid={cents=300, to="ann"}, ref="p1"'


def test_what_befalls_approvals_callbacks_and_state_fields_is_told() -> None:
    phase = {"approval_id": "int_1", "phase": "delegated", "approvers": ["ann"], "by": "bob"}
    assert _line("custom", name="perdure.approval", value=phase) == (
        "approval int_1 delegated to ann by bob"
    )
    pending = {"tool_call_id": "tc_1", "external_ref": "job 7", "expires_in_s": 5}
    assert _line("custom", name="perdure.pending", value=pending) == (
        "the result of tc_1 comes by callback (external reference job 7)"
    )
    published = {"topic": "news", "value": {"a": 1}}
    assert _line("custom", name="perdure.published", value=published) == "publishes to news: a=1"
    read = {"scope": "thread", "field": "n", "version": 0}
    kept = {"scope": "agent", "field": "n", "version": 2, "value": 7}
    assert _line("custom", name="perdure.field_read", value=read) == (
        "finds the thread's n, version 0: nothing"
    )
    assert _line("custom", name="perdure.field_kept", value=kept) == (
        "leaves the agent's n, version 2: 7"
    )
    assert not _line("custom", name="perdure.fields_settled", value={"places": []})
    assert _line("custom", name="mine") == "reports mine"
