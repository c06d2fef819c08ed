/* Channels, ids, events, joins: cm.h says who waits, and under which lock. */
#include "cm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { BOTH_FIELDS = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS };

static int result(int ret)
{
	return ret ? -errno : 0;
}

static int open_channel(struct mcast_channel *self)
{
	int flags;

	self->channel = mcast_sym.rdma_create_event_channel();
	if (!self->channel)
		return -errno;
	/* not blocking: of several threads that saw the channel readable, one gets the event */
	flags = fcntl(self->channel->fd, F_GETFL);
	if (flags < 0 || fcntl(self->channel->fd, F_SETFL, flags | O_NONBLOCK) ||
	    fcntl(self->channel->fd, F_SETFD, FD_CLOEXEC)) {
		int error = errno;

		mcast_sym.rdma_destroy_event_channel(self->channel);
		return -error;
	}
	return 0;
}

int mcast_open_channel(struct mcast_channel **out)
{
	struct mcast_channel *self = calloc(1, sizeof(*self));
	int ret = self ? mcast_gate_open(&self->gate) : -ENOMEM;

	if (!ret) {
		ret = open_channel(self);
		if (ret)
			mcast_gate_free(&self->gate);
	}
	if (ret)
		free(self);
	else
		*out = self;
	return ret;
}

int mcast_channel_fd(struct mcast_channel *self)
{
	return self->channel ? self->channel->fd : -EBADF;
}

void mcast_close_channel(struct mcast_channel *self, int has_ids)
{
	if (!self)
		return;
	mcast_gate_shut(&self->gate);
	mcast_gate_end(&self->gate);
	if (has_ids || !self->channel)
		return; /* an id that could not be destroyed uses it */
	mcast_sym.rdma_destroy_event_channel(self->channel);
	self->channel = NULL;
}

void mcast_free_channel(struct mcast_channel **self)
{
	if (*self)
		mcast_gate_free(&(*self)->gate);
	free(*self);
}

int mcast_has_event(struct mcast_channel *self)
{
	struct pollfd fd = { .events = POLLIN };
	int ret;

	if (!self->channel)
		return -EBADF;
	fd.fd = self->channel->fd;
	ret = poll(&fd, 1, 0);
	return ret < 0 && errno != EINTR ? -errno : ret > 0;
}

int mcast_wait_event(struct mcast_channel *self, const struct mcast_wait *wait)
{
	struct pollfd fds[] = { { .fd = NO_FD, .events = POLLIN },
				{ .fd = NO_FD, .events = POLLIN },
				{ .fd = wait->signal_fd, .events = POLLIN } };
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	fds[0].fd = self->channel->fd;
	fds[1].fd = self->gate.wake_fd;
	ret = mcast_sleep(fds, sizeof(fds) / sizeof(*fds), wait->deadline);
	mcast_leave_gate(&self->gate);
	if (ret <= 0)
		return ret;
	if (fds[0].revents)
		return 1;
	return fds[1].revents ? -EBADF : -EINTR;
}

static uint64_t token_of(const void *pointer)
{
	return (uint64_t)(uintptr_t)pointer;
}

static void *pointer_of(uint64_t token)
{
	return (void *)(uintptr_t)token;
}

static int is_multicast(const struct rdma_cm_event *event)
{
	return event->event == RDMA_CM_EVENT_MULTICAST_JOIN || event->event == RDMA_CM_EVENT_MULTICAST_ERROR;
}

/* A failure in librdmacm (an attach, the look at an address) shows as status -1, its reason in the errno of the
 * get; else status is -errno. */
static int32_t reason_of(const struct rdma_cm_event *event, int get_errno)
{
	if (event->status == -1 && get_errno)
		return get_errno;
	return event->status < 0 && event->status > INT32_MIN ? -event->status : 0;
}

static void copy_event(struct mcast_event *out, const struct rdma_cm_event *event, int get_errno)
{
	const struct rdma_ud_param *ud = &event->param.ud;
	const struct ibv_ah_attr *ah = &ud->ah_attr;

	memset(out, 0, sizeof(*out));
	out->is_taken = 1;
	out->type = (int32_t)event->event;
	out->status = event->status;
	out->error = reason_of(event, get_errno);
	out->id_token = token_of(event->id->context);
	if (!is_multicast(event))
		return;
	out->join_token = token_of(ud->private_data);
	/* as many bits as a header has, and a port that exists */
	out->qp_num = ud->qp_num & 0xffffff;
	out->qkey = ud->qkey;
	out->flow_label = ah->grh.flow_label & 0xfffff;
	out->dlid = ah->dlid;
	out->sl = ah->sl & 0xf;
	out->port_num = ah->port_num ? ah->port_num : 1;
	out->is_global = ah->is_global;
	out->sgid_index = ah->grh.sgid_index;
	out->hop_limit = ah->grh.hop_limit;
	out->traffic_class = ah->grh.traffic_class;
	out->static_rate = ah->static_rate;
	memcpy(out->dgid, ah->grh.dgid.raw, sizeof(out->dgid));
}

