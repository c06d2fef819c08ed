/* Receiving and sending in batches. `*_work` is one cycle that never blocks; `run` and `send` repeat it:
 * spin a while, then arm the CQ and sleep on its fd together with the wake-up fd. */
#include "qp.h"

#include "wait.h"

#include <arpa/inet.h>

enum {
	POLL_BATCH = 32,
	GRH_BYTES = 40,
	LOOKS = 32,	 /* before the first look at the clock, which may cost more than all of these */
};

/* --- both directions --- */

/* The first real reason stays; flushes only follow from it. */
static void note_failure(struct mcast_qp *qp, enum ibv_wc_status status)
{
	qp->state = IBV_QPS_ERR;
	if (qp->failure == IBV_WC_SUCCESS || qp->failure == IBV_WC_WR_FLUSH_ERR)
		qp->failure = status;
}

/* Another thread may have taken it: the fd does not block. */
static int take_completion_event(struct completions *completions)
{
	struct ibv_cq *cq;
	void *context;

	if (mcast_sym.ibv_get_cq_event(completions->channel, &cq, &context))
		return 0;
	mcast_sym.ibv_ack_cq_events(cq, 1);
	return 1;
}

/* 1: look at the CQ again. 0: the deadline has passed, or woken. -EAGAIN: event_fd is readable. Or -errno. */
static int sleep_on(struct mcast_qp *qp, struct completions *completions, int event_fd, int64_t deadline)
{
	int ret = mcast_wait_readable(completions->channel->fd, qp->wake_fd, event_fd, deadline);

	if (ret <= 0)
		return ret;
	take_completion_event(completions);
	return 1;
}

/* --- receiving --- */

static uint64_t payload_of(const struct receive_memory *memory, uint32_t slot)
{
	return memory->address + (uint64_t)slot * memory->stride;
}

static uint8_t *grh_of(struct mcast_qp *qp, uint32_t slot)
{
	if (qp->memory->grh_in_front)
		return (uint8_t *)(uintptr_t)payload_of(qp->memory, slot) - GRH_BYTES;
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
	return -ret;
}

/* Adds a slot to the chain and posts it when it is full. */
static int post_slot(struct mcast_qp *qp, struct receive_chain *chain, uint32_t slot)
{
	struct ibv_recv_wr *wr = &chain->wrs[chain->count];
	struct ibv_sge *sge = chain->sges[chain->count];

	sge[0] = (struct ibv_sge){ (uint64_t)(uintptr_t)grh_of(qp, slot), GRH_BYTES, qp->mr->lkey };
	if (qp->memory->grh_in_front)
		sge[0].length += qp->memory->room;
	else
		sge[1] = (struct ibv_sge){ payload_of(qp->memory, slot), qp->memory->room, qp->memory->lkey };
	*wr = (struct ibv_recv_wr){ .wr_id = slot, .next = wr + 1, .sg_list = sge,
				    .num_sge = qp->memory->grh_in_front ? 1 : 2 };
	qp->memory->slots[slot] = SLOT_POSTED;
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
static int poll_receives(struct mcast_qp *qp, int max, struct ibv_wc *wcs)
{
	int polled;

	if (!qp->has_seen)
		return ibv_poll_cq(qp->recv.cq, max, wcs);
	wcs[0] = qp->seen;
	qp->has_seen = 0;
	polled = max > 1 ? ibv_poll_cq(qp->recv.cq, max - 1, wcs + 1) : 0;
	return polled < 0 ? polled : polled + 1;
}

void mcast_forget_posted(struct mcast_qp *qp)
{
	struct ibv_wc wcs[POLL_BATCH];

	/* completions that nobody read belong to work that is gone */
	while (ibv_poll_cq(qp->send.cq, POLL_BATCH, wcs) > 0)
		;
	while (poll_receives(qp, POLL_BATCH, wcs) > 0)
		;
	for (uint32_t slot = 0; slot < qp->memory->count; slot++)
		if (qp->memory->slots[slot] == SLOT_POSTED)
			qp->memory->slots[slot] = SLOT_FREE;
	qp->counters.recv_free = 0;
	qp->tail = qp->head;
	qp->failure = IBV_WC_SUCCESS;
}

/* RoCEv2 over IPv4 puts an IPv4 header into the last 20 of the 40 bytes; else they are an IPv6-shaped GRH. */
static void read_grh(const uint8_t *grh, struct mcast_message *out)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	if (grh[0] >> 4 == 6) {
		memcpy(out->source, grh + 8, 16);
		memcpy(out->group, grh + 24, 16);
		return;
	}
	memcpy(out->source, mapped, 12);
	memcpy(out->source + 12, grh + 32, 4);
	memcpy(out->group, mapped, 12);
	memcpy(out->group + 12, grh + 36, 4);
}

