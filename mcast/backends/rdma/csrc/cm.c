/* Channels, ids, events, joins. */
#include "dynload.h"

#include "wait.h"

#include <fcntl.h>
#include <unistd.h>

enum { BOTH_FIELDS = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS };

static int result(int ret)
{
	return ret ? -errno : 0;
}

int mcast_open_channel(struct rdma_event_channel **channel)
{
	int flags;

	*channel = mcast_sym.rdma_create_event_channel();
	if (!*channel)
		return -errno;
	/* not blocking: of several threads that saw it readable, one gets the event */
	flags = fcntl((*channel)->fd, F_GETFL);
	if (flags < 0 || fcntl((*channel)->fd, F_SETFL, flags | O_NONBLOCK) ||
	    fcntl((*channel)->fd, F_SETFD, FD_CLOEXEC)) {
		int error = errno;

		mcast_sym.rdma_destroy_event_channel(*channel);
		return -error;
	}
	return 0;
}

int mcast_channel_fd(struct rdma_event_channel *channel)
{
	return channel->fd;
}

void mcast_close_channel(struct rdma_event_channel *channel)
{
	mcast_sym.rdma_destroy_event_channel(channel);
}

int mcast_wait_event(struct rdma_event_channel *channel, int wake_fd, int64_t budget)
{
	return mcast_wait_readable(channel->fd, wake_fd, NO_FD, mcast_now() + budget);
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

/* A failed attach shows as status -1, its reason in the errno of the get; else status is -errno. */
static int32_t reason_of(const struct rdma_cm_event *event, int get_errno)
{
	if (event->event == RDMA_CM_EVENT_MULTICAST_ERROR && event->status == -1 && get_errno)
		return get_errno;
	return event->status < 0 ? -event->status : 0;
}

static void copy_event(struct mcast_event *out, const struct rdma_cm_event *event, int get_errno)
{
	const struct rdma_ud_param *ud = &event->param.ud;
	const struct ibv_ah_attr *ah = &ud->ah_attr;

	memset(out, 0, sizeof(*out));
	out->type = (int32_t)event->event;
	out->status = event->status;
	out->error = reason_of(event, get_errno);
	out->id_token = token_of(event->id->context);
	if (!is_multicast(event))
		return;
	out->join_token = token_of(ud->private_data);
	out->qp_num = ud->qp_num;
	out->qkey = ud->qkey;
	out->flow_label = ah->grh.flow_label;
	out->dlid = ah->dlid;
	out->sl = ah->sl;
	out->port_num = ah->port_num;
	out->is_global = ah->is_global;
	out->sgid_index = ah->grh.sgid_index;
	out->hop_limit = ah->grh.hop_limit;
	out->traffic_class = ah->grh.traffic_class;
	memcpy(out->dgid, ah->grh.dgid.raw, sizeof(out->dgid));
}

int mcast_take_event(struct rdma_event_channel *channel, struct mcast_event *out)
{
	struct rdma_cm_event *event;
	int get_errno;

	errno = 0;
	if (mcast_sym.rdma_get_cm_event(channel, &event))
		return errno == EAGAIN ? 0 : -errno;
	get_errno = errno;
	copy_event(out, event, get_errno);
	mcast_sym.rdma_ack_cm_event(event);
	return 1;
}

int mcast_create_id(struct rdma_event_channel *channel, uint64_t token, int port_space, struct rdma_cm_id **id)
{
	return result(mcast_sym.rdma_create_id(channel, id, pointer_of(token), (enum rdma_port_space)port_space));
}

int mcast_destroy_id(struct rdma_cm_id *id)
{
	return result(mcast_sym.rdma_destroy_id(id));
}

int mcast_bind_addr(struct rdma_cm_id *id, const void *address)
{
	return result(mcast_sym.rdma_bind_addr(id, (struct sockaddr *)(uintptr_t)address));
}

int mcast_resolve_addr(struct rdma_cm_id *id, const void *source, const void *destination, int timeout_ms)
{
	return result(mcast_sym.rdma_resolve_addr(id, (struct sockaddr *)(uintptr_t)source,
						  (struct sockaddr *)(uintptr_t)destination, timeout_ms));
}

/* librdmacm knows the device only once ADDR_RESOLVED was read. The kernel knows it earlier: whether it would
 * refuse a join before that is a race, so it is refused here, with the errno of an unbound id. */
static int has_device(struct rdma_cm_id *id)
{
	return id->verbs != NULL;
}

int mcast_join(struct rdma_cm_id *id, const void *address, uint64_t token)
{
	if (!has_device(id))
		return -EINVAL;
	return result(mcast_sym.rdma_join_multicast(id, (struct sockaddr *)(uintptr_t)address, pointer_of(token)));
}

int mcast_join_ex(struct rdma_cm_id *id, uint32_t comp_mask, uint32_t join_flags, const void *address,
		  uint64_t token)
{
	struct rdma_cm_join_mc_attr_ex attr = {
		.comp_mask = comp_mask,
		.join_flags = join_flags,
		.addr = (struct sockaddr *)(uintptr_t)address,
	};

	if (!mcast_sym.rdma_join_multicast_ex)
		return -ENOSYS;
	/* librdmacm itself looks at the mask first */
	if (!has_device(id) && comp_mask == BOTH_FIELDS)
		return -EINVAL;
	return result(mcast_sym.rdma_join_multicast_ex(id, &attr, pointer_of(token)));
}

int mcast_leave(struct rdma_cm_id *id, const void *address)
{
	return result(mcast_sym.rdma_leave_multicast(id, (struct sockaddr *)(uintptr_t)address));
}

const char *mcast_id_device(struct rdma_cm_id *id)
{
	return id->verbs ? mcast_sym.ibv_get_device_name(id->verbs->device) : NULL;
}

struct ibv_context *mcast_id_context(struct rdma_cm_id *id)
{
	return id->verbs;
}

int mcast_id_port(struct rdma_cm_id *id)
{
	return id->port_num;
}
