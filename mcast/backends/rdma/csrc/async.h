/* The asynchronous events of a device, as one QP hears them: failures of the QP, and news of its port.
 *
 * librdmacm opens a device once a process, so all its QPs share one queue of events, whose descriptor every sleeping
 * thread and every loop outside watches. Whichever of them finds it readable reads the queue, and tells all QPs of the
 * device: a failure goes to the QP's state, which wakes its sleepers; news of the port make `port_fd` readable, which
 * ends a wait for events and wakes the loop outside.
 *
 * One lock of the process guards the lists of devices and their QPs, and is held while a QP is told: so it is taken
 * before the lock of a QP, never after. The lock of the QP guards the news. */
#ifndef MCAST_ASYNC_H
#define MCAST_ASYNC_H

#include "state.h"

struct device_events;

struct async_events {
	struct qp_state *state;
	struct device_events *device; /* NULL: it does not listen */
	struct async_events *next;    /* of the device */
	const struct ibv_cq *cqs[2];
	uint8_t port;
	int fd;	     /* the device's */
	int port_fd; /* readable while port_pending is set */
	int port_pending; /* the port has told of something, and no wait ended for that, nor were its events read */
	uint8_t port_events[PORT_EVENTS]; /* what the port told of; the newest is the port_changes-th */
	uint32_t port_events_read;
	uint32_t port_changes; /* atomic: how often the port or a GID of it changed */
};

int mcast_open_async(struct async_events *self, struct qp_state *state, struct ibv_context *context);

/* Hear what the device tells from now on of the QP, these two queues and this port. */
int mcast_listen(struct async_events *self, struct ibv_context *context, const struct ibv_cq *send,
		 const struct ibv_cq *recv, uint8_t port);

/* Hear no more, and close what was opened. */
void mcast_close_async(struct async_events *self);

/* In the child of a fork. */
void mcast_async_after_fork(void);

/* Read what the device tells, without waiting, and tell its QPs; without the lock of one. */
void mcast_read_events(struct async_events *self);

/* Whether the port has reported something since the last call; with the lock held. */
int mcast_clear_port_pending(struct async_events *self);

/* Whether mcast_take_port_events would find something. */
int mcast_holds_events(struct async_events *self);

/* What the port told of since the last time: how many ibv_event_types are in `out`, at most PORT_EVENTS. */
int mcast_take_port_events(struct async_events *self, uint8_t *out);

#endif
