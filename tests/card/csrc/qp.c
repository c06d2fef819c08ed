/* libibverbs: queue pairs, the groups they are attached to, address handles. */
#include "inside.h"

enum { FIRST_QP = 16 };

static uint32_t last_qp_num = FIRST_QP;

/* --- queue pairs; the lock is held where the connection manager calls --- */

static int refuses(const struct device *device, const struct ibv_qp_init_attr_ex *init)
{
	const struct ibv_qp_cap *cap = &init->cap;

	if (cap->max_send_wr > device->is.max_qp_wr || cap->max_recv_wr > device->is.max_qp_wr ||
	    cap->max_inline_data > device->is.max_inline || cap->max_send_sge > device->is.max_send_sge ||
	    cap->max_recv_sge > MAX_SGES)
		return EINVAL;
	if (init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && init->create_flags &&
	    device->is.block_loopback == BLOCK_REFUSED)
		return EINVAL;
	return 0;
}

struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_qp_init_attr_ex *init)
{
	struct device *device = device_of(KIND_PD, pd);
	struct qp *qp;
	struct qp **at = &all_qps;
	int error = fault(CALL_ibv_create_qp, object_of(KIND_PD, pd), NULL);

	if (!error)
		error = refuses(device, init);
	if (error) {
		errno = error;
		return NULL;
	}
	qp = make(KIND_QP, sizeof(*qp), device);
	qp->qp = (struct ibv_qp){ .context = pd->context, .pd = pd, .send_cq = init->send_cq,
				  .recv_cq = init->recv_cq, .qp_context = init->qp_context,
				  .qp_num = ++last_qp_num, .qp_type = init->qp_type };
	init->cap.max_inline_data = device->is.max_inline; /* a device may grant more than was asked for */
	qp->cap = init->cap;
	qp->mask = power_of_two(init->cap.max_recv_wr) - 1;
	qp->receives = calloc(qp->mask + 1, sizeof(*qp->receives));
	qp->blocks_loopback = init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS &&
			      init->create_flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB &&
			      device->is.block_loopback == BLOCK_HONOURED;
	for (int stage = 0; stage < STAGES; stage++) {
		qp->last[stage] = &qp->first[stage];
		qp->delay[stage] = INT64_MIN;
	}
	object_of(KIND_PD, pd)->uses++;
	object_of(KIND_CQ, init->send_cq)->uses++;
	object_of(KIND_CQ, init->recv_cq)->uses++;
	while (*at)
		at = &(*at)->next;
	*at = qp;
	return &qp->qp;
}

int end_qp(struct ibv_qp *target)
{
	struct qp *qp = (struct qp *)target;
	struct object *object = object_of(KIND_QP, qp);
	struct qp **at = &all_qps;
	int error = fault(CALL_ibv_destroy_qp, object, NULL);

	if (error) {
		object->refused = 1;
		return error;
	}
	if (qp->attached)
		return EBUSY;
	settle_events(CALL_ibv_destroy_qp, KIND_QP, qp);
	forget(&container_of(target->context, struct context, verbs.context)->async, qp);
	while (*at != qp)
		at = &(*at)->next;
	*at = qp->next;
	forget_work(qp);
	forget_entries((struct cq *)target->send_cq, qp);
	forget_entries((struct cq *)target->recv_cq, qp);
	object_of(KIND_PD, target->pd)->uses--;
	object_of(KIND_CQ, target->send_cq)->uses--;
	object_of(KIND_CQ, target->recv_cq)->uses--;
	free(qp->receives);
	free(qp->attachments);
	end(KIND_QP, qp);
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex same = { .send_cq = init->send_cq, .recv_cq = init->recv_cq, .cap = init->cap,
					    .qp_context = init->qp_context, .qp_type = init->qp_type };
	int error = hold(CALL_ibv_create_qp, KIND_PD, pd);
	struct ibv_qp *qp = error ? NULL : new_qp(pd, &same);

	init->cap = same.cap;
	return made(qp, qp ? 0 : error ? error : errno);
}

int ibv_destroy_qp(struct ibv_qp *target)
{
	int error = hold(CALL_ibv_destroy_qp, KIND_QP, target);

	return done(error ? error : end_qp(target));
}

int ibv_query_qp(struct ibv_qp *target, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	int error = enter(CALL_ibv_query_qp, KIND_QP, target);
	struct qp *qp = (struct qp *)target;

	(void)mask;
	if (!error) {
		memset(attr, 0, sizeof(*attr));
		attr->qp_state = attr->cur_qp_state = target->state = qp->state;
		attr->qp_state = (enum ibv_qp_state)said(CALL_lie_qp_state, qp->state);
		attr->qkey = qp->qkey;
		attr->pkey_index = qp->pkey_index;
		attr->port_num = qp->port;
		attr->cap = qp->cap;
		memset(init, 0, sizeof(*init));
		init->cap = qp->cap;
	}
	return done(error);
}

