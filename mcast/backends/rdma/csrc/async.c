/* The asynchronous events of a device. Every thread that sleeps on one of its QPs reads them, and tells all QPs. */
#include "qp.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>

/* librdmacm opens a device once a process, so its events have one queue. */
struct mcast_async {
	struct ibv_context *context;
	struct mcast_qp *qps;
	struct mcast_async *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mcast_async *devices;

/* The QPs are the parent's, whose other threads may have held the lock. */
void mcast_async_after_fork(void)
{
	pthread_mutex_init(&lock, NULL);
	devices = NULL;
}

static struct mcast_async *device_of(struct ibv_context *context)
{
	struct mcast_async *device;
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

void mcast_listen_no_more(struct mcast_qp *qp)
{
	struct mcast_async *device = qp->async, **at = &devices;

	if (!device)
		return;
	pthread_mutex_lock(&lock);
	for (struct mcast_qp **one = &device->qps; *one; one = &(*one)->next_of_device)
		if (*one == qp) {
			*one = qp->next_of_device;
			break;
		}
	if (!device->qps) {
		while (*at != device)
			at = &(*at)->next;
		*at = device->next;
		free(device);
	}
	qp->async = NULL;
	pthread_mutex_unlock(&lock);
}

int mcast_async_fd(const struct mcast_qp *qp)
{
	return qp->async_fd;
}

static int is_about(const struct ibv_async_event *event, const struct mcast_qp *qp)
{
	switch (event->event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		return event->element.qp == qp->qp;
	case IBV_EVENT_CQ_ERR:
		return event->element.cq == qp->send.cq || event->element.cq == qp->recv.cq;
	case IBV_EVENT_DEVICE_FATAL:
		return 1;
	default:
		return 0;
	}
}

static int is_of_port(const struct ibv_async_event *event, const struct mcast_qp *qp)
{
	switch (event->event_type) {
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_GID_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		return event->element.port_num == qp->id->port_num;
	default:
		return 0;
	}
}

static void tell_of_port(struct mcast_qp *qp, enum ibv_event_type type)
{
	uint32_t place = __atomic_fetch_add(&qp->port_changes, 1, __ATOMIC_SEQ_CST);

	qp->port_events[place % PORT_EVENTS] = (uint8_t)type;
	if (!qp->has_news)
		(void)!eventfd_write(qp->news_fd, 1);
	qp->has_news = 1;
}

static void tell(const struct ibv_async_event *event, struct mcast_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	if (is_about(event, qp)) {
		if (!qp->reason)
			qp->reason = (int)event->event_type + 1;
		mcast_note_failure(qp, IBV_WC_FATAL_ERR);
	} else if (is_of_port(event, qp)) {
		tell_of_port(qp, event->event_type);
	}
	pthread_mutex_unlock(&qp->lock);
}

/* With the lock held. */
static void read_all(struct mcast_async *device)
{
	struct ibv_async_event event;

	while (!mcast_sym.ibv_get_async_event(device->context, &event)) {
		for (struct mcast_qp *one = device->qps; one; one = one->next_of_device)
			tell(&event, one);
		mcast_sym.ibv_ack_async_event(&event);
	}
}

/* Read what the device tells, without waiting, and tell its QPs; without the lock of one. */
void mcast_read_async(struct mcast_qp *qp)
{
	pthread_mutex_lock(&lock);
	if (qp->async)
		read_all(qp->async);
	pthread_mutex_unlock(&lock);
}

int mcast_listen(struct mcast_qp *qp, struct ibv_context *context)
{
	pthread_mutex_lock(&lock);
	qp->async = device_of(context);
	if (qp->async) {
		read_all(qp->async); /* an event from before the QP is not about the QP */
		qp->next_of_device = qp->async->qps;
		qp->async->qps = qp;
	}
	pthread_mutex_unlock(&lock);
	return qp->async ? 0 : -ENOMEM;
}

int mcast_take_news(struct mcast_qp *qp)
{
	int had = qp->has_news;
	eventfd_t unused;

	if (had)
		(void)!eventfd_read(qp->news_fd, &unused);
	qp->has_news = 0;
	return had;
}

int mcast_holds_port_events(struct mcast_qp *qp)
{
	int ret;

	pthread_mutex_lock(&qp->lock);
	ret = qp->port_events_read != qp->port_changes;
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

int mcast_has_port_events(struct mcast_qp *qp)
{
	int ret = mcast_enter_gate(&qp->gate);

	if (ret)
		return ret;
	mcast_read_async(qp);
	ret = mcast_holds_port_events(qp);
	mcast_leave_gate(&qp->gate);
	return ret;
}

int mcast_read_port_events(struct mcast_qp *qp, uint8_t *out)
{
	int count = 0, ret = mcast_enter_gate(&qp->gate);

	if (ret)
		return ret;
	mcast_read_async(qp);
	pthread_mutex_lock(&qp->lock);
	mcast_take_news(qp);
	if (qp->port_changes - qp->port_events_read > PORT_EVENTS)
		qp->port_events_read = qp->port_changes - PORT_EVENTS;
	while (qp->port_events_read != qp->port_changes)
		out[count++] = qp->port_events[qp->port_events_read++ % PORT_EVENTS];
	pthread_mutex_unlock(&qp->lock);
	mcast_leave_gate(&qp->gate);
	return count;
}
