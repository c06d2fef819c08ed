/* The asynchronous events of a device, passed on to one QP: failures of the QP, and events of its port.
 *
 * librdmacm opens a device once per process, so all its QPs share one queue of events, whose descriptor every sleeping
 * thread and every event loop outside watches. Whichever of them finds it readable reads the queue, and passes each event
 * to all QPs of the device: a failure goes to the QP's state, which wakes its sleepers; a port event is stored and makes
 * `port_fd` readable, which ends a wait for events and wakes the loop outside.
 *
 * One lock of the process guards the lists of devices and their QPs, and is held while an event is passed to a QP: so it
 * is taken before the lock of a QP, never after. The lock of the QP guards its port events.
 *
 * Not handled: more than PORT_EVENTS port events that nobody reads (the oldest are overwritten), and events that happened
 * before the QP listened, which are read and dropped. */
#ifndef MCAST_ASYNC_H
#define MCAST_ASYNC_H

#include "state.h"

struct device_events;

struct async_events {
	struct qp_state *state;
	struct device_events *device; /* NULL: does not listen */
	struct async_events *next;    /* of the device */
	const struct ibv_cq *cqs[2];
	uint8_t port;
	int fd;	     /* the device's */
	int port_fd; /* readable while port_pending is set */
	int port_pending; /* a port event was stored, and neither ended a wait nor was read */
	uint8_t port_events[PORT_EVENTS]; /* a ring; the newest is the port_changes-th */
	uint32_t port_events_read;
	uint32_t port_changes; /* atomic: number of port events so far */
};

int mcast_open_async(struct async_events *self, struct qp_state *state, struct ibv_context *context);

/* Receive the device's events about the QP, these two queues and this port, from now on. */
int mcast_listen(struct async_events *self, struct ibv_context *context, const struct ibv_cq *send,
		 const struct ibv_cq *recv, uint8_t port);

/* Stop to receive events, and close what was opened. */
void mcast_close_async(struct async_events *self);

/* Start without devices in the child of a fork. */
void mcast_async_after_fork(void);

/* Read the device's events without waiting, and pass them to its QPs. The lock of no QP may be held. */
void mcast_read_events(struct async_events *self);

/* Return 1 if a port event was stored since the last call, and clear that. The lock is held. */
int mcast_clear_port_pending(struct async_events *self);

/* Return 1 if mcast_take_port_events would find an event. */
int mcast_holds_events(struct async_events *self);

/* Write the port events since the last call to `out`, as ibv_event_types. Return their number, at most PORT_EVENTS. */
int mcast_take_port_events(struct async_events *self, uint8_t *out);

#endif
