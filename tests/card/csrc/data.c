/* Messages and completions: what is posted, what travels, what is seen when. */
#include "inside.h"

#include <arpa/inet.h>
#include <time.h>

enum { MOST_BYTES = 4096 };

/* A message or a completion that is on its way through the stages. */
struct work {
	struct work *next;
	struct qp *qp;
	int64_t due;
	struct entry entry;
	struct ah *ah;
	struct ibv_ah_attr to;
	uint32_t remote_qp, remote_qkey;
	enum ibv_wr_opcode opcode;
	unsigned int flags;
	__be32 imm;
	int sge_count;
	struct ibv_sge sges[MOST_SGES];
	uint8_t *copied; /* an inline payload that has to wait */
};

static int64_t next_due = INT64_MAX;
static int armed_queues, clock_runs;
static pthread_cond_t clock_wakes;

static void pass_on(struct work *work, enum stage stage);

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

/* --- completions --- */

static void complete(struct cq *cq, const struct entry *entry)
{
	struct entry *place;

	if (cq->head - cq->tail == cq->size) {
		report("completion queue %u of %u entries overflowed", object_of(KIND_CQ, cq)->serial, cq->size);
		return;
	}
	place = &cq->ring[cq->head++ % cq->size];
	*place = *entry;
	if (cq->cq.start_poll) {
		place->stamp = (uint64_t)read_clock(CLOCK_REALTIME);
		place->ticks = (uint64_t)now_ns();
	}
	if (cq->armed) {
		cq->armed = 0;
		armed_queues--;
		if (cq->cq.channel)
			put(&((struct comp_channel *)cq->cq.channel)->events, (struct node){ .about = cq });
	}
}

static int64_t run_due(void);

int next_entry(struct cq *cq, struct entry *out)
{
	if (next_due != INT64_MAX && next_due <= now_ns())
		run_due();
	if (cq->tail == cq->head)
		return 0;
	*out = cq->ring[cq->tail++ % cq->size];
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
	leave();
	return error;
}

/* What was not polled of a queue pair that is gone, or was reset. */
void forget_entries(struct cq *cq, const struct qp *qp)
{
	unsigned kept = cq->tail;

	for (unsigned at = cq->tail; at != cq->head; at++)
		if (cq->ring[at % cq->size].qp != qp)
			cq->ring[kept++ % cq->size] = cq->ring[at % cq->size];
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
		struct receive *receive = &qp->receives[qp->posted % qp->cap.max_recv_wr];

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
	leave();
	return error;
}

/* Where the device finds these bytes; NULL: it may not touch them. */
static uint8_t *reach(const struct qp *qp, uint64_t address, uint64_t length, uint32_t lkey, int writes)
{
	const struct mr *mr = find_mr(lkey);

	if (!mr) {
		report("queue pair %u: no memory region has the key %u, which is in use", qp->qp.qp_num, lkey);
		return NULL;
	}
	if (mr->mr.pd != qp->qp.pd || address < mr->iova || address + length > mr->iova + mr->mr.length ||
	    (writes && !(mr->access & IBV_ACCESS_LOCAL_WRITE)))
		return NULL;
	return mr->base + (address - mr->iova);
}

/* Write into a receive from its byte `at` on. */
static enum ibv_wc_status scatter(const struct qp *qp, const struct receive *receive, const uint8_t *from,
				  size_t length, size_t at)
{
	for (int i = 0; i < receive->count && length; i++) {
		const struct ibv_sge *sge = &receive->sges[i];
		size_t room, part;
		uint8_t *to;

		if (at >= sge->length) {
			at -= sge->length;
			continue;
		}
		room = sge->length - at;
		part = length < room ? length : room;
		to = reach(qp, sge->addr + at, part, sge->lkey, 1);
		if (!to)
			return IBV_WC_LOC_PROT_ERR;
		memcpy(to, from, part);
		from += part;
		length -= part;
		at = 0;
	}
	return length ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* A message uses up a receive. `grh` NULL: the first 40 bytes stay as they are. */
static int arrive(struct qp *qp, struct ibv_wc wc, const uint8_t *grh, const uint8_t *payload, uint32_t length)
{
	const struct receive *receive;
	struct work work;
	int scripted;

	if (qp->taken == qp->posted) {
		qp->dropped++;
		return -1;
	}
	receive = &qp->receives[qp->taken++ % qp->cap.max_recv_wr];
	wc.wr_id = receive->wr_id;
	wc.opcode = IBV_WC_RECV;
	wc.byte_len = GRH_BYTES + length;
	wc.qp_num = qp->qp.qp_num;
	scripted = fault(CALL_recv_completion, NULL, NULL);
	if (scripted)
		wc.status = (enum ibv_wc_status)scripted;
	if (!wc.status && grh)
		wc.status = scatter(qp, receive, grh, GRH_BYTES, 0);
	if (!wc.status)
		wc.status = scatter(qp, receive, payload, length, GRH_BYTES);
	work.qp = qp;
	work.entry = (struct entry){ .wc = wc, .qp = qp };
	work.copied = NULL;
	pass_on(&work, STAGE_RECV);
	if (wc.status)
		fail_qp(qp);
	return 0;
}

int inject(struct qp *qp, const struct card_message *message, const void *payload, uint32_t length)
{
	struct ibv_wc wc = { .status = (enum ibv_wc_status)message->status, .src_qp = message->src_qp,
			     .wc_flags = message->wc_flags, .imm_data = htonl(message->imm),
			     .slid = (uint16_t)message->slid, .sl = (uint8_t)message->sl,
			     .dlid_path_bits = (uint8_t)message->path_bits,
			     .pkey_index = (uint16_t)message->pkey_index };

	return arrive(qp, wc, message->wc_flags & IBV_WC_GRH ? message->grh : NULL, payload, length);
}

/* --- who gets a message --- */

static uint16_t checksum(const uint8_t *header)
{
	uint32_t sum = 0;

	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)(header[i] << 8 | header[i + 1]);
	sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)~(sum + (sum >> 16));
}

