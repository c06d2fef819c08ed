/* Sending in batches: send.h says what waits for what. */
#include "send.h"

#include <arpa/inet.h>
#include <stdlib.h>

enum { POLL_BATCH = 32 };

int mcast_open_sending(struct sending *self, struct qp_state *state, struct async_events *async,
		       const struct mcast_qp_init *init, struct ibv_context *context)
{
	struct completions_init queue = { state, async, self, init->send_depth, init->comp_vector, 0, 1 };

	self->state = state;
	self->init = init;
	self->signal_every = init->send_depth > 4 ? init->send_depth / 4 : 1;
	self->wrs = calloc(init->send_depth, sizeof(*self->wrs));
	self->sges = calloc(init->send_depth, sizeof(*self->sges));
	if (!self->wrs || !self->sges)
		return -ENOMEM;
	return mcast_open_completions(&self->completions, context, &queue);
}

void mcast_start_sending(struct sending *self, uint32_t slab_lkey, uint32_t max_inline, uint32_t max_sges)
{
	self->slab_lkey = slab_lkey;
	self->max_inline = max_inline;
	self->max_sges = max_sges;
}

int mcast_close_sending(struct sending *self)
{
	int ret, next;

	mcast_retire_all_ahs(&self->handles);
	ret = mcast_sweep_ahs(&self->handles, UINT64_MAX);
	next = mcast_close_completions(&self->completions);
	return ret ? ret : next;
}

void mcast_free_sending(struct sending *self)
{
	free(self->wrs);
	free(self->sges);
	free(self->regions);
}

/* A completion stands for its send and for all before; the first that fails for all behind. */
static void note_sent(struct sending *self, const struct ibv_wc *wc)
{
	/* of a send that is not under way: by its number others would count as complete, and their memory as free */
	if (wc->wr_id < self->tail || wc->wr_id >= self->head) {
		mcast_note_impossible(self->state);
	} else if (wc->status == IBV_WC_SUCCESS) {
		self->tail = wc->wr_id + 1;
	} else {
		if (!self->has_failed)
			self->tail = wc->wr_id;
		self->has_failed = 1;
		mcast_note_failure(self->state, wc->status);
	}
}

void mcast_reap(struct sending *self)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t before = self->tail;
	int polled;

	for (uint32_t left = self->init->send_depth; left; left = polled == POLL_BATCH ? mcast_polls_left(left, polled) : 0) {
		polled = mcast_poll(&self->completions, POLL_BATCH, wcs, NULL);
		for (int i = 0; i < polled; i++)
			note_sent(self, &wcs[i]);
		if (polled == POLL_IMPOSSIBLE)
			mcast_note_impossible(self->state);
		else if (polled < 0)
			mcast_note_failure(self->state, IBV_WC_FATAL_ERR);
	}
	if (self->tail != before && self->completions.followers)
		mcast_call_followers(&self->completions, self->tail);
}

uint64_t mcast_under_way(const struct sending *self)
{
	return self->head - self->tail;
}

void mcast_forget_sends(struct sending *self)
{
	struct ibv_wc wcs[POLL_BATCH];
	int polled;

	/* completions that nobody read belong to work that is gone */
	for (uint32_t left = self->init->send_depth; left; left = mcast_polls_left(left, polled))
		polled = mcast_poll(&self->completions, POLL_BATCH, wcs, NULL);
	self->unsent += mcast_under_way(self);
	self->tail = self->head;
	self->has_failed = 0;
	mcast_end_waits(&self->completions);
	/* a handle may name a source address that is gone, which may be the reason for the reset */
	mcast_retire_all_ahs(&self->handles);
	mcast_sweep_ahs(&self->handles, self->tail);
}

int mcast_create_ah(struct sending *self, struct ibv_pd *pd, const struct mcast_ah_init *init, uint64_t *serial)
{
	struct mcast_ah *new;
	int ret = mcast_make_ah(pd, init, &new);

	if (ret)
		return ret;
	pthread_mutex_lock(&self->state->lock);
	*serial = mcast_add_ah(&self->handles, new);
	mcast_sweep_ahs(&self->handles, self->tail);
	pthread_mutex_unlock(&self->state->lock);
	return 0;
}

