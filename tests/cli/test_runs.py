"""Runs and interrupts from the command line, on a database without any server."""

import json
import re

import anyio

from perdure.ops.exits import ExitCode
from perdure.ops.settings import load_settings
from perdure.runtime import open_core
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

HERE = ("--here", "--agents", REFERENCE, "--timeout", "15")


def test_a_run_that_is_waited_for_says_how_it_ended(perdure: Program) -> None:
    done = perdure("run", "echo", "--input", '{"a": 1}', "--json", *HERE)
    assert (done.code, done.json["state"], done.json["answer"]) == (0, "succeeded", {"a": 1})
    failed = perdure("run", "fails", *HERE)
    assert failed.code == 1
    assert "as asked" in failed.out


def test_a_run_is_not_left_to_a_process_that_does_not_serve_it(perdure: Program) -> None:
    """Nothing is created that this very command could not carry out."""
    perdure("run", "echo", *HERE)
    done = perdure("run", "echo", "--here")
    assert done.code == ExitCode.USAGE
    assert "--agents MODULE:REGISTRY" in done.err
    assert len(perdure("runs", "list", "--json").json["items"]) == 1


def test_a_run_in_a_queue_that_this_process_does_not_serve_is_not_waited_for_here(
    perdure: Program,
) -> None:
    """Else it would wait for an hour for a worker that is not there."""
    perdure("run", "echo", *HERE)
    for options in (("--queue", "far"), ("--options", '{"queue": "far"}')):
        refused = perdure("run", "echo", *options, *HERE)
        assert (refused.code, "does not serve the queue far" in refused.err) == (2, True)
    assert len(perdure("runs", "list", "--json").json["items"]) == 1
    run_id = perdure("run", "echo", "--queue", "far", "--json").json["run_id"]
    refused = perdure("runs", "wait", run_id, *HERE)
    assert (refused.code, "does not serve the queue far" in refused.err) == (2, True)
    perdure.patch.setenv("PERDURE_WORKER__QUEUES", "default,far")
    assert perdure("runs", "wait", run_id, *HERE).code == ExitCode.OK


def test_who_subscribes_to_a_topic_is_said_and_listed(perdure: Program) -> None:
    """R-4.8."""
    thread_id = perdure("run", "echo", "--json", *HERE).json["thread_id"]
    made = perdure("topics", "subscribe", thread_id, "news", "echo", "--json").json
    assert (made["topic"], made["agent_id"]) == ("news", "echo")
    assert perdure("topics", "list", thread_id, "--json").json["items"] == [made]
    assert made["inbox_thread_id"] in perdure("topics", "list", thread_id).out
    assert perdure("topics", "subscribe", thread_id, "no topic", "echo").code == ExitCode.USAGE
    assert perdure("topics", "unsubscribe", thread_id, "news", "echo").code == 0
    assert perdure("topics", "list", thread_id, "--json").json["items"] == []


def test_a_run_that_waits_for_a_person_ends_the_wait_with_3(perdure: Program) -> None:
    done = perdure("run", "ships", "--json", *HERE)
    assert (done.code, done.json["status"]) == (3, "INPUT_REQUIRED")


def test_a_run_that_was_started_elsewhere_is_waited_for(perdure: Program) -> None:
    """And carried out, if asked: the exit code says what came of it, as with `run --wait`."""
    perdure("run", "echo", *HERE)
    run_id = perdure("run", "asks", "--json").json["run_id"]
    wait = ("runs", "wait", run_id)
    assert perdure(*wait, "--timeout", "0").code == ExitCode.TIMED_OUT
    assert perdure(*wait, *HERE).code == ExitCode.WAITING_FOR_HUMAN
    assert perdure(*wait).code == ExitCode.WAITING_FOR_HUMAN
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    perdure("interrupts", "resolve", asked["interrupt_id"], "--respond", '"red"')
    assert perdure(*wait, "--timeout", "0").code == ExitCode.TIMED_OUT
    done = perdure(*wait, "--json", *HERE)
    assert (done.code, done.json["answer"]) == (0, "red")
    assert perdure(*wait).code == ExitCode.OK
    failed = perdure("run", "fails", "--json").json["run_id"]
    assert perdure("runs", "wait", failed, *HERE).code == ExitCode.RUN_FAILED


