/* A completion queue, and the threads that wait for its completions. Its owner, `struct sending` or `struct receiving`,
 * gives the work that is tried again after each sleep.
 *
 * Of the threads that wait for one queue, one leads: it arms the queue, polls once more, and sleeps on the
 * channel. The others sleep on descriptors of their own. A thread that leaves while nobody leads wakes the first of
 * them to lead. A new leader polls before it sleeps, so no thread sleeps while its completion waits. A thread that
 * spins neither leads nor follows: it takes completions, but no event, so the others sleep and wake as without it.
 *
 * A loop outside sleeps on `watch_fd`, an epoll of all that a leader sleeps on, and of `call_fd`. A look that finds
 * nothing arms the queue for it, as a leader would; while a thread leads, that thread takes the events, so it calls the
 * loop by `call_fd` when it leaves.
 *
 * All sleepers also wake for the gate (closed, or in ERR), for the device's asynchronous events, which they read, and
 * leaders of those that wait for sends for `reset_fd`: no completion tells of sends that a reset has ended.
 *
 * The lock of the QP guards all fields. Whoever sleeps, arms or takes an event does so without it. */
#ifndef MCAST_COMPLETIONS_H
#define MCAST_COMPLETIONS_H

#include "async.h"
#include "wait.h"

struct waiter {
	int fd;	      /* NO_FD until it follows somebody */
	uint64_t end; /* the send that the thread waits for, if it waits for one */
	struct waiter *next;
};

/* What a look that finds nothing knows of the descriptor of the loop outside. */
enum watch {
	WATCH_UNKNOWN = 0, /* nothing need be armed, and it may be readable because of anything */
	WATCH_FOUND = 1,   /* something was polled since it was armed, of which the channel tells: a bit of the others */
	WATCH_ARMED = 3,   /* by the last look; nothing was polled since */
	WATCH_POLLED = 5,  /* the same, but for a look in vain: the next one shall see why it is readable */
};

struct completions {
	struct qp_state *state; /* NULL: not opened */
	struct async_events *async;
	void *owner; /* what the work is for */
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_cq_ex *stamped; /* the same, if its completions have time stamps */
	int clock;		   /* of the time stamps: STAMPS_NONE and so on */
	uint64_t clock_khz;	   /* of the device's clock, for STAMPS_DEVICE */
	const struct waiter *leader;
	struct waiter *followers; /* the first has waited longest */
	int watch_fd;		  /* an epoll for an event loop outside; NO_FD until it is asked for */
	int call_fd;		  /* by which a leader tells that loop to look again */
	int reset_fd;		  /* by which the leader learns that no completion will come; NO_FD of receives */
	int is_broken;		  /* the device is gone, and the channel is readable without end */
	enum watch watch;
};

/* A piece of work, called with the QP's lock held. Positive or -errno: done. 0: not yet. */
typedef int mcast_work(void *owner, void *what);

/* What the queue is for: its owner, how many completions it holds, and what it tells of besides. */
struct completions_init {
	struct qp_state *state;
	struct async_events *async;
	void *owner;
	uint32_t depth, vector;
	int timestamps;
	int of_sends;
};

int mcast_open_completions(struct completions *self, struct ibv_context *context, const struct completions_init *init);

/* An event tells of so many completions, or of fewer once the first is so many microseconds old. */
int mcast_moderate(struct completions *completions, uint32_t count, uint32_t period);

int mcast_poll_stamped(struct completions *completions, int max, struct ibv_wc *wcs, uint64_t *stamps);

enum { POLL_IMPOSSIBLE = -1000 };

/* As ibv_poll_cq, with the QP's lock held. `stamps` is written, in nanoseconds, if there is a clock. POLL_IMPOSSIBLE: the
 * driver says that there are more than `max`. */
static inline int mcast_poll(struct completions *completions, int max, struct ibv_wc *wcs, uint64_t *stamps)
{
	int count = completions->clock ? mcast_poll_stamped(completions, max, wcs, stamps) :
					 ibv_poll_cq(completions->cq, max, wcs);

	if (count > 0)
		completions->watch &= WATCH_FOUND;
	return count <= max ? count : POLL_IMPOSSIBLE;
}

/* How many completions may still come of `left`; 0 once there are none. A driver that errs may report more than were ever
 * posted, without end, and these loops hold the lock. */
static inline uint32_t mcast_polls_left(uint32_t left, int polled)
{
	return polled > 0 && (uint32_t)polled < left ? left - (uint32_t)polled : 0;
}

/* The first error; what could not be freed stays for another time. */
int mcast_close_completions(struct completions *completions);

/* The descriptor for a loop outside: `mcast_poll_work` that finds nothing arms it. Or -errno. */
int mcast_watch(struct completions *completions);

/* Do the work once, without waiting. `full`: its answer where more may be left to do. The loop outside is armed by the
 * first of several looks that find nothing, and stays so. */
int mcast_poll_work(struct completions *completions, mcast_work *work, void *what, int full);

/* Do the work up to `polls` times, or for about SPIN_NS but not beyond `deadline`, without sleeping. */
int mcast_poll_often(struct completions *completions, mcast_work *work, void *what, int polls);
int mcast_spin(struct completions *completions, mcast_work *work, void *what, int64_t deadline);

enum { SPIN_NS = 50000 }; /* about what it costs to sleep and be woken */
enum { POLLS = 32 }; /* before the first look at the clock, which may cost more than all of these */

/* Repeat the work until it is done, at most until `wait->spin_until`; then 0, as after the deadline. Otherwise as
 * mcast_wait_for. */
int mcast_busy_poll(struct completions *completions, mcast_work *work, void *what, const struct mcast_wait *wait);

/* Repeat the work until it is done, sleeping in between. 0: the deadline has passed. -EAGAIN, -EINTR: see struct
 * mcast_wait. -EBADF: closed. `end`: where the work keeps the number of the send that it waits for; NULL: none. */
int mcast_wait_for(struct completions *completions, mcast_work *work, void *what, const uint64_t *end,
		   const struct mcast_wait *wait);

/* Wake the threads that wait for a send before `tail`; with the lock held. */
void mcast_call_followers(struct completions *completions, uint64_t tail);

/* Wake all who wait, because no completion will tell of what they wait for; with the lock held. */
void mcast_end_waits(struct completions *completions);

#endif