void mcast_drop_ah(struct sending *self, uint64_t serial)
{
	struct mcast_ah *ah;

	pthread_mutex_lock(&self->state->lock);
	ah = mcast_find_ah(&self->handles, serial);
	if (ah)
		ah->is_retired = 1;
	mcast_sweep_ahs(&self->handles, self->tail);
	pthread_mutex_unlock(&self->state->lock);
}

struct mcast_region *mcast_exchange_regions(struct sending *self, struct mcast_region *regions, uint32_t count)
{
	struct mcast_region *old;

	pthread_mutex_lock(&self->state->lock);
	old = self->regions;
	self->regions = regions;
	self->region_count = count;
	pthread_mutex_unlock(&self->state->lock);
	return old;
}

static uintptr_t slot_of(const struct sending *self, uint32_t slot)
{
	return (uintptr_t)self->init->slab + self->init->send_offset + (size_t)slot * self->init->send_stride;
}

static const struct mcast_region *region_of(const struct sending *self, uintptr_t address, uint32_t length)
{
	for (uint32_t i = 0; i < self->region_count; i++)
		if (address >= self->regions[i].start && address + length <= self->regions[i].end)
			return &self->regions[i];
	return NULL;
}

static int is_on_device(const struct mcast_send_job *job, uint32_t index)
{
	return job->on_device && job->on_device[index];
}

/* Adds a segment, unless it is empty. */
static void add_segment(struct ibv_send_wr *wr, uintptr_t address, uint32_t length, uint32_t lkey)
{
	if (length)
		wr->sg_list[wr->num_sge++] = (struct ibv_sge){ address, length, lkey };
}

/* Inline where it fits; from the user's registered memory where it lies in it; else through the slab, as a head does.
 * What lies on a device goes out from there. Inline data has one segment: irdma takes no more before rdma-core 44. */
static void fill_payload(const struct sending *self, struct mcast_send_job *job, uint32_t index, uint32_t slot,
			 struct ibv_send_wr *wr)
{
	uint32_t length = job->lengths[index], head_length = job->head_length;
	int is_inline = head_length + length <= self->max_inline && !is_on_device(job, index);
	int is_joined = head_length && (is_inline || self->max_sges < 2);
	uintptr_t address = job->addresses[index], place = slot_of(self, slot);
	const struct mcast_region *region;

	wr->num_sge = 0;
	if (is_inline)
		wr->send_flags |= IBV_SEND_INLINE;
	if (is_inline && !head_length) {
		add_segment(wr, address, length, 0);
		return;
	}
	if (head_length)
		memcpy((void *)place, job->heads + (size_t)index * head_length, head_length);
	region = is_joined ? NULL : region_of(self, address, length);
	if (region) {
		add_segment(wr, place, head_length, self->slab_lkey);
		add_segment(wr, address, length, region->lkey);
		if (!region->is_constant)
			job->end = wr->wr_id + 1;
	} else {
		memcpy((void *)(place + head_length), (const void *)address, length);
		add_segment(wr, place, head_length + length, self->slab_lkey);
	}
}

/* The next `count` messages. What is not set here has been 0 from the beginning. */
static void fill_chain(struct sending *self, struct mcast_send_job *job, struct ibv_ah *ah, uint32_t count)
{
	enum ibv_wr_opcode opcode = job->has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
	uint32_t imm = htonl(job->imm), slot = self->head_slot;
	uint64_t signaled = self->signaled;

	for (uint32_t i = 0; i < count; i++) {
		struct ibv_send_wr *wr = &self->wrs[i];
		int is_last = i + 1 == count;

		wr->wr_id = self->head + i;
		wr->next = is_last ? NULL : wr + 1;
		wr->opcode = opcode;
		wr->imm_data = imm;
		wr->wr.ud.ah = ah;
		wr->wr.ud.remote_qpn = job->remote_qp_num;
		wr->wr.ud.remote_qkey = job->remote_qkey;
		wr->send_flags = 0;
		if (is_last || wr->wr_id + 1 - signaled >= self->signal_every) {
			wr->send_flags = IBV_SEND_SIGNALED;
			signaled = wr->wr_id + 1;
		}
		wr->sg_list = self->sges[i];
		fill_payload(self, job, job->posted + i, slot, wr);
		slot = slot + 1 == self->init->send_depth ? 0 : slot + 1;
	}
}

