/* Declarations that the parts of the scripted card share.
 *
 * control.c   what a test lets be and happen          calls.c     each call, first: does it fail, stand still
 * objects.c   what lives, what is gone, the reports   bells.c     descriptors that can be slept on
 * devices.c   libibverbs: devices, contexts           verbs.c     memory, completion queues
 * qp.c        queue pairs, address handles            data.c      what is posted, kept, polled
 * wire.c      who gets a message, and what of it      cm.c        librdmacm: channels, ids, events
 * groups.c    librdmacm: joins
 */
#ifndef INSIDE_H
#define INSIDE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "card.h"

/* Headers turn these names into inline functions that choose between symbols. */
#undef ibv_reg_mr
#undef ibv_query_port

enum { MAX_SGES = 4, MAX_DEVICES = 16, MAX_PORTS = 2 };
enum { KEY = 16, NO_EVENT = -1 };
enum { MULTICAST_QP = 0xffffff, UDP_QKEY = 0x01234567 };

#define container_of(pointer, type, member) ((type *)((char *)(pointer)-offsetof(type, member)))

/* --- calls: what the script can fail --- */

enum { COMMAND = 1, DESTROY = 2 }; /* asks the kernel, which answers EIO once the device is gone; ends an object */

#define CALLS(X)                                      \
	X(ibv_fork_init, 0)                           \
	X(ibv_get_device_list, 0)                     \
	X(ibv_open_device, 0)                         \
	X(ibv_close_device, DESTROY)                  \
	X(ibv_query_device, COMMAND)                  \
	X(ibv_query_port, COMMAND)                    \
	X(ibv_query_gid, COMMAND)                     \
	X(_ibv_query_gid_table, COMMAND)              \
	X(ibv_query_pkey, COMMAND)                    \
	X(ibv_query_rt_values, COMMAND)               \
	X(ibv_alloc_pd, COMMAND)                      \
	X(ibv_dealloc_pd, COMMAND | DESTROY)          \
	X(ibv_reg_mr, COMMAND)                        \
	X(ibv_reg_dmabuf_mr, COMMAND)                 \
	X(ibv_dereg_mr, COMMAND | DESTROY)            \
	X(ibv_create_comp_channel, COMMAND)           \
	X(ibv_destroy_comp_channel, DESTROY)          \
	X(ibv_create_cq, COMMAND)                     \
	X(ibv_create_cq_ex, COMMAND)                  \
	X(ibv_modify_cq, COMMAND)                     \
	X(ibv_destroy_cq, COMMAND | DESTROY)          \
	X(ibv_get_cq_event, 0)                        \
	X(ibv_ack_cq_events, 0)                       \
	X(ibv_get_async_event, 0)                     \
	X(ibv_ack_async_event, 0)                     \
	X(ibv_create_qp, COMMAND)                     \
	X(ibv_query_qp, COMMAND)                      \
	X(ibv_modify_qp, COMMAND)                     \
	X(ibv_destroy_qp, COMMAND | DESTROY)          \
	X(ibv_attach_mcast, COMMAND)                  \
	X(ibv_detach_mcast, COMMAND)                  \
	X(ibv_create_ah, COMMAND)                     \
	X(ibv_destroy_ah, COMMAND | DESTROY)          \
	X(ibv_poll_cq, 0)                             \
	X(ibv_req_notify_cq, 0)                       \
	X(ibv_post_send, 0)                           \
	X(ibv_post_recv, 0)                           \
	X(rdma_create_event_channel, 0)               \
	X(rdma_destroy_event_channel, DESTROY)        \
	X(rdma_create_id, 0)                          \
	X(rdma_destroy_id, DESTROY)                   \
	X(rdma_bind_addr, 0)                          \
	X(rdma_resolve_addr, 0)                       \
	X(rdma_create_qp, 0)                          \
	X(rdma_destroy_qp, 0)                         \
	X(rdma_init_qp_attr, 0)                       \
	X(rdma_set_option, 0)                         \
	X(rdma_join_multicast, 0)                     \
	X(rdma_leave_multicast, 0)                    \
	X(rdma_get_cm_event, 0)                       \
	X(rdma_ack_cm_event, 0)                       \
	X(rdma_get_devices, 0)                        \
	X(send_completion, 0) /* these two fail with an ibv_wc_status */ \
	X(recv_completion, 0)                         \
	X(lie_recv_wr_id, 0) /* these say what is not so: the number that stands for an errno */ \
	X(lie_recv_byte_len, 0)                       \
	X(lie_send_wr_id, 0)                          \
	X(lie_poll_count, 0)                          \
	X(lie_qp_state, 0)                            \
	X(lie_gid_tbl_len, 0)                         \
	X(lie_gid_table_count, 0)

#define CALL_NUMBER(name, flags) CALL_##name,
enum call { CALLS(CALL_NUMBER) CALL_COUNT };
#undef CALL_NUMBER

/* --- objects --- */

