"""The tables of the contract: transitions of run, step and call; failure codes and recoveries."""

import pytest

from perdure.protocol.failures import MEANING, FailureCode, Recovery
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import (
    ANSWERS,
    LEGAL_PAIRS,
    OUTCOMES,
    STEP_TRANSITIONS,
    TERMINAL,
    TOOL_CALL_TRANSITIONS,
    TRANSITIONS,
    IllegalTransition,
    InterruptKind,
    RunState,
    StepStatus,
    ToolCallStatus,
    Transition,
    is_open,
    next_state,
)

CONTRACT = """
pending start planning
planning plan_ready executing
planning plan_error failed
executing next_step planning
executing done succeeded
executing need_approval waiting_human
executing exec_error failed
waiting_human approved executing
waiting_human rejected failed
pending cancelled failed
pending expired failed
planning cancelled failed
planning expired failed
executing cancelled failed
executing expired failed
waiting_human cancelled failed
waiting_human expired failed
"""

CODES = """
MODEL_TIMEOUT MODEL_ERROR TOOL_UNAVAILABLE TOOL_TIMEOUT TOOL_ARGUMENT_INVALID TOOL_NOT_FOUND
TOOL_OUTCOME_UNKNOWN TOOL_RESULT_INVALID CONTEXT_OVERFLOW LOOP_DETECTED MAX_STEPS BUDGET_EXCEEDED
POLICY_DENIED GUARDRAIL_BLOCKED APPROVAL_REJECTED APPROVAL_TIMEOUT RUN_TIMEOUT RUN_CANCELLED
RETRIES_EXHAUSTED NON_DETERMINISTIC CHECKPOINT_INCOMPATIBLE OUTPUT_INVALID CONFLICT QUOTA_EXCEEDED
AGENT_NOT_FOUND ORPHANED INTERNAL
"""


def test_a_run_moves_as_the_contract_says_and_in_no_other_way() -> None:
    """R-2.1: written out a second time, so that a change of the table is noticed."""
    lines = [tuple(line.split()) for line in CONTRACT.split("\n") if line]
    assert {(a, why, b) for (a, why), b in TRANSITIONS.items()} == set(lines)
    for state in RunState:
        for why in Transition:
            if (state, why) in TRANSITIONS:
                assert (state, next_state(state, why)) in LEGAL_PAIRS
            else:
                with pytest.raises(IllegalTransition):
                    next_state(state, why)


def test_nothing_leaves_a_terminal_state() -> None:
    """R-2.2: a terminal run never moves again; the same holds for steps and calls (R-2.8)."""
    assert {state for state, _ in LEGAL_PAIRS}.isdisjoint(TERMINAL)
    assert {call for call, to in TOOL_CALL_TRANSITIONS.items() if not to} == OUTCOMES
    final = {StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED}
    assert {step for step, to in STEP_TRANSITIONS.items() if not to} == final


def test_steps_and_calls_have_tables_of_their_own() -> None:
    """R-2.8: total, closed, every state can be reached and every open one can end."""
    assert set(STEP_TRANSITIONS) == set(StepStatus)
    assert set(TOOL_CALL_TRANSITIONS) == set(ToolCallStatus)
    for table, first in (
        (STEP_TRANSITIONS, StepStatus.PENDING),
        (TOOL_CALL_TRANSITIONS, ToolCallStatus.PROPOSED),
    ):
        reached, edge = {first}, [first]
        while edge:
            for found in table[edge.pop()] - reached:  # pyright: ignore[reportArgumentType]  # keys of one table each
                reached.add(found)
                edge.append(found)
        assert reached == set(table)
    assert all(TOOL_CALL_TRANSITIONS[call] >= OUTCOMES for call in ToolCallStatus if is_open(call))


def test_an_open_call_is_one_without_an_outcome() -> None:
    """R-2.8, R-5.5: seven outcomes, no state is both."""
    assert len(OUTCOMES) == 7
    assert {call for call in ToolCallStatus if not is_open(call)} == OUTCOMES


def test_the_codes_are_closed_and_each_has_a_meaning_and_a_recovery() -> None:
    """R-2.4, R-10.1: at least those of the contract; TOOL_ERROR is ours."""
    assert set(FailureCode) == {*CODES.split(), "TOOL_ERROR"}
    assert set(MEANING) == set(FailureCode)
    assert all(meaning and recoveries for meaning, recoveries in MEANING.values())


def test_the_recoveries_are_those_of_the_published_table() -> None:
    """R-10.1: the ones that the contract names, as far as the runtime does them: an idempotent
    call that stays unavailable, and a denial, ask nobody.
    """
    model = (Recovery.RETRY, Recovery.FALLBACK_MODEL, Recovery.FAIL)
    told = (Recovery.TELL_PLANNER, Recovery.FAIL)
    expected = {
        FailureCode.MODEL_TIMEOUT: model,
        FailureCode.TOOL_UNAVAILABLE: (Recovery.RETRY_IF_IDEMPOTENT, Recovery.TELL_PLANNER),
        FailureCode.TOOL_ARGUMENT_INVALID: told,
        FailureCode.TOOL_NOT_FOUND: told,
        FailureCode.CONTEXT_OVERFLOW: (Recovery.COMPRESS, Recovery.FAIL),
        FailureCode.LOOP_DETECTED: (Recovery.FAIL,),
        FailureCode.POLICY_DENIED: (Recovery.FAIL,),
    }
    assert {code: MEANING[code][1] for code in expected} == expected


def test_a_back_off_grows_to_its_limit_with_jitter() -> None:
    """R-10.1: exponential, bounded, at least half of it is waited."""
    policy = RetryPolicy(backoff_s=1, backoff_factor=2, backoff_max_s=5)
    assert [policy.delay_s(failed, 0.999) for failed in (1, 2, 3, 4)] == pytest.approx(
        [1, 2, 4, 5], rel=0.001
    )
    assert policy.delay_s(3, 0.0) == 2
    assert RetryPolicy(backoff_s=1, jitter=False).delay_s(2, 0.0) == 2


def test_every_kind_of_interrupt_takes_answers_but_the_breakpoint() -> None:
    """R-8.3, R-8.4, R-5.7: a run at a breakpoint is continued."""
    assert set(ANSWERS) == set(InterruptKind)
    assert {kind for kind, answers in ANSWERS.items() if not answers} == {InterruptKind.BREAKPOINT}
