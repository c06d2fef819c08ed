/* Counts the calls that use an object now, so that closing frees nothing that a call still uses. No Python code runs
 * between enter and leave, so a close never waits for its own thread. The memory of the gate outlives the close.
 *
 * A close sets `shut`, makes `wake_fd` readable, which all sleepers inside watch, and waits for `left`; whoever leaves as
 * the last one of a gate that is shut signals that. `users` and `shut` are atomic and in one order for all threads, so
 * that either the close sees the newcomer or the newcomer sees the close; `lock` is `left`'s alone. */
#ifndef MCAST_GATE_H
#define MCAST_GATE_H

#include "native.h"

#include <pthread.h>

struct mcast_gate {
	int users, shut; /* atomic */
	int wake_fd;	 /* readable: every thread that sleeps shall look again */
	pthread_mutex_t lock;
	pthread_cond_t left;
};

int mcast_gate_open(struct mcast_gate *gate);

/* When this returns no call is inside, and none enters any more. */
void mcast_gate_shut(struct mcast_gate *gate);

/* Close the descriptor, once nothing can write to it any more, because its number may belong to another file then. */
void mcast_gate_end(struct mcast_gate *gate);

/* Frees what mcast_gate_open made. */
void mcast_gate_free(struct mcast_gate *gate);

void mcast_gate_left(struct mcast_gate *gate);

static inline void mcast_leave_gate(struct mcast_gate *gate)
{
	if (__atomic_sub_fetch(&gate->users, 1, __ATOMIC_SEQ_CST) == 0 && __atomic_load_n(&gate->shut, __ATOMIC_SEQ_CST))
		mcast_gate_left(gate);
}

/* 0, or -EBADF if the object is closed. */
static inline int mcast_enter_gate(struct mcast_gate *gate)
{
	__atomic_add_fetch(&gate->users, 1, __ATOMIC_SEQ_CST);
	if (!__atomic_load_n(&gate->shut, __ATOMIC_SEQ_CST))
		return 0;
	mcast_leave_gate(gate);
	return -EBADF;
}

static inline int mcast_is_shut(const struct mcast_gate *gate)
{
	return __atomic_load_n(&gate->shut, __ATOMIC_SEQ_CST);
}

#endif
