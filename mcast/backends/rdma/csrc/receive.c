/* Receiving in batches. `receive_work` is one cycle that never blocks. */
#include "qp.h"

#include <arpa/inet.h>

enum {
	POLL_BATCH = 32,
	GRH_BYTES = 40,
};

static uint64_t payload_of(const struct receive_memory *memory, uint32_t slot)
{
	return memory->address + (uint64_t)slot * memory->stride;
}

static uint8_t *grh_of(const struct mcast_qp *qp, const struct receive_memory *memory, uint32_t slot)
{
	if (memory->grh_in_front)
		return (uint8_t *)(uintptr_t)payload_of(memory, slot) - GRH_BYTES;
	return (uint8_t *)qp->init.slab + (size_t)slot * qp->init.grh_stride;
}

struct receive_chain {
	struct ibv_recv_wr wrs[POLL_BATCH];
	struct ibv_sge sges[POLL_BATCH][2];
	uint32_t count;
};

static int post_chain(struct mcast_qp *qp, struct receive_chain *chain)
{
	struct ibv_recv_wr *bad = NULL;
	int ret;

	if (!chain->count)
		return 0;
	chain->wrs[chain->count - 1].next = NULL;
	ret = ibv_post_recv(qp->qp, chain->wrs, &bad);
	for (struct ibv_recv_wr *wr = ret ? bad : NULL; wr; wr = wr->next) {
		qp->memory->slots[wr->wr_id] = SLOT_FREE;
		qp->counters.recv_free--;
	}
	chain->count = 0;
	return mcast_returned(ret);
}

/* Adds a slot to the chain and posts it when it is full. */
static int post_slot(struct mcast_qp *qp, struct receive_chain *chain, uint32_t slot)
{
	const struct receive_memory *memory = qp->memory;
	struct ibv_recv_wr *wr = &chain->wrs[chain->count];
	struct ibv_sge *sge = chain->sges[chain->count];

	sge[0] = (struct ibv_sge){ (uint64_t)(uintptr_t)grh_of(qp, memory, slot), GRH_BYTES, qp->mr->lkey };
	if (memory->grh_in_front)
		sge[0].length += memory->room;
	else
		sge[1] = (struct ibv_sge){ payload_of(memory, slot), memory->room, memory->lkey };
	*wr = (struct ibv_recv_wr){ .wr_id = slot, .next = wr + 1, .sg_list = sge,
				    .num_sge = memory->grh_in_front ? 1 : 2 };
	memory->slots[slot] = SLOT_POSTED;
	qp->counters.recv_free++;
	return ++chain->count == POLL_BATCH ? post_chain(qp, chain) : 0;
}

int mcast_post_free_slots(struct mcast_qp *qp)
{
	struct receive_chain chain = { .count = 0 };
	int ret = 0;

	for (uint32_t slot = 0; slot < qp->memory->count && !ret; slot++)
		if (qp->memory->slots[slot] == SLOT_FREE)
			ret = post_slot(qp, &chain, slot);
	return ret ? ret : post_chain(qp, &chain);
}

/* What mcast_is_receiving has looked at comes first. */
static int poll_receives(struct mcast_qp *qp, int max, struct ibv_wc *wcs, uint64_t *stamps)
{
	int polled;

	if (!qp->has_seen)
		return mcast_poll(&qp->recv, max, wcs, stamps);
	wcs[0] = qp->seen;
	stamps[0] = qp->seen_stamp;
	qp->has_seen = 0;
	polled = max > 1 ? mcast_poll(&qp->recv, max - 1, wcs + 1, stamps + 1) : 0;
	return polled < 0 ? 1 : polled + 1; /* what fails does so again, when nothing is lost by it */
}

enum sight { IS_MESSAGE, IS_FLUSHED, IS_UNUSABLE, IS_IMPOSSIBLE };

/* What a completion of a receive says, if that can be true: drivers have been seen to err, and by a wrong number or
 * length the reader would take other memory for the message. */
static enum sight look_at(const struct receive_memory *memory, const struct ibv_wc *wc)
{
	if (wc->wr_id >= memory->count || memory->slots[wc->wr_id] != SLOT_POSTED)
		return IS_IMPOSSIBLE;
	if (wc->status != IBV_WC_SUCCESS)
		return IS_FLUSHED;
	return wc->byte_len >= GRH_BYTES && wc->byte_len - GRH_BYTES <= memory->room ? IS_MESSAGE : IS_UNUSABLE;
}