#define KINDS(X)                       \
	X(CONTEXT, "context")          \
	X(PD, "protection domain")     \
	X(MR, "memory region")         \
	X(COMP_CHANNEL, "completion channel") \
	X(CQ, "completion queue")      \
	X(QP, "queue pair")            \
	X(AH, "address handle")        \
	X(EVENT_CHANNEL, "event channel") \
	X(ID, "id")                    \
	X(EVENT, "event")

#define KIND_NUMBER(name, text) KIND_##name,
enum kind { KINDS(KIND_NUMBER) KIND_COUNT };
#undef KIND_NUMBER

struct device;

enum { ALIVE = 0x11f3, DEAD = 0xdead };

/* Lies in front of every object that is handed out. One that is destroyed is kept a while, to be recognised. */
struct object {
	uint32_t magic; /* ALIVE or DEAD */
	enum kind kind;
	unsigned serial;
	int uses;    /* by other objects: its destroy answers EBUSY */
	int unacked; /* events of it that were read and not acked */
	int refused; /* a destroy of it failed by the script, or because the device is gone */
	size_t size;
	struct device *device;
	struct object *next, **back; /* the living */
};

/* A descriptor that is readable while something is queued. */
struct bell {
	int fd, peer, rung;
};

struct node {
	struct node *next;
	void *about;		       /* a CQ or an id: gone with it */
	struct ibv_async_event async; /* of a context's queue */
};

struct queue {
	struct bell bell;
	struct node *first, **last;
};

struct device {
	struct ibv_device ibv; /* a list of devices points to this */
	struct card_device is;
	struct card_port ports[MAX_PORTS];
	struct context *cm_context;
	int used;
	int gone;	   /* in no list of devices */
	int disassociated; /* the kernel answers EIO */
};

struct context {
	struct queue async;
	int is_cm; /* librdmacm's own, which it keeps open while the device is there */
	int is_dead;
	struct verbs_context verbs;
};

struct pd {
	struct ibv_pd pd;
};

struct mr {
	struct ibv_mr mr;
	uint64_t iova; /* addresses in work requests start from this */
	uint8_t *base; /* where that is in memory */
	unsigned int access;
	void *mapped;
	size_t mapped_bytes;
};

struct comp_channel {
	struct ibv_comp_channel channel;
	struct queue events;
};

struct entry {
	struct ibv_wc wc;
	struct qp *qp;
	int is_send;
	uint64_t position; /* of the work in its queue */
	uint64_t stamp, ticks; /* nanoseconds: of the day; of the clock that the device's runs with */
};

struct cq {
	struct ibv_cq_ex cq; /* starts as an ibv_cq */
	struct entry *ring;
	struct entry now; /* the entry that the ex interface reads */
	unsigned head, tail, size, mask; /* the ring has a power of two of places */
	int armed, is_polled;
	struct ibv_moderate_cq moderation;
	unsigned untold; /* completions since it was armed, of which no event has told yet */
	int64_t tell_at; /* when one tells of them at the latest; INT64_MAX: there are none, or nothing limits it */
	uint32_t vector;
};

struct receive {
	uint64_t wr_id;
	struct ibv_sge sges[MAX_SGES];
	int count;
};

struct attachment {
	union ibv_gid gid;
	uint16_t lid;
};

struct qp {
	struct ibv_qp qp;
	struct ibv_qp_cap cap;
	enum ibv_qp_state state; /* the device's; the user's copy is older */
	struct receive *receives; /* as many as a power of two */
	uint32_t mask;
	uint64_t posted, taken, freed; /* receives: by the user, by a message, polled */
	uint64_t sent, done;	       /* sends: posted, polled */
	struct work *first[STAGES], **last[STAGES];
	int64_t delay[STAGES];
	struct attachment *attachments;
	uint32_t attached;
	uint32_t qkey;
	uint16_t pkey_index;
	uint8_t port;
	int blocks_loopback;
	uint64_t dropped; /* messages that found no receive */
	struct qp *next;
};

struct ah {
	struct ibv_ah ah;
	struct ibv_ah_attr attr;
};

struct membership {
	uint8_t key[16]; /* the address that was joined */
	struct ibv_ah_attr ah;
	void *context;
	uint32_t qkey;
	int receives, attached;
	int is_left; /* librdmacm has forgotten it, the kernel has not */
	struct membership *next;
};

struct event {
	struct rdma_cm_event event;
	struct membership *membership;
	struct event *next;
};

struct event_channel {
	struct rdma_event_channel channel;
	struct bell bell;
	struct event *first, **last;
};

struct id {
	struct rdma_cm_id id;
	uint8_t address[16];
	uint8_t sgid_index;
	struct device *target; /* of a resolved address whose event was not read */
	uint8_t target_port;
	uint8_t tos;
	struct membership *memberships, **last;
};

/* --- control.c --- */

