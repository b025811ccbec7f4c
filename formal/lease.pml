/* One run, its row in the store, two workers, a sweeper, and a client that may cancel.
 *
 * Modelled: the lease with its token, the cancel epoch, the fenced commit whose answer may be lost
 * and which is then sent again, a worker that is paused past its lease and comes back, a worker
 * that dies. Time is not modelled: a lease may run out at any moment, more than a clock allows.
 *
 * A step is two commits (decision 23): its action, and, after the effect, its result. The commit
 * that ends the run follows the last result. After an accepted cancel only a closing commit is due.
 *
 * What must hold is asserted at the place where it would be broken:
 *   A1  a commit is accepted only from the worker that holds the run, at the end of the log it knows
 *   A2  after an accepted cancel nothing is accepted but the closing commit
 *   A3  no commit is applied twice, and a run ends once
 *   A4  an effect is begun only when its action is durable, and once under one token
 *   A5  what was acknowledged is in the store, whoever dies afterwards
 * and `ends` (checked with weak fairness): when misfortunes are finitely many, the run ends.
 *
 * Known-bad variants; each breaks the assertion named with it:
 *   GUARD_STATE_ONLY   the commit compares the run's state only, not token, epoch and seq     A1
 *   TOKEN_REUSED       a claim after a lost lease does not advance the token                  A1, A4
 *   CANCEL_BY_MESSAGE  a cancel is a message to the worker, the row is not touched            A2
 *   ACK_BEFORE_COMMIT  the acknowledgement goes out before the commit is durable              A5
 */

#ifndef STEPS
#define STEPS 2
#endif
#ifndef MISFORTUNES
#define MISFORTUNES 2 /* deaths, lost leases and lost answers in all */
#endif
#define NOBODY 255
#define IDS 32

mtype = { planning, executing, succeeded, cancelled }; /* the run's state */
mtype = { action, result, finish, closing };           /* kinds of commits */
mtype = { applied, refused, lost };                    /* answers */

/* the row: durable */
mtype state = planning;
byte owner = NOBODY;
byte token = 0;
byte epoch = 0;
byte seq = 0;
byte step = 0;
byte last_commit = 0;

/* not in the row: what is counted and what is checked */
byte misfortunes = 0;
byte ids = 0;
bool is_applied[IDS];
byte ends_seen = 0;
bool cancel_accepted = false;
bool cancel_message = false;
byte told_seq = 0;
byte begun_by[STEPS];
bool dead[2];

#define ended (state == succeeded || state == cancelled)
#define misfortune (misfortunes < MISFORTUNES)

#ifdef GUARD_STATE_ONLY
#define fence (!ended && state == my_state)
#else
#define fence (!ended && owner != NOBODY && token == my_token && epoch == my_epoch && seq == my_seq)
#endif

/* Writes one commit; called inside an atomic piece, as the store writes under the row's lock. */
inline apply()
{
	assert(owner == me && seq == my_seq);            /* A1 */
	assert(!cancel_accepted || kind == closing);     /* A2 */
	assert(!is_applied[id]);                         /* A3 */
	is_applied[id] = true;
	last_commit = id;
	seq++;
	if
	:: kind == action -> state = executing
	:: kind == result -> state = planning; step++
	:: kind == finish -> state = succeeded; owner = NOBODY; ends_seen++
	:: kind == closing -> state = cancelled; owner = NOBODY; ends_seen++
	fi;
	assert(ends_seen <= 1)                           /* A3 */
}

/* Sends one commit, again and again while its answer is lost. */
inline send()
{
	atomic {
		ids++;
		id = ids;
		assert(id < IDS);
		answer = lost
	};
	do
	:: answer != lost -> break
	:: answer == lost && !dead[me] ->
#ifdef ACK_BEFORE_COMMIT
		told_seq = (my_seq + 1 > told_seq -> my_seq + 1 : told_seq);
		maybe_die();
#endif
		atomic {
			if
			:: last_commit == id -> answer = applied     /* it had been written */
			:: last_commit != id && fence -> apply(); answer = applied
			:: last_commit != id && !fence -> answer = refused
			fi;
			if
			:: true
			:: misfortune -> misfortunes++; answer = lost
			fi;
			if
			:: answer == applied -> told_seq = (my_seq + 1 > told_seq -> my_seq + 1 : told_seq)
			:: else
			fi
		}
	:: dead[me] -> break
	od
}

/* A worker's death: it forgets everything; the row still names it until the sweeper comes. */
inline maybe_die()
{
	if
	:: true
	:: atomic { misfortune -> misfortunes++; dead[me] = true; holds = false; assert(told_seq <= seq) } /* A5 */
	fi
}

inline learn()
{
	my_token = token;
	my_epoch = epoch;
	my_seq = seq;
	my_state = state;
	my_step = step
}

proctype Worker(byte me)
{
	byte my_token, my_epoch, my_seq, my_step, id;
	mtype my_state, kind, answer;
	bool holds = false;

	do
	:: ended -> break
	:: atomic { !holds && owner == NOBODY && !ended ->   /* claim; a dead worker's successor too */
		dead[me] = false;
		owner = me;
#ifdef TOKEN_REUSED
		token = (token == 0 -> 1 : token);
#else
		token++;
#endif
		learn();
		holds = true
	   }
	:: holds ->
		/* what the heartbeat, or a message, says of a cancel */
		if
		:: true
		:: atomic { owner == me && token == my_token && epoch != my_epoch -> learn() }
#ifdef CANCEL_BY_MESSAGE
		:: atomic { cancel_message -> my_epoch = 1 }
#endif
		fi;
		if
		:: my_epoch > 0 -> kind = closing
		:: my_epoch == 0 && my_state == executing ->
			atomic {
				assert(my_seq <= seq && begun_by[my_step] != my_token); /* A4 */
				begun_by[my_step] = my_token                           /* the effect itself */
			};
			kind = result
		:: my_epoch == 0 && my_state == planning && my_step < STEPS -> kind = action
		:: my_epoch == 0 && my_state == planning && my_step >= STEPS -> kind = finish
		fi;
		maybe_die();
		if
		:: dead[me]
		:: !dead[me] ->
			send();
			if
			:: dead[me]
			:: !dead[me] && answer == applied -> atomic {
				/* known from the answer alone: the worker does not read the row */
				my_seq++;
				if
				:: kind == action -> my_state = executing
				:: kind == result -> my_state = planning; my_step++
				:: kind == finish || kind == closing -> holds = false
				fi }
			:: !dead[me] && answer == refused -> atomic {
				if
				:: owner == me && token == my_token && !ended -> learn()
				:: else -> holds = false
				fi }
			fi
		fi
	od
}

/* Takes leases away: of the dead whenever it looks, of the living as a misfortune (a pause). */
proctype Sweeper()
{
	do
	:: ended -> break
	:: atomic { !ended && owner != NOBODY && dead[owner] -> owner = NOBODY }
	:: atomic { !ended && owner != NOBODY && !dead[owner] && misfortune -> misfortunes++; owner = NOBODY }
	od
}

proctype Client()
{
	if
	:: true
	:: atomic { !ended ->
		cancel_accepted = true;
#ifdef CANCEL_BY_MESSAGE
		cancel_message = true
#else
		epoch++;
		seq++
#endif
	   }
	fi
}

init
{
	atomic {
		run Worker(0);
		run Worker(1);
		run Sweeper();
		run Client()
	}
}

ltl ends { <> ended }