def test_a_wait_that_cannot_end_well_is_refused(perdure: Program) -> None:
    """Before a database or a worker is made."""
    nobody = ("runs", "wait", "run_" + "0" * 32)
    assert perdure(*nobody, *HERE).code == ExitCode.NOT_FOUND
    assert not (perdure.folder / ".perdure").exists()
    run_id = perdure("run", "echo", "--json", *HERE).json["run_id"]
    assert perdure(*nobody, *HERE).code == ExitCode.NOT_FOUND
    assert perdure("runs", "wait", run_id, "--agents", REFERENCE).code == ExitCode.USAGE
    refused = perdure("runs", "wait", run_id, "--here")
    assert (refused.code, "does not serve echo" in refused.err) == (ExitCode.USAGE, True)


def test_a_run_that_nobody_carries_out_times_out_and_stays(perdure: Program) -> None:
    perdure("run", "echo", *HERE)
    done = perdure("run", "echo", "--wait", "--timeout", "0.1", "--json")
    assert (done.code, done.json["status"]) == (124, "QUEUED")
    assert done.err.endswith("the time is over, and the run goes on; no worker has taken it yet\n")
    listed = perdure("runs", "list", "--unfinished", "--json").json["items"]
    assert [run["run_id"] for run in listed] == [done.json["run_id"]]


def test_a_cancel_of_a_run_that_has_ended_says_so(perdure: Program) -> None:
    """R-9.1: it changes nothing, and is no error, unless something was to be undone."""
    ended = perdure("run", "echo", "--json", *HERE).json["run_id"]
    done = perdure("runs", "cancel", ended)
    assert done.code == 0
    assert "had ended before (COMPLETED)" in done.err
    waits = perdure("run", "asks", "--json", *HERE).json["run_id"]
    for _ in range(2):
        assert perdure("runs", "cancel", waits).err == ""
    for late in (ended, waits):
        for wish in ("--compensate", "--discard-artifacts"):
            done = perdure("runs", "cancel", late, wish)
            assert done.code == ExitCode.CONFLICT
            assert "this cancel changed nothing: the run had ended before" in done.err
    asked = perdure("run", "asks", "--json", *HERE).json["run_id"]
    for _ in range(2):  # what was asked in time is no news
        assert perdure("runs", "cancel", asked, "--compensate").code == 0


def test_a_run_without_wait_returns_at_once(perdure: Program) -> None:
    perdure("run", "echo", *HERE)
    done = perdure("run", "echo")
    assert done.code == 0
    assert done.err.startswith("run run_")


def test_the_same_key_is_the_same_run_and_another_input_a_conflict(perdure: Program) -> None:
    first = perdure("run", "echo", "--input", "1", "--key", "k", "--json", *HERE)
    assert "draining" not in first.err  # nothing is held any more
    again = perdure("run", "echo", "--input", "1", "--key", "k", "--json")
    other = perdure("run", "echo", "--input", "2", "--key", "k")
    assert first.json["run_id"] == again.json["run_id"]
    assert other.err.endswith(f": {first.json['run_id']}\n")
    assert (other.code, other.err.split(":")[1].strip()) == (5, "idempotency_mismatch")


def test_the_log_can_be_read_as_text_lines_and_one_document(perdure: Program) -> None:
    run_id = perdure("run", "echo", "--json", *HERE).json["run_id"]
    lines = perdure("runs", "events", run_id, "--jsonl", "--follow").out.splitlines()
    document = perdure("runs", "events", run_id, "--json").json
    text = perdure("runs", "events", run_id)
    assert [json.loads(line) for line in lines] == document
    assert [event["seq"] for event in document] == list(range(1, len(document) + 1))
    assert "state succeeded" in text.out
    later = perdure("runs", "events", run_id, "--json", "--after", "2").json
    assert later == document[2:]


def test_a_run_starts_later_in_a_queue_and_by_priority(perdure: Program) -> None:
    """R-3.4, R-12.7: flags go before what --options says."""
    perdure("run", "echo", *HERE)
    flags = ("--after", "3600", "--queue", "slow", "--priority", "-5", "--json")
    done = perdure("run", "echo", "--options", '{"queue": "other", "max_steps": 7}', *flags)
    options = done.json["options"]
    assert (done.code, done.json["status"], done.json["waiting_on"]) == (0, "SUBMITTED", "timer")
    assert (options["after"], options["queue"], options["priority"]) == (3600, "slow", -5)
    assert options["max_steps"] == 7
    assert perdure("runs", "cancel", done.json["run_id"], "--json").json["status"] == "INTERRUPTED"
    timed = perdure("run", "echo", "--after", "2020-01-01T00:00:00Z", "--json")
    assert (timed.code, timed.json["status"]) == (0, "QUEUED")
    perdure("runs", "cancel", timed.json["run_id"])
    wrong = perdure("run", "echo", "--after", "soon")
    assert (wrong.code, "after" in wrong.err) == (2, True)


