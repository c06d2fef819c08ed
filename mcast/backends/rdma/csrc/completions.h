/* A completion queue (CQ), and the threads that wait for its completions. Its owner, `struct sending` or
 * `struct receiving`, provides the work that is tried again after each sleep.
 *
 * States of a waiting thread: one leads, the others follow. The leader arms the CQ, polls once more, and sleeps on the
 * completion channel. A follower sleeps on an eventfd of its own. A thread that leaves while nobody leads wakes the first
 * follower to lead. A new leader polls before it sleeps, so no thread sleeps while its completion waits. A thread that
 * spins neither leads nor follows: it takes completions, but no completion event, so the others sleep and wake as without
 * it.
 *
 * An event loop outside sleeps on `watch_fd`, an epoll of all that a leader sleeps on, and of `call_fd`. A poll that finds
 * nothing arms the CQ for it, as a leader would (`enum watch`); while a thread leads, that thread takes the completion
 * events, so it wakes the loop by `call_fd` when it leaves.
 *
 * All sleepers also wake for the gate (closed, or in ERR) and for the device's asynchronous events, which they read.
 * Leaders that wait for sends also wake for `reset_fd`, because sends that a reset has ended have no completion.
 *
 * The lock of the QP guards all fields. A thread sleeps, arms or takes a completion event without it.
 *
 * Not handled: fairness. Whoever polls takes the completions of all; followers are served in the order in which they
 * began to wait, but a thread that spins may take messages before them. */
#ifndef MCAST_COMPLETIONS_H
#define MCAST_COMPLETIONS_H

#include "async.h"
#include "wait.h"

struct waiter {
	int fd;	      /* NO_FD until it follows somebody */
	uint64_t end; /* the send that the thread waits for, if it waits for one */
	struct waiter *next;
};

/* Known state of the loop's descriptor, for a poll that finds nothing. */
enum watch {
	WATCH_UNKNOWN = 0, /* the CQ may not be armed, and the descriptor may be readable for any reason */
	WATCH_FOUND = 1,   /* completions were polled since it was armed, so the channel has an event: a bit of the others */
	WATCH_ARMED = 3,   /* by the last poll; nothing was found since */
	WATCH_POLLED = 5,  /* armed, and one more poll found nothing: the next one finds out why it is readable */
};

struct completions {
	struct qp_state *state; /* NULL: not opened */
	struct async_events *async;
	void *owner; /* argument of the work */
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_cq_ex *stamped; /* the same, if its completions have time stamps */
	int clock;		   /* of the time stamps: STAMPS_NONE and so on */
	uint64_t clock_khz;	   /* of the device's clock, for STAMPS_DEVICE */
	const struct waiter *leader;
	struct waiter *followers; /* the first has waited longest */
	int watch_fd;		  /* an epoll for an event loop outside; NO_FD until it is asked for */
	int call_fd;		  /* wakes that loop, to poll again */
	int reset_fd;		  /* wakes the leader: no completion will follow. NO_FD for receives */
	int is_broken;		  /* the device was removed, and the channel stays readable */
	enum watch watch;
};

/* Work that is tried with the QP's lock held. Positive or -errno: done. 0: not yet. */
typedef int mcast_work(void *owner, void *what);

/* Arguments of mcast_open_completions. */
struct completions_init {
	struct qp_state *state;
	struct async_events *async;
	void *owner;
	uint32_t depth, vector;
	int timestamps;
	int of_sends;
};

int mcast_open_completions(struct completions *self, struct ibv_context *context, const struct completions_init *init);

/* Raise an event after `count` completions, or `period` microseconds after the first. Return 0 or -errno. */
int mcast_moderate(struct completions *completions, uint32_t count, uint32_t period);

int mcast_poll_stamped(struct completions *completions, int max, struct ibv_wc *wcs, uint64_t *stamps);

enum { POLL_IMPOSSIBLE = -1000 };

/* Call ibv_poll_cq, with the QP's lock held. `stamps` is written, in nanoseconds, if there is a clock. POLL_IMPOSSIBLE: the
 * driver reports more than `max`. */
static inline int mcast_poll(struct completions *completions, int max, struct ibv_wc *wcs, uint64_t *stamps)
{
	int count = completions->clock ? mcast_poll_stamped(completions, max, wcs, stamps) :
					 ibv_poll_cq(completions->cq, max, wcs);

	if (count > 0)
		completions->watch &= WATCH_FOUND;
	return count <= max ? count : POLL_IMPOSSIBLE;
}

/* Return the number of completions that may follow, of `left`; 0 if the last poll found none. Bounds the loops that hold
 * the lock: a faulty driver may report more completions than were ever posted, without end. */
static inline uint32_t mcast_polls_left(uint32_t left, int polled)
{
	return polled > 0 && (uint32_t)polled < left ? left - (uint32_t)polled : 0;
}

/* Return 0 or the first -errno; what could not be freed is freed by a later call. */
int mcast_close_completions(struct completions *completions);

/* Return the descriptor for a loop outside, or -errno. `mcast_poll_work` that finds nothing arms it. */
int mcast_watch(struct completions *completions);

/* Try the work once, without waiting. `full`: its result where more may be left to do. The loop outside is armed by the
 * first of several polls that find nothing, and stays armed. */
int mcast_poll_work(struct completions *completions, mcast_work *work, void *what, int full);

/* Try the work up to `polls` times, or for about SPIN_NS but not beyond `deadline`, without sleeping. */
int mcast_poll_often(struct completions *completions, mcast_work *work, void *what, int polls);
int mcast_spin(struct completions *completions, mcast_work *work, void *what, int64_t deadline);

enum { SPIN_NS = 50000 }; /* about the cost of one sleep and wake-up */
enum { POLLS = 32 }; /* before the clock is read, which may cost more than all of these */

/* Repeat the work until it is done, at most until `wait->spin_until`; then return 0, as after the deadline. All else is
 * as in mcast_wait_for. */
int mcast_busy_poll(struct completions *completions, mcast_work *work, void *what, const struct mcast_wait *wait);

/* Repeat the work until it is done, sleeping in between. 0: the deadline has passed. -EAGAIN, -EINTR: see struct
 * mcast_wait. -EBADF: closed. `end`: number of the send that the work waits for; NULL: none. */
int mcast_wait_for(struct completions *completions, mcast_work *work, void *what, const uint64_t *end,
		   const struct mcast_wait *wait);

/* Wake the threads that wait for a send before `tail`; with the lock held. */
void mcast_call_followers(struct completions *completions, uint64_t tail);

/* Wake all waiting threads, because no completion will follow; with the lock held. */
void mcast_end_waits(struct completions *completions);

#endif
