/* libibverbs: devices, what a context makes, asynchronous events. */
#include "inside.h"

#include <arpa/inet.h>
#include <endian.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

enum { MOST_MRS = 4096, FIRST_QP = 16 };

static struct mr *mrs[MOST_MRS];
static unsigned last_mr;
static uint32_t last_qp_num = FIRST_QP;
static int fork_initialised;

static struct device *device_of(enum kind kind, const void *object)
{
	return object_of(kind, object)->device;
}

/* What a call that makes something returns. */
static void *made(void *object, int error)
{
	leave();
	if (error)
		errno = error;
	return error ? NULL : object;
}

/* What a call that returns its errno returns. */
static int done(int error)
{
	leave();
	return error;
}

/* --- devices --- */

struct ibv_device **ibv_get_device_list(int *count)
{
	int error = enter(CALL_ibv_get_device_list, KIND_COUNT, NULL);
	struct ibv_device **list = calloc(MOST_DEVICES + 1, sizeof(*list));
	int found = 0;

	for (int i = 0; i < MOST_DEVICES; i++)
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

static int query_port_ex(struct ibv_context *which, uint8_t number, struct ibv_port_attr *attr, size_t size)
{
	int error = enter(CALL_ibv_query_port, KIND_CONTEXT, which);
	struct card_port *port = error ? NULL : port_of(device_of(KIND_CONTEXT, which), number);
	struct ibv_port_attr found = { 0 };

	if (!error && !port)
		error = EINVAL;
	if (error)
		return done(error);
	found.state = (enum ibv_port_state)port->state;
	found.link_layer = (uint8_t)port->link_layer;
	found.active_mtu = (enum ibv_mtu)port->active_mtu;
	found.max_mtu = (enum ibv_mtu)port->max_mtu;
	found.active_speed = (uint8_t)port->active_speed;
	found.active_width = (uint8_t)port->active_width;
	found.lid = (uint16_t)port->lid;
	found.lmc = (uint8_t)port->lmc;
	found.sm_lid = (uint16_t)port->sm_lid;
	found.qkey_viol_cntr = port->qkey_violations;
	found.gid_tbl_len = GIDS;
	found.pkey_tbl_len = PKEYS;
	memcpy(attr, &found, size);
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
	attr->max_sge = MOST_SGES;
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
	found.completion_timestamp_mask = device->is.has_cq_ex ? UINT64_MAX : 0;
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
	leave();
	return error ? -error : count;
}

/* --- contexts --- */

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *which, struct ibv_cq_init_attr_ex *init);
static int modify_cq(struct ibv_cq *target, struct ibv_modify_cq_attr *attr);

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

/* --- protection domains and memory --- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *which)
{
	int error = enter(CALL_ibv_alloc_pd, KIND_CONTEXT, which);
	struct pd *pd = NULL;

	if (!error) {
		pd = make(KIND_PD, sizeof(*pd), device_of(KIND_CONTEXT, which));
		pd->pd.context = which;
		object_of(KIND_CONTEXT, which)->uses++;
	}
	return made(pd, error);
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	int error = enter(CALL_ibv_dealloc_pd, KIND_PD, pd);

	if (!error) {
		object_of(KIND_CONTEXT, pd->context)->uses--;
		end(KIND_PD, pd);
	}
	return done(error);
}

/* An lkey has the place in the table and how often it was taken before: one that is gone is known. */
static int place_mr(struct mr *mr)
{
	for (unsigned tries = 0; tries < MOST_MRS; tries++) {
		unsigned number = ++last_mr, place = number % MOST_MRS;

		if (mrs[place])
			continue;
		mrs[place] = mr;
		mr->mr.lkey = mr->mr.rkey = number;
		return 0;
	}
	return ENOMEM;
}

struct mr *find_mr(uint32_t lkey)
{
	struct mr *mr = mrs[lkey % MOST_MRS];

	return mr && mr->mr.lkey == lkey ? mr : NULL;
}

void forget_regions(void)
{
	memset(mrs, 0, sizeof(mrs));
}

static struct mr *new_mr(struct ibv_pd *pd, uint8_t *base, size_t length, uint64_t iova, unsigned int access)
{
	struct mr *mr = make(KIND_MR, sizeof(*mr), device_of(KIND_PD, pd));

	mr->mr.context = pd->context;
	mr->mr.pd = pd;
	mr->mr.addr = base;
	mr->mr.length = length;
	mr->base = base;
	mr->iova = iova;
	mr->access = access;
	object_of(KIND_PD, pd)->uses++;
	if (place_mr(mr))
		abort();
	return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
	int error = enter(CALL_ibv_reg_mr, KIND_PD, pd);

