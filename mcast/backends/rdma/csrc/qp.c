/* Making, changing and ending a QP: qp.h says what its parts are, and how a call passes through them. */
#include "qp.h"

#include "cm.h"

#include <stdlib.h>

/* The most inline data worth asking for, then less: devices refuse what they lack. */
static const uint32_t inline_sizes[] = { 256, 128, 64, 0 };

static int create_qp_with(struct mcast_qp *self, struct ibv_pd *pd, uint32_t sges, uint32_t inline_size)
{
	struct ibv_qp_init_attr_ex attr = {
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
		.send_cq = self->sending.completions.cq,
		.recv_cq = self->receiving.completions.cq,
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
		return mcast_errno_or(EINVAL);
	self->state.qp = self->id->qp;
	/* a device may grant more; the slab's room bounds what is ever sent */
	mcast_start_sending(&self->sending, self->mr->lkey, attr.cap.max_inline_data, sges);
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

/* Ends all that was made; what was not, or is ended, is NULL. The QP goes first: the rest is in use by it, the address
 * handles too. All is tried; the first error is returned, and what failed can be tried again. */
static int end_all(struct mcast_qp *self)
{
	int ret = 0, next;

	mcast_close_async(&self->async);
	mcast_gate_end(&self->state.gate); /* nobody tells of anything any more */
	if (self->state.qp) {
		/* rdma_destroy_qp would not say that it failed, and forget the QP all the same */
		ret = mcast_returned(mcast_sym.ibv_destroy_qp(self->state.qp));
		if (self->id)
			self->id->qp = NULL;
		self->id = NULL; /* the id may be destroyed before this is tried again */
		if (ret == -EBUSY)
			return ret; /* still attached: the QP works, and needs the rest */
		if (!ret)
			self->state.qp = NULL;
	}
	next = mcast_close_sending(&self->sending);
	ret = ret ? ret : next;
	next = mcast_close_receiving(&self->receiving);
	ret = ret ? ret : next;
	next = mcast_deregister(&self->mr);
	return ret ? ret : next;
}

void mcast_free_qp(struct mcast_qp *self)
{
	mcast_free_state(&self->state);
	mcast_free_sending(&self->sending);
	mcast_free_receiving(&self->receiving);
	free(self);
}

static int build(struct mcast_qp *self, struct ibv_pd *pd, int *refused)
{
	const struct mcast_qp_init *init = &self->init;
	struct qp_state *state = &self->state;
	struct async_events *async = &self->async;
	int ret;

	ret = mcast_open_async(async, state, pd->context);
	if (!ret)
		ret = mcast_open_sending(&self->sending, state, async, init, pd->context);
	if (!ret)
		ret = mcast_open_receiving(&self->receiving, state, async, init, pd->context, refused);
	if (!ret)
		ret = mcast_register(pd, init->slab, init->slab_bytes, 1, 0, &self->mr);
	if (!ret)
		ret = create_qp(self, pd);
	if (!ret)
		ret = mcast_listen(async, pd->context, self->sending.completions.cq, self->receiving.completions.cq,
				   self->id->port_num);
	if (ret)
		return ret;
	state->state = init->qp_type == IBV_QPT_UD ? IBV_QPS_RTS : IBV_QPS_INIT;
	return mcast_start_receiving(&self->receiving, self->mr->lkey, state->qp->qp_num);
}

int mcast_create_qp(struct mcast_id *id, struct ibv_pd *pd, const struct mcast_qp_init *init,
		    struct mcast_qp **out, int *refused)
{
	struct mcast_qp *self;
	int ret;

	if (!id->id || id->id->qp)
		return id->id ? -EINVAL : -EBADF;
	self = aligned_alloc(_Alignof(struct mcast_qp), sizeof(*self));
	if (!self)
		return -ENOMEM;
	memset(self, 0, sizeof(*self));
	ret = mcast_open_state(&self->state);
	if (ret) {
		free(self);
		return ret;
	}
	self->id = id->id;
	self->pd = pd;
	self->init = *init;
	ret = build(self, pd, refused);
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
	int is_first;

	if (!self)
		return 0;
	is_first = !mcast_is_closed(self);
	mcast_gate_shut(&self->state.gate);
	if (is_first)
		mcast_linger(&self->sending, linger); /* takes the lock: what holds that instead of entering has left, too */
	return end_all(self);
}

int mcast_drain(struct mcast_qp *self, int64_t budget)
{
	struct mcast_send_job all = { .end = ALL_POSTED };
	struct mcast_wait wait = { .event_fd = NO_FD, .signal_fd = NO_FD, .deadline = mcast_now() + budget };

	return mcast_send(&self->sending, &all, &wait);
}

int mcast_clock(struct mcast_qp *self)
{
	return self->receiving.completions.clock;
}

uint32_t mcast_qp_num(struct mcast_qp *self)
{
	return self->state.qp->qp_num;
}

int mcast_query_qp(struct mcast_qp *self)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init_attr;
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_query_qp(self->state.qp, &attr, IBV_QP_STATE, &init_attr));
	if (!ret && attr.qp_state == IBV_QPS_ERR) {
		pthread_mutex_lock(&self->state.lock);
		mcast_note_failure(&self->state, IBV_WC_WR_FLUSH_ERR);
		pthread_mutex_unlock(&self->state.lock);
	}
	mcast_leave_gate(&self->state.gate);
	return ret ? ret : attr.qp_state < IBV_QPS_UNKNOWN ? (int)attr.qp_state : IBV_QPS_UNKNOWN;
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
	int ret = fill_attr(self->id, self->state.state, &attr, &mask);

	if (!ret && state == IBV_QPS_RESET) /* now, because some drivers take what was not polled out of the queue at a reset */
		mcast_drop_received(&self->receiving);
	if (!ret)
		ret = mcast_returned(mcast_sym.ibv_modify_qp(self->state.qp, &attr, mask));
	if (ret && state == IBV_QPS_RESET && self->state.state != IBV_QPS_RESET)
		mcast_post_free_slots(&self->receiving);
	if (ret)
		return ret;
	mcast_set_state(&self->state, state);
	if (state == IBV_QPS_RESET) {
		mcast_forget_sends(&self->sending);
		mcast_forget_receives(&self->receiving);
	}
	if (state == IBV_QPS_INIT && self->init.qp_type == IBV_QPT_UD)
		return mcast_post_free_slots(&self->receiving);
	return 0;
}

