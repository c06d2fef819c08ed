/* Sending in batches: what is copied, inline or to the slab, is posted and forgotten. */
#include "qp.h"

#include <arpa/inet.h>

enum { POLL_BATCH = 32 };

/* A completion stands for its send and for all before; the first that fails for all behind. */
static void note_sent(struct mcast_qp *qp, const struct ibv_wc *wc)
{
	/* of a send that is not under way: by its number others would count as complete, and their memory as free */
	if (wc->wr_id < qp->tail || wc->wr_id >= qp->head) {
		mcast_note_impossible(qp);
	} else if (wc->status == IBV_WC_SUCCESS) {
		qp->tail = wc->wr_id + 1;
	} else {
		if (!qp->send_failed)
			qp->tail = wc->wr_id;
		qp->send_failed = 1;
		mcast_note_failure(qp, wc->status);
	}
}

void mcast_reap(struct mcast_qp *qp)
{
	struct ibv_wc wcs[POLL_BATCH];
	uint64_t before = qp->tail;
	int polled;

	for (uint32_t left = qp->init.send_depth; left; left = polled == POLL_BATCH ? mcast_polls_left(left, polled) : 0) {
		polled = mcast_poll(&qp->send, POLL_BATCH, wcs, NULL);
		for (int i = 0; i < polled; i++)
			note_sent(qp, &wcs[i]);
		if (polled == POLL_IMPOSSIBLE)
			mcast_note_impossible(qp);
		else if (polled < 0)
			mcast_note_failure(qp, IBV_WC_FATAL_ERR);
	}
	if (qp->tail != before && qp->send.followers)
		mcast_call_followers(&qp->send, qp->tail);
}

static uintptr_t slot_of(const struct mcast_qp *qp, uint32_t slot)
{
	return (uintptr_t)qp->init.slab + qp->init.send_offset + (size_t)slot * qp->init.send_stride;
}

