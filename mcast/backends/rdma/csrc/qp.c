/* Making, changing and ending a QP and what belongs to it. */
#include "qp.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The most inline data worth asking for, then less: devices refuse what they lack. */
static const uint32_t inline_sizes[] = { 256, 128, 64, 0 };

static int error_or(int fallback)
{
	return -(errno ? errno : fallback);
}

int mcast_alloc_pd(struct rdma_cm_id *id, struct ibv_pd **pd)
{
	if (!id->verbs)
		return -EINVAL;
	errno = 0;
	*pd = mcast_sym.ibv_alloc_pd(id->verbs);
	return *pd ? 0 : error_or(ENOMEM);
}

int mcast_dealloc_pd(struct ibv_pd *pd)
{
	return -mcast_sym.ibv_dealloc_pd(pd);
}

int mcast_register(struct ibv_pd *pd, void *address, uint64_t bytes, int writable, struct ibv_mr **mr)
{
	errno = 0;
	*mr = (mcast_sym.ibv_reg_mr)(pd, address, bytes, writable ? IBV_ACCESS_LOCAL_WRITE : 0);
	return *mr ? 0 : error_or(ENOMEM);
}

uint32_t mcast_lkey(struct ibv_mr *mr)
{
	return mr->lkey;
}

int mcast_deregister(struct ibv_mr *mr)
{
	return -mcast_sym.ibv_dereg_mr(mr);
}

static int open_completions(struct ibv_context *context, uint32_t depth, struct completions *out)
{
	int flags;

	errno = 0;
	out->channel = mcast_sym.ibv_create_comp_channel(context);
	if (!out->channel)
		return error_or(ENOMEM);
	flags = fcntl(out->channel->fd, F_GETFL);
	if (flags < 0 || fcntl(out->channel->fd, F_SETFL, flags | O_NONBLOCK))
		return -errno;
	errno = 0;
	out->cq = mcast_sym.ibv_create_cq(context, (int)depth, NULL, out->channel, 0);
	return out->cq ? 0 : error_or(ENOMEM);
}

static void close_completions(struct completions *completions)
{
	if (completions->cq)
		mcast_sym.ibv_destroy_cq(completions->cq);
	if (completions->channel)
		mcast_sym.ibv_destroy_comp_channel(completions->channel);
}

static int create_qp(struct mcast_qp *self, struct ibv_pd *pd)
{
	for (size_t i = 0; i < sizeof(inline_sizes) / sizeof(*inline_sizes); i++) {
		struct ibv_qp_init_attr_ex attr = {
			.comp_mask = IBV_QP_INIT_ATTR_PD,
			.pd = pd,
			.send_cq = self->send.cq,
			.recv_cq = self->recv.cq,
			.qp_type = (enum ibv_qp_type)self->init.qp_type,
			.cap = { .max_send_wr = self->init.send_depth,
				 .max_recv_wr = self->init.recv_depth,
				 .max_send_sge = 1,
				 .max_recv_sge = 2,
				 .max_inline_data = inline_sizes[i] },
		};

		if (self->init.block_loopback) {
			attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
			attr.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
		}
		if (!mcast_sym.rdma_create_qp_ex(self->id, &attr)) {
			self->qp = self->id->qp;
			/* a device may grant more; the slab's room bounds what is ever sent */
			self->max_inline = attr.cap.max_inline_data;
			return 0;
		}
	}
	return error_or(EINVAL);
}

static int allocate_work(struct mcast_qp *self)
{
	self->send_wrs = calloc(self->init.send_depth, sizeof(*self->send_wrs));
	self->send_sges = calloc(self->init.send_depth, sizeof(*self->send_sges));
	self->slab.slots = calloc(self->init.recv_depth, 1);
	self->user.slots = calloc(self->init.recv_depth, 1);
	return self->send_wrs && self->send_sges && self->slab.slots && self->user.slots ? 0 : -ENOMEM;
}

