/* A QP with its completion queues, its slab and its receive slots. */
#ifndef MCAST_QP_H
#define MCAST_QP_H

#include "completions.h"
#include "dynload.h"
#include "gate.h"

#include <pthread.h>

/* Where a receive slot is. */
enum slot_state {
	SLOT_FREE,   /* with us, not posted */
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

/* An address handle. Devices may read it until the last send to it is complete. */
struct mcast_ah {
	struct ibv_ah *ah;
	uint64_t serial; /* what Python knows the handle by */
	uint64_t end;	 /* of the last send to it */
	int is_retired;
	struct mcast_ah *next;
};

/* mcast_close_qp frees what the struct holds, after which calls return -EBADF; mcast_free_qp frees the struct. */
struct mcast_qp {
	struct mcast_gate gate; /* of all calls but mcast_close_qp and those that hold `lock` from their look at it to their
				 * end; its wake_fd is readable in ERR, too */
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct completions send, recv;
	struct mcast_qp_init init;
	struct mcast_async *async;
	struct mcast_qp *next_of_device;
	int async_fd;
	uint32_t port_changes; /* atomic: how often the port or a GID of it changed */
	int news_fd;	       /* readable while has_news is set: ends a wait for events, and wakes loops outside */

	int reset_fd;	       /* by which a reset calls the thread that leads those that wait for sends */

	/* Guards all below: polling, posting and modifying are short; sleeping is done without it. */
	pthread_mutex_t lock;
	enum ibv_qp_state state; /* as asked for; ERR also when the device changed it */
	enum ibv_wc_status failure;
	int reason; /* 0, or the asynchronous event that put the QP into ERR, plus 1; GONE, IMPOSSIBLE */

	uint8_t port_events[PORT_EVENTS]; /* what the port told of; the newest is the port_changes-th */
	uint32_t port_events_read;
	int has_news; /* the port has told of something, and no wait ended for that, nor were its events read */

	uint64_t head, tail; /* sends posted; sends completed, in ERR with success */
	uint64_t told;	     /* end of the sends that a completion will tell of: all, but for a post that failed */
	uint32_t head_slot;  /* of the slab, for the next send */
	uint32_t signal_every;
	uint32_t max_inline;
	uint32_t most_sges; /* of a send: 2, or 1 on a device that has no more */
	struct ibv_send_wr *send_wrs;
	struct ibv_sge (*send_sges)[2];
	int send_failed;     /* a send has completed with an error */
	struct mcast_region *regions; /* what is sent from without a copy */
	uint32_t region_count;
	struct mcast_ah *ahs;
	uint64_t last_serial;

	struct ibv_wc seen; /* polled, not yet received */
	uint64_t seen_stamp;
	int has_seen;
	struct receive_memory slab, user;
	struct receive_memory *memory; /* one of the two */
	struct mcast_counters counters;
};

/* --- qp.c --- */

/* Post every free slot; call with the lock held. */
int mcast_post_free_slots(struct mcast_qp *qp);

/* Drop and count the messages that nobody has received; with the lock held. */
void mcast_drop_received(struct mcast_qp *qp);

/* Forget what was posted, as the device does at RESET; call with the lock held. */
void mcast_forget_posted(struct mcast_qp *qp);

/* The QP is in ERR: keep the first reason that is no flush, because flushes follow from it. Wakes all threads. With the
 * lock held. */
void mcast_note_failure(struct mcast_qp *qp, enum ibv_wc_status status);

/* The device is gone; -EIO. With the lock held. */
int mcast_note_gone(struct mcast_qp *qp);

/* The driver has told what cannot be true, so nothing more of this QP can be believed: ERR until a reset; -EIO. With the
 * lock held. */
int mcast_note_impossible(struct mcast_qp *self);

/* Destroy the handles that were retired and that nothing under way can need; of a closed QP all. Lock held.
 * The first error; what failed stays for another time. */
int mcast_sweep_ahs(struct mcast_qp *qp, int is_closed);

/* Retire all handles, so that no message is posted to them any more; with the lock held. */
void mcast_retire_ahs(struct mcast_qp *qp);

/* The handle with that serial number, NULL if it is retired; with the lock held. */
struct mcast_ah *mcast_find_ah(struct mcast_qp *qp, uint64_t serial);

/* --- async.c --- */

int mcast_listen(struct mcast_qp *qp, struct ibv_context *context);
void mcast_listen_no_more(struct mcast_qp *qp);
int mcast_async_fd(const struct mcast_qp *qp);

/* In the child of a fork. */
void mcast_async_after_fork(void);

/* Whether the port has reported something since the last call; with the lock held. */
int mcast_take_news(struct mcast_qp *qp);

/* Whether mcast_read_port_events would find something; or -errno. */
int mcast_has_port_events(struct mcast_qp *qp);

/* The same without asking the device. */
int mcast_holds_port_events(struct mcast_qp *qp);

/* --- receive.c --- */

enum { COPY_ROOM = 4096, NO_SLOT = UINT32_MAX };

struct mcast_receive_job {
	struct mcast_message *out;
	uint32_t max;
	uint8_t *copy; /* NULL, or COPY_ROOM bytes for the payload of a single message, whose receive is then posted again
			* at once, and whose slot is NO_SLOT; longer ones, and those in memory of the user, stay leased */
};

/* Messages received; 0: none. -EIO: the QP is in ERR. -EBADF: closed. Looks a few times if `looks` says so. */
int mcast_receive_now(struct mcast_qp *qp, struct mcast_receive_job *job, int looks);

/* The same, asleep as mcast_wait_for says; or spinning for a while. */
int mcast_receive(struct mcast_qp *qp, struct mcast_receive_job *job, const struct mcast_wait *wait);
int mcast_spin_receive(struct mcast_qp *qp, struct mcast_receive_job *job, int64_t deadline);

/* Post the receives of these messages again. */
int mcast_release(struct mcast_qp *qp, uint32_t generation, const struct mcast_message *messages, uint32_t count);

/* --- send.c --- */

struct mcast_send_job {
	uint64_t serial; /* of the address handle */
	uint32_t remote_qp_num;
	uint32_t remote_qkey;
	uint32_t imm;
	int has_imm;
	const uintptr_t *addresses;
	const uint32_t *lengths;
	const uint8_t *on_device; /* which of them the CPU cannot read; NULL: none */
	const uint8_t *heads;	  /* what goes before each payload, one after another */
	uint32_t head_length;	  /* 0: nothing */
	uint32_t count;
	uint32_t posted;
	uint64_t end;	   /* wait until the sends before this one are complete; or ALL_POSTED */
	uint64_t room_end; /* the sends that the job waits for at the moment */
};

/* See what is complete; with the lock held. */
void mcast_reap(struct mcast_qp *qp);

static const uint64_t ALL_POSTED = UINT64_MAX;

/* 1: all is posted, and what is not copied complete. 0: not yet. -EIO: the QP is in ERR. -ESTALE:
 * the address handle is retired; or another -errno. `posted` is true in every case. */
int mcast_send_now(struct mcast_qp *qp, struct mcast_send_job *job, int looks);
int mcast_spin_send(struct mcast_qp *qp, struct mcast_send_job *job, int64_t deadline);
int mcast_send(struct mcast_qp *qp, struct mcast_send_job *job, const struct mcast_wait *wait);

/* Wait until every posted send is complete, if the device is well. No other call may use the QP. */
void mcast_linger(struct mcast_qp *qp, int64_t budget);

#endif