def test_a_run_is_shown_with_its_calls(perdure: Program) -> None:
    run_id = perdure("run", "ships", "--json", *HERE).json["run_id"]
    shown = perdure("runs", "show", run_id)
    assert "ship" in shown.out
    found = perdure("runs", "show", run_id, "--json").json
    assert found["run_id"] == run_id
    assert re.search(rf"^thread +{found['thread_id']}$", shown.out, re.MULTILINE)
    fork_id = perdure("runs", "fork", run_id, "--json").json["run_id"]
    forked = perdure("runs", "show", fork_id).out
    assert re.search(rf"^forked from +{run_id}$", forked, re.MULTILINE)


def test_a_waiting_run_is_cancelled_at_once(perdure: Program) -> None:
    run_id = perdure("run", "asks", "--json", *HERE).json["run_id"]
    done = perdure("runs", "cancel", run_id, "--reason", "not needed", "--compensate", "--json")
    assert (done.code, done.json["status"]) == (0, "INTERRUPTED")  # nothing to be undone
    told = perdure("runs", "events", run_id, "--json").out
    assert '"compensate":true' in told.replace(" ", "")
    one, other = (perdure("run", "asks", "--json", *HERE).json["run_id"] for _ in range(2))
    perdure("runs", "cancel", one, "--discard-artifacts")
    perdure("runs", "cancel-many", "--agent", "asks", "--discard-artifacts")
    for run_id in (one, other):
        told = perdure("runs", "events", run_id, "--json").out
        assert '"discard_artifacts":true' in told.replace(" ", "")


def test_a_failed_run_is_retried_in_a_new_one(perdure: Program) -> None:
    """R-10.3."""
    run_id = perdure("run", "fails", "--json", *HERE).json["run_id"]
    done = perdure("runs", "retry", run_id, "--reason", "mended", "--json")
    assert (done.code, done.json["retry_of"], done.json["status"]) == (0, run_id, "QUEUED")
    again = perdure("runs", "retry", done.json["run_id"])
    assert (again.code, again.err.split(":")[1].strip()) == (5, "conflict")


def test_a_run_is_forked_and_compared(perdure: Program) -> None:
    """R-7.4."""
    run_id = perdure("run", "echo", "--input", "1", "--json", *HERE).json["run_id"]
    done = perdure("runs", "fork", run_id, "--input", "2", "--state", '{"n": 1}', "--json")
    assert (done.code, done.json["forked_from"], done.json["input"]) == (0, run_id, 2)
    wrong = perdure("runs", "fork", run_id, "--checkpoint", "ckp_" + "0" * 32)
    assert (wrong.code, wrong.err.split(":")[1].strip()) == (4, "not_found")
    assert perdure("runs", "state", "ckp_" + "0" * 32).code == 4
    assert perdure("runs", "diff", "ckp_" + "0" * 32, "ckp_" + "1" * 32).code == 4


def test_an_approval_is_given_once(perdure: Program) -> None:
    """R-8.2, R-8.3."""
    run_id = perdure("run", "ships", "--json", *HERE).json["run_id"]
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    assert asked["action"]["args"] == {"parcel": "p1"}
    identifier = asked["interrupt_id"]
    handed = perdure("interrupts", "delegate", identifier, "--to", "local", "--json")
    assert (handed.code, handed.json["approvers"]) == (0, ["local"])
    unknown = perdure("interrupts", "delegate", identifier, "--to", "nobody")
    assert (unknown.code, unknown.err.split(":")[1].strip()) == (2, "invalid")
    assert "(--to)" in unknown.err
    first = perdure("interrupts", "resolve", identifier, "--approve", "--json")
    again = perdure("interrupts", "resolve", identifier, "--approve", "--json")
    other = perdure("interrupts", "resolve", identifier, "--reject")
    assert (first.code, first.json["replayed"]) == (0, False)
    assert (again.code, again.json["replayed"]) == (0, True)
    assert (other.code, other.err.split(":")[1].strip()) == (5, "already_answered")
    assert perdure("interrupts", "list", "--json").json["items"] == []
    (closed,) = perdure("interrupts", "list", "--all", "--run", run_id, "--json").json["items"]
    assert closed["answer"] == "approve"


