/* librdmacm and libibverbs without a device: a message sent is at once received by the attached QPs of the process.
 *
 * Nothing is simulated but the queues. It shows what a message costs outside the kernel, without the kernel:
 *   gcc -shared -fPIC -O2 -Wl,--version-script=null_verbs.map -Wl,-soname,librdmacm.so.1 ...
 * MCAST_LIBRDMACM and MCAST_LIBIBVERBS name it to this package; LD_PRELOAD gives it to reference.c.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#undef ibv_reg_mr
#undef ibv_query_port

enum { DEEP = 1024, MOST_QPS = 256, GRH = 40, MTU = 1024 };

struct cq {
	struct ibv_cq cq;
	struct ibv_wc wcs[DEEP];
	unsigned head, tail;
	int armed;
};

struct receive {
	uint64_t wr_id;
	struct ibv_sge sges[2];
	int count;
};

struct member {
	uint32_t group;
	struct member *next;
};

struct qp {
	struct ibv_qp qp;
	struct receive receives[DEEP];
	unsigned head, tail;
	uint32_t address;
	struct member *groups;
};

struct ah {
	struct ibv_ah ah;
	uint32_t group;
};

struct pending {
	struct rdma_cm_event event;
	struct pending *next;
};

struct channel {
	struct rdma_event_channel channel;
	struct pending *first, **last;
};

struct id {
	struct rdma_cm_id id;
	uint32_t address;
};

static struct ibv_device device = { .node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "null0" };
static struct ibv_context context;
static struct qp *qps[MOST_QPS];
static uint32_t last_qp_num = 16;

static uint32_t last4(const void *gid)
{
	uint32_t address;

	memcpy(&address, (const uint8_t *)gid + 12, 4);
	return address;
}

/* --- data --- */

static void complete(struct ibv_cq *target, struct ibv_wc *wc)
{
	struct cq *cq = (struct cq *)target;

	cq->wcs[cq->head++ % DEEP] = *wc;
	if (cq->armed && target->channel) {
		cq->armed = 0;
		eventfd_write(target->channel->fd, 1);
	}
}

static int poll_cq(struct ibv_cq *target, int max, struct ibv_wc *out)
{
	struct cq *cq = (struct cq *)target;
	int count = 0;

	while (count < max && cq->tail != cq->head)
		out[count++] = cq->wcs[cq->tail++ % DEEP];
	return count;
}

static int req_notify_cq(struct ibv_cq *target, int solicited)
{
	(void)solicited;
	((struct cq *)target)->armed = 1;
	return 0;
}