	/* libibverbs masks what is optional and not there */
	if (!error && !device_of(KIND_PD, pd)->is.has_relaxed_ordering)
		access &= ~(unsigned int)IBV_ACCESS_OPTIONAL_RANGE;
	return made(error ? NULL : new_mr(pd, address, length, iova, access), error);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, address, length, (uintptr_t)address, (unsigned int)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	int error = enter(CALL_ibv_reg_dmabuf_mr, KIND_PD, pd);
	struct mr *mr = NULL;
	uint8_t *memory;

	if (!error && !device_of(KIND_PD, pd)->is.has_dmabuf)
		error = EOPNOTSUPP;
	if (error)
		return made(NULL, error);
	/* the file from its start: an offset need not be that of a page */
	memory = mmap(NULL, offset + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return made(NULL, errno);
	mr = new_mr(pd, memory + offset, length, iova, (unsigned int)access);
	mr->mr.addr = NULL;
	mr->mapped = memory;
	mr->mapped_bytes = offset + length;
	return made(mr, 0);
}

int ibv_dereg_mr(struct ibv_mr *target)
{
	int error = enter(CALL_ibv_dereg_mr, KIND_MR, target);
	struct mr *mr = (struct mr *)target;

	if (!error) {
		mrs[target->lkey % MOST_MRS] = NULL;
		if (mr->mapped)
			munmap(mr->mapped, mr->mapped_bytes);
		object_of(KIND_PD, target->pd)->uses--;
		end(KIND_MR, mr);
	}
	return done(error);
}

/* --- completion channels and queues --- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *which)
{
	int error = enter(CALL_ibv_create_comp_channel, KIND_CONTEXT, which);
	struct comp_channel *channel = NULL;

	if (!error) {
		struct device *device = device_of(KIND_CONTEXT, which);

		channel = make(KIND_COMP_CHANNEL, sizeof(*channel), device);
		/* a benchmark's device is never removed, and an eventfd is quicker */
		open_queue(&channel->events, !device->ports[0].any_address);
		channel->channel.context = which;
		channel->channel.fd = channel->events.bell.fd;
		object_of(KIND_CONTEXT, which)->uses++;
	}
	return made(channel, error);
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *target)
{
	int error = enter(CALL_ibv_destroy_comp_channel, KIND_COMP_CHANNEL, target);

	if (!error) {
		object_of(KIND_CONTEXT, target->context)->uses--;
		close_queue(&((struct comp_channel *)target)->events);
		end(KIND_COMP_CHANNEL, target);
	}
	return done(error);
}

static struct cq *new_cq(enum call call, struct ibv_context *which, uint32_t depth, void *user,
			 struct ibv_comp_channel *channel, uint32_t vector, int *error)
{
	struct cq *cq;

	*error = enter(call, KIND_CONTEXT, which);
	if (!*error && (!depth || vector >= device_of(KIND_CONTEXT, which)->is.comp_vectors))
		*error = EINVAL;
	if (*error)
		return NULL;
	cq = make(KIND_CQ, sizeof(*cq), device_of(KIND_CONTEXT, which));
	cq->ring = calloc(depth, sizeof(*cq->ring));
	cq->size = depth;
	cq->vector = vector;
	cq->cq.context = which;
	cq->cq.channel = channel;
	cq->cq.cq_context = user;
	cq->cq.cqe = (int)depth;
	if (channel)
		object_of(KIND_COMP_CHANNEL, channel)->uses++;
	object_of(KIND_CONTEXT, which)->uses++;
	return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *which, int depth, void *user, struct ibv_comp_channel *channel,
			     int vector)
{
	int error;
	struct cq *cq = new_cq(CALL_ibv_create_cq, which, (uint32_t)depth, user, channel, (uint32_t)vector, &error);

	return made(cq, error);
}

#define FIELD(type, name, value)                                    \
	static type read_##name(struct ibv_cq_ex *target)           \
	{                                                           \
		const struct entry *now = &((struct cq *)target)->now; \
									\
		return value;                                       \
	}

FIELD(enum ibv_wc_opcode, opcode, now->wc.opcode)
FIELD(uint32_t, vendor_err, now->wc.vendor_err)
FIELD(uint32_t, byte_len, now->wc.byte_len)
FIELD(__be32, imm_data, now->wc.imm_data)
FIELD(uint32_t, qp_num, now->wc.qp_num)
FIELD(uint32_t, src_qp, now->wc.src_qp)
FIELD(unsigned int, wc_flags, now->wc.wc_flags)
FIELD(uint32_t, slid, now->wc.slid)
FIELD(uint8_t, sl, now->wc.sl)
FIELD(uint8_t, dlid_path_bits, now->wc.dlid_path_bits)
FIELD(uint64_t, completion_wallclock_ns, now->stamp)