int mcast_take_event(struct mcast_channel *self, struct mcast_event *out)
{
	struct rdma_cm_event *event;
	int get_errno;

	if (!self->channel)
		return -EBADF;
	if (out->is_taken)
		return 1;
	errno = 0;
	if (mcast_sym.rdma_get_cm_event(self->channel, &event))
		return errno == EAGAIN ? 0 : -errno;
	get_errno = errno;
	copy_event(out, event, get_errno);
	mcast_sym.rdma_ack_cm_event(event);
	return 1;
}

int mcast_create_id(struct mcast_channel *channel, uint64_t token, int port_space, struct mcast_id **out)
{
	struct mcast_id *self = calloc(1, sizeof(*self));
	int ret;

	if (!self)
		return -ENOMEM;
	ret = channel->channel ? result(mcast_sym.rdma_create_id(channel->channel, &self->id, pointer_of(token),
								 (enum rdma_port_space)port_space)) :
				 -EBADF;
	if (ret)
		free(self);
	else
		*out = self;
	return ret;
}

/* A step that fails can be tried again. */
int mcast_destroy_id(struct mcast_id *self)
{
	int ret = self && self->id ? result(mcast_sym.rdma_destroy_id(self->id)) : 0;

	if (self && !ret)
		self->id = NULL;
	return ret;
}

void mcast_free_id(struct mcast_id **self)
{
	free(*self);
}

int mcast_bind_addr(struct mcast_id *self, const void *address)
{
	return self->id ? result(mcast_sym.rdma_bind_addr(self->id, (struct sockaddr *)(uintptr_t)address)) : -EBADF;
}

int mcast_resolve_addr(struct mcast_id *self, const void *source, const void *destination, int timeout_ms)
{
	if (!self->id)
		return -EBADF;
	return result(mcast_sym.rdma_resolve_addr(self->id, (struct sockaddr *)(uintptr_t)source,
						  (struct sockaddr *)(uintptr_t)destination, timeout_ms));
}

/* librdmacm knows the device only once ADDR_RESOLVED was read. The kernel knows it earlier: whether it would
 * refuse a join before that is a race, so it is refused here, with the errno of an unbound id. */
static int has_device(struct rdma_cm_id *id)
{
	return id->verbs != NULL;
}

int mcast_join(struct mcast_id *self, const void *address, uint64_t token)
{
	if (!self->id)
		return -EBADF;
	if (!has_device(self->id))
		return -EINVAL;
	return result(mcast_sym.rdma_join_multicast(self->id, (struct sockaddr *)(uintptr_t)address, pointer_of(token)));
}

int mcast_join_ex(struct mcast_id *self, uint32_t comp_mask, uint32_t join_flags, const void *address,
		  uint64_t token)
{
	struct rdma_cm_join_mc_attr_ex attr = {
		.comp_mask = comp_mask,
		.join_flags = join_flags,
		.addr = (struct sockaddr *)(uintptr_t)address,
	};

	if (!self->id)
		return -EBADF;
	if (!mcast_sym.rdma_join_multicast_ex)
		return -ENOSYS;
	/* librdmacm itself looks at the mask first */
	if (!has_device(self->id) && comp_mask == BOTH_FIELDS)
		return -EINVAL;
	return result(mcast_sym.rdma_join_multicast_ex(self->id, &attr, pointer_of(token)));
}

int mcast_leave(struct mcast_id *self, const void *address)
{
	if (!self->id)
		return -EBADF;
	return result(mcast_sym.rdma_leave_multicast(self->id, (struct sockaddr *)(uintptr_t)address));
}

const char *mcast_id_device(struct mcast_id *self)
{
	return self->id && self->id->verbs ? mcast_sym.ibv_get_device_name(self->id->verbs->device) : NULL;
}

struct ibv_context *mcast_id_context(struct mcast_id *self)
{
	return self->id ? self->id->verbs : NULL;
}

int mcast_id_port(struct mcast_id *self)
{
	return self->id ? self->id->port_num : 0;
}

int mcast_id_pkey(struct mcast_id *self)
{
	return self->id ? ntohs(self->id->route.addr.addr.ibaddr.pkey) : 0;
}
