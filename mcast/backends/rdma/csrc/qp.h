/* A QP put together from its parts, and what Python calls of it (cdefs.h).
 *
 * Each part belongs to one file, and includes only those above it:
 *
 *     state.h        open or closed, working or failed; the lock of all parts
 *     async.h        what the device tells of the QP and its port
 *     completions.h  one queue, and who sleeps on it
 *     send.h, receive.h
 *     qp.h           all of them
 *
 * A call enters the gate, does its work under the lock, and leaves; those of send.h and receive.h do so themselves.
 * mcast_close_qp shuts the gate, so that no call is inside, and frees what the struct holds; calls then return -EBADF.
 * mcast_free_qp frees the struct, once Python has no reference to it. */
#ifndef MCAST_QP_H
#define MCAST_QP_H

#include "receive.h"
#include "send.h"

/* Parts that begin where a cache line does: otherwise a message took up to a tenth longer, as the heap had it. */
struct mcast_qp {
	_Alignas(64) struct qp_state state;
	_Alignas(64) struct async_events async;
	_Alignas(64) struct sending sending;
	_Alignas(64) struct receiving receiving;
	struct mcast_qp_init init;
	struct rdma_cm_id *id; /* NULL: the id may be gone */
	struct ibv_pd *pd;
	struct ibv_mr *mr; /* of the slab */
};

static inline int mcast_is_closed(const struct mcast_qp *self)
{
	return mcast_is_shut(&self->state.gate);
}

/* Return 1 if mcast_read_port_events would find an event; or -errno. */
int mcast_has_port_events(struct mcast_qp *self);

#endif
