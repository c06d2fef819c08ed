/* State that all parts of a QP share: if it is open, and if it works.
 *
 * The gate counts the calls that are inside; a close shuts it, and waits until they have left. `lock` guards the state
 * here, and all of `struct sending`, `struct receiving`, their completions and the news of the port: whatever polls,
 * posts or modifies holds it for a short time, and sleeps without it. A call that holds the lock from its look at the
 * gate to its end need not enter the gate, because a close takes the lock, too.
 *
 * The gate's descriptor is readable while the QP is shut or in ERR, and ends every sleep on the QP: so whoever notes a
 * failure need not know who sleeps. Parts report failures here, and ask here; nothing here knows of a part. */
#ifndef MCAST_STATE_H
#define MCAST_STATE_H

#include "dynload.h"
#include "gate.h"

#include <pthread.h>

struct qp_state {
	struct mcast_gate gate;
	pthread_mutex_t lock;
	struct ibv_qp *qp;	 /* NULL: not made, or destroyed */
	enum ibv_qp_state state; /* as asked for; ERR also when the device changed it */
	enum ibv_wc_status failure;
	int reason; /* 0, or the asynchronous event that put the QP into ERR, plus 1; GONE, IMPOSSIBLE */
};

int mcast_open_state(struct qp_state *self);
void mcast_free_state(struct qp_state *self);

/* All below: with the lock held. */

void mcast_set_state(struct qp_state *self, enum ibv_qp_state state);

/* The QP is in ERR: keep the first reason that is no flush, because flushes follow from it. Wakes all threads. */
void mcast_note_failure(struct qp_state *self, enum ibv_wc_status status);

/* Note a failure for a reason that the device gave (ibv_event_type plus 1). */
void mcast_note_reason(struct qp_state *self, int reason);

/* The device is gone; -EIO. */
int mcast_note_gone(struct qp_state *self);

/* The driver has reported something impossible, so no report about this QP can be trusted: ERR until a reset; -EIO. */
int mcast_note_impossible(struct qp_state *self);

/* In RESET: the QP has not failed. */
void mcast_forget_failure(struct qp_state *self);

#endif
