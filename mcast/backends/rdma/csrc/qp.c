/* Making, changing and ending a QP and what belongs to it. */
#include "qp.h"

#include "cm.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The most inline data worth asking for, then less: devices refuse what they lack. */
static const uint32_t inline_sizes[] = { 256, 128, 64, 0 };

static int error_or(int fallback)
{
	return -(errno ? errno : fallback);
}

int mcast_alloc_pd(struct mcast_id *id, struct ibv_pd **pd)
{
	if (!id->id || !id->id->verbs)
		return -EINVAL;
	errno = 0;
	*pd = mcast_sym.ibv_alloc_pd(id->id->verbs);
	return *pd ? 0 : error_or(ENOMEM);
}

int mcast_dealloc_pd(struct ibv_pd *pd)
{
	return mcast_returned(mcast_sym.ibv_dealloc_pd(pd));
}

/* What is optional goes the way of ibv_reg_mr_iova2, which leaves out what the kernel or the device cannot do. */
int mcast_register(struct ibv_pd *pd, void *address, uint64_t bytes, int writable, int relaxed, struct ibv_mr **mr)
{
	int access = writable ? IBV_ACCESS_LOCAL_WRITE : 0;

	errno = 0;
	if (relaxed && mcast_sym.ibv_reg_mr_iova2)
		*mr = mcast_sym.ibv_reg_mr_iova2(pd, address, bytes, (uint64_t)(uintptr_t)address,
						 (unsigned int)(access | IBV_ACCESS_RELAXED_ORDERING));
	else
		*mr = (mcast_sym.ibv_reg_mr)(pd, address, bytes, access);
	return *mr ? 0 : error_or(ENOMEM);
}

int mcast_has_dmabuf(void)
{
	return mcast_sym.ibv_reg_dmabuf_mr != NULL;
}

int mcast_register_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int writable,
			  int relaxed, struct ibv_mr **mr)
{
	int access = (writable ? IBV_ACCESS_LOCAL_WRITE : 0) | (relaxed ? IBV_ACCESS_RELAXED_ORDERING : 0);

	if (!mcast_has_dmabuf())
		return -ENOSYS;
	errno = 0;
	*mr = mcast_sym.ibv_reg_dmabuf_mr(pd, offset, bytes, iova, fd, access);
	return *mr ? 0 : error_or(EOPNOTSUPP);
}

uint32_t mcast_lkey(struct ibv_mr *mr)
{
	return mr->lkey;
}

int mcast_deregister(struct ibv_mr *mr)
{
	return mcast_returned(mcast_sym.ibv_dereg_mr(mr));
}

static int create_qp_with(struct mcast_qp *self, struct ibv_pd *pd, uint32_t sges, uint32_t inline_size)
{
	struct ibv_qp_init_attr_ex attr = {
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
		.send_cq = self->send.cq,
		.recv_cq = self->recv.cq,
		.qp_type = (enum ibv_qp_type)self->init.qp_type,
		.cap = { .max_send_wr = self->init.send_depth,
			 .max_recv_wr = self->init.recv_depth,
			 .max_send_sge = sges,
			 .max_recv_sge = 2,
			 .max_inline_data = inline_size },
	};

	if (self->init.block_loopback) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
		attr.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
	}
	errno = 0;
	if (mcast_sym.rdma_create_qp_ex(self->id, &attr))
		return error_or(EINVAL);
	self->qp = self->id->qp;
	/* a device may grant more; the slab's room bounds what is ever sent */
	self->max_inline = attr.cap.max_inline_data;
	self->most_sges = sges;
	return 0;
}

/* The error does not say what a device lacks: librdmacm before 33 says ENOMEM for each. */
static int create_qp(struct mcast_qp *self, struct ibv_pd *pd)
{
	int ret = -EINVAL;

	for (uint32_t sges = 2; ret && sges; sges--)
		for (size_t i = 0; ret && i < sizeof(inline_sizes) / sizeof(*inline_sizes); i++)
			ret = create_qp_with(self, pd, sges, inline_sizes[i]);
	return ret;
}

