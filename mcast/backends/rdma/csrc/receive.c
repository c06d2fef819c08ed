/* Receiving in batches: receive.h says who has a slot when. `receive_work` is one cycle that never blocks. */
#include "receive.h"

#include <arpa/inet.h>
#include <stdlib.h>

enum {
	POLL_BATCH = 32,
	GRH_BYTES = 40,
};

/* Only receives are moderated, because a call that waits for sends waits for room, and would wait longer. */
static int open_queue(struct receiving *self, struct async_events *async, struct ibv_context *context, int *refused)
{
	const struct mcast_qp_init *init = self->init;
	struct completions_init queue = { self->state, async, self, init->recv_depth, init->comp_vector, init->timestamps, 0 };
	int ret;

	*refused = init->timestamps ? REFUSED_TIMESTAMPS : REFUSED_NOTHING;
	ret = mcast_open_completions(&self->completions, context, &queue);
	if (!ret && init->moderation_count) {
		*refused = REFUSED_MODERATION;
		ret = mcast_moderate(&self->completions, init->moderation_count, init->moderation_period);
	}
	if (!ret)
		*refused = REFUSED_NOTHING;
	return ret;
}

int mcast_open_receiving(struct receiving *self, struct qp_state *state, struct async_events *async,
			 const struct mcast_qp_init *init, struct ibv_context *context, int *refused)
{
	self->state = state;
	self->init = init;
	self->slab.slots = calloc(init->recv_depth, 1);
	self->user.slots = calloc(init->recv_depth, 1);
	if (!self->slab.slots || !self->user.slots)
		return -ENOMEM;
	return open_queue(self, async, context, refused);
}

int mcast_start_receiving(struct receiving *self, uint32_t slab_lkey, uint32_t qp_num)
{
	const struct mcast_qp_init *init = self->init;
	int ret;

	self->slab_lkey = slab_lkey;
	self->qp_num = qp_num;
	self->slab.address = (uint64_t)(uintptr_t)init->slab + init->recv_offset;
	self->slab.lkey = slab_lkey;
	self->slab.grh_in_front = 1;
	self->slab.room = init->recv_room;
	self->slab.stride = init->recv_stride;
	self->slab.count = init->recv_depth;
	self->memory = &self->slab;
	if (init->qp_type != IBV_QPT_UD)
		return 0;
	ret = mcast_post_free_slots(self);
	self->counters.recv_low_water = self->counters.recv_free;
	return ret;
}

int mcast_close_receiving(struct receiving *self)
{
	return mcast_close_completions(&self->completions);
}

void mcast_free_receiving(struct receiving *self)
{
	free(self->slab.slots);
	free(self->user.slots);
}

static void use_user_memory(struct receiving *self, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count)
{
	self->user.address = address;
	self->user.lkey = mr->lkey;
	self->user.stride = slot;
	self->user.room = slot < INT32_MAX ? (uint32_t)slot : INT32_MAX; /* more has no place in a segment's length */
	self->user.count = count < self->init->recv_depth ? count : self->init->recv_depth;
	self->user.generation = self->user.generation == UINT16_MAX ? 1 : self->user.generation + 1;
	memset(self->user.slots, SLOT_FREE, self->init->recv_depth);
	self->memory = &self->user;
}

int mcast_use_memory(struct receiving *self, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count)
{
	if (mr)
		use_user_memory(self, mr, address, slot, count);
	else
		self->memory = &self->slab;
	return (int)self->memory->generation;
}

static uint64_t payload_of(const struct receive_memory *memory, uint32_t slot)
{
	return memory->address + (uint64_t)slot * memory->stride;
}

static uint8_t *grh_of(const struct receiving *self, const struct receive_memory *memory, uint32_t slot)
{
	if (memory->grh_in_front)
		return (uint8_t *)(uintptr_t)payload_of(memory, slot) - GRH_BYTES;
	return (uint8_t *)self->init->slab + (size_t)slot * self->init->grh_stride;
}

struct receive_chain {
	struct ibv_recv_wr wrs[POLL_BATCH];
	struct ibv_sge sges[POLL_BATCH][2];
	uint32_t count;
};

static int post_chain(struct receiving *self, struct receive_chain *chain)
{
	struct ibv_recv_wr *bad = NULL;
	int ret;

	if (!chain->count)
		return 0;
	chain->wrs[chain->count - 1].next = NULL;
	ret = ibv_post_recv(self->state->qp, chain->wrs, &bad);
	for (struct ibv_recv_wr *wr = ret ? bad : NULL; wr; wr = wr->next) {
		self->memory->slots[wr->wr_id] = SLOT_FREE;
		self->counters.recv_free--;
	}
	chain->count = 0;
	return mcast_returned(ret);
}

