/* Completion queues, and sleeping until they have completions; completions.h explains who wakes whom. */
#include "completions.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { CHANNEL, CALL, WAKE, ASYNC, PORT_PENDING, SOURCES };

/* Query the device; zeros where the driver is too old. */
static struct ibv_device_attr_ex attributes_of(struct ibv_context *context)
{
	struct verbs_context *extended = verbs_get_ctx_op(context, query_device_ex);
	struct ibv_device_attr_ex attr = { .completion_timestamp_mask = 0 };

	if (!extended || extended->query_device_ex(context, NULL, &attr, sizeof(attr)))
		attr.completion_timestamp_mask = 0;
	return attr;
}

/* The time of day if the device can tell the time of day, else the device's own clock. */
static int create_stamped(struct ibv_context *context, struct ibv_cq_init_attr_ex *init, struct completions *out)
{
	struct ibv_device_attr_ex attr = attributes_of(context);

	if (!attr.completion_timestamp_mask)
		return -EOPNOTSUPP;
	out->clock = STAMPS_REALTIME;
	init->wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
	out->stamped = ibv_create_cq_ex(context, init);
	if (!out->stamped && attr.hca_core_clock) {
		out->clock = STAMPS_DEVICE;
		out->clock_khz = attr.hca_core_clock;
		init->wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
		out->stamped = ibv_create_cq_ex(context, init);
	}
	if (!out->stamped)
		return -(errno ? errno : EOPNOTSUPP);
	out->cq = ibv_cq_ex_to_cq(out->stamped);
	return 0;
}

int mcast_open_completions(struct completions *self, struct ibv_context *context, const struct completions_init *init)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = init->depth, .comp_vector = init->vector };
	int flags;

	self->state = init->state;
	self->async = init->async;
	self->owner = init->owner;
	self->watch_fd = self->call_fd = NO_FD;
	self->reset_fd = init->of_sends ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : NO_FD;
	if (init->of_sends && self->reset_fd < 0)
		return -errno;
	errno = 0;
	self->channel = mcast_sym.ibv_create_comp_channel(context);
	if (!self->channel)
		return -(errno ? errno : ENOMEM);
	/* not blocking: a thread that finds the event gone polls the queue and sleeps again */
	flags = fcntl(self->channel->fd, F_GETFL);
	if (flags < 0 || fcntl(self->channel->fd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
	errno = 0;
	attr.channel = self->channel;
	if (init->timestamps)
		return create_stamped(context, &attr, self);
	self->cq = mcast_sym.ibv_create_cq(context, (int)init->depth, NULL, self->channel, (int)init->vector);
	return self->cq ? 0 : -(errno ? errno : ENOMEM);
}

int mcast_moderate(struct completions *completions, uint32_t count, uint32_t period)
{
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE,
					   .moderate = { (uint16_t)count, (uint16_t)period } };

	return -ibv_modify_cq(completions->cq, &attr);
}

static uint64_t read_stamp(const struct completions *completions)
{
	if (completions->clock == STAMPS_REALTIME)
		return ibv_wc_read_completion_wallclock_ns(completions->stamped);
	return (uint64_t)((unsigned __int128)ibv_wc_read_completion_ts(completions->stamped) * 1000000 /
			  completions->clock_khz);
}

/* Read the completion of a receive; of one that failed only wr_id and status are valid (K-DATA-11). */
static void read_completion(const struct completions *completions, struct ibv_wc *wc, uint64_t *stamp)
{
	struct ibv_cq_ex *from = completions->stamped;

	*wc = (struct ibv_wc){ .wr_id = from->wr_id, .status = from->status };
	*stamp = 0;
	if (wc->status != IBV_WC_SUCCESS)
		return;
	wc->byte_len = ibv_wc_read_byte_len(from);
	wc->wc_flags = ibv_wc_read_wc_flags(from);
	if (wc->wc_flags & IBV_WC_WITH_IMM)
		wc->imm_data = ibv_wc_read_imm_data(from);
	wc->src_qp = ibv_wc_read_src_qp(from);
	wc->slid = (uint16_t)ibv_wc_read_slid(from);
	wc->sl = ibv_wc_read_sl(from);
	wc->dlid_path_bits = ibv_wc_read_dlid_path_bits(from);
	*stamp = read_stamp(completions);
}

int mcast_poll_stamped(struct completions *completions, int max, struct ibv_wc *wcs, uint64_t *stamps)
{
	struct ibv_poll_cq_attr attr = { .comp_mask = 0 };
	int count = 0, ret = ibv_start_poll(completions->stamped, &attr);

	if (ret)
		return ret == ENOENT ? 0 : -1;
	do {
		read_completion(completions, &wcs[count], &stamps[count]);
		count++;
	} while (count < max && !ibv_next_poll(completions->stamped)); /* an error here comes again from the next start */
	ibv_end_poll(completions->stamped);
	return count;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = NO_FD;
}