static int allocate_work(struct mcast_qp *self)
{
	self->send_wrs = calloc(self->init.send_depth, sizeof(*self->send_wrs));
	self->send_sges = calloc(self->init.send_depth, sizeof(*self->send_sges));
	self->slab.slots = calloc(self->init.recv_depth, 1);
	self->user.slots = calloc(self->init.recv_depth, 1);
	return self->send_wrs && self->send_sges && self->slab.slots && self->user.slots ? 0 : -ENOMEM;
}

static void close_descriptors(struct mcast_qp *self)
{
	if (self->news_fd >= 0)
		close(self->news_fd);
	if (self->reset_fd >= 0)
		close(self->reset_fd);
	self->news_fd = self->reset_fd = NO_FD;
}

/* Ends all that was made; what was not, or is ended, is NULL. The QP goes first: the rest is in use by it, the address
 * handles too. All is tried; the first error is returned, and what failed can be tried again. */
static int end_all(struct mcast_qp *self)
{
	int ret = 0, next;

	mcast_listen_no_more(self);
	mcast_gate_end(&self->gate); /* nobody tells of anything any more */
	close_descriptors(self);
	if (self->qp) {
		/* rdma_destroy_qp would not say that it failed, and forget the QP all the same */
		ret = mcast_returned(mcast_sym.ibv_destroy_qp(self->qp));
		if (self->id)
			self->id->qp = NULL;
		self->id = NULL; /* the id may be destroyed before this is tried again */
		if (ret == -EBUSY)
			return ret; /* still attached: the QP works, and needs the rest */
		if (!ret)
			self->qp = NULL;
	}
	next = mcast_sweep_ahs(self, 1);
	ret = ret ? ret : next;
	next = self->mr ? mcast_deregister(self->mr) : 0;
	if (!next)
		self->mr = NULL;
	ret = ret ? ret : next;
	next = mcast_close_completions(&self->send);
	ret = ret ? ret : next;
	next = mcast_close_completions(&self->recv);
	return ret ? ret : next;
}

void mcast_free_qp(struct mcast_qp *self)
{
	mcast_gate_free(&self->gate);
	close_descriptors(self);
	pthread_mutex_destroy(&self->lock);
	free(self->send_wrs);
	free(self->send_sges);
	free(self->slab.slots);
	free(self->user.slots);
	free(self->regions);
	free(self);
}

/* Only receives are moderated, because a call that waits for sends waits for room, and would wait longer. */
static int open_queues(struct mcast_qp *self, struct ibv_context *context, int *refused)
{
	const struct mcast_qp_init *init = &self->init;
	int ret = mcast_open_completions(context, init->send_depth, init->comp_vector, 0, &self->send);

	if (!ret) {
		*refused = init->timestamps ? REFUSED_TIMESTAMPS : REFUSED_NOTHING;
		ret = mcast_open_completions(context, init->recv_depth, init->comp_vector, init->timestamps, &self->recv);
	}
	if (!ret && init->moderation_count) {
		*refused = REFUSED_MODERATION;
		ret = mcast_moderate(&self->recv, init->moderation_count, init->moderation_period);
	}
	if (!ret)
		*refused = REFUSED_NOTHING;
	return ret;
}