/* Frees all that was made; what was not is zero. The QP goes first: the rest is in use by it. */
static void free_all(struct mcast_qp *self)
{
	if (self->qp)
		mcast_sym.rdma_destroy_qp(self->id);
	if (self->mr)
		mcast_sym.ibv_dereg_mr(self->mr);
	close_completions(&self->send);
	close_completions(&self->recv);
	if (self->wake_fd >= 0)
		close(self->wake_fd);
	pthread_mutex_destroy(&self->lock);
	free(self->send_wrs);
	free(self->send_sges);
	free(self->slab.slots);
	free(self->user.slots);
	free(self);
}

static int build(struct mcast_qp *self, struct ibv_pd *pd)
{
	const struct mcast_qp_init *init = &self->init;
	int is_ud = init->qp_type == IBV_QPT_UD;
	int ret;

	self->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (self->wake_fd < 0)
		return -errno;
	ret = allocate_work(self);
	if (!ret)
		ret = open_completions(pd->context, init->send_depth, &self->send);
	if (!ret)
		ret = open_completions(pd->context, init->recv_depth, &self->recv);
	if (!ret)
		ret = mcast_register(pd, init->slab, init->slab_bytes, 1, &self->mr);
	if (!ret)
		ret = create_qp(self, pd);
	if (ret)
		return ret;

	self->state = is_ud ? IBV_QPS_RTS : IBV_QPS_INIT;
	self->signal_every = init->send_depth > 4 ? init->send_depth / 4 : 1;
	self->slab.address = (uint64_t)(uintptr_t)init->slab + init->recv_offset;
	self->slab.lkey = self->mr->lkey;
	self->slab.grh_in_front = 1;
	self->slab.room = init->recv_room;
	self->slab.stride = init->recv_stride;
	self->slab.count = init->recv_depth;
	self->memory = &self->slab;
	if (!is_ud)
		return 0;
	ret = mcast_post_free_slots(self);
	self->counters.recv_low_water = self->counters.recv_free;
	return ret;
}

int mcast_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, const struct mcast_qp_init *init,
		    struct mcast_qp **out)
{
	struct mcast_qp *self;
	int ret;

	if (id->qp)
		return -EINVAL;
	self = calloc(1, sizeof(*self));
	if (!self)
		return -ENOMEM;
	self->id = id;
	self->init = *init;
	self->wake_fd = -1;
	pthread_mutex_init(&self->lock, NULL);
	ret = build(self, pd);
	if (ret) {
		free_all(self);
		return ret;
	}
	*out = self;
	return 0;
}

/* rdma_destroy_qp tells nothing, and frees nothing while the QP is attached: the errno is all there is. */
int mcast_destroy_qp(struct mcast_qp *self)
{
	int ret;

	errno = 0;
	mcast_sym.rdma_destroy_qp(self->id);
	ret = -errno;
	self->qp = NULL;
	free_all(self);
	return ret == -EBUSY ? ret : 0;
}

uint32_t mcast_qp_num(struct mcast_qp *self)
{
	return self->qp->qp_num;
}

int mcast_query_qp(struct mcast_qp *self)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init_attr;
	int ret = mcast_sym.ibv_query_qp(self->qp, &attr, IBV_QP_STATE, &init_attr);

	if (ret)
		return -ret;
	if (attr.qp_state == IBV_QPS_ERR) {
		pthread_mutex_lock(&self->lock);
		self->state = IBV_QPS_ERR;
		pthread_mutex_unlock(&self->lock);
	}
	return (int)attr.qp_state;
}

/* INIT takes its P_Key, port and Q_Key from the id; the later steps of a UD QP take next to nothing. */
static int fill_attr(struct rdma_cm_id *id, enum ibv_qp_state from, struct ibv_qp_attr *attr, int *mask)
{
	*mask = IBV_QP_STATE;
	if (attr->qp_state == IBV_QPS_INIT)
		return mcast_sym.rdma_init_qp_attr(id, attr, mask) ? -errno : 0;
	if (attr->qp_state == IBV_QPS_RTS && from == IBV_QPS_RTR)
		*mask |= IBV_QP_SQ_PSN;
	return 0;
}

