/* libibverbs: devices, ports, contexts and their asynchronous events. */
#include "inside.h"

#include <arpa/inet.h>
#include <endian.h>
#include <stdio.h>

static int fork_initialised;

/* --- devices --- */

struct ibv_device **ibv_get_device_list(int *count)
{
	int error = enter(CALL_ibv_get_device_list, KIND_COUNT, NULL);
	struct ibv_device **list = calloc(MAX_DEVICES + 1, sizeof(*list));
	int found = 0;

	for (int i = 0; i < MAX_DEVICES; i++)
		if (devices[i].used && !devices[i].gone)
			list[found++] = &devices[i].ibv;
	if (error) {
		free(list);
		found = 0;
	}
	if (count)
		*count = found;
	return made(list, error);
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *which)
{
	return which->name;
}

__be64 ibv_get_device_guid(struct ibv_device *which)
{
	return htobe64(container_of(which, struct device, ibv)->is.guid);
}

/* Bytes of struct ibv_port_attr with its newest field, active_speed_ex; and what older fields say instead. */
enum { NEWER_PORT_ATTR = 56, FASTEST_OLD_SPEED = 128 };

static int query_port_ex(struct ibv_context *which, uint8_t number, struct ibv_port_attr *attr, size_t size)
{
	int error = enter(CALL_ibv_query_port, KIND_CONTEXT, which);
	struct card_port *port = error ? NULL : port_of(device_of(KIND_CONTEXT, which), number);
	struct ibv_port_attr found = { 0 };
	uint32_t speed = port ? port->active_speed : 0;

	if (!error && !port)
		error = EINVAL;
	if (error)
		return done(error);
	found.state = (enum ibv_port_state)port->state;
	found.link_layer = (uint8_t)port->link_layer;
	found.active_mtu = (enum ibv_mtu)port->active_mtu;
	found.max_mtu = (enum ibv_mtu)port->max_mtu;
	found.active_speed = speed > UINT8_MAX ? FASTEST_OLD_SPEED : (uint8_t)speed; /* as the kernel does */
	found.active_width = (uint8_t)port->active_width;
	found.lid = (uint16_t)port->lid;
	found.lmc = (uint8_t)port->lmc;
	found.sm_lid = (uint16_t)port->sm_lid;
	found.qkey_viol_cntr = port->qkey_violations;
	found.gid_tbl_len = (int)said(CALL_lie_gid_tbl_len, GIDS);
	found.pkey_tbl_len = PKEYS;
	memset(attr, 0, size);
	memcpy(attr, &found, size < sizeof(found) ? size : sizeof(found));
	if (size >= NEWER_PORT_ATTR)
		memcpy((char *)attr + NEWER_PORT_ATTR - sizeof(speed), &speed, sizeof(speed));
	return done(0);
}