/* Read the events of now: they are about work that a reset has ended. */
static void forget_failure(struct mcast_qp *self)
{
	mcast_read_events(&self->async);
	pthread_mutex_lock(&self->state.lock);
	mcast_forget_failure(&self->state);
	pthread_mutex_unlock(&self->state.lock);
}

/* keeps_failure: the reason why the QP was in ERR is reported again when it is in ERR again. */
int mcast_modify_qp(struct mcast_qp *self, int state, int keeps_failure)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	pthread_mutex_lock(&self->state.lock);
	ret = modify_locked(self, (enum ibv_qp_state)state);
	pthread_mutex_unlock(&self->state.lock);
	if (!ret && state == IBV_QPS_RESET && !keeps_failure)
		forget_failure(self);
	mcast_leave_gate(&self->state.gate);
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
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_attach_mcast(self->state.qp, &group, lid));
	mcast_leave_gate(&self->state.gate);
	return ret;
}

int mcast_detach(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_returned(mcast_sym.ibv_detach_mcast(self->state.qp, &group, lid));
	mcast_leave_gate(&self->state.gate);
	return ret;
}

/* Detach what a leave should have detached, of a QP that its close could not destroy. */
int mcast_detach_late(struct mcast_qp *self, const uint8_t *gid, uint16_t lid)
{
	union ibv_gid group = gid_of(gid);

	if (!mcast_is_closed(self) || !self->state.qp)
		return -EBADF;
	return mcast_returned(mcast_sym.ibv_detach_mcast(self->state.qp, &group, lid));
}

int mcast_new_ah(struct mcast_qp *self, const struct mcast_ah_init *init, uint64_t *serial)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_create_ah(&self->sending, self->pd, init, serial);
	mcast_leave_gate(&self->state.gate);
	return ret;
}