void mcast_drop_received(struct mcast_qp *qp)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t stamps[POLL_BATCH];
	int polled;

	for (uint32_t left = qp->init.recv_depth; left; left = mcast_polls_left(left, polled)) {
		polled = poll_receives(qp, POLL_BATCH, wcs, stamps);
		for (int i = 0; i < polled; i++) {
			enum sight sight = look_at(qp->memory, &wcs[i]);

			if (sight == IS_IMPOSSIBLE)
				continue;
			qp->memory->slots[wcs[i].wr_id] = SLOT_FREE;
			qp->counters.recv_free--;
			qp->counters.received += sight == IS_MESSAGE;
			qp->counters.dropped_reset += sight == IS_MESSAGE;
		}
	}
}

void mcast_forget_posted(struct mcast_qp *qp)
{
	struct ibv_wc wcs[POLL_BATCH];
	int polled;

	/* completions that nobody read belong to work that is gone */
	for (uint32_t left = qp->init.send_depth; left; left = mcast_polls_left(left, polled))
		polled = mcast_poll(&qp->send, POLL_BATCH, wcs, NULL);
	mcast_drop_received(qp);
	for (uint32_t slot = 0; slot < qp->memory->count; slot++)
		if (qp->memory->slots[slot] == SLOT_POSTED)
			qp->memory->slots[slot] = SLOT_FREE;
	qp->counters.recv_free = 0;
	qp->counters.unsent += qp->head - qp->tail;
	qp->tail = qp->head;
	qp->send_failed = 0;
	mcast_end_sends(qp);
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

static void read_message(const struct mcast_qp *qp, const struct receive_memory *memory, const struct ibv_wc *wc,
			 uint64_t stamp, struct mcast_message *out)
{
	uint32_t slot = (uint32_t)wc->wr_id;
	int is_ethernet = qp->init.is_ethernet, has_imm = (wc->wc_flags & IBV_WC_WITH_IMM) != 0;

	out->offset = (uint64_t)slot * memory->stride;
	out->length = wc->byte_len - GRH_BYTES;
	out->src_qp = wc->src_qp & 0xffffff; /* as many bits as the header has of this, and of what follows */
	out->imm = has_imm ? ntohl(wc->imm_data) : 0;
	out->slot = slot;
	out->has_imm = (uint8_t)has_imm;
	out->own_qp_num = out->src_qp == qp->qp->qp_num;
	out->src_lid = is_ethernet ? 0 : wc->slid; /* some drivers fill it there, too */
	out->generation = memory->generation;
	out->sl = wc->sl & 0xf;
	out->path_bits = wc->dlid_path_bits & 0x7f;
	out->timestamp = stamp;
	if (wc->wc_flags & IBV_WC_GRH) {
		read_grh(grh_of(qp, memory, slot), is_ethernet, out);
	} else {
		memset(out->source, 0, sizeof(out->source));
		memset(out->group, 0, sizeof(out->group));
	}
}

/* 1: a message is leased, or waits to be received. */
int mcast_is_receiving(struct mcast_qp *qp)
{
	int ret = mcast_enter_gate(&qp->gate);

	if (ret)
		return ret;
	pthread_mutex_lock(&qp->lock);
	if (!qp->has_seen)
		qp->has_seen = mcast_poll(&qp->recv, 1, &qp->seen, &qp->seen_stamp) == 1;
	ret = qp->has_seen;
	for (uint32_t slot = 0; slot < qp->memory->count && !ret; slot++)
		ret = qp->memory->slots[slot] == SLOT_HELD;
	pthread_mutex_unlock(&qp->lock);
	mcast_leave_gate(&qp->gate);
	return ret;
}

/* One completion: 1 for a message, which is written to `out`. */
static int take_completion(struct mcast_qp *qp, const struct ibv_wc *wc, uint64_t stamp, struct receive_chain *again,
			   struct mcast_message *out)
{
	const struct receive_memory *memory = qp->memory;
	enum sight sight = look_at(memory, wc);

	if (sight == IS_IMPOSSIBLE) {
		qp->counters.dropped_invalid += wc->status == IBV_WC_SUCCESS;
		mcast_note_impossible(qp);
		return 0;
	}
	qp->counters.recv_free--;
	memory->slots[wc->wr_id] = sight == IS_MESSAGE ? SLOT_HELD : SLOT_FREE;
	if (sight == IS_MESSAGE)
		read_message(qp, memory, wc, stamp, out);
	else if (sight == IS_FLUSHED)
		mcast_note_failure(qp, wc->status);
	else
		qp->counters.dropped_invalid++;
	if (sight == IS_UNUSABLE && qp->state != IBV_QPS_RESET)
		post_slot(qp, again, (uint32_t)wc->wr_id); /* a receive that cannot be posted is not this call's to report */
	return sight == IS_MESSAGE;
}

/* One cycle: poll an array of completions, turn them into messages. How many there are, and in `polled` how many
 * completions there were; or -EIO. */
static int receive_work(struct mcast_qp *qp, struct mcast_message *out, uint32_t max, int *polled)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t stamps[POLL_BATCH];
	struct receive_chain again;
	int has_clock = qp->recv.clock != STAMPS_NONE, count = 0;

	*polled = poll_receives(qp, max < POLL_BATCH ? (int)max : POLL_BATCH, wcs, stamps);
	if (*polled == POLL_IMPOSSIBLE)
		return mcast_note_impossible(qp);
	if (*polled < 0)
		return -EIO;
	again.count = 0;
	for (int i = 0; i < *polled; i++)
		count += take_completion(qp, &wcs[i], has_clock ? stamps[i] : 0, &again, &out[count]);
	qp->counters.received += (uint32_t)count;
	if (*polled && qp->counters.recv_free < qp->counters.recv_low_water)
		qp->counters.recv_low_water = qp->counters.recv_free;
	qp->counters.recv_empty += *polled && !qp->counters.recv_free;
	post_chain(qp, &again);
	return count;
}