static void write_grh(uint8_t *grh, const struct ibv_global_route *route, const uint8_t *source, uint32_t length,
		      enum grh_form form)
{
	uint32_t first = htonl(6u << 28 | (uint32_t)route->traffic_class << 20 | (route->flow_label & 0xfffff));
	uint16_t bytes;

	memset(grh, 0, GRH_BYTES);
	if (form == GRH_IPV6) {
		bytes = htons((uint16_t)length);
		memcpy(grh, &first, 4);
		memcpy(grh + 4, &bytes, 2);
		grh[6] = 0x1b;
		grh[7] = route->hop_limit;
		memcpy(grh + 8, source, 16);
		memcpy(grh + 24, route->dgid.raw, 16);
		return;
	}
	if (form == GRH_IPV4_JUNK)
		memset(grh, 0x60, 20);
	bytes = htons((uint16_t)(20 + length));
	grh[20] = 0x45;
	grh[21] = route->traffic_class;
	memcpy(grh + 22, &bytes, 2);
	grh[28] = route->hop_limit;
	grh[29] = 17;
	memcpy(grh + 32, source + 12, 4);
	memcpy(grh + 36, route->dgid.raw + 12, 4);
	bytes = htons((uint16_t)(checksum(grh + 20) ^ (form == GRH_IPV4_WRONG)));
	memcpy(grh + 30, &bytes, 2);
}

static int is_mapped(const uint8_t *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid, mapped, sizeof(mapped));
}

static enum grh_form form_at(const struct card_port *port, const struct work *work)
{
	if (port->grh != GRH_AUTO)
		return (enum grh_form)port->grh;
	if (!work->to.is_global)
		return GRH_NONE;
	return port->link_layer == IBV_LINK_LAYER_ETHERNET && is_mapped(work->to.grh.dgid.raw) ? GRH_IPV4 : GRH_IPV6;
}

static void deliver(struct work *work, struct card_port *from, struct qp *qp, struct card_port *to,
		    const uint8_t *payload, uint32_t length)
{
	int is_ethernet = to->link_layer == IBV_LINK_LAYER_ETHERNET;
	enum grh_form form = form_at(to, work);
	uint8_t grh[GRH_BYTES];
	struct ibv_wc wc = { .src_qp = work->qp->qp.qp_num, .sl = work->to.sl, .pkey_index = qp->pkey_index,
			     .slid = (uint16_t)(is_ethernet ? to->ethernet_slid : from->lid | work->to.src_path_bits) };

	if (work->opcode == IBV_WR_SEND_WITH_IMM) {
		wc.wc_flags |= IBV_WC_WITH_IMM;
		wc.imm_data = work->imm;
	}
	if (!is_ethernet && work->remote_qp != MULTICAST_QP)
		wc.dlid_path_bits = (uint8_t)(work->to.dlid & ((1u << to->lmc) - 1));
	if (form != GRH_NONE) {
		wc.wc_flags |= IBV_WC_GRH;
		write_grh(grh, &work->to.grh, from->gids[work->to.is_global ? work->to.grh.sgid_index : 0], length, form);
	}
	arrive(qp, wc, form == GRH_NONE ? NULL : grh, payload, length);
}

static int is_attached(const struct work *work, const struct qp *qp, const struct card_port *port)
{
	for (const struct attachment *one = qp->attachments; one; one = one->next)
		if (!memcmp(&one->gid, &work->to.grh.dgid, sizeof(one->gid)) &&
		    (port->link_layer == IBV_LINK_LAYER_ETHERNET || one->lid == work->to.dlid))
			return 1;
	return 0;
}