static const struct mcast_region *region_of(const struct mcast_qp *qp, uintptr_t address, uint32_t length)
{
	for (uint32_t i = 0; i < qp->region_count; i++)
		if (address >= qp->regions[i].start && address + length <= qp->regions[i].end)
			return &qp->regions[i];
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
static void fill_payload(const struct mcast_qp *qp, struct mcast_send_job *job, uint32_t index, uint32_t slot,
			 struct ibv_send_wr *wr)
{
	uint32_t length = job->lengths[index], head_length = job->head_length;
	int is_inline = head_length + length <= qp->max_inline && !is_on_device(job, index);
	int is_joined = head_length && (is_inline || qp->most_sges < 2);
	uintptr_t address = job->addresses[index], place = slot_of(qp, slot);
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
	region = is_joined ? NULL : region_of(qp, address, length);
	if (region) {
		add_segment(wr, place, head_length, qp->mr->lkey);
		add_segment(wr, address, length, region->lkey);
		if (!region->is_constant)
			job->end = wr->wr_id + 1;
	} else {
		memcpy((void *)(place + head_length), (const void *)address, length);
		add_segment(wr, place, head_length + length, qp->mr->lkey);
	}
}

/* The next `count` messages. What is not set here has been 0 from the beginning. */
static void fill_chain(struct mcast_qp *qp, struct mcast_send_job *job, struct ibv_ah *ah, uint32_t count)
{
	enum ibv_wr_opcode opcode = job->has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
	uint32_t imm = htonl(job->imm), slot = qp->head_slot;
	uint64_t told = qp->told;

	for (uint32_t i = 0; i < count; i++) {
		struct ibv_send_wr *wr = &qp->send_wrs[i];
		int is_last = i + 1 == count;

		wr->wr_id = qp->head + i;
		wr->next = is_last ? NULL : wr + 1;
		wr->opcode = opcode;
		wr->imm_data = imm;
		wr->wr.ud.ah = ah;
		wr->wr.ud.remote_qpn = job->remote_qp_num;
		wr->wr.ud.remote_qkey = job->remote_qkey;
		wr->send_flags = 0;
		if (is_last || wr->wr_id + 1 - told >= qp->signal_every) {
			wr->send_flags = IBV_SEND_SIGNALED;
			told = wr->wr_id + 1;
		}
		wr->sg_list = qp->send_sges[i];
		fill_payload(qp, job, job->posted + i, slot, wr);
		slot = slot + 1 == qp->init.send_depth ? 0 : slot + 1;
	}
}

/* 0, or why the next `count` messages cannot be sent. */
static int check_next(const struct mcast_qp *qp, const struct mcast_send_job *job, uint32_t count)
{
	uint32_t end = job->posted + count;

	for (uint32_t i = job->posted; i < end; i++)
		if (job->head_length + job->lengths[i] > qp->init.send_room)
			return -EMSGSIZE;
	for (uint32_t i = job->on_device ? job->posted : end; i < end; i++) {
		const struct mcast_region *region = job->on_device[i] ? region_of(qp, job->addresses[i], job->lengths[i]) :
									NULL;

		if (job->on_device[i] && !(region && region->is_device))
			return -EINVAL; /* the memory was deregistered meanwhile */
	}
	return 0;
}

/* So many of the chain are with the device. */
static void note_posted(struct mcast_qp *qp, uint32_t count)
{
	for (uint32_t i = count; i; i--)
		if (qp->send_wrs[i - 1].send_flags & IBV_SEND_SIGNALED) {
			qp->told = qp->head + i;
			break;
		}
	qp->head += count;
	qp->head_slot += count;
	if (qp->head_slot >= qp->init.send_depth)
		qp->head_slot -= qp->init.send_depth;
	qp->counters.sent += count;
}

/* Chains as many as there is room for behind one doorbell. Those behind one that the device refuses stay ours. */
static int post_sends(struct mcast_qp *qp, struct mcast_send_job *job)
{
	uint32_t room = qp->init.send_depth - (uint32_t)(qp->head - qp->tail);
	uint32_t left = job->count - job->posted;
	uint32_t count = left < room ? left : room;
	struct ibv_send_wr *bad = NULL;
	struct mcast_ah *ah;
	int ret;

	if (!count)
		return 0;
	ah = mcast_find_ah(qp, job->serial);
	if (!ah)
		return -ESTALE;
	ret = check_next(qp, job, count);
	if (ret)
		return ret;
	if (qp->head == qp->tail)
		qp->head_slot = 0; /* none is in use: take those that are in the cache */
	fill_chain(qp, job, ah->ah, count);
	ret = ibv_post_send(qp->qp, qp->send_wrs, &bad);
	if (ret)
		count = bad ? (uint32_t)(bad - qp->send_wrs) : 0;
	note_posted(qp, count);
	job->posted += count;
	if (job->end > qp->head)
		job->end = qp->head;
	ah->end = qp->head;
	return mcast_returned(ret);
}

static int state_for_sending(const struct mcast_qp *qp)
{
	if (qp->state == IBV_QPS_ERR)
		return -EIO;
	return qp->state == IBV_QPS_RTS ? 0 : -EINVAL;
}

static int work(struct mcast_qp *qp, void *what)
{
	struct mcast_send_job *job = what;
	int ret;

	if (job->end == ALL_POSTED)
		job->end = qp->told;
	mcast_reap(qp);
	ret = qp->state == IBV_QPS_ERR || job->count ? state_for_sending(qp) : 0;
	if (!ret && job->posted < job->count)
		ret = post_sends(qp, job);
	if (!ret)
		ret = job->posted == job->count && qp->tail >= job->end;
	/* for room, until a quarter is free: a completion tells of about as many */
	job->room_end = job->posted == job->count ? job->end : qp->head - qp->init.send_depth + 1;
	return ret;
}

int mcast_send_now(struct mcast_qp *qp, struct mcast_send_job *job, int looks)
{
	return looks ? mcast_look_often(qp, work, job, LOOKS) : mcast_look(qp, &qp->send, work, job, 1);
}

int mcast_spin_send(struct mcast_qp *qp, struct mcast_send_job *job, int64_t deadline)
{
	int ret = mcast_enter_gate(&qp->gate);

	if (ret)
		return ret;
	ret = mcast_spin(qp, work, job, deadline);
	mcast_leave_gate(&qp->gate);
	return ret;
}

int mcast_send(struct mcast_qp *qp, struct mcast_send_job *job, const struct mcast_wait *wait)
{
	int ret = mcast_enter_gate(&qp->gate);

	if (ret)
		return ret;
	ret = mcast_busy_poll(qp, &qp->send, work, job, wait);
	if (!ret)
		ret = mcast_wait_for(qp, &qp->send, work, job, &job->room_end, wait);
	mcast_leave_gate(&qp->gate);
	return ret;
}

void mcast_linger(struct mcast_qp *qp, int64_t budget)
{
	struct mcast_send_job all = { .end = ALL_POSTED };
	struct mcast_wait wait = { .event_fd = NO_FD, .signal_fd = NO_FD, .deadline = mcast_now() + budget, .is_last = 1 };

	mcast_wait_for(qp, &qp->send, work, &all, NULL, &wait);
}
