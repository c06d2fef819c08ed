/* Receiving: the slots that messages arrive in, and what has arrived.
 *
 * A slot is free, posted (the device owns it), or held by a batch; the lock of the QP guards all slots and all other
 * fields, and `struct receiving` is receive.c's alone. A receiver polls, and turns completions into messages whose slots
 * it holds; it sleeps by the scheme in completions.h until there is one. A batch that ends gives its slots back, which
 * posts them again at once, except in RESET, where INIT posts all that are free.
 *
 * There are two memories, the slab and the user's; messages arrive in one of them, and in RESET alone they change.
 * Batches may hold slots of the other for any time: a generation number says whose slots they give back.
 *
 * Not handled: a queue without a posted slot. The device drops messages then, and only `recv_empty` and the device's own
 * counters show it (K-DATA-8). A completion that cannot be true counts as a failure of the driver and puts the QP into
 * ERR: its slot number or length would lead to other memory. */
#ifndef MCAST_RECEIVE_H
#define MCAST_RECEIVE_H

#include "completions.h"

/* Where a receive slot is. */
enum slot_state {
	SLOT_FREE,   /* not posted */
	SLOT_POSTED, /* with the device */
	SLOT_HELD,   /* leased to a batch */
};

/* The memory that payloads arrive in. In the slab a GRH lies in front of its payload: one segment, which a driver
 * looks up once. The GRHs for user memory lie in the slab, by themselves. */
struct receive_memory {
	int grh_in_front;
	uint64_t address;
	uint32_t lkey;
	uint32_t room;
	uint64_t stride;
	uint32_t count;
	uint16_t generation; /* 0 is the slab; each user memory has a new one */
	uint8_t *slots;	     /* enum slot_state of each */
};

struct receiving {
	struct qp_state *state;
	const struct mcast_qp_init *init;
	struct completions completions;
	struct mcast_counters counters;
	uint32_t slab_lkey, qp_num;
	struct receive_memory *memory; /* one of the next two */
	struct receive_memory slab, user;
	struct ibv_wc seen; /* polled, not yet received */
	uint64_t seen_stamp;
	int has_seen;
};

enum { COPY_ROOM = 4096, NO_SLOT = UINT32_MAX };

struct mcast_receive_job {
	struct mcast_message *out;
	uint32_t max;
	uint8_t *copy; /* NULL, or COPY_ROOM bytes for the payload of a single message, whose receive is then posted again
			* at once, and whose slot is NO_SLOT; longer ones, and those in memory of the user, stay leased */
};

/* --- of a QP that is being made, or has ended --- */

/* `refused`: what of the optional features the device lacks, where that is why it fails. */
int mcast_open_receiving(struct receiving *self, struct qp_state *state, struct async_events *async,
			 const struct mcast_qp_init *init, struct ibv_context *context, int *refused);

/* The QP is made: post all receives, if it is UD. */
int mcast_start_receiving(struct receiving *self, uint32_t slab_lkey, uint32_t qp_num);

/* The first error; what could not be freed stays for another time. */
int mcast_close_receiving(struct receiving *self);
void mcast_free_receiving(struct receiving *self);

/* --- of a QP that is open --- */

/* Messages received; 0: none. -EIO: the QP is in ERR. -EBADF: closed. Looks a few times if `polls` says so. */
int mcast_receive_now(struct receiving *self, struct mcast_receive_job *job, int polls);

/* Receive, and sleep as mcast_wait_for does; or spin for a while. */
int mcast_receive(struct receiving *self, struct mcast_receive_job *job, const struct mcast_wait *wait);
int mcast_spin_receive(struct receiving *self, struct mcast_receive_job *job, int64_t deadline);

/* Post the receives of these messages again. */
int mcast_release(struct receiving *self, uint32_t generation, const struct mcast_message *messages, uint32_t count);

/* 1: a message is leased, or waits to be received. */
int mcast_has_messages(struct receiving *self);

/* All below: with the lock held. */

/* In RESET: payloads arrive in memory of the user from now on, or (mr NULL) in the slab. The generation. */
int mcast_use_memory(struct receiving *self, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count);

/* Post every free slot. */
int mcast_post_free_slots(struct receiving *self);

/* Drop and count the messages that nobody has received. */
void mcast_drop_received(struct receiving *self);

/* Forget what was posted, as the device does at RESET. */
void mcast_forget_receives(struct receiving *self);

#endif
