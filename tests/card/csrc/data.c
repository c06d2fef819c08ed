/* Messages and completions: what is posted, what travels, what is seen when. */
#include "inside.h"

#include <time.h>

enum { MAX_PAYLOAD = 4096 };

static int64_t next_due = INT64_MAX;
static int armed_queues, clock_runs;
static pthread_cond_t clock_wakes;

static int64_t read_clock(clockid_t which)
{
	struct timespec time;

	clock_gettime(which, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t now_ns(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

static int64_t run_due(void);
static void wake_clock(void);

/* --- completions --- */

static void tell_of(struct cq *cq)
{
	cq->armed = 0;
	cq->untold = 0;
	cq->tell_at = INT64_MAX;
	armed_queues--;
	if (cq->cq.channel)
		put(&((struct comp_channel *)cq->cq.channel)->events, (struct node){ .about = cq });
}

static void complete(struct cq *cq, const struct entry *entry)
{
	struct entry *place;

	if (cq->head - cq->tail == cq->size) {
		report("completion queue %u of %u entries overflowed", object_of(KIND_CQ, cq)->serial, cq->size);
		raise_async(device_of(KIND_CQ, cq),
			    (struct ibv_async_event){ .event_type = IBV_EVENT_CQ_ERR, .element.cq = (struct ibv_cq *)cq }, cq,
			    container_of(cq->cq.context, struct context, verbs.context));
		return;
	}
	place = &cq->ring[cq->head++ & cq->mask];
	*place = *entry;
	if (cq->cq.start_poll) {
		place->stamp = (uint64_t)read_clock(CLOCK_REALTIME);
		place->ticks = (uint64_t)now_ns();
	}
	if (!cq->armed)
		return;
	if (++cq->untold >= cq->moderation.cq_count) {
		tell_of(cq);
	} else if (cq->untold == 1 && cq->moderation.cq_period) {
		cq->tell_at = now_ns() + cq->moderation.cq_period * INT64_C(1000);
		if (cq->tell_at < next_due) {
			next_due = cq->tell_at;
			wake_clock();
		}
	}
}

int next_entry(struct cq *cq, struct entry *out)
{
	if (next_due != INT64_MAX && next_due <= now_ns())
		run_due();
	if (cq->tail == cq->head)
		return 0;
	*out = cq->ring[cq->tail++ & cq->mask];
	if (out->is_send)
		out->qp->done = out->position + 1;
	else
		out->qp->freed++;
	return 1;
}

int poll_cq(struct ibv_cq *target, int max, struct ibv_wc *out)
{
	int error = enter(CALL_ibv_poll_cq, KIND_CQ, target);
	struct entry entry;
	int count = 0;

	while (!error && count < max && next_entry((struct cq *)target, &entry))
		out[count++] = entry.wc;
	if (!error)
		count = (int)said(CALL_lie_poll_count, count);
	leave();
	return error ? -error : count;
}

int req_notify_cq(struct ibv_cq *target, int solicited)
{
	int error = enter(CALL_ibv_req_notify_cq, KIND_CQ, target);
	struct cq *cq = (struct cq *)target;

	(void)solicited;
	if (!error && !cq->armed) {
		cq->armed = 1;
		armed_queues++;
		if (next_due != INT64_MAX)
			wake_clock();
	}
	return done(error);
}

/* Remove the completions of a queue pair that is gone, or was reset, which were not polled. */
void forget_entries(struct cq *cq, const struct qp *qp)
{
	unsigned kept = cq->tail;

	for (unsigned at = cq->tail; at != cq->head; at++)
		if (cq->ring[at & cq->mask].qp != qp)
			cq->ring[kept++ & cq->mask] = cq->ring[at & cq->mask];
	cq->head = kept;
}

void forget_cq(struct cq *cq)
{
	armed_queues -= cq->armed;
	free(cq->ring);
}

void forget_armed(void)
{
	armed_queues = 0;
	next_due = INT64_MAX;
}

/* --- receives --- */

int post_recv(struct ibv_qp *target, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	int taken = 0, error = hold(CALL_ibv_post_recv, KIND_QP, target);
	struct qp *qp = (struct qp *)target;
	int scripted = error ? 0 : fault(CALL_ibv_post_recv, NULL, &taken);

	if (!error && qp->state == IBV_QPS_RESET)
		error = EINVAL;
	while (!error && wr) {
		struct receive *receive = &qp->receives[qp->posted & qp->mask];

		if (scripted && !taken--)
			error = scripted;
		else if (qp->posted - qp->freed == qp->cap.max_recv_wr)
			error = ENOMEM;
		else if ((uint32_t)wr->num_sge > qp->cap.max_recv_sge)
			error = EINVAL;
		if (error)
			break;
		receive->wr_id = wr->wr_id;
		receive->count = wr->num_sge;
		memcpy(receive->sges, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
		qp->posted++;
		wr = wr->next;
	}
	if (error)
		*bad = wr;
	else if (qp->state == IBV_QPS_ERR)
		fail_qp(qp);
	return done(error);
}

/* --- sends --- */

static int accept_send(struct qp *qp, const struct ibv_send_wr *wr)
{
	struct ah *ah = (struct ah *)wr->wr.ud.ah;
	struct work work;
	uint64_t length = 0;

	if (qp->sent - qp->done == qp->cap.max_send_wr)
		return ENOMEM;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge || !is_alive(CALL_ibv_post_send, KIND_AH, ah))
		return EINVAL;
	if (wr->send_flags & IBV_SEND_INLINE && wr->num_sge > 1)
		report("queue pair %u: of inline data some devices take the first segment alone", qp->qp.qp_num);
	for (int i = 0; i < wr->num_sge; i++) {
		work.sges[i] = wr->sg_list[i];
		length += wr->sg_list[i].length;
	}
	if (wr->send_flags & IBV_SEND_INLINE && length > qp->cap.max_inline_data)
		return EINVAL;
	work.qp = qp;
	work.entry = (struct entry){ .wc = { .wr_id = wr->wr_id, .qp_num = qp->qp.qp_num, .opcode = IBV_WC_SEND },
				     .qp = qp, .is_send = 1, .position = qp->sent++ };
	work.ah = ah;
	work.to = ah->attr;
	work.remote_qp = wr->wr.ud.remote_qpn;
	work.remote_qkey = wr->wr.ud.remote_qkey;
	work.opcode = wr->opcode;
	work.flags = wr->send_flags;
	work.imm = wr->imm_data;
	work.sge_count = wr->num_sge;
	work.copied = NULL;
	pass_on(&work, STAGE_WIRE);
	return 0;
}

int post_send(struct ibv_qp *target, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	int taken = 0, error = hold(CALL_ibv_post_send, KIND_QP, target);
	struct qp *qp = (struct qp *)target;
	int scripted = error ? 0 : fault(CALL_ibv_post_send, NULL, &taken);

	if (!error && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR)
		error = EINVAL;
	while (!error && wr) {
		error = scripted && !taken-- ? scripted : accept_send(qp, wr);
		if (!error)
			wr = wr->next;
	}
	if (error)
		*bad = wr;
	return done(error);
}

/* --- the stages --- */

static void perform(struct work *work, enum stage stage)
{
	if (stage == STAGE_WIRE)
		transmit(work);
	else if (stage == STAGE_SEND)
		complete((struct cq *)work->qp->qp.send_cq, &work->entry);
	else
		complete((struct cq *)work->qp->qp.recv_cq, &work->entry);
}

/* An inline payload was the device's own from the post on. */
static void copy_inline(struct work *work)
{
	size_t at = 0;

	work->copied = malloc(MAX_PAYLOAD);
	for (int i = 0; i < work->sge_count; i++) {
		memcpy(work->copied + at, (void *)(uintptr_t)work->sges[i].addr, work->sges[i].length);
		work->sges[i].addr = (uintptr_t)work->copied + at;
		at += work->sges[i].length;
	}
}

static void keep(struct work *work, enum stage stage, int64_t delay)
{
	struct qp *qp = work->qp;
	struct work *kept = malloc(sizeof(*kept));
	const struct work *before = qp->first[stage] ? container_of(qp->last[stage], struct work, next) : NULL;

	*kept = *work;
	kept->next = NULL;
	kept->due = delay < 0 ? INT64_MAX : now_ns() + delay;
	if (before && kept->due < before->due)
		kept->due = before->due;
	if (stage == STAGE_WIRE) {
		object_of(KIND_AH, work->ah)->uses++;
		if (work->flags & IBV_SEND_INLINE)
			copy_inline(kept);
	}
	*qp->last[stage] = kept;
	qp->last[stage] = &kept->next;
	if (kept->due < next_due) {
		next_due = kept->due;
		if (armed_queues)
			wake_clock();
	}
}

void pass_on(struct work *work, enum stage stage)
{
	struct qp *qp = work->qp;
	int64_t delay = qp->delay[stage] == INT64_MIN ? delays[stage] : qp->delay[stage];

	if (delay || qp->first[stage])
		keep(work, stage, delay);
	else
		perform(work, stage);
}

static struct work *take_out(struct qp *qp, enum stage stage, struct work **at)
{
	struct work *work = *at;

	*at = work->next;
	if (!work->next)
		qp->last[stage] = at;
	if (stage == STAGE_WIRE && work->ah)
		object_of(KIND_AH, work->ah)->uses--;
	return work;
}

static void let_go(struct qp *qp, enum stage stage, struct work **at)
{
	struct work *work = take_out(qp, stage, at);

	perform(work, stage);
	free(work->copied);
	free(work);
}

/* The event of a moderated queue, if it is due. */
static void tell_if_due(struct cq *cq, int64_t now)
{
	if (cq->tell_at <= now)
		tell_of(cq);
	else if (cq->tell_at < next_due)
		next_due = cq->tell_at;
}

/* Let all work that is due take its next step; return when the next is due. */
static int64_t run_due(void)
{
	int64_t now = now_ns();
	int again = 1;

	while (again) {
		again = 0;
		next_due = INT64_MAX;
		for (struct qp *qp = all_qps; qp; qp = qp->next)
			for (int stage = 0; stage < STAGES; stage++) {
				while (qp->first[stage] && qp->first[stage]->due <= now) {
					let_go(qp, (enum stage)stage, &qp->first[stage]);
					again = 1;
				}
				if (qp->first[stage] && qp->first[stage]->due < next_due)
					next_due = qp->first[stage]->due;
			}
	}
	for (struct qp *qp = all_qps; qp; qp = qp->next) {
		tell_if_due((struct cq *)qp->qp.send_cq, now);
		tell_if_due((struct cq *)qp->qp.recv_cq, now);
	}
	return next_due;
}

int count_work(struct qp *qp, enum stage stage)
{
	int count = 0;

	for (struct work *work = qp->first[stage]; work; work = work->next)
		count++;
	return count;
}

/* Of what is kept, the one at this place; -1: all, in order. How many there were. */
int release_work(struct qp *qp, enum stage stage, int index)
{
	int count = count_work(qp, stage);

	if (index < 0) {
		for (int left = count; left; left--)
			let_go(qp, stage, &qp->first[stage]);
	} else if (index < count) {
		struct work **at = &qp->first[stage];

		while (index--)
			at = &(*at)->next;
		let_go(qp, stage, at);
	}
	return count;
}

void forget_work(struct qp *qp)
{
	for (int stage = 0; stage < STAGES; stage++)
		while (qp->first[stage]) {
			struct work *work = take_out(qp, (enum stage)stage, &qp->first[stage]);

			free(work->copied);
			free(work);
		}
}

void forget_sends_with(const struct ah *ah)
{
	for (struct qp *qp = all_qps; qp; qp = qp->next)
		for (struct work *work = qp->first[STAGE_WIRE]; work; work = work->next)
			if (work->ah == ah)
				work->ah = NULL;
}

/* Into ERR: what is posted completes with a flush error. */
void fail_qp(struct qp *qp)
{
	qp->state = IBV_QPS_ERR;
	while (qp->first[STAGE_WIRE])
		let_go(qp, STAGE_WIRE, &qp->first[STAGE_WIRE]);
	while (qp->taken != qp->posted) {
		struct receive *receive = &qp->receives[qp->taken++ & qp->mask];
		struct work work = { .qp = qp, .entry = { .wc = { .wr_id = receive->wr_id, .opcode = IBV_WC_RECV,
								  .status = IBV_WC_WR_FLUSH_ERR,
								  .qp_num = qp->qp.qp_num },
							  .qp = qp } };

		pass_on(&work, STAGE_RECV);
	}
}

/* --- the clock: only those who sleep need it, who polls finds what is due --- */

static void *run_clock(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&card_lock);
	for (;;) {
		int64_t next = run_due();
		struct timespec until = { .tv_sec = next / 1000000000, .tv_nsec = next % 1000000000 };

		if (next == INT64_MAX || !armed_queues)
			pthread_cond_wait(&clock_wakes, &card_lock);
		else
			pthread_cond_timedwait(&clock_wakes, &card_lock, &until);
	}
	return NULL;
}

static void wake_clock(void)
{
	pthread_condattr_t attr;
	pthread_t thread;

	if (!clock_runs) {
		clock_runs = 1;
		pthread_condattr_init(&attr);
		pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
		pthread_cond_init(&clock_wakes, &attr);
		if (pthread_create(&thread, NULL, run_clock, NULL))
			abort();
		pthread_detach(thread);
	}
	pthread_cond_signal(&clock_wakes);
}