/* 0, or why the next `count` messages cannot be sent. */
static int check_next(const struct sending *self, const struct mcast_send_job *job, uint32_t count)
{
	uint32_t end = job->posted + count;

	for (uint32_t i = job->posted; i < end; i++)
		if (job->head_length + job->lengths[i] > self->init->send_room)
			return -EMSGSIZE;
	for (uint32_t i = job->on_device ? job->posted : end; i < end; i++) {
		const struct mcast_region *region = job->on_device[i] ? region_of(self, job->addresses[i], job->lengths[i]) :
									NULL;

		if (job->on_device[i] && !(region && region->is_device))
			return -EINVAL; /* the memory was deregistered meanwhile */
	}
	return 0;
}

/* Note that so many sends of the chain were posted. */
static void note_posted(struct sending *self, uint32_t count)
{
	for (uint32_t i = count; i; i--)
		if (self->wrs[i - 1].send_flags & IBV_SEND_SIGNALED) {
			self->signaled = self->head + i;
			break;
		}
	self->head += count;
	self->head_slot += count;
	if (self->head_slot >= self->init->send_depth)
		self->head_slot -= self->init->send_depth;
	self->sent += count;
}

/* Chains as many as there is room for behind one doorbell. Those behind one that the device refuses stay ours. */
static int post_sends(struct sending *self, struct mcast_send_job *job)
{
	uint32_t room = self->init->send_depth - (uint32_t)(self->head - self->tail);
	uint32_t left = job->count - job->posted;
	uint32_t count = left < room ? left : room;
	struct ibv_send_wr *bad = NULL;
	struct mcast_ah *ah;
	int ret;

	if (!count)
		return 0;
	ah = mcast_find_ah(&self->handles, job->serial);
	if (!ah)
		return -ESTALE;
	ret = check_next(self, job, count);
	if (ret)
		return ret;
	if (self->head == self->tail)
		self->head_slot = 0; /* none is in use: take those that are in the cache */
	fill_chain(self, job, ah->ah, count);
	ret = ibv_post_send(self->state->qp, self->wrs, &bad);
	if (ret)
		count = bad ? (uint32_t)(bad - self->wrs) : 0;
	note_posted(self, count);
	job->posted += count;
	if (job->end > self->head)
		job->end = self->head;
	ah->end = self->head;
	return mcast_returned(ret);
}

static int state_for_sending(const struct sending *self)
{
	if (self->state->state == IBV_QPS_ERR)
		return -EIO;
	return self->state->state == IBV_QPS_RTS ? 0 : -EINVAL;
}

static int work(void *owner, void *what)
{
	struct sending *self = owner;
	struct mcast_send_job *job = what;
	int ret;

	if (job->end == ALL_POSTED)
		job->end = self->signaled;
	mcast_reap(self);
	ret = self->state->state == IBV_QPS_ERR || job->count ? state_for_sending(self) : 0;
	if (!ret && job->posted < job->count)
		ret = post_sends(self, job);
	if (!ret)
		ret = job->posted == job->count && self->tail >= job->end;
	/* for room, until a quarter is free: a completion tells of about as many */
	job->room_end = job->posted == job->count ? job->end : self->head - self->init->send_depth + 1;
	return ret;
}

int mcast_send_now(struct sending *self, struct mcast_send_job *job, int polls)
{
	return polls ? mcast_poll_often(&self->completions, work, job, POLLS) : mcast_poll_work(&self->completions, work, job, 1);
}

int mcast_spin_send(struct sending *self, struct mcast_send_job *job, int64_t deadline)
{
	int ret = mcast_enter_gate(&self->state->gate);

	if (ret)
		return ret;
	ret = mcast_spin(&self->completions, work, job, deadline);
	mcast_leave_gate(&self->state->gate);
	return ret;
}

int mcast_send(struct sending *self, struct mcast_send_job *job, const struct mcast_wait *wait)
{
	int ret = mcast_enter_gate(&self->state->gate);

	if (ret)
		return ret;
	ret = mcast_busy_poll(&self->completions, work, job, wait);
	if (!ret)
		ret = mcast_wait_for(&self->completions, work, job, &job->room_end, wait);
	mcast_leave_gate(&self->state->gate);
	return ret;
}

void mcast_linger(struct sending *self, int64_t budget)
{
	struct mcast_send_job all = { .end = ALL_POSTED };
	struct mcast_wait wait = { .event_fd = NO_FD, .signal_fd = NO_FD, .deadline = mcast_now() + budget, .is_last = 1 };

	mcast_wait_for(&self->completions, work, &all, NULL, &wait);
}