static int build(struct mcast_qp *self, struct ibv_pd *pd, int *refused)
{
	const struct mcast_qp_init *init = &self->init;
	int is_ud = init->qp_type == IBV_QPT_UD;
	int ret;

	ret = allocate_work(self);
	if (!ret)
		ret = open_queues(self, pd->context, refused);
	if (!ret)
		ret = mcast_register(pd, init->slab, init->slab_bytes, 1, 0, &self->mr);
	if (!ret)
		ret = create_qp(self, pd);
	if (!ret)
		ret = mcast_listen(self, pd->context);
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

int mcast_create_qp(struct mcast_id *id, struct ibv_pd *pd, const struct mcast_qp_init *init,
		    struct mcast_qp **out, int *refused)
{
	struct mcast_qp *self;
	int ret;

	if (!id->id || id->id->qp)
		return id->id ? -EINVAL : -EBADF;
	self = calloc(1, sizeof(*self));
	if (!self)
		return -ENOMEM;
	ret = mcast_gate_open(&self->gate);
	if (ret) {
		free(self);
		return ret;
	}
	self->id = id->id;
	self->pd = pd;
	self->init = *init;
	self->async_fd = pd->context->async_fd;
	self->send.watch_fd = self->send.call_fd = self->recv.watch_fd = self->recv.call_fd = NO_FD;
	pthread_mutex_init(&self->lock, NULL);
	self->news_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	self->reset_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ret = self->news_fd < 0 || self->reset_fd < 0 ? error_or(EMFILE) : build(self, pd, refused);
	if (ret) {
		end_all(self);
		mcast_free_qp(self);
		return ret;
	}
	*out = self;
	return 0;
}

int mcast_close_qp(struct mcast_qp *self, int64_t linger)
{
	int is_first = !mcast_is_shut(&self->gate);

	mcast_gate_shut(&self->gate);
	if (is_first)
		mcast_linger(self, linger); /* takes the lock: what holds that instead of entering has left, too */
	return end_all(self);
}

int mcast_clock(struct mcast_qp *self)
{
	return self->recv.clock;
}

uint32_t mcast_qp_num(struct mcast_qp *self)
{
	return self->qp->qp_num;
}

int mcast_query_qp(struct mcast_qp *self)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init_attr;
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_query_qp(self->qp, &attr, IBV_QP_STATE, &init_attr));
	if (!ret && attr.qp_state == IBV_QPS_ERR) {
		pthread_mutex_lock(&self->lock);
		mcast_note_failure(self, IBV_WC_WR_FLUSH_ERR);
		pthread_mutex_unlock(&self->lock);
	}
	mcast_leave_gate(&self->gate);
	return ret ? ret : attr.qp_state < IBV_QPS_UNKNOWN ? (int)attr.qp_state : IBV_QPS_UNKNOWN;
}

/* In ERR nobody sleeps: the gate's descriptor stays readable until the QP is reset. */
static void set_state(struct mcast_qp *self, enum ibv_qp_state state)
{
	eventfd_t unused;

	if (state == IBV_QPS_ERR && self->state != IBV_QPS_ERR)
		(void)!eventfd_write(self->gate.wake_fd, 1);
	if (state != IBV_QPS_ERR && self->state == IBV_QPS_ERR) {
		(void)!eventfd_read(self->gate.wake_fd, &unused);
		if (mcast_is_shut(&self->gate))
			(void)!eventfd_write(self->gate.wake_fd, 1); /* the close had made it readable, which was read just now */
	}
	self->state = state;
}

void mcast_note_failure(struct mcast_qp *self, enum ibv_wc_status status)
{
	set_state(self, IBV_QPS_ERR);
	if (self->failure == IBV_WC_SUCCESS || self->failure == IBV_WC_WR_FLUSH_ERR)
		self->failure = status;
}

static int note_reason(struct mcast_qp *self, int reason)
{
	self->reason = self->reason ? self->reason : reason;
	mcast_note_failure(self, IBV_WC_FATAL_ERR);
	return -EIO;
}

int mcast_note_gone(struct mcast_qp *self)
{
	return note_reason(self, GONE);
}

int mcast_note_impossible(struct mcast_qp *self)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	if (self->state != IBV_QPS_ERR && self->qp)
		mcast_sym.ibv_modify_qp(self->qp, &attr, IBV_QP_STATE); /* the device shall write nothing more for it */
	return note_reason(self, IMPOSSIBLE);
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

	if (!ret && state == IBV_QPS_RESET)
		mcast_drop_received(self); /* now, because some drivers take what was not polled out of the queue at a reset */
	if (!ret)
		ret = mcast_returned(mcast_sym.ibv_modify_qp(self->qp, &attr, mask));
	if (ret && state == IBV_QPS_RESET && self->state != IBV_QPS_RESET)
		mcast_post_free_slots(self);
	if (ret)
		return ret;
	set_state(self, state);
	if (state == IBV_QPS_RESET) {
		mcast_forget_posted(self);
		/* a handle may name a source address that is gone, which may be the reason for the reset */
		mcast_retire_ahs(self);
	}
	if (state == IBV_QPS_INIT && self->init.qp_type == IBV_QPT_UD)
		return mcast_post_free_slots(self);
	return 0;
}

/* What the device has told by now is about what a reset has ended. */
static void forget_failure(struct mcast_qp *self)
{
	mcast_read_async(self);
	pthread_mutex_lock(&self->lock);
	set_state(self, IBV_QPS_RESET);
	self->reason = 0;
	self->failure = IBV_WC_SUCCESS;
	pthread_mutex_unlock(&self->lock);
}