int mcast_close_completions(struct completions *completions)
{
	int ret, other;

	if (!completions->state)
		return 0;
	ret = completions->cq ? mcast_returned(mcast_sym.ibv_destroy_cq(completions->cq)) : 0;
	if (!ret)
		completions->cq = NULL;
	other = completions->channel ? mcast_returned(mcast_sym.ibv_destroy_comp_channel(completions->channel)) : 0;
	if (!other) {
		completions->channel = NULL;
	} else {
		close_fd(&completions->channel->fd); /* whatever the library keeps: no descriptor stays */
	}
	close_fd(&completions->watch_fd);
	close_fd(&completions->call_fd);
	close_fd(&completions->reset_fd);
	return ret ? ret : other;
}

/* Stop to watch the channel: that of a removed device stays readable. */
static void give_up(struct completions *completions)
{
	pthread_mutex_lock(&completions->state->lock);
	completions->is_broken = 1;
	if (completions->watch_fd >= 0)
		epoll_ctl(completions->watch_fd, EPOLL_CTL_DEL, completions->channel->fd, NULL);
	mcast_call_followers(completions, UINT64_MAX); /* the leader may wait for an event, and sleep on */
	pthread_mutex_unlock(&completions->state->lock);
}

/* Take an event of the channel: 0, or -1 if there is none. The queue is armed no more then, for there is one event per arm
 * (K-DATA-20). */
static int try_completion_event(struct completions *completions)
{
	struct ibv_cq *cq;
	void *context;

	if (mcast_sym.ibv_get_cq_event(completions->channel, &cq, &context))
		return -1;
	mcast_sym.ibv_ack_cq_events(completions->cq, 1);
	return 0;
}

static void take_completion_event(struct completions *completions, int is_in_error)
{
	if (try_completion_event(completions) && (is_in_error || errno != EAGAIN))
		give_up(completions);
}

static int arm(struct completions *completions)
{
	return -ibv_req_notify_cq(completions->cq, 0);
}

static void call(int fd)
{
	(void)!eventfd_write(fd, 1);
}

/* Make the descriptor of the loop outside readable, until a poll finds nothing. */
static void call_loop(struct completions *completions)
{
	completions->watch = WATCH_UNKNOWN;
	if (completions->watch_fd >= 0)
		call(completions->call_fd);
}

/* If nobody leads, wake the first follower to lead; it polls before it sleeps. */
static void call_next(struct completions *completions)
{
	if (!completions->leader && completions->followers)
		call(completions->followers->fd);
}

/* --- loops outside --- */

static int is_of_sends(const struct completions *completions)
{
	return completions->reset_fd >= 0;
}

