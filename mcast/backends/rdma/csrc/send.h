/* Sending: what a QP has posted, and what of it is complete.
 *
 * A job is posted in parts as large as the queue has room for. Payloads that are copied, inline or to the slab, need no
 * further care; a job waits for room, and for the end of what the device reads from memory of the user. Completions arrive
 * in order, and only some sends are signaled (`signal_every`), so one number, `tail`, says what is complete: a thread
 * waits, by the scheme in completions.h, until `tail` has passed the `end` of its job. Whoever polls takes the completions
 * of all jobs, and wakes the threads whose end has been passed.
 *
 * States of a job: posting (part of it may be posted, `posted` counts); posted, until `tail` passes `end`; done. Closing
 * the QP and a reset wake all waiting threads by mcast_end_waits, because no completion follows for what they wait for.
 *
 * The lock of the QP guards all fields; `struct sending` is send.c's alone. Not handled: fairness between jobs that wait
 * for room, and any retransmission: UD has none. */
#ifndef MCAST_SEND_H
#define MCAST_SEND_H

#include "completions.h"
#include "handles.h"

struct sending {
	struct qp_state *state;
	const struct mcast_qp_init *init;
	struct completions completions;
	struct address_handles handles;
	uint64_t head, tail; /* sends posted; sends completed, in ERR with success */
	uint64_t signaled;   /* end of the sends that a completion covers: all, unless a post failed */
	uint64_t sent, unsent; /* counters */
	uint32_t head_slot;  /* of the slab, for the next send */
	uint32_t signal_every;
	uint32_t slab_lkey;
	uint32_t max_inline;
	uint32_t max_sges; /* of a send: 2, or 1 on a device that has no more */
	struct ibv_send_wr *wrs;
	struct ibv_sge (*sges)[2];
	int has_failed; /* a send has completed with an error */
	struct mcast_region *regions; /* registered memory that is sent from without a copy */
	uint32_t region_count;
};

struct mcast_send_job {
	uint64_t serial; /* of the address handle */
	uint32_t remote_qp_num;
	uint32_t remote_qkey;
	uint32_t imm;
	int has_imm;
	const uintptr_t *addresses;
	const uint32_t *lengths;
	const uint8_t *on_device; /* which of them the CPU cannot read; NULL: none */
	const uint8_t *heads;	  /* headers in front of the payloads, one after another */
	uint32_t head_length;	  /* 0: nothing */
	uint32_t count;
	uint32_t posted;
	uint64_t end;	   /* wait until the sends before this one are complete; or ALL_POSTED */
	uint64_t room_end; /* the sends that the job waits for at the moment */
};

static const uint64_t ALL_POSTED = UINT64_MAX;

/* --- of a QP that is being made, or has ended --- */

int mcast_open_sending(struct sending *self, struct qp_state *state, struct async_events *async,
		       const struct mcast_qp_init *init, struct ibv_context *context);

/* The QP is made, and has these limits. */
void mcast_start_sending(struct sending *self, uint32_t slab_lkey, uint32_t max_inline, uint32_t max_sges);

/* Wait until every posted send is complete, if the device is well. No other call may use the QP. */
void mcast_linger(struct sending *self, int64_t budget);

/* The first error; what could not be freed stays for another time. */
int mcast_close_sending(struct sending *self);
void mcast_free_sending(struct sending *self);

/* --- of a QP that is open --- */

/* 1: all is posted, and what is not copied complete. 0: not yet. -EIO: the QP is in ERR. -ESTALE:
 * the address handle is retired; or another -errno. `posted` is true in every case. */
int mcast_send_now(struct sending *self, struct mcast_send_job *job, int polls);
int mcast_spin_send(struct sending *self, struct mcast_send_job *job, int64_t deadline);
int mcast_send(struct sending *self, struct mcast_send_job *job, const struct mcast_wait *wait);

int mcast_create_ah(struct sending *self, struct ibv_pd *pd, const struct mcast_ah_init *init, uint64_t *serial);
void mcast_drop_ah(struct sending *self, uint64_t serial);

/* Use these regions, allocated by malloc, from now on; the old ones are returned. */
struct mcast_region *mcast_exchange_regions(struct sending *self, struct mcast_region *regions, uint32_t count);

/* All below: with the lock held. */

/* See what is complete. */
void mcast_reap(struct sending *self);

/* Return the number of sends under way; those of a QP in ERR are lost. */
uint64_t mcast_under_way(const struct sending *self);

/* Forget what was posted, as the device does at RESET. */
void mcast_forget_sends(struct sending *self);

#endif