/* keeps_failure: why the QP was in ERR is told again when it is there again. */
int mcast_modify_qp(struct mcast_qp *self, int state, int keeps_failure)
{
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	pthread_mutex_lock(&self->lock);
	ret = modify_locked(self, (enum ibv_qp_state)state);
	pthread_mutex_unlock(&self->lock);
	if (!ret && state == IBV_QPS_RESET && !keeps_failure)
		forget_failure(self);
	mcast_leave_gate(&self->gate);
	return ret;
}

static union ibv_gid gid_of(const uint8_t *bytes)
{
	union ibv_gid gid = { .raw = { 0 } };

	memcpy(gid.raw, bytes, sizeof(gid.raw));
	return gid;
}

int mcast_attach(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_attach_mcast(self->qp, &group, lid));
	mcast_leave_gate(&self->gate);
	return ret;
}

int mcast_detach(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_detach_mcast(self->qp, &group, lid));
	mcast_leave_gate(&self->gate);
	return ret;
}

/* What a leave should have detached, of a QP that its close could not destroy. */
int mcast_detach_late(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);

	if (!mcast_is_shut(&self->gate) || !self->qp)
		return -EBADF;
	return mcast_returned(mcast_sym.ibv_detach_mcast(self->qp, &group, lid));
}

/* --- address handles --- */

static int create_ah(struct ibv_pd *pd, const struct mcast_ah_init *init, struct ibv_ah **ah)
{
	struct ibv_ah_attr attr = {
		.grh = { .dgid = gid_of(init->gid),
			 .flow_label = init->flow_label,
			 .sgid_index = init->sgid_index,
			 .hop_limit = init->hop_limit,
			 .traffic_class = init->traffic_class },
		.dlid = init->dlid,
		.sl = init->sl,
		.static_rate = init->static_rate,
		.src_path_bits = init->src_path_bits,
		.is_global = init->is_global,
		.port_num = init->port_num,
	};

	errno = 0;
	*ah = mcast_sym.ibv_create_ah(pd, &attr);
	return *ah ? 0 : error_or(EINVAL);
}

int mcast_new_ah(struct mcast_qp *self, const struct mcast_ah_init *init, uint64_t *serial)
{
	struct mcast_ah *new = calloc(1, sizeof(*new));
	int ret = new ? mcast_enter_gate(&self->gate) : -ENOMEM;

	if (ret) {
		free(new);
		return ret;
	}
	ret = create_ah(self->pd, init, &new->ah);
	if (ret) {
		free(new);
	} else {
		pthread_mutex_lock(&self->lock);
		*serial = new->serial = ++self->last_serial;
		new->next = self->ahs;
		self->ahs = new;
		mcast_sweep_ahs(self, 0);
		pthread_mutex_unlock(&self->lock);
	}
	mcast_leave_gate(&self->gate);
	return ret;
}

void mcast_retire_ah(struct mcast_qp *self, uint64_t serial)
{
	struct mcast_ah *ah;

	if (mcast_enter_gate(&self->gate))
		return;
	pthread_mutex_lock(&self->lock);
	ah = mcast_find_ah(self, serial);
	if (ah)
		ah->is_retired = 1;
	mcast_sweep_ahs(self, 0);
	pthread_mutex_unlock(&self->lock);
	mcast_leave_gate(&self->gate);
}

void mcast_retire_ahs(struct mcast_qp *self)
{
	for (struct mcast_ah *ah = self->ahs; ah; ah = ah->next)
		ah->is_retired = 1;
	mcast_sweep_ahs(self, 0);
}

struct mcast_ah *mcast_find_ah(struct mcast_qp *self, uint64_t serial)
{
	for (struct mcast_ah **at = &self->ahs; *at; at = &(*at)->next) {
		struct mcast_ah *found = *at;

		if (found->serial != serial)
			continue;
		if (found != self->ahs) { /* to the front: the next send likely goes there, too */
			*at = found->next;
			found->next = self->ahs;
			self->ahs = found;
		}
		return found->is_retired ? NULL : found;
	}
	return NULL;
}