void mcast_retire_ah(struct mcast_qp *self, uint64_t serial)
{
	if (mcast_enter_gate(&self->state.gate))
		return;
	mcast_drop_ah(&self->sending, serial);
	mcast_leave_gate(&self->state.gate);
}

/* From now on what lies in these is sent from there; in sends that are not posted yet, too. */
int mcast_set_regions(struct mcast_qp *self, const struct mcast_region *regions, uint32_t count)
{
	struct mcast_region *copy = malloc((count ? count : 1) * sizeof(*copy)), *old;
	int ret = copy ? mcast_enter_gate(&self->state.gate) : -ENOMEM;

	if (ret) {
		free(copy);
		return ret;
	}
	if (count)
		memcpy(copy, regions, count * sizeof(*copy));
	old = mcast_exchange_regions(&self->sending, copy, count);
	mcast_leave_gate(&self->state.gate);
	free(old);
	return 0;
}

/* Changes where payloads arrive; only in RESET, where nothing is posted. mr NULL: the slab again.
 * Returns the generation, which stands in the messages received there. */
int mcast_receive_into(struct mcast_qp *self, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	pthread_mutex_lock(&self->state.lock);
	ret = self->state.state != IBV_QPS_RESET ? -EINVAL :
						   mcast_use_memory(&self->receiving, mr, address, slot, count);
	pthread_mutex_unlock(&self->state.lock);
	mcast_leave_gate(&self->state.gate);
	return ret;
}

int mcast_is_receiving(struct mcast_qp *self)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_has_messages(&self->receiving);
	mcast_leave_gate(&self->state.gate);
	return ret;
}

void mcast_read_failure(struct mcast_qp *self, struct mcast_failure *out)
{
	int is_closed = mcast_enter_gate(&self->state.gate);

	if (!is_closed)
		mcast_read_events(&self->async); /* the device's event and its flushed completions may be seen in either order */
	pthread_mutex_lock(&self->state.lock);
	if (!is_closed)
		mcast_reap(&self->sending); /* a flushed receive may have been seen before the send that is the reason */
	*out = (struct mcast_failure){ (int)self->state.failure, self->state.reason, mcast_under_way(&self->sending) };
	pthread_mutex_unlock(&self->state.lock);
	if (!is_closed)
		mcast_leave_gate(&self->state.gate);
}

/* Those that are under way in ERR are lost already, and counted for good at the reset. */
void mcast_read_counters(struct mcast_qp *self, struct mcast_counters *out)
{
	pthread_mutex_lock(&self->state.lock);
	*out = self->receiving.counters;
	out->sent = self->sending.sent;
	out->unsent = self->sending.unsent;
	if (self->state.state == IBV_QPS_ERR)
		out->unsent += mcast_under_way(&self->sending);
	pthread_mutex_unlock(&self->state.lock);
}

/* --- what the device tells --- */

void mcast_read_async(struct mcast_qp *self)
{
	mcast_read_events(&self->async);
}

uint32_t mcast_port_changes(struct mcast_qp *self)
{
	return __atomic_load_n(&self->async.port_changes, __ATOMIC_SEQ_CST);
}

int mcast_has_port_events(struct mcast_qp *self)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	mcast_read_events(&self->async);
	ret = mcast_holds_events(&self->async);
	mcast_leave_gate(&self->state.gate);
	return ret;
}

int mcast_read_port_events(struct mcast_qp *self, uint8_t *out)
{
	int count = mcast_enter_gate(&self->state.gate);

	if (count)
		return count;
	count = mcast_take_port_events(&self->async, out);
	mcast_leave_gate(&self->state.gate);
	return count;
}

/* --- descriptors for loops outside --- */

static int watch(struct mcast_qp *self, struct completions *completions)
{
	int ret = mcast_enter_gate(&self->state.gate);

	if (ret)
		return ret;
	ret = mcast_watch(completions);
	mcast_leave_gate(&self->state.gate);
	return ret;
}

int mcast_recv_fd(struct mcast_qp *self)
{
	return watch(self, &self->receiving.completions);
}

int mcast_send_fd(struct mcast_qp *self)
{
	return watch(self, &self->sending.completions);
}