/* Post the receives of these messages again; with the lock held. */
static int give_back(struct mcast_qp *qp, struct receive_memory *memory, const struct mcast_message *messages,
		     uint32_t count)
{
	struct receive_chain chain;
	int ret = 0;

	for (uint32_t i = 0; i < count; i++)
		memory->slots[messages[i].slot] = SLOT_FREE;
	/* in RESET slots wait for INIT; those of the other memory wait until messages arrive there again */
	if (memory != qp->memory || qp->state == IBV_QPS_RESET)
		return 0;
	chain.count = 0;
	for (uint32_t i = 0; i < count && !ret; i++)
		ret = post_slot(qp, &chain, messages[i].slot);
	return ret ? ret : post_chain(qp, &chain);
}

/* As a lease of the message would be read and given back. */
static void copy_out(struct mcast_qp *qp, struct mcast_message *message, uint8_t *copy)
{
	if (qp->memory != &qp->slab || message->length > COPY_ROOM)
		return;
	memcpy(copy, (const void *)(uintptr_t)payload_of(qp->memory, message->slot), message->length);
	give_back(qp, qp->memory, message, 1); /* a receive that cannot be posted is not this call's to report */
	message->slot = NO_SLOT;
}

/* Fill the room as far as messages are there. */
static int work(struct mcast_qp *qp, void *what)
{
	const struct mcast_receive_job *job = what;
	uint32_t count = 0, left = qp->init.recv_depth;
	int got, polled;

	do {
		got = receive_work(qp, job->out + count, job->max - count, &polled);
		count += got > 0 ? (uint32_t)got : 0;
		left = mcast_polls_left(left, polled);
	} while (got >= 0 && left && count < job->max);
	if (count && job->copy)
		copy_out(qp, job->out, job->copy);
	if (count)
		return (int)count;
	return !got && qp->state == IBV_QPS_ERR ? -EIO : got;
}

int mcast_receive_now(struct mcast_qp *qp, struct mcast_receive_job *job, int looks)
{
	return looks ? mcast_look_often(qp, work, job, LOOKS) : mcast_look(qp, &qp->recv, work, job, (int)job->max);
}

int mcast_receive(struct mcast_qp *qp, struct mcast_receive_job *job, const struct mcast_wait *wait)
{
	int got = mcast_enter_gate(&qp->gate);

	if (got)
		return got;
	got = mcast_busy_poll(qp, &qp->recv, work, job, wait);
	if (!got)
		got = mcast_wait_for(qp, &qp->recv, work, job, NULL, wait);
	mcast_leave_gate(&qp->gate);
	return got;
}

int mcast_spin_receive(struct mcast_qp *qp, struct mcast_receive_job *job, int64_t deadline)
{
	int got = mcast_enter_gate(&qp->gate);

	if (got)
		return got;
	got = mcast_spin(qp, work, job, deadline);
	mcast_leave_gate(&qp->gate);
	return got;
}

/* Slots of a user memory that is gone are nobody's any more. */
static struct receive_memory *memory_of(struct mcast_qp *qp, uint32_t generation)
{
	if (generation == qp->slab.generation)
		return &qp->slab;
	return generation == qp->user.generation ? &qp->user : NULL;
}

int mcast_release(struct mcast_qp *qp, uint32_t generation, const struct mcast_message *messages, uint32_t count)
{
	struct receive_memory *memory;
	int ret = 0;

	pthread_mutex_lock(&qp->lock);
	memory = memory_of(qp, generation);
	if (mcast_is_shut(&qp->gate))
		ret = -EBADF;
	else if (memory)
		ret = give_back(qp, memory, messages, count);
	pthread_mutex_unlock(&qp->lock);
	return ret;
}