int mcast_sweep_ahs(struct mcast_qp *self, int is_closed)
{
	struct mcast_ah **at = &self->ahs;
	int ret = 0;

	while (*at) {
		struct mcast_ah *one = *at;
		int is_over = is_closed || (one->is_retired && one->end <= self->tail);
		int failed = is_over ? mcast_returned(mcast_sym.ibv_destroy_ah(one->ah)) : 0;

		ret = ret ? ret : failed;
		if (is_over && !failed) {
			*at = one->next;
			free(one);
		} else {
			at = &one->next;
		}
	}
	return ret;
}

/* --- registered memory --- */

/* From now on what lies in these is sent from there; in sends that are not posted yet, too. */
int mcast_set_regions(struct mcast_qp *self, const struct mcast_region *regions, uint32_t count)
{
	struct mcast_region *copy = malloc((count ? count : 1) * sizeof(*copy)), *old;
	int ret = copy ? mcast_enter_gate(&self->gate) : -ENOMEM;

	if (ret) {
		free(copy);
		return ret;
	}
	if (count)
		memcpy(copy, regions, count * sizeof(*copy));
	pthread_mutex_lock(&self->lock);
	old = self->regions;
	self->regions = copy;
	self->region_count = count;
	pthread_mutex_unlock(&self->lock);
	mcast_leave_gate(&self->gate);
	free(old);
	return 0;
}

static void use_user_memory(struct mcast_qp *self, struct ibv_mr *mr, uint64_t address, uint64_t slot,
			    uint32_t count)
{
	self->user.address = address;
	self->user.lkey = mr->lkey;
	self->user.stride = slot;
	self->user.room = slot < INT32_MAX ? (uint32_t)slot : INT32_MAX; /* more has no place in a segment's length */
	self->user.count = count < self->init.recv_depth ? count : self->init.recv_depth;
	self->user.generation = self->user.generation == UINT16_MAX ? 1 : self->user.generation + 1;
	memset(self->user.slots, SLOT_FREE, self->init.recv_depth);
	self->memory = &self->user;
}

/* Changes where payloads arrive; only in RESET, where nothing is posted. mr NULL: the slab again.
 * Returns the generation, which stands in the messages received there. */
int mcast_receive_into(struct mcast_qp *self, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count)
{
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = -EINVAL;
	pthread_mutex_lock(&self->lock);
	if (self->state == IBV_QPS_RESET) {
		if (mr)
			use_user_memory(self, mr, address, slot, count);
		else
			self->memory = &self->slab;
		ret = (int)self->memory->generation;
	}
	pthread_mutex_unlock(&self->lock);
	mcast_leave_gate(&self->gate);
	return ret;
}

void mcast_read_failure(struct mcast_qp *self, struct mcast_failure *out)
{
	int is_closed = mcast_enter_gate(&self->gate);

	if (!is_closed)
		mcast_read_async(self); /* what the device tells, and what it flushes, may be seen in either order */
	pthread_mutex_lock(&self->lock);
	if (!is_closed)
		mcast_reap(self); /* a flushed receive may have been seen before the send that is the reason */
	*out = (struct mcast_failure){ (int)self->failure, self->reason, self->head - self->tail };
	pthread_mutex_unlock(&self->lock);
	if (!is_closed)
		mcast_leave_gate(&self->gate);
}

/* Those that are under way in ERR are lost already, and counted for good at the reset. */
void mcast_read_counters(struct mcast_qp *self, struct mcast_counters *out)
{
	pthread_mutex_lock(&self->lock);
	*out = self->counters;
	if (self->state == IBV_QPS_ERR)
		out->unsent += self->head - self->tail;
	pthread_mutex_unlock(&self->lock);
}

uint32_t mcast_port_changes(struct mcast_qp *self)
{
	return __atomic_load_n(&self->port_changes, __ATOMIC_SEQ_CST);
}

int mcast_recv_fd(struct mcast_qp *self)
{
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = mcast_watch(self, &self->recv);
	mcast_leave_gate(&self->gate);
	return ret;
}

int mcast_send_fd(struct mcast_qp *self)
{
	int ret = mcast_enter_gate(&self->gate);

	if (ret)
		return ret;
	ret = mcast_watch(self, &self->send);
	mcast_leave_gate(&self->gate);
	return ret;
}