/* Ticks of the device's clock, which starts with the host's. */
static uint64_t read_completion_ts(struct ibv_cq_ex *target)
{
	const struct device *device = device_of(KIND_CQ, target);

	return (uint64_t)((unsigned __int128)((struct cq *)target)->now.ticks * device->is.clock_khz / 1000000);
}

static int next_poll(struct ibv_cq_ex *target)
{
	struct cq *cq = (struct cq *)target;
	int error = enter(CALL_ibv_poll_cq, KIND_CQ, target);

	if (!error && !next_entry(cq, &cq->now))
		error = ENOENT;
	if (!error) {
		target->wr_id = cq->now.wc.wr_id;
		target->status = cq->now.wc.status;
	}
	return done(error);
}

static int start_poll(struct ibv_cq_ex *target, struct ibv_poll_cq_attr *attr)
{
	int error = attr->comp_mask ? EINVAL : next_poll(target);
	struct cq *cq = (struct cq *)target;

	if (!error && cq->is_polled)
		report("ibv_start_poll: the last poll was not ended");
	cq->is_polled |= !error;
	return error;
}

static void end_poll(struct ibv_cq_ex *target)
{
	((struct cq *)target)->is_polled = 0;
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *which, struct ibv_cq_init_attr_ex *init)
{
	int error;
	struct cq *cq = new_cq(CALL_ibv_create_cq_ex, which, init->cqe, init->cq_context, init->channel,
			       init->comp_vector, &error);

	if (cq) {
		cq->cq.start_poll = start_poll;
		cq->cq.next_poll = next_poll;
		cq->cq.end_poll = end_poll;
		cq->cq.read_opcode = read_opcode;
		cq->cq.read_vendor_err = read_vendor_err;
		cq->cq.read_byte_len = read_byte_len;
		cq->cq.read_imm_data = read_imm_data;
		cq->cq.read_qp_num = read_qp_num;
		cq->cq.read_src_qp = read_src_qp;
		cq->cq.read_wc_flags = read_wc_flags;
		cq->cq.read_slid = read_slid;
		cq->cq.read_sl = read_sl;
		cq->cq.read_dlid_path_bits = read_dlid_path_bits;
		if (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
			cq->cq.read_completion_ts = read_completion_ts;
		if (init->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
			cq->cq.read_completion_wallclock_ns = read_completion_wallclock_ns;
	}
	return made(cq, error);
}

static int modify_cq(struct ibv_cq *target, struct ibv_modify_cq_attr *attr)
{
	int error = enter(CALL_ibv_modify_cq, KIND_CQ, target);

	if (!error && attr->attr_mask == IBV_CQ_ATTR_MODERATE)
		((struct cq *)target)->moderation = attr->moderate;
	else if (!error)
		error = EINVAL;
	return done(error);
}

int ibv_destroy_cq(struct ibv_cq *target)
{
	int error = enter(CALL_ibv_destroy_cq, KIND_CQ, target);
	struct cq *cq = (struct cq *)target;

	if (error)
		return done(error);
	settle_events(CALL_ibv_destroy_cq, KIND_CQ, target);
	forget(&container_of(target->context, struct context, verbs.context)->async, cq);
	if (target->channel) {
		forget(&((struct comp_channel *)target->channel)->events, cq);
		object_of(KIND_COMP_CHANNEL, target->channel)->uses--;
	}
	object_of(KIND_CONTEXT, target->context)->uses--;
	forget_cq(cq);
	end(KIND_CQ, cq);
	return done(0);
}

int ibv_get_cq_event(struct ibv_comp_channel *target, struct ibv_cq **cq, void **user)
{
	int error = enter(CALL_ibv_get_cq_event, KIND_COMP_CHANNEL, target);
	struct node node;

	if (!error && take(&((struct comp_channel *)target)->events, &node))
		error = errno;
	if (!error) {
		*cq = node.about;
		*user = (*cq)->cq_context;
		object_of(KIND_CQ, *cq)->unacked++;
	}
	leave();
	errno = error ? error : errno;
	return error ? -1 : 0;
}

void ibv_ack_cq_events(struct ibv_cq *target, unsigned int count)
{
	if (!enter(CALL_ibv_ack_cq_events, KIND_CQ, target)) {
		struct object *object = object_of(KIND_CQ, target);

		if ((unsigned int)object->unacked < count)
			report("ibv_ack_cq_events: %u acked, %d were read", count, object->unacked);
		object->unacked -= (int)count;
	}
	leave();
}

/* --- queue pairs; the lock is held where the connection manager calls --- */

static int refuses(const struct device *device, const struct ibv_qp_init_attr_ex *init)
{
	const struct ibv_qp_cap *cap = &init->cap;

	if (cap->max_send_wr > device->is.max_qp_wr || cap->max_recv_wr > device->is.max_qp_wr ||
	    cap->max_inline_data > device->is.max_inline || cap->max_send_sge > MOST_SGES ||
	    cap->max_recv_sge > MOST_SGES)
		return EINVAL;
	if (init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && init->create_flags &&
	    device->is.block_loopback == BLOCK_REFUSED)
		return EINVAL;
	return 0;
}

struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_qp_init_attr_ex *init)
{
	struct device *device = device_of(KIND_PD, pd);
	struct qp *qp;
	struct qp **at = &all_qps;
	int error = fault(CALL_ibv_create_qp, object_of(KIND_PD, pd), NULL);

	if (!error)
		error = refuses(device, init);
	if (error) {
		errno = error;
		return NULL;
	}
	qp = make(KIND_QP, sizeof(*qp), device);
	qp->qp = (struct ibv_qp){ .context = pd->context, .pd = pd, .send_cq = init->send_cq,
				  .recv_cq = init->recv_cq, .qp_context = init->qp_context,
				  .qp_num = ++last_qp_num, .qp_type = init->qp_type };
	init->cap.max_inline_data = device->is.max_inline; /* a device may grant more than was asked for */
	qp->cap = init->cap;
	qp->receives = calloc(init->cap.max_recv_wr + 1, sizeof(*qp->receives));
	qp->blocks_loopback = init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS &&
			      init->create_flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB &&
			      device->is.block_loopback == BLOCK_HONOURED;
	for (int stage = 0; stage < STAGES; stage++) {
		qp->last[stage] = &qp->first[stage];
		qp->delay[stage] = INT64_MIN;
	}
	object_of(KIND_PD, pd)->uses++;
	object_of(KIND_CQ, init->send_cq)->uses++;
	object_of(KIND_CQ, init->recv_cq)->uses++;
	while (*at)
		at = &(*at)->next;
	*at = qp;
	return &qp->qp;
}

int end_qp(struct ibv_qp *target)
{
	struct qp *qp = (struct qp *)target;
	struct object *object = object_of(KIND_QP, qp);
	struct qp **at = &all_qps;
	int error = fault(CALL_ibv_destroy_qp, object, NULL);

	if (error) {
		object->refused = 1;
		return error;
	}
	if (qp->attachments)
		return EBUSY;
	settle_events(CALL_ibv_destroy_qp, KIND_QP, qp);
	forget(&container_of(target->context, struct context, verbs.context)->async, qp);
	while (*at != qp)
		at = &(*at)->next;
	*at = qp->next;
	forget_work(qp);
	forget_entries((struct cq *)target->send_cq, qp);
	forget_entries((struct cq *)target->recv_cq, qp);
	object_of(KIND_PD, target->pd)->uses--;
	object_of(KIND_CQ, target->send_cq)->uses--;
	object_of(KIND_CQ, target->recv_cq)->uses--;
	free(qp->receives);
	end(KIND_QP, qp);
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex same = { .send_cq = init->send_cq, .recv_cq = init->recv_cq, .cap = init->cap,
					    .qp_context = init->qp_context, .qp_type = init->qp_type };
	int error = hold(CALL_ibv_create_qp, KIND_PD, pd);
	struct ibv_qp *qp = error ? NULL : new_qp(pd, &same);

	init->cap = same.cap;
	return made(qp, qp ? 0 : error ? error : errno);
}

int ibv_destroy_qp(struct ibv_qp *target)
{
	int error = hold(CALL_ibv_destroy_qp, KIND_QP, target);

	return done(error ? error : end_qp(target));
}

int ibv_query_qp(struct ibv_qp *target, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	int error = enter(CALL_ibv_query_qp, KIND_QP, target);
	struct qp *qp = (struct qp *)target;

	(void)mask;
	if (!error) {
		memset(attr, 0, sizeof(*attr));
		attr->qp_state = attr->cur_qp_state = target->state = qp->state;
		attr->qkey = qp->qkey;
		attr->pkey_index = qp->pkey_index;
		attr->port_num = qp->port;
		attr->cap = qp->cap;
		memset(init, 0, sizeof(*init));
		init->cap = qp->cap;
	}
	return done(error);
}

static int may_follow(enum ibv_qp_state from, enum ibv_qp_state to)
{
	if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
		return 1;
	return (from == IBV_QPS_RESET && to == IBV_QPS_INIT) || (from == IBV_QPS_INIT && to == IBV_QPS_INIT) ||
	       (from == IBV_QPS_INIT && to == IBV_QPS_RTR) || (from == IBV_QPS_RTR && to == IBV_QPS_RTS) ||
	       (from == IBV_QPS_RTS && to == IBV_QPS_RTS);
}

int ibv_modify_qp(struct ibv_qp *target, struct ibv_qp_attr *attr, int mask)
{
	int error = enter(CALL_ibv_modify_qp, KIND_QP, target);
	struct qp *qp = (struct qp *)target;

	if (!error && mask & IBV_QP_STATE && !may_follow(qp->state, attr->qp_state))
		error = EINVAL;
	if (error)
		return done(error);
	if (mask & IBV_QP_QKEY)
		qp->qkey = attr->qkey;
	if (mask & IBV_QP_PKEY_INDEX)
		qp->pkey_index = attr->pkey_index;
	if (mask & IBV_QP_PORT)
		qp->port = attr->port_num;
	if (!(mask & IBV_QP_STATE))
		return done(0);
	if (attr->qp_state == IBV_QPS_ERR) {
		fail_qp(qp);
	} else if (attr->qp_state == IBV_QPS_RESET) {
		forget_work(qp);
		forget_entries((struct cq *)target->send_cq, qp);
		forget_entries((struct cq *)target->recv_cq, qp);
		qp->posted = qp->taken = qp->freed = qp->sent = qp->done = 0;
	}
	qp->state = target->state = attr->qp_state;
	return done(0);
}

/* --- groups and address handles --- */

static int is_group(const uint8_t *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return gid[0] == 0xff || (!memcmp(gid, mapped, sizeof(mapped)) && gid[12] >> 4 == 0xe);
}

int attach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	struct qp *qp = (struct qp *)target;
	int error = fault(CALL_ibv_attach_mcast, object_of(KIND_QP, qp), NULL);
	struct attachment *attachment;

	if (!error && (target->qp_type != IBV_QPT_UD || !is_group(gid->raw)))
		error = EINVAL;
	if (error)
		return error;
	for (attachment = qp->attachments; attachment; attachment = attachment->next)
		if (!memcmp(&attachment->gid, gid, sizeof(*gid)) && attachment->lid == lid)
			return 0;
	attachment = malloc(sizeof(*attachment));
	*attachment = (struct attachment){ *gid, lid, qp->attachments };
	qp->attachments = attachment;
	return 0;
}

