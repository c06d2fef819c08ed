#include "completions.h"

#include "qp.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { CHANNEL, CALL, WAKE, ASYNC, NEWS, SOURCES };

int mcast_open_completions(struct ibv_context *context, uint32_t depth, uint32_t vector, struct completions *out)
{
	int flags;

	errno = 0;
	out->channel = mcast_sym.ibv_create_comp_channel(context);
	if (!out->channel)
		return -(errno ? errno : ENOMEM);
	/* not blocking: whoever finds an event gone looks at the queue and sleeps again */
	flags = fcntl(out->channel->fd, F_GETFL);
	if (flags < 0 || fcntl(out->channel->fd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
	errno = 0;
	out->cq = mcast_sym.ibv_create_cq(context, (int)depth, NULL, out->channel, (int)vector);
	return out->cq ? 0 : -(errno ? errno : ENOMEM);
}

int mcast_close_completions(struct completions *completions)
{
	int ret = completions->cq ? -mcast_sym.ibv_destroy_cq(completions->cq) : 0;
	int other;

	if (!ret)
		completions->cq = NULL;
	other = completions->channel ? -mcast_sym.ibv_destroy_comp_channel(completions->channel) : 0;
	if (!other) {
		completions->channel = NULL;
	} else if (completions->channel->fd >= 0) {
		close(completions->channel->fd); /* whatever the library keeps: no descriptor stays */
		completions->channel->fd = NO_FD;
	}
	if (completions->watch_fd >= 0)
		close(completions->watch_fd);
	if (completions->call_fd >= 0)
		close(completions->call_fd);
	completions->watch_fd = completions->call_fd = NO_FD;
	return ret ? ret : other;
}

/* The channel's descriptor tells of nothing: of a device that is gone it would do so without end. */
static void give_up(struct mcast_qp *qp, struct completions *completions)
{
	pthread_mutex_lock(&qp->lock);
	completions->is_broken = 1;
	if (completions->watch_fd >= 0)
		epoll_ctl(completions->watch_fd, EPOLL_CTL_DEL, completions->channel->fd, NULL);
	pthread_mutex_unlock(&qp->lock);
}

/* Take what the channel tells; the queue is armed no more. */
static void take_completion_event(struct mcast_qp *qp, struct completions *completions, int is_in_error)
{
	struct ibv_cq *cq;
	void *context;

	if (!mcast_sym.ibv_get_cq_event(completions->channel, &cq, &context))
		mcast_sym.ibv_ack_cq_events(completions->cq, 1);
	else if (is_in_error || errno != EAGAIN)
		give_up(qp, completions);
}

static int arm(struct completions *completions)
{
	return -ibv_req_notify_cq(completions->cq, 0);
}

static void call(int fd)
{
	(void)!eventfd_write(fd, 1);
}

/* If nobody leads, the thread that has followed longest shall; it looks before it sleeps. */
static void call_next(struct completions *completions)
{
	if (!completions->leader && completions->followers)
		call(completions->followers->fd);
}

/* --- loops outside --- */

static int open_watch(struct mcast_qp *qp, struct completions *completions)
{
	int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	int call_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	int fds[SOURCES] = { completions->is_broken ? NO_FD : completions->channel->fd, call_fd, qp->gate.wake_fd,
			     mcast_async_fd(qp), completions == &qp->recv ? qp->news_fd : NO_FD };
	int ret = epoll_fd < 0 || call_fd < 0 ? -errno : 0;

	for (uint32_t source = 0; source < SOURCES && !ret; source++) {
		struct epoll_event event = { .events = EPOLLIN, .data.u32 = source };

		if (fds[source] >= 0 && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fds[source], &event))
			ret = -errno;
	}
	if (ret) {
		close(epoll_fd);
		close(call_fd);
		return ret;
	}
	completions->watch_fd = epoll_fd;
	completions->call_fd = call_fd;
	return 0;
}

int mcast_watch(struct mcast_qp *qp, struct completions *completions)
{
	int ret = 0;

	pthread_mutex_lock(&qp->lock);
	if (completions->watch_fd < 0)
		ret = open_watch(qp, completions);
	if (!ret)
		ret = completions->watch_fd;
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

static int look_once(struct mcast_qp *qp, mcast_work *work, void *what)
{
	int ret;

	pthread_mutex_lock(&qp->lock);
	ret = work(qp, what);
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

static void forget_news(struct mcast_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	mcast_take_news(qp);
	pthread_mutex_unlock(&qp->lock);
}

/* Silence the descriptor; what the completion channel has to tell. */
static uint32_t silence(struct mcast_qp *qp, struct completions *completions)
{
	struct epoll_event events[SOURCES];
	int count = epoll_wait(completions->watch_fd, events, SOURCES, 0);
	uint32_t told = 0;
	eventfd_t unused;

	for (int i = 0; i < count; i++) {
		if (events[i].data.u32 == CALL)
			(void)!eventfd_read(completions->call_fd, &unused);
		else if (events[i].data.u32 == ASYNC)
			mcast_read_async(qp);
		else if (events[i].data.u32 == NEWS)
			forget_news(qp);
		else if (events[i].data.u32 == CHANNEL)
			told = events[i].events;
	}
	return told;
}

/* Nothing was found: arm the descriptor as a leader would, and look again. If a thread leads, it calls as it leaves. */
static int look_armed(struct mcast_qp *qp, struct completions *completions, mcast_work *work, void *what)
{
	static const struct waiter loop = { .fd = NO_FD };
	uint32_t told = silence(qp, completions);
	int leads, ret = 0;

	pthread_mutex_lock(&qp->lock);
	leads = !completions->leader;
	if (leads)
		completions->leader = &loop;
	pthread_mutex_unlock(&qp->lock);
	if (leads && told)
		take_completion_event(qp, completions, told & (EPOLLERR | EPOLLHUP));
	if (leads)
		ret = arm(completions);
	pthread_mutex_lock(&qp->lock);
	ret = ret ? ret : work(qp, what);
	if (leads)
		completions->leader = NULL;
	call_next(completions);
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

int mcast_look(struct mcast_qp *qp, struct completions *completions, mcast_work *work, void *what)
{
	int ret, is_watched;

	pthread_mutex_lock(&qp->lock);
	ret = work(qp, what);
	is_watched = completions->watch_fd >= 0;
	pthread_mutex_unlock(&qp->lock);
	return ret || !is_watched ? ret : look_armed(qp, completions, work, what);
}

int mcast_look_often(struct mcast_qp *qp, mcast_work *work, void *what, int looks)
{
	int ret = 0;

	for (; !ret && looks; looks--)
		ret = look_once(qp, work, what);
	return ret;
}

int mcast_spin(struct mcast_qp *qp, mcast_work *work, void *what, int64_t deadline)
{
	int64_t end = mcast_now() + SPIN_NS;
	int ret;

	if (end > deadline)
		end = deadline;
	do
		ret = look_once(qp, work, what);
	while (!ret && !mcast_is_shut(&qp->gate) && mcast_now() < end);
	return ret;
}

/* --- threads --- */

void mcast_call_followers(struct completions *completions, uint64_t tail)
{
	for (struct waiter *one = completions->followers; one; one = one->next)
		if (one->end <= tail)
			call(one->fd);
}

/* 0: `self` leads, or follows. -errno: it can do neither. */
static int lead_or_follow(struct completions *completions, struct waiter *self)
{
	struct waiter **last = &completions->followers;

	if (!completions->leader) {
		completions->leader = self;
		for (; *last; last = &(*last)->next)
			if (*last == self) {
				*last = self->next;
				break;
			}
		return 0;
	}
	if (completions->leader == self || self->fd >= 0)
		return 0;
	self->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (self->fd < 0)
		return -errno;
	while (*last)
		last = &(*last)->next;
	*last = self;
	return 0;
}

/* Hand over to the next thread, and to the loop outside. */
static void leave(struct completions *completions, struct waiter *self)
{
	int led = completions->leader == self;

	for (struct waiter **at = &completions->followers; *at; at = &(*at)->next)
		if (*at == self) {
			*at = self->next;
			break;
		}
	if (led)
		completions->leader = NULL;
	call_next(completions);
	if (led && completions->watch_fd >= 0)
		call(completions->call_fd);
}

/* 0: look again. -EAGAIN, -EINTR: look again, then end with it. */
static int sleep_once(struct mcast_qp *qp, struct completions *completions, int own, int leads,
		      const struct mcast_wait *wait)
{
	enum { OWN, GATE, DEVICE, NEWS, EVENT, SIGNAL };
	struct pollfd fds[] = {
		[OWN] = { .fd = own, .events = POLLIN },
		[GATE] = { .fd = wait->is_last ? NO_FD : qp->gate.wake_fd, .events = POLLIN },
		[DEVICE] = { .fd = mcast_async_fd(qp), .events = POLLIN },
		[NEWS] = { .fd = wait->event_fd >= 0 ? qp->news_fd : NO_FD, .events = POLLIN },
		[EVENT] = { .fd = wait->event_fd, .events = POLLIN },
		[SIGNAL] = { .fd = wait->signal_fd, .events = POLLIN },
	};
	int ready = mcast_sleep(fds, sizeof(fds) / sizeof(*fds), wait->deadline);
	eventfd_t unused;

	if (ready <= 0)
		return ready;
	if (fds[DEVICE].revents)
		mcast_read_async(qp);
	if (fds[OWN].revents && leads)
		take_completion_event(qp, completions, fds[OWN].revents & ~POLLIN);
	else if (fds[OWN].revents)
		(void)!eventfd_read(own, &unused);
	if (fds[SIGNAL].revents)
		return -EINTR;
	return fds[EVENT].revents ? -EAGAIN : 0;
}

int mcast_wait_for(struct mcast_qp *qp, struct completions *completions, mcast_work *work, void *what,
		   const uint64_t *end, const struct mcast_wait *wait)
{
	struct waiter self = { .fd = NO_FD };
	int armed = 0, over = 0, own, ret;

	pthread_mutex_lock(&qp->lock);
	for (;;) {
		int leads, is_late = wait->deadline != FOREVER && mcast_now() >= wait->deadline;

		ret = work(qp, what);
		if (!ret && mcast_is_shut(&qp->gate) && !wait->is_last)
			ret = -EBADF;
		if (!ret)
			ret = over;
		if (!ret && wait->event_fd >= 0 && mcast_take_news(qp))
			ret = -EAGAIN;
		if (!ret && completions->is_broken && wait->event_fd < 0)
			ret = mcast_note_gone(qp);
		if (ret || is_late)
			break;
		if (end)
			self.end = *end;
		ret = lead_or_follow(completions, &self);
		if (ret)
			break;
		leads = completions->leader == &self;
		own = leads ? completions->is_broken ? NO_FD : completions->channel->fd : self.fd;
		pthread_mutex_unlock(&qp->lock);
		/* armed, then looked once more: only now nothing can slip through */
		if (leads && !armed && own >= 0) {
			over = arm(completions);
			armed = 1;
		} else {
			over = sleep_once(qp, completions, own, leads, wait);
			armed = 0;
		}
		pthread_mutex_lock(&qp->lock);
	}
	leave(completions, &self);
	pthread_mutex_unlock(&qp->lock);
	if (self.fd >= 0)
		close(self.fd);
	return ret;
}