def test_a_question_takes_json(perdure: Program) -> None:
    perdure("run", "asks", *HERE)
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    (perdure.folder / "answer.json").write_text('"red"')
    done = perdure(
        "interrupts", "resolve", asked["interrupt_id"], "--respond", "@answer.json", "--json"
    )
    assert done.json["interrupt"]["value"] == "red"
    assert "Which colour?" in perdure("interrupts", "list", "--all").out


def test_an_outcome_is_told_with_what_the_call_gave(perdure: Program) -> None:
    """R-5.7, R-8.2."""
    run_id = perdure("run", "pays", "--json", *HERE).json["run_id"]
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    answer = ("interrupts", "resolve", asked["interrupt_id"])
    alone = perdure(*answer, "--retry", "--output", '{"paid": 3}')
    assert (alone.code, "--output goes with --happened" in alone.err) == (2, True)
    done = perdure(*answer, "--happened", "order-7", "--output", '{"paid": 3}', "--json")
    assert (done.code, done.json["interrupt"]["value"]) == (0, {"paid": 3})
    assert perdure("runs", "wait", run_id, *HERE).code == 0
    known = "succeeded: paid=3 (external reference order-7), known from the person"
    assert known in perdure("runs", "events", run_id).out


def test_all_that_is_asked_can_be_read_before_it_is_answered(perdure: Program) -> None:
    """R-8.1: large arguments and a question's payload in full, without what steers a terminal."""
    run_id = perdure("run", "ships_much", "--json", *HERE).json["run_id"]
    listed = perdure("interrupts", "list")
    assert 'ship({"parcel":"ppp' in listed.out
    assert 'call ship({"parcel":"ppp' in perdure("runs", "events", run_id).out
    (asked,) = perdure("interrupts", "list", "--json").json["items"]
    shown = perdure("interrupts", "show", asked["interrupt_id"])
    assert (shown.code, "p" * 9000 + "end" in shown.out) == (0, True)
    assert "approve, edit, respond, reject" in shown.out
    whole = perdure("interrupts", "show", asked["interrupt_id"], "--json").json
    assert whole["action"]["args"] == {"parcel": "p" * 9000 + "end"}

    run_id = perdure("run", "asks", "--json", *HERE).json["run_id"]
    (asked,) = perdure("interrupts", "list", "--run", run_id, "--json").json["items"]
    assert "the shed" in perdure("interrupts", "list", "--run", run_id).out
    shown = perdure("interrupts", "show", asked["interrupt_id"])
    assert '"of": "the shed\\u202e"' in shown.out
    assert perdure("interrupts", "show", "int_" + "0" * 32).code == ExitCode.NOT_FOUND


def test_agents_are_known_after_a_worker_ran(perdure: Program) -> None:
    assert perdure("agents", "list", "--json").code == ExitCode.NOT_FOUND  # nor is a database
    perdure("run", "echo", *HERE)
    found = perdure("agents", "list", "--json").json["items"]
    known = ["asks", "echo", "fails", "hangs", "keeps", "pays", "ships", "ships_much"]
    assert [agent["agent_id"] for agent in found] == known
    assert "Answers with its input." in perdure("agents", "list").out


def test_what_runs_left_in_fields_is_shown(perdure: Program) -> None:
    """R-1.5."""
    run = perdure("run", "keeps", "--json", *HERE).json
    (field,) = perdure("agents", "state", "keeps", "--json").json["items"]
    assert (field["name"], field["value"], field["version"]) == ("n", 1, 1)
    assert run["run_id"] in perdure("agents", "state", "keeps").out
    assert perdure("threads", "state", run["thread_id"], "--json").json["items"] == []
    assert perdure("agents", "state", "nobody").code == ExitCode.NOT_FOUND


def test_what_the_tests_leave_behind_passes_verify(perdure: Program) -> None:
    perdure("run", "echo", *HERE)
    perdure("run", "ships", *HERE)
    done = perdure("verify", "--json")
    assert (done.code, done.json["findings"], done.json["runs"]) == (0, [], 2)


def test_many_runs_are_cancelled_by_filter_and_a_tree_is_shown(perdure: Program) -> None:
    """CAN-12, R-13.1: without a filter nothing is cancelled."""
    run_id = perdure("run", "ships", "--json", *HERE).json["run_id"]
    shown = perdure("runs", "show", run_id, "--tree", "--json")
    assert [run["run_id"] for run in shown.json["items"]] == [run_id]
    assert run_id in perdure("runs", "show", run_id, "--tree").out
    refused = perdure("runs", "cancel-many")
    assert refused.code != 0
    assert "invalid" in refused.err
    done = perdure("runs", "cancel-many", "--agent", "ships", "--json")
    assert (done.code, done.json["run_ids"]) == (0, [run_id])
    assert perdure("runs", "cancel-many", "--all", "--json").json["run_ids"] == []
    assert perdure("runs", "show", run_id, "--json").json["status"] == "INTERRUPTED"