/* The old struct ends where the new one has got its last field. */
int ibv_query_port(struct ibv_context *which, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return query_port_ex(which, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

static void fill_device(const struct device *device, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	attr->node_guid = htobe64(device->is.guid);
	attr->max_qp_wr = (int)device->is.max_qp_wr;
	attr->max_cqe = 1 << 20;
	attr->max_sge = MAX_SGES;
	attr->phys_port_cnt = (uint8_t)device->is.ports;
	attr->max_mcast_grp = (int)device->is.max_mcast_grp;
	attr->max_mcast_qp_attach = (int)device->is.max_mcast_qp_attach;
	attr->max_pkeys = PKEYS;
}

int ibv_query_device(struct ibv_context *which, struct ibv_device_attr *attr)
{
	int error = enter(CALL_ibv_query_device, KIND_CONTEXT, which);

	if (!error)
		fill_device(device_of(KIND_CONTEXT, which), attr);
	return done(error);
}

static int query_device_ex(struct ibv_context *which, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	int error = enter(CALL_ibv_query_device, KIND_CONTEXT, which);
	const struct device *device = error ? NULL : device_of(KIND_CONTEXT, which);
	struct ibv_device_attr_ex found;

	(void)input;
	if (!device)
		return done(error);
	memset(&found, 0, sizeof(found));
	fill_device(device, &found.orig_attr);
	found.completion_timestamp_mask = device->is.clocks ? UINT64_MAX : 0;
	found.hca_core_clock = device->is.clock_khz;
	found.cq_mod_caps.max_cq_count = device->is.has_modify_cq ? UINT16_MAX : 0;
	found.cq_mod_caps.max_cq_period = device->is.has_modify_cq ? UINT16_MAX : 0;
	found.phys_port_cnt_ex = device->is.ports;
	memcpy(attr, &found, size < sizeof(found) ? size : sizeof(found));
	return done(0);
}

static int query_rt_values(struct ibv_context *which, struct ibv_values_ex *values)
{
	int error = enter(CALL_ibv_query_rt_values, KIND_CONTEXT, which);
	int64_t now = now_ns();

	if (!error && values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK) {
		values->raw_clock.tv_sec = now / 1000000000;
		values->raw_clock.tv_nsec = now % 1000000000;
		values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
	}
	return done(error);
}

static const uint8_t *gid_at(const struct card_port *port, int64_t index)
{
	return port && index >= 0 && index < GIDS ? port->gids[index] : NULL;
}

int ibv_query_gid(struct ibv_context *which, uint8_t port, int index, union ibv_gid *gid)
{
	int error = enter(CALL_ibv_query_gid, KIND_CONTEXT, which);
	const uint8_t *found = error ? NULL : gid_at(port_of(device_of(KIND_CONTEXT, which), port), index);

	if (found)
		memcpy(gid->raw, found, sizeof(gid->raw));
	else
		errno = error ? error : EINVAL;
	leave();
	return found ? 0 : -1;
}

int ibv_query_pkey(struct ibv_context *which, uint8_t port, int index, __be16 *pkey)
{
	int error = enter(CALL_ibv_query_pkey, KIND_CONTEXT, which);
	const struct card_port *found = error ? NULL : port_of(device_of(KIND_CONTEXT, which), port);

	if (!error && (!found || index < 0 || index >= PKEYS))
		error = EINVAL;
	if (!error)
		*pkey = htons(found->pkeys[index]);
	leave();
	errno = error ? error : errno;
	return error ? -1 : 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *which, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
			     size_t size)
{
	static const uint8_t none[16];
	int error = enter(CALL__ibv_query_gid_table, KIND_CONTEXT, which);
	struct device *device = error ? NULL : device_of(KIND_CONTEXT, which);
	ssize_t count = 0;

	(void)flags, (void)size;
	if (device && !device->is.has_gid_table)
		error = EOPNOTSUPP;
	for (uint32_t port = 1; !error && port <= device->is.ports; port++)
		for (uint32_t index = 0; index < GIDS && (size_t)count < most; index++) {
			struct card_port *at = &device->ports[port - 1];

			if (!memcmp(at->gids[index], none, sizeof(none)))
				continue;
			entries[count] = (struct ibv_gid_entry){ .gid_index = index, .port_num = port,
								 .ndev_ifindex = at->ifindex };
			entries[count].gid_type = at->link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_GID_TYPE_ROCE_V2 :
											      IBV_GID_TYPE_IB;
			memcpy(entries[count++].gid.raw, at->gids[index], sizeof(none));
		}
	if (!error)
		count = said(CALL_lie_gid_table_count, count);
	leave();
	return error ? -error : count;
}

/* --- contexts --- */

struct context *new_context(struct device *device)
{
	struct context *context = make(KIND_CONTEXT, sizeof(*context), device);
	struct verbs_context *verbs = &context->verbs;

	open_queue(&context->async, 1);
	verbs->sz = sizeof(*verbs);
	verbs->query_port = query_port_ex;
	verbs->query_device_ex = query_device_ex;
	verbs->query_rt_values = query_rt_values;
	verbs->create_cq_ex = device->is.has_cq_ex ? create_cq_ex : NULL;
	verbs->modify_cq = device->is.has_modify_cq ? modify_cq : NULL;
	verbs->context = (struct ibv_context){ .device = &device->ibv, .cmd_fd = -1, .async_fd = context->async.bell.fd,
					       .num_comp_vectors = (int)device->is.comp_vectors,
					       .abi_compat = __VERBS_ABI_IS_EXTENDED };
	verbs->context.ops.poll_cq = poll_cq;
	verbs->context.ops.req_notify_cq = req_notify_cq;
	verbs->context.ops.post_recv = post_recv;
	verbs->context.ops.post_send = post_send;
	return context;
}

struct ibv_context *ibv_open_device(struct ibv_device *which)
{
	int error = enter(CALL_ibv_open_device, KIND_COUNT, NULL);
	struct device *device = container_of(which, struct device, ibv);

	if (!error && device->gone)
		error = ENODEV;
	return made(error ? NULL : &new_context(device)->verbs.context, error);
}

static void close_context(struct context *context)
{
	close_queue(&context->async);
	end(KIND_CONTEXT, &context->verbs.context);
}

int ibv_close_device(struct ibv_context *which)
{
	int error = enter(CALL_ibv_close_device, KIND_CONTEXT, which);

	if (error == EBUSY) {
		report("ibv_close_device: context %u has objects", object_of(KIND_CONTEXT, which)->serial);
		error = 0;
	}
	if (!error)
		close_context(container_of(which, struct context, verbs.context));
	leave();
	errno = error ? error : errno;
	return error ? -1 : 0;
}

/* librdmacm lets go of removed devices that nothing is bound to, when it looks at the list of devices. */
void close_dead_contexts(void)
{
	for (struct object *object = first_object, *next; object; object = next) {
		struct context *context = (struct context *)(object + 1);

		next = object->next;
		if (object->kind == KIND_CONTEXT && context->is_cm && context->is_dead && !object->uses)
			close_context(context);
	}
}

int ibv_fork_init(void)
{
	int error = enter(CALL_ibv_fork_init, KIND_COUNT, NULL);

	fork_initialised |= !error;
	return done(error);
}

enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return fork_initialised ? IBV_FORK_ENABLED : IBV_FORK_DISABLED;
}

/* --- asynchronous events --- */

static struct object *affected(const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return object_of(KIND_CQ, event->element.cq);
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return object_of(KIND_QP, event->element.qp);
	default:
		return NULL;
	}
}

int ibv_get_async_event(struct ibv_context *which, struct ibv_async_event *event)
{
	int error = enter(CALL_ibv_get_async_event, KIND_CONTEXT, which);
	struct node node;
	struct object *about;

	if (!error && take(&container_of(which, struct context, verbs.context)->async, &node))
		error = errno;
	if (!error) {
		*event = node.async;
		about = affected(event);
		if (about)
			about->unacked++;
	}
	leave();
	errno = error ? error : errno;
	return error ? -1 : 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	struct object *about = affected(event);

	hold(CALL_ibv_ack_async_event, KIND_COUNT, NULL);
	if (about && about->unacked-- <= 0)
		report("ibv_ack_async_event: the event was acked before");
	leave();
}

const char *ibv_event_type_str(enum ibv_event_type event)
{
	static __thread char text[32];

	snprintf(text, sizeof(text), "event %d", (int)event);
	return text;
}