/* Adds a slot to the chain and posts it when it is full. */
static int post_slot(struct receiving *self, struct receive_chain *chain, uint32_t slot)
{
	const struct receive_memory *memory = self->memory;
	struct ibv_recv_wr *wr = &chain->wrs[chain->count];
	struct ibv_sge *sge = chain->sges[chain->count];

	sge[0].addr = (uint64_t)(uintptr_t)grh_of(self, memory, slot);
	sge[0].length = GRH_BYTES + (memory->grh_in_front ? memory->room : 0);
	sge[0].lkey = self->slab_lkey;
	if (!memory->grh_in_front)
		sge[1] = (struct ibv_sge){ payload_of(memory, slot), memory->room, memory->lkey };
	*wr = (struct ibv_recv_wr){ .wr_id = slot, .next = wr + 1, .sg_list = sge,
				    .num_sge = memory->grh_in_front ? 1 : 2 };
	memory->slots[slot] = SLOT_POSTED;
	self->counters.recv_free++;
	return ++chain->count == POLL_BATCH ? post_chain(self, chain) : 0;
}

int mcast_post_free_slots(struct receiving *self)
{
	struct receive_chain chain = { .count = 0 };
	int ret = 0;

	for (uint32_t slot = 0; slot < self->memory->count && !ret; slot++)
		if (self->memory->slots[slot] == SLOT_FREE)
			ret = post_slot(self, &chain, slot);
	return ret ? ret : post_chain(self, &chain);
}

/* Poll; the completion that mcast_has_messages has polled is the first. */
static int poll_receives(struct receiving *self, int max, struct ibv_wc *wcs, uint64_t *stamps)
{
	int polled;

	if (!self->has_seen)
		return mcast_poll(&self->completions, max, wcs, stamps);
	wcs[0] = self->seen;
	stamps[0] = self->seen_stamp;
	self->has_seen = 0;
	polled = max > 1 ? mcast_poll(&self->completions, max - 1, wcs + 1, stamps + 1) : 0;
	return polled < 0 ? 1 : polled + 1; /* an error appears again in the next poll, when nothing is lost by it */
}

enum verdict { IS_MESSAGE, IS_FLUSHED, IS_UNUSABLE, IS_IMPOSSIBLE };

/* Classify a completion of a receive, with its numbers checked: drivers have been seen to err, and by a wrong number or
 * length the reader would take other memory for the message. */
static enum verdict classify(const struct receive_memory *memory, const struct ibv_wc *wc)
{
	if (wc->wr_id >= memory->count || memory->slots[wc->wr_id] != SLOT_POSTED)
		return IS_IMPOSSIBLE;
	if (wc->status != IBV_WC_SUCCESS)
		return IS_FLUSHED;
	return wc->byte_len >= GRH_BYTES && wc->byte_len - GRH_BYTES <= memory->room ? IS_MESSAGE : IS_UNUSABLE;
}

void mcast_drop_received(struct receiving *self)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t stamps[POLL_BATCH];
	int polled;

	for (uint32_t left = self->init->recv_depth; left; left = mcast_polls_left(left, polled)) {
		polled = poll_receives(self, POLL_BATCH, wcs, stamps);
		for (int i = 0; i < polled; i++) {
			enum verdict verdict = classify(self->memory, &wcs[i]);

			if (verdict == IS_IMPOSSIBLE)
				continue;
			self->memory->slots[wcs[i].wr_id] = SLOT_FREE;
			self->counters.recv_free--;
			self->counters.received += verdict == IS_MESSAGE;
			self->counters.dropped_reset += verdict == IS_MESSAGE;
		}
	}
}

void mcast_forget_receives(struct receiving *self)
{
	mcast_drop_received(self);
	for (uint32_t slot = 0; slot < self->memory->count; slot++)
		if (self->memory->slots[slot] == SLOT_POSTED)
			self->memory->slots[slot] = SLOT_FREE;
	self->counters.recv_free = 0;
}

enum { IPV4_AT = 20, IPV4_BYTES = 20 };