static int open_watch(struct completions *completions)
{
	int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	int call_fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* an earlier poll has armed nothing */
	int fds[SOURCES] = { completions->is_broken ? NO_FD : completions->channel->fd, call_fd, completions->state->gate.wake_fd,
			     completions->async->fd, is_of_sends(completions) ? NO_FD : completions->async->port_fd };
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

int mcast_watch(struct completions *completions)
{
	int ret = 0;

	pthread_mutex_lock(&completions->state->lock);
	if (completions->watch_fd < 0)
		ret = open_watch(completions);
	if (!ret)
		ret = completions->watch_fd;
	pthread_mutex_unlock(&completions->state->lock);
	return ret;
}

static int poll_locked(struct completions *completions, mcast_work *work, void *what)
{
	int ret;

	pthread_mutex_lock(&completions->state->lock);
	ret = work(completions->owner, what);
	pthread_mutex_unlock(&completions->state->lock);
	return ret;
}

static void clear_port_pending(struct completions *completions)
{
	pthread_mutex_lock(&completions->state->lock);
	mcast_clear_port_pending(completions->async);
	pthread_mutex_unlock(&completions->state->lock);
}

/* Clear all that makes the descriptor readable, except the completion channel. Return the channel's epoll events. */
static uint32_t drain_watch(struct completions *completions)
{
	struct epoll_event events[SOURCES];
	int count = epoll_wait(completions->watch_fd, events, SOURCES, 0);
	uint32_t channel_events = 0;
	eventfd_t unused;

	for (int i = 0; i < count; i++) {
		if (events[i].data.u32 == CALL)
			(void)!eventfd_read(completions->call_fd, &unused);
		else if (events[i].data.u32 == ASYNC)
			mcast_read_events(completions->async);
		else if (events[i].data.u32 == PORT_PENDING)
			clear_port_pending(completions);
		else if (events[i].data.u32 == CHANNEL)
			channel_events = events[i].events;
	}
	return channel_events;
}

/* Nothing was found: arm the descriptor as a leader would, and look again. If a thread leads, it calls as it leaves.
 * After messages the channel mostly tells of them, and of nothing else: then one system call does. What else there is
 * to tell keeps the descriptor readable. */
static int poll_armed(struct completions *completions, mcast_work *work, void *what, int full)
{
	static const struct waiter loop = { .fd = NO_FD };
	int leads, has_found, ret = 0;

	pthread_mutex_lock(&completions->state->lock);
	leads = !completions->leader;
	if (leads)
		completions->leader = &loop;
	has_found = completions->watch == WATCH_FOUND;
	pthread_mutex_unlock(&completions->state->lock);
	if (!leads || !has_found || try_completion_event(completions)) {
		uint32_t channel_events = drain_watch(completions);

		if (leads && channel_events)
			take_completion_event(completions, channel_events & (EPOLLERR | EPOLLHUP));
	}
	if (leads)
		ret = arm(completions);
	pthread_mutex_lock(&completions->state->lock);
	if (leads) {
		completions->leader = NULL;
		completions->watch = ret ? WATCH_UNKNOWN : WATCH_ARMED;
	}
	ret = ret ? ret : work(completions->owner, what);
	/* more may have arrived before it was armed; and the leader may have left, and its wake-up been drained above */
	if (ret == full || (!leads && !completions->leader))
		call_loop(completions);
	call_next(completions);
	pthread_mutex_unlock(&completions->state->lock);
	return ret;
}

int mcast_poll_work(struct completions *completions, mcast_work *work, void *what, int full)
{
	int ret, is_to_arm;

	pthread_mutex_lock(&completions->state->lock);
	ret = mcast_is_shut(&completions->state->gate) ? -EBADF : work(completions->owner, what);
	is_to_arm = !ret && completions->watch_fd >= 0;
	if (is_to_arm && completions->watch == WATCH_ARMED && !completions->async->port_pending) {
		completions->watch = WATCH_POLLED;
		is_to_arm = 0;
	}
	pthread_mutex_unlock(&completions->state->lock);
	if (!is_to_arm)
		return ret;
	ret = mcast_enter_gate(&completions->state->gate);
	if (ret)
		return ret;
	ret = poll_armed(completions, work, what, full);
	mcast_leave_gate(&completions->state->gate);
	return ret;
}

int mcast_poll_often(struct completions *completions, mcast_work *work, void *what, int polls)
{
	int ret = 0;

	for (; !ret && polls; polls--) {
		pthread_mutex_lock(&completions->state->lock);
		ret = mcast_is_shut(&completions->state->gate) ? -EBADF : work(completions->owner, what);
		pthread_mutex_unlock(&completions->state->lock);
	}
	return ret;
}

int mcast_spin(struct completions *completions, mcast_work *work, void *what, int64_t deadline)
{
	int64_t end = mcast_now() + SPIN_NS;
	int ret;

	if (end > deadline)
		end = deadline;
	do
		ret = poll_locked(completions, work, what);
	while (!ret && !mcast_is_shut(&completions->state->gate) && mcast_now() < end);
	return ret;
}

/* --- threads --- */

void mcast_call_followers(struct completions *completions, uint64_t tail)
{
	for (struct waiter *one = completions->followers; one; one = one->next)
		if (one->end <= tail)
			call(one->fd);
}

void mcast_end_waits(struct completions *completions)
{
	mcast_call_followers(completions, UINT64_MAX);
	call(completions->reset_fd);
	call_loop(completions);
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

/* Hand over to the next thread, and to the loop outside: for that nothing is armed unless somebody leads. */
static void leave(struct completions *completions, struct waiter *self)
{
	for (struct waiter **at = &completions->followers; *at; at = &(*at)->next)
		if (*at == self) {
			*at = self->next;
			break;
		}
	if (completions->leader == self)
		completions->leader = NULL;
	call_next(completions);
	if (!completions->leader)
		call_loop(completions);
}

/* Check, for a thread that spins, all that would wake a sleeper except completions: 0, or as `sleep_once`. 1: no device. */
static int poll_interrupts(struct completions *completions, const struct mcast_wait *wait)
{
	enum { CHANNEL_FAILED, DEVICE, EVENT, SIGNAL };
	struct pollfd fds[] = {
		[CHANNEL_FAILED] = { .fd = completions->channel->fd },
		[DEVICE] = { .fd = completions->async->fd, .events = POLLIN },
		[EVENT] = { .fd = wait->event_fd, .events = POLLIN },
		[SIGNAL] = { .fd = wait->signal_fd, .events = POLLIN },
	};
	int ready = mcast_sleep(fds, sizeof(fds) / sizeof(*fds), 0);

	if (ready <= 0)
		return ready;
	if (fds[DEVICE].revents)
		mcast_read_events(completions->async);
	if (fds[CHANNEL_FAILED].revents)
		return 1;
	if (fds[SIGNAL].revents)
		return -EINTR;
	return fds[EVENT].revents ? -EAGAIN : 0;
}

/* Return 1 if a call that waits for events ends by a port event, as it would in a sleep. */
static int take_port_pending(struct completions *completions, const struct mcast_wait *wait)
{
	int ret;

	if (wait->event_fd < 0)
		return 0;
	pthread_mutex_lock(&completions->state->lock);
	ret = mcast_clear_port_pending(completions->async);
	pthread_mutex_unlock(&completions->state->lock);
	return ret;
}

int mcast_busy_poll(struct completions *completions, mcast_work *work, void *what,
		    const struct mcast_wait *wait)
{
	int interrupted = 0, ret = 0;

	while (!ret && !interrupted && mcast_now() < wait->spin_until && mcast_now() < wait->deadline) {
		ret = mcast_spin(completions, work, what, wait->deadline);
		if (!ret)
			interrupted = mcast_is_shut(&completions->state->gate) ? -EBADF : poll_interrupts(completions, wait);
		if (!ret && !interrupted && take_port_pending(completions, wait))
			interrupted = -EAGAIN;
	}
	if (!ret && interrupted < 0)
		ret = poll_locked(completions, work, what); /* a completion may have come together with what ended the spin */
	return ret || interrupted > 0 ? ret : interrupted;
}

/* 0: poll again. -EAGAIN, -EINTR: poll again, then return it. */
static int sleep_once(struct completions *completions, int own, int leads,
		      const struct mcast_wait *wait)
{
	enum { OWN, GATE, DEVICE, PORT, RESET, EVENT, SIGNAL };
	struct pollfd fds[] = {
		[OWN] = { .fd = own, .events = POLLIN },
		[GATE] = { .fd = wait->is_last ? NO_FD : completions->state->gate.wake_fd, .events = POLLIN },
		[DEVICE] = { .fd = completions->async->fd, .events = POLLIN },
		[PORT] = { .fd = wait->event_fd >= 0 ? completions->async->port_fd : NO_FD, .events = POLLIN },
		[RESET] = { .fd = leads ? completions->reset_fd : NO_FD, .events = POLLIN },
		[EVENT] = { .fd = wait->event_fd, .events = POLLIN },
		[SIGNAL] = { .fd = wait->signal_fd, .events = POLLIN },
	};
	int ready = mcast_sleep(fds, sizeof(fds) / sizeof(*fds), wait->deadline);
	eventfd_t unused;

	if (ready <= 0)
		return ready;
	if (fds[DEVICE].revents)
		mcast_read_events(completions->async);
	if (fds[OWN].revents && leads)
		take_completion_event(completions, fds[OWN].revents & ~POLLIN);
	else if (fds[OWN].revents)
		(void)!eventfd_read(own, &unused);
	if (fds[RESET].revents)
		(void)!eventfd_read(completions->reset_fd, &unused);
	if (fds[SIGNAL].revents)
		return -EINTR;
	return fds[EVENT].revents ? -EAGAIN : 0;
}

int mcast_wait_for(struct completions *completions, mcast_work *work, void *what,
		   const uint64_t *end, const struct mcast_wait *wait)
{
	struct waiter self = { .fd = NO_FD };
	int armed = 0, has_slept = 0, over = 0, own, ret;

	pthread_mutex_lock(&completions->state->lock);
	for (;;) {
		int leads, is_late = wait->deadline != FOREVER && mcast_now() >= wait->deadline;

		ret = work(completions->owner, what);
		if (!ret && mcast_is_shut(&completions->state->gate) && !wait->is_last)
			ret = -EBADF;
		if (!ret)
			ret = over;
		if (!ret && wait->event_fd >= 0 && mcast_clear_port_pending(completions->async))
			ret = -EAGAIN;
		if (!ret && completions->is_broken && wait->event_fd < 0)
			ret = mcast_note_gone(completions->state);
		if (ret || is_late)
			break;
		if (end)
			self.end = *end;
		ret = lead_or_follow(completions, &self);
		if (ret)
			break;
		leads = completions->leader == &self;
		own = leads ? completions->is_broken ? NO_FD : completions->channel->fd : self.fd;
		/* it has taken the event that was to wake the loop outside, which may wait for fewer sends */
		if (end && has_slept && !armed)
			call_loop(completions);
		pthread_mutex_unlock(&completions->state->lock);
		/* arm, then poll once more: a completion in between would wake nobody */
		if (leads && !armed && own >= 0) {
			over = arm(completions);
			armed = 1;
		} else {
			over = sleep_once(completions, own, leads, wait);
			armed = 0;
			has_slept = leads;
		}
		pthread_mutex_lock(&completions->state->lock);
	}
	leave(completions, &self);
	pthread_mutex_unlock(&completions->state->lock);
	if (self.fd >= 0)
		close(self.fd);
	return ret;
}
