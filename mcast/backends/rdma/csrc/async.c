/* Reads the asynchronous events of devices, and passes them to their QPs; async.h explains wake-ups and lock order. */
#include "async.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct device_events {
	struct ibv_context *context;
	struct async_events *listeners;
	struct device_events *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device_events *devices;

/* The QPs are the parent's, whose other threads may have held the lock. */
void mcast_async_after_fork(void)
{
	pthread_mutex_init(&lock, NULL);
	devices = NULL;
}

int mcast_open_async(struct async_events *self, struct qp_state *state, struct ibv_context *context)
{
	self->state = state;
	self->fd = context->async_fd;
	self->port_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return self->port_fd < 0 ? -errno : 0;
}

static struct device_events *device_of(struct ibv_context *context)
{
	struct device_events *device;
	int flags;

	for (device = devices; device; device = device->next)
		if (device->context == context)
			return device;
	device = calloc(1, sizeof(*device));
	if (!device)
		return NULL;
	flags = fcntl(context->async_fd, F_GETFL);
	if (flags >= 0)
		fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK);
	device->context = context;
	device->next = devices;
	devices = device;
	return device;
}

static void leave(struct async_events *self)
{
	struct device_events *device = self->device, **at = &devices;

	for (struct async_events **one = &device->listeners; *one; one = &(*one)->next)
		if (*one == self) {
			*one = self->next;
			break;
		}
	if (!device->listeners) {
		while (*at != device)
			at = &(*at)->next;
		*at = device->next;
		free(device);
	}
	self->device = NULL;
}

void mcast_close_async(struct async_events *self)
{
	pthread_mutex_lock(&lock);
	if (self->device)
		leave(self);
	pthread_mutex_unlock(&lock);
	if (self->port_fd >= 0)
		close(self->port_fd);
	self->port_fd = -1;
}

static int is_about(const struct ibv_async_event *event, const struct async_events *self)
{
	switch (event->event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		return event->element.qp == self->state->qp;
	case IBV_EVENT_CQ_ERR:
		return event->element.cq == self->cqs[0] || event->element.cq == self->cqs[1];
	case IBV_EVENT_DEVICE_FATAL:
		return 1;
	default:
		return 0;
	}
}

static int is_of_port(const struct ibv_async_event *event, const struct async_events *self)
{
	switch (event->event_type) {
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_GID_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		return event->element.port_num == self->port;
	default:
		return 0;
	}
}

static void tell_of_port(struct async_events *self, enum ibv_event_type type)
{
	uint32_t place = __atomic_fetch_add(&self->port_changes, 1, __ATOMIC_SEQ_CST);

	self->port_events[place % PORT_EVENTS] = (uint8_t)type;
	if (!self->port_pending)
		(void)!eventfd_write(self->port_fd, 1);
	self->port_pending = 1;
}

static void tell(const struct ibv_async_event *event, struct async_events *self)
{
	pthread_mutex_lock(&self->state->lock);
	if (is_about(event, self))
		mcast_note_reason(self->state, (int)event->event_type + 1);
	else if (is_of_port(event, self))
		tell_of_port(self, event->event_type);
	pthread_mutex_unlock(&self->state->lock);
}

/* With the lock held. */
static void read_all(struct device_events *device)
{
	struct ibv_async_event event;

	while (!mcast_sym.ibv_get_async_event(device->context, &event)) {
		for (struct async_events *one = device->listeners; one; one = one->next)
			tell(&event, one);
		mcast_sym.ibv_ack_async_event(&event);
	}
}

void mcast_read_events(struct async_events *self)
{
	pthread_mutex_lock(&lock);
	if (self->device)
		read_all(self->device);
	pthread_mutex_unlock(&lock);
}

int mcast_listen(struct async_events *self, struct ibv_context *context, const struct ibv_cq *send,
		 const struct ibv_cq *recv, uint8_t port)
{
	int ret;

	self->cqs[0] = send;
	self->cqs[1] = recv;
	self->port = port;
	pthread_mutex_lock(&lock);
	self->device = device_of(context);
	ret = self->device ? 0 : -ENOMEM;
	if (self->device) {
		read_all(self->device); /* an event from before the QP is not about the QP */
		self->next = self->device->listeners;
		self->device->listeners = self;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

int mcast_clear_port_pending(struct async_events *self)
{
	int had = self->port_pending;
	eventfd_t unused;

	if (had)
		(void)!eventfd_read(self->port_fd, &unused);
	self->port_pending = 0;
	return had;
}

int mcast_holds_events(struct async_events *self)
{
	int ret;

	pthread_mutex_lock(&self->state->lock);
	ret = self->port_events_read != self->port_changes;
	pthread_mutex_unlock(&self->state->lock);
	return ret;
}

int mcast_take_port_events(struct async_events *self, uint8_t *out)
{
	int count = 0;

	mcast_read_events(self);
	pthread_mutex_lock(&self->state->lock);
	mcast_clear_port_pending(self);
	if (self->port_changes - self->port_events_read > PORT_EVENTS)
		self->port_events_read = self->port_changes - PORT_EVENTS;
	while (self->port_events_read != self->port_changes)
		out[count++] = self->port_events[self->port_events_read++ % PORT_EVENTS];
	pthread_mutex_unlock(&self->state->lock);
	return count;
}