/* Of a header with its checksum in it the sum is all ones. */
static int is_sum_right(const uint8_t *header)
{
	uint32_t sum = 0;

	for (int i = 0; i < IPV4_BYTES; i += 2)
		sum += (uint32_t)(header[i] << 8 | header[i + 1]);
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

/* RoCEv2 over IPv4 puts an IPv4 header into the last 20 of the 40 bytes; what lies before is anything. Else they are
 * an IPv6-shaped GRH. Told apart as libibverbs does it (get_grh_header_version). */
static int is_ipv4(const uint8_t *grh)
{
	if (grh[0] >> 4 != 6)
		return grh[IPV4_AT] >> 4 == 4;
	return (grh[IPV4_AT] & 0xf) == IPV4_BYTES / 4 && is_sum_right(grh + IPV4_AT);
}

static void read_grh(const uint8_t *grh, int is_ethernet, struct mcast_message *out)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	if (!is_ethernet || !is_ipv4(grh)) {
		memcpy(out->source, grh + 8, 16);
		memcpy(out->group, grh + 24, 16);
		return;
	}
	memcpy(out->source, mapped, 12);
	memcpy(out->source + 12, grh + 32, 4);
	memcpy(out->group, mapped, 12);
	memcpy(out->group + 12, grh + 36, 4);
}

static void read_message(const struct receiving *self, const struct receive_memory *memory, const struct ibv_wc *wc,
			 uint64_t stamp, struct mcast_message *out)
{
	uint32_t slot = (uint32_t)wc->wr_id;
	int is_ethernet = self->init->is_ethernet, has_imm = (wc->wc_flags & IBV_WC_WITH_IMM) != 0;

	out->offset = (uint64_t)slot * memory->stride;
	out->length = wc->byte_len - GRH_BYTES;
	out->src_qp = wc->src_qp & 0xffffff; /* as many bits as the header has of this, and of what follows */
	out->imm = has_imm ? ntohl(wc->imm_data) : 0;
	out->slot = slot;
	out->has_imm = (uint8_t)has_imm;
	out->own_qp_num = out->src_qp == self->qp_num;
	out->src_lid = is_ethernet ? 0 : wc->slid; /* some drivers fill it there, too */
	out->generation = memory->generation;
	out->sl = wc->sl & 0xf;
	out->path_bits = wc->dlid_path_bits & 0x7f;
	out->timestamp = stamp;
	if (wc->wc_flags & IBV_WC_GRH) {
		read_grh(grh_of(self, memory, slot), is_ethernet, out);
	} else {
		memset(out->source, 0, sizeof(out->source));
		memset(out->group, 0, sizeof(out->group));
	}
}

int mcast_has_messages(struct receiving *self)
{
	int ret;

	pthread_mutex_lock(&self->state->lock);
	if (!self->has_seen)
		self->has_seen = mcast_poll(&self->completions, 1, &self->seen, &self->seen_stamp) == 1;
	ret = self->has_seen;
	for (uint32_t slot = 0; slot < self->memory->count && !ret; slot++)
		ret = self->memory->slots[slot] == SLOT_HELD;
	pthread_mutex_unlock(&self->state->lock);
	return ret;
}

/* One completion: 1 for a message, which is written to `out`. */
static int take_completion(struct receiving *self, const struct ibv_wc *wc, uint64_t stamp, struct receive_chain *again,
			   struct mcast_message *out)
{
	const struct receive_memory *memory = self->memory;
	enum verdict verdict = classify(memory, wc);

	if (verdict == IS_IMPOSSIBLE) {
		self->counters.dropped_invalid += wc->status == IBV_WC_SUCCESS;
		mcast_note_impossible(self->state);
		return 0;
	}
	self->counters.recv_free--;
	memory->slots[wc->wr_id] = verdict == IS_MESSAGE ? SLOT_HELD : SLOT_FREE;
	if (verdict == IS_MESSAGE)
		read_message(self, memory, wc, stamp, out);
	else if (verdict == IS_FLUSHED)
		mcast_note_failure(self->state, wc->status);
	else
		self->counters.dropped_invalid++;
	if (verdict == IS_UNUSABLE && self->state->state != IBV_QPS_RESET)
		post_slot(self, again, (uint32_t)wc->wr_id); /* a receive that cannot be posted is not this call's to report */
	return verdict == IS_MESSAGE;
}

/* One cycle: poll an array of completions, turn them into messages. How many there are, and in `polled` how many
 * completions there were; or -EIO. */