static int post_recv(struct ibv_qp *target, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *qp = (struct qp *)target;

	(void)bad;
	for (; wr; wr = wr->next) {
		struct receive *receive = &qp->receives[qp->head++ % DEEP];

		receive->wr_id = wr->wr_id;
		receive->count = wr->num_sge;
		memcpy(receive->sges, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	}
	return 0;
}

static void scatter(struct receive *receive, const uint8_t *from, size_t length, size_t at)
{
	for (int i = 0; i < receive->count && length; i++) {
		struct ibv_sge *sge = &receive->sges[i];
		size_t room, part;

		if (at >= sge->length) {
			at -= sge->length;
			continue;
		}
		room = sge->length - at;
		part = length < room ? length : room;
		memcpy((uint8_t *)(uintptr_t)sge->addr + at, from, part);
		from += part;
		length -= part;
		at = 0;
	}
}

static void deliver(struct qp *from, struct qp *to, struct ibv_send_wr *wr, uint32_t group)
{
	struct receive *receive = &to->receives[to->tail++ % DEEP];
	size_t length = wr->num_sge ? wr->sg_list->length : 0;
	uint8_t grh[GRH] = { 0 };
	struct ibv_wc wc = {
		.wr_id = receive->wr_id,
		.opcode = IBV_WC_RECV,
		.byte_len = (uint32_t)(GRH + length),
		.src_qp = from->qp.qp_num,
		.wc_flags = IBV_WC_GRH,
	};

	if (wr->opcode == IBV_WR_SEND_WITH_IMM) {
		wc.wc_flags |= IBV_WC_WITH_IMM;
		wc.imm_data = wr->imm_data;
	}
	grh[20] = 0x45;
	memcpy(grh + 32, &from->address, 4);
	memcpy(grh + 36, &group, 4);
	scatter(receive, grh, GRH, 0);
	if (length)
		scatter(receive, (uint8_t *)(uintptr_t)wr->sg_list->addr, length, GRH);
	complete(to->qp.recv_cq, &wc);
}

static int is_member(struct qp *qp, uint32_t group)
{
	for (struct member *member = qp->groups; member; member = member->next)
		if (member->group == group)
			return 1;
	return 0;
}

static int post_send(struct ibv_qp *target, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *from = (struct qp *)target;

	(void)bad;
	for (; wr; wr = wr->next) {
		uint32_t group = ((struct ah *)wr->wr.ud.ah)->group;

		for (int i = 0; i < MOST_QPS && qps[i]; i++)
			if (is_member(qps[i], group) && qps[i]->head != qps[i]->tail)
				deliver(from, qps[i], wr, group);
		if (wr->send_flags & IBV_SEND_SIGNALED)
			complete(target->send_cq, &(struct ibv_wc){ .wr_id = wr->wr_id, .qp_num = target->qp_num });
	}
	return 0;
}

/* --- verbs --- */

static struct ibv_context *the_context(void)
{
	context.device = &device;
	context.async_fd = -1;
	context.ops.poll_cq = poll_cq;
	context.ops.req_notify_cq = req_notify_cq;
	context.ops.post_recv = post_recv;
	context.ops.post_send = post_send;
	return &context;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	list[0] = &device;
	if (count)
		*count = 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *which)
{
	return which->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *which)
{
	(void)which;
	return the_context();
}

int ibv_close_device(struct ibv_context *which)
{
	(void)which;
	return 0;
}

int ibv_query_device(struct ibv_context *which, struct ibv_device_attr *attr)
{
	(void)which;
	memset(attr, 0, sizeof(*attr));
	attr->max_qp_wr = DEEP;
	attr->phys_port_cnt = 1;
	attr->max_mcast_grp = 8192;
	attr->max_mcast_qp_attach = 56;
	return 0;
}

int ibv_query_port(struct ibv_context *which, uint8_t port, struct _compat_ibv_port_attr *out)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)out;

	(void)which, (void)port;
	memset(attr, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
	attr->state = IBV_PORT_ACTIVE;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	attr->active_mtu = IBV_MTU_1024;
	attr->max_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 1;
	return 0;
}

int ibv_query_gid(struct ibv_context *which, uint8_t port, int index, union ibv_gid *gid)
{
	(void)which, (void)port, (void)index;
	memset(gid, 0, sizeof(*gid));
	gid->raw[10] = gid->raw[11] = 0xff;
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *which)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = which;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	struct ibv_mr *mr = calloc(1, sizeof(*mr));

	(void)access;
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = address;
	mr->length = length;
	mr->lkey = 1;
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *which)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));

	channel->context = which;
	channel->fd = eventfd(0, EFD_CLOEXEC);
	return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *which, int depth, void *user, struct ibv_comp_channel *channel,
			     int vector)
{
	struct cq *cq = calloc(1, sizeof(*cq));

	(void)depth, (void)user, (void)vector;
	cq->cq.context = which;
	cq->cq.channel = channel;
	return &cq->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	free(cq);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user)
{
	eventfd_t unused;

	*cq = NULL;
	*user = NULL;
	return eventfd_read(channel->fd, &unused);
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count)
{
	(void)cq, (void)count;
}

int ibv_get_async_event(struct ibv_context *which, struct ibv_async_event *event)
{
	(void)which, (void)event;
	errno = EAGAIN;
	return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

int ibv_fork_init(void)
{
	return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask, (void)init;
	attr->qp_state = qp->state;
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	(void)mask;
	qp->state = attr->qp_state;
	if (qp->state == IBV_QPS_RESET)
		((struct qp *)qp)->tail = ((struct qp *)qp)->head;
	return 0;
}

int ibv_attach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	struct qp *qp = (struct qp *)target;
	struct member *member = malloc(sizeof(*member));

	(void)lid;
	*member = (struct member){ last4(gid), qp->groups };
	qp->groups = member;
	return 0;
}

int ibv_detach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	for (struct member **at = &((struct qp *)target)->groups; *at; at = &(*at)->next)
		if ((*at)->group == last4(gid)) {
			struct member *gone = *at;

			*at = gone->next;
			free(gone);
			return 0;
		}
	return EINVAL;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct ah *ah = calloc(1, sizeof(*ah));

	ah->ah.context = pd->context;
	ah->group = last4(attr->grh.dgid.raw);
	return &ah->ah;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
	free(ah);
	return 0;
}