static void read_message(struct mcast_qp *qp, const struct ibv_wc *wc, struct mcast_message *out)
{
	uint32_t slot = (uint32_t)wc->wr_id;

	*out = (struct mcast_message){
		.offset = (uint64_t)slot * qp->memory->stride,
		.length = wc->byte_len - GRH_BYTES,
		.src_qp = wc->src_qp,
		.slot = slot,
		.src_lid = wc->slid,
		.own_qp_num = wc->src_qp == qp->qp->qp_num,
		.generation = qp->memory->generation,
	};
	if (wc->wc_flags & IBV_WC_WITH_IMM) {
		out->has_imm = 1;
		out->imm = ntohl(wc->imm_data);
	}
	if (wc->wc_flags & IBV_WC_GRH)
		read_grh(grh_of(qp, slot), out);
}

/* 1: a message is leased, or waits to be received. */
int mcast_is_receiving(struct mcast_qp *qp)
{
	int ret;

	pthread_mutex_lock(&qp->lock);
	if (!qp->has_seen)
		qp->has_seen = ibv_poll_cq(qp->recv.cq, 1, &qp->seen) == 1;
	ret = qp->has_seen;
	for (uint32_t slot = 0; slot < qp->memory->count && !ret; slot++)
		ret = qp->memory->slots[slot] == SLOT_HELD;
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

/* One cycle: poll an array of completions, turn them into messages. */
static int receive_work(struct mcast_qp *qp, struct mcast_message *out, uint32_t max)
{
	struct ibv_wc wcs[POLL_BATCH];
	int polled = poll_receives(qp, max < POLL_BATCH ? (int)max : POLL_BATCH, wcs);
	int count = 0;

	if (polled < 0)
		return -EIO;
	for (int i = 0; i < polled; i++) {
		int good = wcs[i].status == IBV_WC_SUCCESS;

		qp->memory->slots[wcs[i].wr_id] = good ? SLOT_HELD : SLOT_FREE;
		if (good)
			read_message(qp, &wcs[i], &out[count++]);
		else
			note_failure(qp, wcs[i].status);
	}
	qp->counters.recv_free -= (uint32_t)polled;
	qp->counters.received += (uint32_t)count;
	if (polled && qp->counters.recv_free < qp->counters.recv_low_water)
		qp->counters.recv_low_water = qp->counters.recv_free;
	qp->counters.recv_empty += polled && !qp->counters.recv_free;
	return count;
}

/* Fill `out` as far as messages are there. */
static int receive_all(struct mcast_qp *qp, struct mcast_message *out, uint32_t max)
{
	uint32_t count = 0;
	int got;

	pthread_mutex_lock(&qp->lock);
	do {
		got = receive_work(qp, out + count, max - count);
		count += got > 0 ? (uint32_t)got : 0;
	} while (got > 0 && count < max);
	if (!count && !got && qp->state == IBV_QPS_ERR)
		got = -EIO;
	pthread_mutex_unlock(&qp->lock);
	return count ? (int)count : got;
}

static int arm(struct ibv_cq *cq)
{
	return -ibv_req_notify_cq(cq, 0);
}

static int run(struct mcast_qp *qp, struct mcast_message *out, uint32_t max, int event_fd, int64_t spin,
	       int64_t budget)
{
	int64_t start = 0, deadline = 0;
	int armed = 0;

	for (;;) {
		int got = receive_all(qp, out, max);
		int64_t now;

		if (got || budget <= 0)
			return got;
		now = mcast_now();
		if (!start) {
			start = now;
			deadline = now + budget;
		}
		if (now >= deadline)
			return 0;
		if (now < start + spin)
			continue;
		/* armed, then polled once more: only now nothing can slip through */
		got = armed ? sleep_on(qp, &qp->recv, event_fd, deadline) : arm(qp->recv.cq);
		if (got < 0 || (armed && !got))
			return got;
		armed = !armed;
	}
}

/* Nothing is there, and somebody sleeps on the fd: silence it, arm it, look again, so that nothing slips through. */
static int rearm(struct mcast_qp *qp, struct mcast_message *out, uint32_t max)
{
	int ret;

	while (take_completion_event(&qp->recv))
		;
	ret = arm(qp->recv.cq);
	return ret ? ret : receive_all(qp, out, max);
}

int mcast_poll(struct mcast_qp *qp, struct mcast_message *out, uint32_t max)
{
	int got = 0;

	for (int looks = 0; !got && looks < LOOKS; looks++)
		got = receive_all(qp, out, max);
	return got;
}

int mcast_run(struct mcast_qp *qp, struct mcast_message *out, uint32_t max, int event_fd, int64_t spin,
	      int64_t budget)
{
	int got = run(qp, out, max, event_fd, spin, budget);
	int late = 0;

	if (qp->fd_is_watched && (!got || got == -EAGAIN))
		late = rearm(qp, out, max);
	return late ? late : got;
}

int mcast_recv_fd(struct mcast_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	qp->fd_is_watched = 1;
	pthread_mutex_unlock(&qp->lock);
	return qp->recv.channel->fd;
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
	struct receive_chain chain = { .count = 0 };
	struct receive_memory *memory;
	int ret = 0;

	pthread_mutex_lock(&qp->lock);
	memory = memory_of(qp, generation);
	for (uint32_t i = 0; memory && i < count; i++)
		memory->slots[messages[i].slot] = SLOT_FREE;
	/* in RESET they wait for INIT, in the other memory for its turn */
	if (memory == qp->memory && qp->state != IBV_QPS_RESET) {
		for (uint32_t i = 0; i < count && !ret; i++)
			ret = post_slot(qp, &chain, messages[i].slot);
		if (!ret)
			ret = post_chain(qp, &chain);
	}
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

/* --- sending --- */

/* One cycle of completions. A completion stands for itself and for all before it. */
static void reap(struct mcast_qp *qp)
{
	struct ibv_wc wcs[POLL_BATCH];
	int polled;

	do {
		polled = ibv_poll_cq(qp->send.cq, POLL_BATCH, wcs);
		for (int i = 0; i < polled; i++) {
			qp->tail = wcs[i].wr_id + 1;
			if (wcs[i].status != IBV_WC_SUCCESS)
				note_failure(qp, wcs[i].status);
		}
	} while (polled == POLL_BATCH);
}

static uint64_t slab_copy(struct mcast_qp *qp, uint64_t sequence, const void *payload, uint32_t length)
{
	uint8_t *slot = (uint8_t *)qp->init.slab + qp->init.send_offset +
			(size_t)((sequence - qp->first_slot) % qp->init.send_depth) * qp->init.send_stride;

	memcpy(slot, payload, length);
	return (uint64_t)(uintptr_t)slot;
}

/* Inline where it fits; from the user's registered memory where it lies in it; else through the slab. */
static void fill_payload(struct mcast_qp *qp, struct mcast_send_job *job, uint64_t sequence, struct ibv_send_wr *wr,
			 struct ibv_sge *sge)
{
	uint32_t length = job->lengths[job->posted];
	int64_t lkey = job->lkeys ? job->lkeys[job->posted] : -1;
	const uint8_t *payload = job->addresses ? (const uint8_t *)job->addresses[job->posted] :
						  job->joined + job->joined_offset;

	job->joined_offset += length;
	*sge = (struct ibv_sge){ (uint64_t)(uintptr_t)payload, length, (uint32_t)lkey };
	if (length <= qp->max_inline) {
		wr->send_flags |= IBV_SEND_INLINE;
	} else if (lkey < 0) {
		sge->addr = slab_copy(qp, sequence, payload, length);
		sge->lkey = qp->mr->lkey;
	}
	wr->sg_list = sge;
	wr->num_sge = length ? 1 : 0;
}

static void fill_wr(struct mcast_qp *qp, struct mcast_send_job *job, uint64_t sequence, int last,
		    struct ibv_send_wr *wr, struct ibv_sge *sge)
{
	*wr = (struct ibv_send_wr){
		.wr_id = sequence,
		.next = last ? NULL : wr + 1,
		.opcode = job->has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
		.wr.ud = { job->ah, job->remote_qp_num, job->remote_qkey },
	};
	if (job->has_imm)
		wr->imm_data = htonl(job->imm);
	if (last || (sequence + 1) % qp->signal_every == 0)
		wr->send_flags |= IBV_SEND_SIGNALED;
	fill_payload(qp, job, sequence, wr, sge);
}

/* Chains as many as there is room for behind one doorbell. */
static int post_sends(struct mcast_qp *qp, struct mcast_send_job *job)
{
	uint32_t room = qp->init.send_depth - (uint32_t)(qp->head - qp->tail);
	uint32_t left = job->count - job->posted;
	uint32_t count = left < room ? left : room;
	struct ibv_send_wr *bad = NULL;
	int ret;

	if (!count)
		return 0;
	if (qp->head == qp->tail)
		qp->first_slot = qp->head; /* none is in use: take those that are in the cache */
	for (uint32_t i = 0; i < count; i++, job->posted++) {
		if (job->lengths[job->posted] > qp->init.send_room)
			return -EMSGSIZE;
		fill_wr(qp, job, qp->head + i, i + 1 == count, &qp->send_wrs[i], &qp->send_sges[i]);
	}
	ret = ibv_post_send(qp->qp, qp->send_wrs, &bad);
	if (ret)
		count = (uint32_t)(bad - qp->send_wrs);
	qp->head += count;
	qp->counters.sent += count;
	job->end = qp->head;
	return -ret;
}

static int state_for_sending(const struct mcast_qp *qp)
{
	if (qp->state == IBV_QPS_ERR)
		return -EIO;
	return qp->state == IBV_QPS_RTS ? 0 : -EINVAL;
}

/* 1: all of the job is posted and completed. 0: not yet. -EIO: the QP is in ERR. Or another -errno. */
static int send_work(struct mcast_qp *qp, struct mcast_send_job *job)
{
	int ret;

	pthread_mutex_lock(&qp->lock);
	reap(qp);
	ret = state_for_sending(qp);
	if (!ret && job->posted < job->count)
		ret = post_sends(qp, job);
	if (!ret)
		ret = job->posted == job->count && qp->tail >= job->end;
	pthread_mutex_unlock(&qp->lock);
	return ret;
}

int mcast_send(struct mcast_qp *qp, struct mcast_send_job *job, int64_t budget)
{
	int64_t now = mcast_now();
	int64_t deadline = now + budget, spin_until = now + MCAST_SPIN_NS;
	uint64_t tail = qp->tail;
	int armed = 0;

	for (;;) {
		int ret = send_work(qp, job);

		if (ret)
			return ret;
		now = mcast_now();
		if (now >= deadline)
			return 0;
		if (qp->tail != tail) {
			tail = qp->tail;
			spin_until = now + MCAST_SPIN_NS;
		}
		if (now < spin_until)
			continue;
		ret = armed ? sleep_on(qp, &qp->send, NO_FD, deadline) : arm(qp->send.cq);
		if (ret < 0 || (armed && !ret))
			return ret;
		armed = !armed;
	}
}

int mcast_send_at_once(struct mcast_qp *qp, struct mcast_send_job *job)
{
	int ret = -EAGAIN;

	pthread_mutex_lock(&qp->lock);
	reap(qp);
	if (!state_for_sending(qp) && job->count <= qp->init.send_depth - (uint32_t)(qp->head - qp->tail))
		ret = post_sends(qp, job);
	pthread_mutex_unlock(&qp->lock);
	for (int looks = 0; !ret && looks < LOOKS; looks++)
		ret = send_work(qp, job);
	return ret;
}

/* As mcast_send, for what was posted before. */
int mcast_wait_sent(struct mcast_qp *qp, uint64_t end, int64_t budget)
{
	struct mcast_send_job nothing = { .end = end };

	return mcast_send(qp, &nothing, budget);
}

int mcast_drain_sends(struct mcast_qp *qp, int64_t budget)
{
	uint64_t end;

	pthread_mutex_lock(&qp->lock);
	end = qp->head;
	pthread_mutex_unlock(&qp->lock);
	return mcast_wait_sent(qp, end, budget);
}