def test_a_state_is_updated_by_hand(perdure: Program) -> None:
    """R-11.3."""
    waits = perdure("run", "asks", "--json", *HERE).json["run_id"]
    made = perdure("runs", "update-state", waits, '{"n": 1}', "--reason", "so", "--json").json
    assert (made["agent_state"], made["reason"]) == ({"n": 1}, "so")
    shown = perdure("runs", "state", made["checkpoint_id"]).json
    assert shown["values"]["agent_state"] == {"n": 1}
    assert perdure("runs", "update-state", waits, "{").code == ExitCode.USAGE
    ended = perdure("run", "echo", "--json", *HERE).json["run_id"]
    assert perdure("runs", "update-state", ended, "1").code == ExitCode.CONFLICT


def test_threads_are_listed_forked_adopted_and_deleted(perdure: Program) -> None:
    """R-11.1, R-11.3."""
    thread = perdure("run", "echo", "--json", *HERE).json["thread_id"]
    assert thread in perdure("threads", "list").out
    shown = perdure("threads", "show", thread, "--json").json
    assert (shown["last_position"], shown["bases"]) == (2, [])
    beyond = perdure("threads", "fork", thread, "--position", "9999")
    assert (beyond.code, "(--position)" in beyond.err) == (2, True)
    made = perdure("threads", "fork", thread, "--position", "1", "--title", "b", "--json").json
    assert (made["title"], made["last_position"]) == ("b", 1)
    branch = made["thread_id"]
    assert f"fork of {thread} up to 1" in perdure("threads", "show", branch).out
    (listed,) = perdure("threads", "branches", thread, "--json").json["items"]
    assert (listed["thread_id"], listed["adopted_at"]) == (branch, None)
    assert branch in perdure("threads", "branches", thread).out
    adopted = perdure("threads", "adopt", thread, branch, "--json").json
    assert [base["kind"] for base in adopted["bases"]] == ["adopt"]
    assert perdure("threads", "adopt", branch, thread).code == ExitCode.CONFLICT
    found = perdure("threads", "list", "--metadata", '{"team": "x"}', "--json").json
    assert found["items"] == []
    assert perdure("threads", "list", "--metadata", "1").code == ExitCode.USAGE
    done = perdure("threads", "delete", branch)
    assert (done.code, done.out.strip()) == (0, f"{branch} is deleted")
    assert perdure("threads", "show", branch).code == ExitCode.CONFLICT
    busy = perdure("run", "echo", "--thread", thread, "--json").json["run_id"]
    refused = perdure("threads", "delete", thread)
    assert (refused.code, refused.err.endswith(f": {busy}\n")) == (ExitCode.CONFLICT, True)
    assert perdure("threads", "delete", f"thr_{'0' * 32}").code == ExitCode.NOT_FOUND
    listed = perdure("threads", "list", "--json").json["items"]
    assert [item["thread_id"] for item in listed] == [thread]


def test_a_run_that_is_put_aside_is_repaired_by_hand(perdure: Program) -> None:
    """R-7.7: looking changes nothing; a repair needs its reason, and only one way is taken."""
    run_id = perdure("run", "asks", "--json", *HERE).json["run_id"]
    assert perdure("runs", "repair", run_id).code == ExitCode.CONFLICT
    _put_aside(run_id)
    seen = perdure("runs", "repair", run_id)
    assert (seen.code, "can return  yes" in seen.out) == (0, True)
    assert perdure("runs", "repair", run_id, "--return").code == ExitCode.USAGE
    both = perdure("runs", "repair", run_id, "--return", "--fail", "--reason", "x")
    assert both.code == ExitCode.USAGE
    done = perdure("runs", "repair", run_id, "--return", "--reason", "mended", "--json")
    assert (done.code, done.json["retry_of"]) == (0, run_id)
    new = done.json["run_id"]
    _put_aside(new)
    ended = perdure("runs", "repair", new, "--fail", "--reason", "no use", "--json").json
    assert (ended["run_id"], ended["error"]["code"]) == (new, "CHECKPOINT_INCOMPATIBLE")


def _put_aside(run_id: str) -> None:
    """Do what a check of the runtime does."""

    async def aside() -> None:
        async with open_core(load_settings()) as core:
            assert await core.store.quarantine(run_id, None, "nothing moves it", None)

    anyio.run(aside)