int detach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	struct qp *qp = (struct qp *)target;
	int error = fault(CALL_ibv_detach_mcast, object_of(KIND_QP, qp), NULL);

	for (struct attachment **at = &qp->attachments; !error && *at; at = &(*at)->next)
		if (!memcmp(&(*at)->gid, gid, sizeof(*gid)) && (*at)->lid == lid) {
			struct attachment *gone = *at;

			*at = gone->next;
			free(gone);
			return 0;
		}
	return error ? error : EINVAL;
}

int ibv_attach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	int error = hold(CALL_ibv_attach_mcast, KIND_QP, target);

	return done(error ? error : attach(target, gid, lid));
}

int ibv_detach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	int error = hold(CALL_ibv_detach_mcast, KIND_QP, target);

	return done(error ? error : detach(target, gid, lid));
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	int error = enter(CALL_ibv_create_ah, KIND_PD, pd);
	struct card_port *port = error ? NULL : port_of(device_of(KIND_PD, pd), attr->port_num);
	struct ah *ah = NULL;

	if (!error && (!port || (!attr->is_global && port->link_layer == IBV_LINK_LAYER_ETHERNET) ||
		       (attr->is_global && attr->grh.sgid_index >= GIDS)))
		error = EINVAL;
	if (!error) {
		ah = make(KIND_AH, sizeof(*ah), device_of(KIND_PD, pd));
		ah->ah.context = pd->context;
		ah->ah.pd = pd;
		ah->attr = *attr;
		object_of(KIND_PD, pd)->uses++;
	}
	return made(ah, error);
}

int ibv_destroy_ah(struct ibv_ah *target)
{
	int error = enter(CALL_ibv_destroy_ah, KIND_AH, target);

	/* a device may look an address up as late as when it sends */
	if (error == EBUSY) {
		report("ibv_destroy_ah: sends with address handle %u are under way", object_of(KIND_AH, target)->serial);
		forget_sends_with((struct ah *)target);
		error = 0;
	}
	if (!error) {
		object_of(KIND_PD, target->pd)->uses--;
		end(KIND_AH, target);
	}
	return done(error);
}
