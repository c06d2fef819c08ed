/* A QP with its completion queues, its slab and its receive slots. */
#ifndef MCAST_QP_H
#define MCAST_QP_H

#include "dynload.h"

#include <pthread.h>

/* Where a receive slot is. */
enum slot_state {
	SLOT_FREE,   /* with us, not posted */
	SLOT_POSTED, /* with the device */
	SLOT_HELD,   /* leased to a batch */
};

struct completions {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
};

/* The memory that payloads arrive in. In the slab a GRH lies in front of its payload: one segment, which a driver
 * looks up once. The GRHs for user memory lie in the slab, by themselves. */
struct receive_memory {
	int grh_in_front;
	uint64_t address;
	uint32_t lkey;
	uint32_t room;
	uint32_t stride;
	uint32_t count;
	uint32_t generation; /* 0 is the slab; each user memory has a new one */
	uint8_t *slots;	     /* enum slot_state of each */
};

struct mcast_qp {
	struct rdma_cm_id *id;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	int wake_fd;
	struct completions send, recv;
	struct mcast_qp_init init;

	/* Guards all below: polling, posting and modifying are short; sleeping is done without it. */
	pthread_mutex_t lock;
	enum ibv_qp_state state; /* as asked for; ERR also when the device did it */
	enum ibv_wc_status failure;

	uint64_t head, tail; /* sends posted, sends completed */
	uint64_t first_slot; /* the send that has the slab's first slot */
	uint32_t signal_every;
	uint32_t max_inline;
	struct ibv_send_wr *send_wrs;
	struct ibv_sge *send_sges;

	struct ibv_wc seen; /* polled, not yet received */
	int has_seen;
	int fd_is_watched; /* somebody else sleeps on the receive channel's fd: arm it */
	struct receive_memory slab, user;
	struct receive_memory *memory; /* one of the two */
	struct mcast_counters counters;
};

/* Post every free slot; call with the lock held. */
int mcast_post_free_slots(struct mcast_qp *qp);

/* Forget what was posted, as the device does at RESET; call with the lock held. */
void mcast_forget_posted(struct mcast_qp *qp);

enum { MCAST_SPIN_NS = 50000 }; /* about what it costs to sleep and be woken */

/* Messages received, 0 when `budget` ns are over, of which the first `spin` are not slept; -EAGAIN when `event_fd`
 * (or NO_FD) became readable; -EIO when the QP is in ERR; -EINTR; or another -errno. */
int mcast_run(struct mcast_qp *qp, struct mcast_message *out, uint32_t max, int event_fd, int64_t spin,
	      int64_t budget);

/* Messages that are there, or come while one looks a few times; else as mcast_run. Does not sleep. */
int mcast_poll(struct mcast_qp *qp, struct mcast_message *out, uint32_t max);

/* Post the receives of these messages again. */
int mcast_release(struct mcast_qp *qp, uint32_t generation, const struct mcast_message *messages, uint32_t count);

/* Post the whole job behind one doorbell, or nothing of it: -EAGAIN, for lack of room or in another state.
 * Then as mcast_send, without sleeping. */
int mcast_send_at_once(struct mcast_qp *qp, struct mcast_send_job *job);

#endif