extern struct device devices[MAX_DEVICES];
extern struct qp *all_qps;
extern int64_t delays[STAGES];
struct card_port *port_of(struct device *device, uint8_t port);
struct qp *find_qp(uint32_t qp_num);
/* To the context `only`, or to each context of the device. */
void raise_async(struct device *device, struct ibv_async_event event, const void *about, const struct context *only);

/* --- calls.c --- */

extern pthread_mutex_t card_lock;
const char *name_of(enum call call);
/* Take the lock, and see that the object is alive: 0, or EINVAL and a report. KIND_COUNT stands for no object. */
int hold(enum call call, enum kind kind, const void *object);
/* The errno that the script, or the device, has for this call; 0 for none. The lock is held. */
int fault(enum call call, const struct object *object, int *take);
/* Return the value that the script makes the device report instead of the true one, if any. The lock is held. */
int64_t said(enum call call, int64_t truth);
/* Both. A destroy is refused while the object is in use. */
int enter(enum call call, enum kind kind, const void *object);
void leave(void);
/* `leave`, and what the call returns: the object or NULL and errno; the errno; -1 and errno. */
void *made(void *object, int error);
int done(int error);
int result(int error);
void forget_script(void);

/* --- objects.c --- */

extern struct object *first_object;
void *make(enum kind kind, size_t size, struct device *device);
/* End the object; its rings and lists are freed by the caller. */
void end(enum kind kind, void *object);
struct object *object_of(enum kind kind, const void *object);
struct device *device_of(enum kind kind, const void *object);
int is_alive(enum call call, enum kind kind, const void *object);
/* Report events that were read and not acked: the real library would wait for ever. */
void settle_events(enum call call, enum kind kind, const void *object);
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
void forget_objects(void);

/* --- bells.c --- */

int open_bell(struct bell *bell, int breakable);
void close_bell(struct bell *bell);
void ring(struct bell *bell, int wanted);
void break_bell(struct bell *bell);
/* With the lock held: 0 once the bell is rung, else -1 with errno. The lock is given up while waiting. */
int await_bell(struct bell *bell);
int open_queue(struct queue *queue, int breakable);
void close_queue(struct queue *queue);
void put(struct queue *queue, struct node node);
/* 0 and the first node; or -1 with errno. As `await_bell`. */
int take(struct queue *queue, struct node *out);
void forget(struct queue *queue, const void *about);

/* --- devices.c --- */

struct context *new_context(struct device *device);
void close_dead_contexts(void);

/* --- verbs.c --- */

struct ibv_cq_ex *create_cq_ex(struct ibv_context *which, struct ibv_cq_init_attr_ex *init);
int modify_cq(struct ibv_cq *target, struct ibv_modify_cq_attr *attr);
struct mr *find_mr(uint32_t lkey);
uint32_t power_of_two(uint32_t least);
void forget_regions(void);

/* --- qp.c: the lock is held --- */

struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_qp_init_attr_ex *init);
int end_qp(struct ibv_qp *qp);
int attach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid);
int detach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid);

/* --- data.c --- */

/* A message or a completion that is on its way through the stages. */
struct work {
	struct work *next;
	struct qp *qp;
	int64_t due;
	struct entry entry;
	struct ah *ah;
	struct ibv_ah_attr to;
	uint32_t remote_qp, remote_qkey;
	enum ibv_wr_opcode opcode;
	unsigned int flags;
	__be32 imm;
	int sge_count;
	struct ibv_sge sges[MAX_SGES];
	uint8_t *copied; /* an inline payload that has to wait */
};

int64_t now_ns(void);
int poll_cq(struct ibv_cq *target, int max, struct ibv_wc *out);
int req_notify_cq(struct ibv_cq *target, int solicited);
int post_recv(struct ibv_qp *target, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int post_send(struct ibv_qp *target, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
/* The work takes its next step, or is kept before it. */
void pass_on(struct work *work, enum stage stage);
int next_entry(struct cq *cq, struct entry *out);
void forget_entries(struct cq *cq, const struct qp *qp);
void forget_cq(struct cq *cq);
void forget_armed(void);
void forget_sends_with(const struct ah *ah);
void forget_work(struct qp *qp);
void fail_qp(struct qp *qp);
int release_work(struct qp *qp, enum stage stage, int index);
int count_work(struct qp *qp, enum stage stage);

/* --- wire.c --- */

void transmit(struct work *work);
int inject(struct qp *qp, const struct card_message *message, const void *payload, uint32_t length);

/* --- cm.c --- */

void key_of(const struct sockaddr *address, uint8_t *key);
void tell(struct id *id, int type, int status, struct membership *membership);
void forget_events(const struct id *id, const struct membership *membership);
uint32_t qkey_of(const struct id *id);

/* --- groups.c --- */

struct answer {
	int nth, event, status;
};

/* Return the scripted answer to a resolve (0) or a join (1); the usual one, if there is none. */
struct answer answer_to(int join, int usual);
void forget_answers(void);

#endif