static int receive_work(struct receiving *self, struct mcast_message *out, uint32_t max, int *polled)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t stamps[POLL_BATCH];
	struct receive_chain again;
	int has_clock = self->completions.clock != STAMPS_NONE, count = 0;

	*polled = poll_receives(self, max < POLL_BATCH ? (int)max : POLL_BATCH, wcs, stamps);
	if (*polled == POLL_IMPOSSIBLE)
		return mcast_note_impossible(self->state);
	if (*polled < 0)
		return -EIO;
	again.count = 0;
	for (int i = 0; i < *polled; i++)
		count += take_completion(self, &wcs[i], has_clock ? stamps[i] : 0, &again, &out[count]);
	self->counters.received += (uint32_t)count;
	if (*polled && self->counters.recv_free < self->counters.recv_low_water)
		self->counters.recv_low_water = self->counters.recv_free;
	self->counters.recv_empty += *polled && !self->counters.recv_free;
	post_chain(self, &again);
	return count;
}

/* Post the receives of these messages again; with the lock held. */
static int give_back(struct receiving *self, struct receive_memory *memory, const struct mcast_message *messages,
		     uint32_t count)
{
	struct receive_chain chain;
	int ret = 0;

	for (uint32_t i = 0; i < count; i++)
		memory->slots[messages[i].slot] = SLOT_FREE;
	/* in RESET slots wait for INIT; those of the other memory wait until messages arrive there again */
	if (memory != self->memory || self->state->state == IBV_QPS_RESET)
		return 0;
	chain.count = 0;
	for (uint32_t i = 0; i < count && !ret; i++)
		ret = post_slot(self, &chain, messages[i].slot);
	return ret ? ret : post_chain(self, &chain);
}

/* Copy the message, and post its receive again, as a lease would do. */
static void copy_out(struct receiving *self, struct mcast_message *message, uint8_t *copy)
{
	if (self->memory != &self->slab || message->length > COPY_ROOM)
		return;
	memcpy(copy, (const void *)(uintptr_t)payload_of(self->memory, message->slot), message->length);
	give_back(self, self->memory, message, 1); /* a receive that cannot be posted is not this call's to report */
	message->slot = NO_SLOT;
}

/* Fill the room as far as messages are there. */
static int work(void *owner, void *what)
{
	struct receiving *self = owner;
	const struct mcast_receive_job *job = what;
	uint32_t count = 0, left = self->init->recv_depth;
	int got, polled;

	do {
		got = receive_work(self, job->out + count, job->max - count, &polled);
		count += got > 0 ? (uint32_t)got : 0;
		left = mcast_polls_left(left, polled);
	} while (got >= 0 && left && count < job->max);
	if (count && job->copy)
		copy_out(self, job->out, job->copy);
	if (count)
		return (int)count;
	return !got && self->state->state == IBV_QPS_ERR ? -EIO : got;
}

int mcast_receive_now(struct receiving *self, struct mcast_receive_job *job, int polls)
{
	if (polls)
		return mcast_poll_often(&self->completions, work, job, POLLS);
	return mcast_poll_work(&self->completions, work, job, (int)job->max);
}

int mcast_receive(struct receiving *self, struct mcast_receive_job *job, const struct mcast_wait *wait)
{
	int got = mcast_enter_gate(&self->state->gate);

	if (got)
		return got;
	got = mcast_busy_poll(&self->completions, work, job, wait);
	if (!got)
		got = mcast_wait_for(&self->completions, work, job, NULL, wait);
	mcast_leave_gate(&self->state->gate);
	return got;
}

int mcast_spin_receive(struct receiving *self, struct mcast_receive_job *job, int64_t deadline)
{
	int got = mcast_enter_gate(&self->state->gate);

	if (got)
		return got;
	got = mcast_spin(&self->completions, work, job, deadline);
	mcast_leave_gate(&self->state->gate);
	return got;
}

/* Slots of a user memory that is gone are nobody's any more. */
static struct receive_memory *memory_of(struct receiving *self, uint32_t generation)
{
	if (generation == self->slab.generation)
		return &self->slab;
	return generation == self->user.generation ? &self->user : NULL;
}

int mcast_release(struct receiving *self, uint32_t generation, const struct mcast_message *messages, uint32_t count)
{
	struct receive_memory *memory;
	int ret = 0;

	pthread_mutex_lock(&self->state->lock);
	memory = memory_of(self, generation);
	if (mcast_is_shut(&self->state->gate))
		ret = -EBADF;
	else if (memory)
		ret = give_back(self, memory, messages, count);
	pthread_mutex_unlock(&self->state->lock);
	return ret;
}