static int is_meant(const struct work *work, const struct qp *qp, const struct card_port *port)
{
	if (work->remote_qp == MULTICAST_QP)
		return !(qp == work->qp && qp->blocks_loopback) && is_attached(work, qp, port);
	if (work->remote_qp != qp->qp.qp_num)
		return 0;
	if (port->link_layer != IBV_LINK_LAYER_ETHERNET)
		return (work->to.dlid & ~((1u << port->lmc) - 1)) == port->lid;
	for (int i = 0; i < GIDS; i++)
		if (!memcmp(port->gids[i], work->to.grh.dgid.raw, 16))
			return 1;
	return 0;
}

static int is_allowed(const struct work *work, const struct card_port *from, const struct qp *qp,
		      struct card_port *to)
{
	uint16_t one = from->pkeys[work->qp->pkey_index % PKEYS], other = to->pkeys[qp->pkey_index % PKEYS];
	uint32_t qkey = work->remote_qkey & 0x80000000 ? work->qp->qkey : work->remote_qkey;

	if (to->link_layer != IBV_LINK_LAYER_ETHERNET && ((one ^ other) & 0x7fff || !((one | other) & 0x8000)))
		return 0;
	if (qkey == qp->qkey)
		return 1;
	to->qkey_violations++;
	return 0;
}

static void spread(struct work *work, struct card_port *from, const uint8_t *payload, uint32_t length)
{
	int is_group = work->remote_qp == MULTICAST_QP;

	for (struct qp *qp = all_qps; qp; qp = qp->next) {
		struct card_port *to = port_of(object_of(KIND_QP, qp)->device, qp->port);

		if (!to || to->link_layer != from->link_layer || to->state != IBV_PORT_ACTIVE ||
		    object_of(KIND_QP, qp)->device->gone || (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_RTR))
			continue;
		if (!is_meant(work, qp, to) || length > 128u << to->active_mtu)
			continue;
		if (is_group && to->link_layer != IBV_LINK_LAYER_ETHERNET && length > 128u << to->group_mtu)
			continue;
		if (is_allowed(work, from, qp, to))
			deliver(work, from, qp, to, payload, length);
	}
}

/* --- sends --- */

static enum ibv_wc_status gather(const struct work *work, uint8_t *room, const uint8_t **payload, uint32_t *length)
{
	int is_inline = !!(work->flags & IBV_SEND_INLINE);

	*length = 0;
	*payload = room;
	for (int i = 0; i < work->sge_count; i++) {
		const struct ibv_sge *sge = &work->sges[i];
		const uint8_t *from = is_inline ? (const uint8_t *)(uintptr_t)sge->addr :
						  reach(work->qp, sge->addr, sge->length, sge->lkey, 0);

		if (!from)
			return IBV_WC_LOC_PROT_ERR;
		if (*length + sge->length > MOST_BYTES)
			return IBV_WC_LOC_LEN_ERR;
		if (work->sge_count == 1)
			*payload = from;
		else
			memcpy(room + *length, from, sge->length);
		*length += sge->length;
	}
	return IBV_WC_SUCCESS;
}

static void transmit(struct work *work)
{
	struct device *device = object_of(KIND_QP, work->qp)->device;
	struct card_port *from = port_of(device, work->qp->port);
	enum ibv_wc_status status = (enum ibv_wc_status)fault(CALL_send_completion, NULL, NULL);
	uint8_t room[MOST_BYTES];
	const uint8_t *payload;
	uint32_t length;

	if (work->qp->state == IBV_QPS_ERR)
		status = IBV_WC_WR_FLUSH_ERR;
	if (!status)
		status = gather(work, room, &payload, &length);
	if (!status && from && length > 128u << from->active_mtu)
		status = IBV_WC_LOC_LEN_ERR;
	if (!status && from && from->state == IBV_PORT_ACTIVE)
		spread(work, from, payload, length);
	work->entry.wc.status = status;
	free(work->copied);
	work->copied = NULL;
	if (status || work->flags & IBV_SEND_SIGNALED)
		pass_on(work, STAGE_SEND);
	if (status && work->qp->state != IBV_QPS_ERR)
		fail_qp(work->qp);
}

static int accept_send(struct qp *qp, const struct ibv_send_wr *wr)
{
	struct ah *ah = (struct ah *)wr->wr.ud.ah;
	struct work work;
	uint64_t length = 0;

	if (qp->sent - qp->done == qp->cap.max_send_wr)
		return ENOMEM;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > MOST_SGES || !is_alive(CALL_ibv_post_send, KIND_AH, ah))
		return EINVAL;
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
	leave();
	return error;
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

	work->copied = malloc(MOST_BYTES);
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

static void pass_on(struct work *work, enum stage stage)
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

/* What is due takes its next step; when the next is due. */
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
		struct receive *receive = &qp->receives[qp->taken++ % qp->cap.max_recv_wr];
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

void wake_clock(void)
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