static int modify_locked(struct mcast_qp *self, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask;
	int ret = fill_attr(self->id, self->state, &attr, &mask);

	if (!ret)
		ret = -mcast_sym.ibv_modify_qp(self->qp, &attr, mask);
	if (ret)
		return ret;
	self->state = state;
	if (state == IBV_QPS_RESET)
		mcast_forget_posted(self);
	if (state == IBV_QPS_INIT && self->init.qp_type == IBV_QPT_UD)
		return mcast_post_free_slots(self);
	return 0;
}

int mcast_modify_qp(struct mcast_qp *self, int state)
{
	int ret;

	pthread_mutex_lock(&self->lock);
	ret = modify_locked(self, (enum ibv_qp_state)state);
	pthread_mutex_unlock(&self->lock);
	return ret;
}

static union ibv_gid gid_of(const uint8_t *bytes)
{
	union ibv_gid gid = { .raw = { 0 } };

	memcpy(gid.raw, bytes, sizeof(gid.raw));
	return gid;
}

/* These two return the errno itself (AT-2); some drivers return -1 and set it. */
static int returned_errno(int ret)
{
	return ret < 0 ? -errno : -ret;
}

int mcast_attach(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);

	return returned_errno(mcast_sym.ibv_attach_mcast(self->qp, &group, lid));
}

int mcast_detach(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);

	return returned_errno(mcast_sym.ibv_detach_mcast(self->qp, &group, lid));
}

int mcast_create_ah(struct ibv_pd *pd, const struct mcast_ah_init *init, struct ibv_ah **ah)
{
	struct ibv_ah_attr attr = {
		.grh = { .dgid = gid_of(init->gid),
			 .flow_label = init->flow_label,
			 .sgid_index = init->sgid_index,
			 .hop_limit = init->hop_limit,
			 .traffic_class = init->traffic_class },
		.dlid = init->dlid,
		.sl = init->sl,
		.is_global = init->is_global,
		.port_num = init->port_num,
	};

	errno = 0;
	*ah = mcast_sym.ibv_create_ah(pd, &attr);
	return *ah ? 0 : error_or(EINVAL);
}

int mcast_destroy_ah(struct ibv_ah *ah)
{
	return -mcast_sym.ibv_destroy_ah(ah);
}

static void use_user_memory(struct mcast_qp *self, struct ibv_mr *mr, uint64_t address, uint32_t room,
			    uint32_t count)
{
	self->user.address = address;
	self->user.lkey = mr->lkey;
	self->user.room = self->user.stride = room;
	self->user.count = count < self->init.recv_depth ? count : self->init.recv_depth;
	self->user.generation++;
	memset(self->user.slots, SLOT_FREE, self->init.recv_depth);
	self->memory = &self->user;
}

/* Changes where payloads arrive; only in RESET, where nothing is posted. mr NULL: the slab again.
 * Returns the generation, which stands in the messages received there. */
int mcast_receive_into(struct mcast_qp *self, struct ibv_mr *mr, uint64_t address, uint32_t room, uint32_t count)
{
	int ret = -EINVAL;

	pthread_mutex_lock(&self->lock);
	if (self->state == IBV_QPS_RESET) {
		if (mr)
			use_user_memory(self, mr, address, room, count);
		else
			self->memory = &self->slab;
		ret = (int)self->memory->generation;
	}
	pthread_mutex_unlock(&self->lock);
	return ret;
}

void mcast_wake(struct mcast_qp *self)
{
	(void)!eventfd_write(self->wake_fd, 1);
}

int mcast_failure(struct mcast_qp *self)
{
	int failure;

	pthread_mutex_lock(&self->lock);
	failure = (int)self->failure;
	pthread_mutex_unlock(&self->lock);
	return failure;
}

void mcast_read_counters(struct mcast_qp *self, struct mcast_counters *out)
{
	pthread_mutex_lock(&self->lock);
	*out = self->counters;
	pthread_mutex_unlock(&self->lock);
}
