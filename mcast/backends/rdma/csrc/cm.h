/* Channels and ids. Closing frees what a struct holds, and not the struct: a later call on it returns -EBADF.
 *
 * A lock of Python's guards both; C has none of its own. Only a thread that waits for an event is without that lock: it
 * is inside the channel's gate, and sleeps on the channel's descriptor, which librdmacm makes readable, and on the
 * gate's, by which a close ends the sleep before it destroys the channel. Of several threads that see an event one takes
 * it, with the lock held, and the others sleep again. An event that was taken, and not forgotten, is taken once more: so
 * none is lost between the two. */
#ifndef MCAST_CM_H
#define MCAST_CM_H

#include "dynload.h"
#include "gate.h"
#include "wait.h"

struct mcast_channel {
	struct mcast_gate gate; /* of the sleepers; all else is under a lock in Python */
	struct rdma_event_channel *channel;
};

struct mcast_id {
	struct rdma_cm_id *id; /* NULL: destroyed */
};

/* 1: an event waits. 0: too late. -EBADF: closed; -EINTR, or another -errno. */
int mcast_wait_event(struct mcast_channel *channel, const struct mcast_wait *wait);

#endif
