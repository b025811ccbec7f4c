"""Both dialects define the same statements; what only one of them has, has a reason here."""

from importlib.resources import files

from perdure.store.sqlfiles import load_statements

SET_ORIENTED = "PostgreSQL writes a table's rows of a whole batch in one statement"
IN_BATCH = "part of commit_batch, the one statement of PostgreSQL's commit"
LOCKS = "PostgreSQL locks rows; SQLite has one writer"
IN_INSERT = "part of insert_run, take_runs or lock_ready_runs on PostgreSQL"
QUEUE_TABLE = "SQLite keeps a thread's queue in a table, PostgreSQL a flag on the locked thread"
LONE = "SQLite's form for a lone row; PostgreSQL's commit is one statement anyway"

ONLY_POSTGRES = {
    "commit_batch": SET_ORIENTED,
    "count_interrupts": "counts and ages in one statement",
    "drop_history": SET_ORIENTED,
    "end_attempts": SET_ORIENTED,
    "find_leases": LOCKS,
    "find_runs": "find_run on SQLite, where a read is a call and not a journey",
    "hand_over_runs": SET_ORIENTED,
    "insert_events": SET_ORIENTED,
    "insert_state_values": SET_ORIENTED,
    "insert_timers": SET_ORIENTED,
    "keep_run_blobs": SET_ORIENTED,
    "list_all_runs": "list_runs on SQLite, which plans a statement for its values",
    "lock_free_runs": LOCKS,
    "lock_origin": LOCKS,
    "leave_reports": SET_ORIENTED,
    "lock_ready_runs": LOCKS,
    "lock_run": LOCKS,
    "lock_runs": LOCKS,
    "lock_thread": LOCKS,
    "lock_thread_of": LOCKS,
    "lock_threads": LOCKS,
    "move_runs": SET_ORIENTED,
    "moved_state_values": SET_ORIENTED,
    "read_clock": "SQLite's clock is the process's",
    "register_agents": SET_ORIENTED,
    "register_tools": SET_ORIENTED,
    "renew_leases": SET_ORIENTED,
    "runs_below": LOCKS,
    "set_timers": SET_ORIENTED,
    "set_close_timers": SET_ORIENTED,
    "set_ready": SET_ORIENTED,
    "sync_deadlines": SET_ORIENTED,
    "take_runs": SET_ORIENTED,
    "update_state_values": SET_ORIENTED,
    "use_blobs": SET_ORIENTED,
    "use_run_blobs": SET_ORIENTED,
}

ONLY_SQLITE = {
    "advance_run": IN_BATCH,
    "advance_runs": IN_BATCH,
    "count_open_interrupts": "count_interrupts on PostgreSQL",
    "delete_blob_uses": "drop_history on PostgreSQL",
    "delete_checkpoints": "drop_history on PostgreSQL",
    "delete_history": "drop_history on PostgreSQL",
    "page_of_blobs": "delete_blobs on PostgreSQL",
    "delete_timer": "delete_timers, set-oriented",
    "end_attempt": "end_attempts, set-oriented",
    "end_execution": IN_BATCH,
    "end_execution_one": LONE,
    "find_active_run": QUEUE_TABLE,
    "find_run": "find_runs, for all who look at once",
    "find_attempt_end": IN_INSERT,
    "find_attempts_max": "a column of expired_leases on PostgreSQL",
    "find_epoch": "find_leases on PostgreSQL",
    "finish_runs": IN_BATCH,
    "hand_over_run": "hand_over_runs, set-oriented",
    "insert_attempt": IN_INSERT,
    "insert_checkpoint": IN_BATCH,
    "insert_event": "insert_events, set-oriented",
    "insert_execution": IN_BATCH,
    "insert_first_execution": IN_BATCH,
    "insert_run_state": IN_INSERT,
    "insert_state_value": "insert_state_values, set-oriented",
    "insert_timer": "insert_timers, set-oriented",
    "insert_tool_call": IN_BATCH,
    "is_unfinished": "part of leave_reports on PostgreSQL",
    "leave_thread_queue": QUEUE_TABLE,
    "pass_fence": IN_BATCH,
    "renew_lease": "renew_leases, set-oriented",
    "queue_in_thread": QUEUE_TABLE,
    "save_hot": "move_runs, set-oriented",
    "set_retained": "drop_history on PostgreSQL",
    "unfinished_children": "runs_below on PostgreSQL, which locks what it finds",
    "state_value_version": "moved_state_values, set-oriented",
    "update_state_value": "update_state_values, set-oriented",
    "update_tool_call": IN_BATCH,
    "update_tool_call_one": LONE,
    "upsert_agent": "register_agents, set-oriented",
    "upsert_step": IN_BATCH,
    "upsert_tool": "register_tools, set-oriented",
    "use_blob": "use_blobs and use_run_blobs, set-oriented",
}


def names(dialect: str) -> set[str]:
    return set(load_statements(files(f"perdure.store.{dialect}") / "sql"))


def test_both_dialects_define_the_same_statements() -> None:
    sqlite, postgres = names("sqlite"), names("postgres")
    assert postgres - sqlite <= ONLY_POSTGRES.keys()
    assert sqlite - postgres <= ONLY_SQLITE.keys()


def test_no_exception_is_left_over() -> None:
    sqlite, postgres = names("sqlite"), names("postgres")
    assert not ONLY_POSTGRES.keys() - postgres
    assert not ONLY_SQLITE.keys() - sqlite