static int may_follow(enum ibv_qp_state from, enum ibv_qp_state to)
{
	if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
		return 1;
	return (from == IBV_QPS_RESET && to == IBV_QPS_INIT) || (from == IBV_QPS_INIT && to == IBV_QPS_INIT) ||
	       (from == IBV_QPS_INIT && to == IBV_QPS_RTR) || (from == IBV_QPS_RTR && to == IBV_QPS_RTS) ||
	       (from == IBV_QPS_RTS && to == IBV_QPS_RTS);
}

int ibv_modify_qp(struct ibv_qp *target, struct ibv_qp_attr *attr, int mask)
{
	int error = enter(CALL_ibv_modify_qp, KIND_QP, target);
	struct qp *qp = (struct qp *)target;

	if (!error && mask & IBV_QP_STATE && !may_follow(qp->state, attr->qp_state))
		error = EINVAL;
	if (error)
		return done(error);
	if (mask & IBV_QP_QKEY)
		qp->qkey = attr->qkey;
	if (mask & IBV_QP_PKEY_INDEX)
		qp->pkey_index = attr->pkey_index;
	if (mask & IBV_QP_PORT)
		qp->port = attr->port_num;
	if (!(mask & IBV_QP_STATE))
		return done(0);
	if (attr->qp_state == IBV_QPS_ERR) {
		fail_qp(qp);
	} else if (attr->qp_state == IBV_QPS_RESET) {
		forget_work(qp);
		forget_entries((struct cq *)target->send_cq, qp);
		forget_entries((struct cq *)target->recv_cq, qp);
		qp->posted = qp->taken = qp->freed = qp->sent = qp->done = 0;
	}
	qp->state = target->state = attr->qp_state;
	return done(0);
}

/* --- groups and address handles --- */

static int is_group(const uint8_t *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return gid[0] == 0xff || (!memcmp(gid, mapped, sizeof(mapped)) && gid[12] >> 4 == 0xe);
}

static uint32_t find_attachment(const struct qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	uint32_t place = 0;

	while (place < qp->attached &&
	       (memcmp(&qp->attachments[place].gid, gid, sizeof(*gid)) || qp->attachments[place].lid != lid))
		place++;
	return place;
}

int attach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	struct qp *qp = (struct qp *)target;
	int error = fault(CALL_ibv_attach_mcast, object_of(KIND_QP, qp), NULL);

	if (!error && (target->qp_type != IBV_QPT_UD || !is_group(gid->raw)))
		error = EINVAL;
	if (error)
		return error;
	if (find_attachment(qp, gid, lid) < qp->attached)
		return 0;
	if (!(qp->attached & (qp->attached - 1))) /* a power of two: the room is full */
		qp->attachments = realloc(qp->attachments, (2 * qp->attached + 1) * sizeof(*qp->attachments));
	qp->attachments[qp->attached++] = (struct attachment){ *gid, lid };
	return 0;
}

int detach(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	struct qp *qp = (struct qp *)target;
	int error = fault(CALL_ibv_detach_mcast, object_of(KIND_QP, qp), NULL);

	uint32_t place = find_attachment(qp, gid, lid);

	if (!error && place == qp->attached)
		error = EINVAL;
	if (!error)
		qp->attachments[place] = qp->attachments[--qp->attached];
	return error;
}

int ibv_attach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	int error = hold(CALL_ibv_attach_mcast, KIND_QP, target);

	return done(error ? error : attach(target, gid, lid));
}

int ibv_detach_mcast(struct ibv_qp *target, const union ibv_gid *gid, uint16_t lid)
{
	int error = hold(CALL_ibv_detach_mcast, KIND_QP, target);

	return done(error ? error : detach(target, gid, lid));
}

static int last_rate;

int card_last_rate(void)
{
	return __atomic_load_n(&last_rate, __ATOMIC_SEQ_CST);
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	int error = enter(CALL_ibv_create_ah, KIND_PD, pd);
	struct card_port *port = error ? NULL : port_of(device_of(KIND_PD, pd), attr->port_num);
	struct ah *ah = NULL;

	if (!error && (!port || (!attr->is_global && port->link_layer == IBV_LINK_LAYER_ETHERNET) ||
		       (attr->is_global && attr->grh.sgid_index >= GIDS)))
		error = EINVAL;
	if (!error) {
		ah = make(KIND_AH, sizeof(*ah), device_of(KIND_PD, pd));
		ah->ah.context = pd->context;
		ah->ah.pd = pd;
		ah->attr = *attr;
		__atomic_store_n(&last_rate, attr->static_rate, __ATOMIC_SEQ_CST);
		object_of(KIND_PD, pd)->uses++;
	}
	return made(ah, error);
}

int ibv_destroy_ah(struct ibv_ah *target)
{
	int error = enter(CALL_ibv_destroy_ah, KIND_AH, target);

	/* a device may look an address up as late as when it sends */
	if (error == EBUSY) {
		report("ibv_destroy_ah: sends with address handle %u are under way", object_of(KIND_AH, target)->serial);
		forget_sends_with((struct ah *)target);
		error = 0;
	}
	if (!error) {
		object_of(KIND_PD, target->pd)->uses--;
		end(KIND_AH, target);
	}
	return done(error);
}