/* --- the connection manager --- */

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct channel *channel = calloc(1, sizeof(*channel));

	channel->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	channel->last = &channel->first;
	return &channel->channel;
}

void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
	close(channel->fd);
	free(channel);
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *user, enum rdma_port_space ps)
{
	struct id *id = calloc(1, sizeof(*id));

	id->id.channel = channel;
	id->id.context = user;
	id->id.ps = ps;
	*out = &id->id;
	return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	free(id);
	return 0;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
	((struct id *)id)->address = ((struct sockaddr_in *)address)->sin_addr.s_addr;
	id->verbs = the_context();
	id->port_num = 1;
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *source, struct sockaddr *target, int timeout)
{
	(void)id, (void)source, (void)target, (void)timeout;
	errno = ENOSYS;
	return -1;
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct qp *qp = calloc(1, sizeof(*qp));

	qp->qp = (struct ibv_qp){ .context = pd->context, .pd = pd, .send_cq = init->send_cq,
				  .recv_cq = init->recv_cq, .qp_num = ++last_qp_num, .state = IBV_QPS_RTS,
				  .qp_type = init->qp_type };
	qp->address = ((struct id *)id)->address;
	init->cap.max_inline_data = 256;
	for (int i = 0; i < MOST_QPS; i++)
		if (!qps[i]) {
			qps[i] = qp;
			break;
		}
	id->qp = &qp->qp;
	return 0;
}

int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *init)
{
	struct ibv_qp_init_attr same = { .send_cq = init->send_cq, .recv_cq = init->recv_cq, .cap = init->cap,
					 .qp_type = init->qp_type };
	int ret = rdma_create_qp(id, init->pd, &same);

	init->cap = same.cap;
	return ret;
}

void rdma_destroy_qp(struct rdma_cm_id *id)
{
	int last = 0, at = 0;

	while (last < MOST_QPS && qps[last]) {
		at = qps[last] == (struct qp *)id->qp ? last : at;
		last++;
	}
	qps[at] = qps[last - 1];
	qps[last - 1] = NULL;
	free(id->qp);
	id->qp = NULL;
}

int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
	(void)id, (void)attr, (void)mask;
	return 0;
}

static int join(struct rdma_cm_id *id, struct sockaddr *address, void *user, int receives)
{
	struct channel *channel = (struct channel *)id->channel;
	struct pending *pending = calloc(1, sizeof(*pending));
	struct rdma_cm_event *event = &pending->event;
	uint8_t *gid = event->param.ud.ah_attr.grh.dgid.raw;

	event->id = id;
	event->event = RDMA_CM_EVENT_MULTICAST_JOIN;
	event->param.ud.private_data = user;
	event->param.ud.qp_num = 0xffffff;
	event->param.ud.qkey = 0x01234567;
	event->param.ud.ah_attr.is_global = 1;
	event->param.ud.ah_attr.port_num = 1;
	gid[10] = gid[11] = 0xff;
	memcpy(gid + 12, &((struct sockaddr_in *)address)->sin_addr, 4);
	if (receives && id->qp)
		ibv_attach_mcast(id->qp, &event->param.ud.ah_attr.grh.dgid, 0);
	*channel->last = pending;
	channel->last = &pending->next;
	return eventfd_write(id->channel->fd, 1);
}

int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *address, void *user)
{
	return join(id, address, user, 1);
}

int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr, void *user)
{
	return join(id, attr->addr, user, attr->join_flags == RDMA_MC_JOIN_FLAG_FULLMEMBER);
}

int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *address)
{
	union ibv_gid gid = { .raw = { 0 } };

	memcpy(gid.raw + 12, &((struct sockaddr_in *)address)->sin_addr, 4);
	return id->qp && ibv_detach_mcast(id->qp, &gid, 0) ? 0 : 0;
}

int rdma_get_cm_event(struct rdma_event_channel *target, struct rdma_cm_event **out)
{
	struct channel *channel = (struct channel *)target;
	eventfd_t unused;

	if (eventfd_read(target->fd, &unused))
		return -1;
	*out = &channel->first->event;
	channel->first = channel->first->next;
	if (!channel->first)
		channel->last = &channel->first;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	free(event);
	return 0;
}

struct ibv_context **rdma_get_devices(int *count)
{
	struct ibv_context **list = calloc(2, sizeof(*list));

	list[0] = the_context();
	*count = 1;
	return list;
}

void rdma_free_devices(struct ibv_context **list)
{
	free(list);
}
