// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The responder of a reliable connection (IBA 9.7.4, 9.7.5): what a request does to the queue pair that it reaches,
 * and what is answered.
 *
 * All runs in the requester's send engine, under the responder's r_lock, one packet at a time. r_psn is the PSN that
 * is expected. A packet with it is new; one before it is a repetition, whose answer was lost: it is acknowledged
 * again, a READ is read again, and an atomic gets the result that was kept; one after it gets a NAK. A receive is
 * taken from the queue by the first packet of a SEND and stays the queue pair's (RVT_R_WRID_VALID, r_sge) until the
 * last; rdmavt flushes it if the queue pair goes to ERR in between. Its completion waits (has_received) until the
 * requester's message has completed, see softib.h.
 */
#include "softib.h"

/* Credits are not used: a requester sends, and gets an RNR NAK (IBA 9.7.7.2). */
#define ACK IB_AETH_CREDIT_INVAL

static enum softib_outcome answer(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response,
				  u8 opcode, u32 psn, u8 syndrome)
{
	response->opcode = opcode;
	response->extension_length = 0;
	if (opcode == IB_OPCODE_RC_ATOMIC_ACKNOWLEDGE) {
		response->extension_length = sizeof(response->extension.at);
		ib_u64_put(((struct softib_qp *)qp->priv)->atomic_result, &response->extension.at.atomic_ack_eth);
	} else if (opcode != IB_OPCODE_RC_RDMA_READ_RESPONSE_MIDDLE) {
		response->extension_length = sizeof(response->extension.aeth);
	}
	/* `at` starts with the AETH, too */
	if (response->extension_length)
		response->extension.aeth = cpu_to_be32(syndrome << IB_AETH_CREDIT_SHIFT | (qp->r_msn & IB_MSN_MASK));
	response->psn = psn & SOFTIB_PSN_MASK;
	response->dest_qpn = qp->remote_qpn;
	response->pkey = rvt_get_pkey(&hca->rdi, 0, qp->s_pkey_index);
	softib_packet_address(hca, response, &qp->remote_ah_attr);
	return SOFTIB_ANSWERED;
}

static enum softib_outcome acknowledge(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response,
				       u32 psn, u8 syndrome)
{
	response->length = 0;
	return answer(hca, qp, response, IB_OPCODE_RC_ACKNOWLEDGE, psn, syndrome);
}

/* The connection ends: the requester gets the NAK, and this queue pair goes to ERR. */
static enum softib_outcome fail(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response,
				u8 syndrome, enum ib_wc_status status)
{
	rvt_rc_error(qp, status);
	return acknowledge(hca, qp, response, qp->r_psn, syndrome);
}

static enum softib_outcome invalid(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response)
{
	return fail(hca, qp, response, IB_NAK_INVALID_REQUEST, IB_WC_LOC_QP_OP_ERR);
}

static enum softib_outcome no_access(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response)
{
	return fail(hca, qp, response, IB_NAK_REMOTE_ACCESS_ERROR, IB_WC_LOC_PROT_ERR);
}

static enum softib_outcome not_ready(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *response)
{
	hca->rvp.n_rnr_naks++;
	return acknowledge(hca, qp, response, qp->r_psn, IB_RNR_NAK | qp->r_min_rnr_timer);
}

static bool has_immediate(u8 opcode)
{
	return opcode == IB_OPCODE_RC_SEND_LAST_WITH_IMMEDIATE || opcode == IB_OPCODE_RC_SEND_ONLY_WITH_IMMEDIATE ||
		opcode == IB_OPCODE_RC_RDMA_WRITE_LAST_WITH_IMMEDIATE ||
		opcode == IB_OPCODE_RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE;
}

/* The receive is done; softib_announce() tells. */
static void complete_receive(struct rvt_qp *qp, const struct softib_packet *request, enum ib_wc_opcode opcode,
			     u32 length)
{
	struct softib_qp *priv = qp->priv;

	priv->has_received = test_bit(RVT_R_WRID_VALID, &qp->r_aflags);
	priv->received_solicited = request->solicited;
	priv->received = (struct ib_wc){
		.wr_id = qp->r_wr_id,
		.status = IB_WC_SUCCESS,
		.opcode = opcode,
		.byte_len = length,
		.qp = &qp->ibqp,
		.src_qp = qp->remote_qpn,
		.slid = request->slid,
		.sl = request->sl,
		.pkey_index = qp->s_pkey_index,
		.port_num = 1,
	};
	if (has_immediate(request->opcode)) {
		priv->received.wc_flags = IB_WC_WITH_IMM;
		priv->received.ex.imm_data = request->imm;
	}
}

/* The caller has r_lock. A receive that was flushed meanwhile is not the queue pair's any more. */
static void announce(struct rvt_qp *qp)
{
	struct softib_qp *priv = qp->priv;

	if (!priv->has_received)
		return;
	priv->has_received = false;
	if (test_and_clear_bit(RVT_R_WRID_VALID, &qp->r_aflags))
		rvt_recv_cq(qp, &priv->received, priv->received_solicited);
}

/* The packet is done: the next one is expected. A message's last is acknowledged. */
static enum softib_outcome taken(struct softib_hca *hca, struct rvt_qp *qp, const struct softib_packet *request,
				 struct softib_packet *response)
{
	qp->r_psn = (qp->r_psn + 1) & SOFTIB_PSN_MASK;
	if (!request->wants_ack)
		return SOFTIB_TAKEN;
	qp->r_msn++;
	return acknowledge(hca, qp, response, request->psn, ACK);
}

static enum softib_outcome take_send(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				     struct softib_packet *response, bool first, bool last)
{
	int got;

	if (first) {
		got = rvt_get_rwqe(qp, false);
		if (got < 0)
			return fail(hca, qp, response, IB_NAK_REMOTE_OPERATIONAL_ERROR, IB_WC_LOC_QP_OP_ERR);
		if (!got)
			return not_ready(hca, qp, response);
		qp->r_rcv_len = 0;
	}
	qp->r_rcv_len += request->length;
	if (qp->r_rcv_len > qp->r_len)
		return fail(hca, qp, response, IB_NAK_INVALID_REQUEST, IB_WC_LOC_LEN_ERR);
	rvt_copy_sge(qp, &qp->r_sge, request->payload, request->length, true, false);
	if (last) {
		rvt_put_ss(&qp->r_sge);
		complete_receive(qp, request, IB_WC_RECV, qp->r_rcv_len);
	}
	return taken(hca, qp, request, response);
}

/* Returns true if the region may be accessed; `state`, of one element, is that memory, and has a reference to it. */
static bool open_region(struct rvt_qp *qp, struct rvt_sge_state *state, u64 at, u32 rkey, u32 length, int access)
{
	*state = (struct rvt_sge_state){ .num_sge = 1, .total_len = length };
	return rvt_rkey_ok(qp, &state->sge, length, at, rkey, access);
}

/* A range is checked as a whole before the first byte of it is touched, and each packet's part again. */
static bool may_access(struct rvt_qp *qp, u64 at, u32 rkey, u32 length, int access)
{
	struct rvt_sge_state state;

	if (!length)
		return true;
	if (!open_region(qp, &state, at, rkey, length, access))
		return false;
	rvt_put_ss(&state);
	return true;
}

static enum softib_outcome take_write(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				      struct softib_packet *response, bool first, bool last)
{
	struct ib_reth *reth = &request->extension.rc.reth;
	struct softib_qp *priv = qp->priv;
	struct rvt_sge_state to;

	if (!(qp->qp_access_flags & IB_ACCESS_REMOTE_WRITE))
		return invalid(hca, qp, response);
	if (first) {
		priv->write_at = get_ib_reth_vaddr(reth);
		priv->write_rkey = be32_to_cpu(reth->rkey);
		priv->write_length = be32_to_cpu(reth->length);
		priv->write_left = priv->write_length;
		if (!may_access(qp, priv->write_at, priv->write_rkey, priv->write_left, IB_ACCESS_REMOTE_WRITE))
			return no_access(hca, qp, response);
	}
	if (request->length > priv->write_left || (last && request->length != priv->write_left))
		return invalid(hca, qp, response);
	if (has_immediate(request->opcode) && !rvt_get_rwqe(qp, true))
		return not_ready(hca, qp, response);
	if (request->length) {
		if (!open_region(qp, &to, priv->write_at, priv->write_rkey, request->length, IB_ACCESS_REMOTE_WRITE))
			return no_access(hca, qp, response);
		rvt_copy_sge(qp, &to, request->payload, request->length, true, false);
	}
	priv->write_at += request->length;
	priv->write_left -= request->length;
	if (last)
		complete_receive(qp, request, IB_WC_RECV_RDMA_WITH_IMM, priv->write_length);
	return taken(hca, qp, request, response);
}

/* One packet of the answer to a READ; part 0 is the first. */
static enum softib_outcome read_part(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				     u32 part, struct softib_packet *response)
{
	struct ib_reth *reth = &request->extension.rc.reth;
	u32 whole = be32_to_cpu(reth->length), offset = part * qp->pmtu, length;
	struct rvt_sge_state from;
	bool last;
	u8 opcode;

	length = min_t(u32, whole - offset, qp->pmtu);
	last = offset + length == whole;
	if (length) {
		if (!open_region(qp, &from, get_ib_reth_vaddr(reth) + offset, be32_to_cpu(reth->rkey), length,
				 IB_ACCESS_REMOTE_READ))
			return no_access(hca, qp, response);
		softib_gather(&from, response->payload, length, true);
	}
	if (part)
		opcode = last ? IB_OPCODE_RC_RDMA_READ_RESPONSE_LAST : IB_OPCODE_RC_RDMA_READ_RESPONSE_MIDDLE;
	else
		opcode = last ? IB_OPCODE_RC_RDMA_READ_RESPONSE_ONLY : IB_OPCODE_RC_RDMA_READ_RESPONSE_FIRST;
	response->length = length;
	return answer(hca, qp, response, opcode, request->psn + part, ACK);
}

static enum softib_outcome take_read(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				     struct softib_packet *response)
{
	struct ib_reth *reth = &request->extension.rc.reth;
	u32 length = be32_to_cpu(reth->length);

	if (!(qp->qp_access_flags & IB_ACCESS_REMOTE_READ) || !qp->r_max_rd_atomic)
		return invalid(hca, qp, response);
	if (!may_access(qp, get_ib_reth_vaddr(reth), be32_to_cpu(reth->rkey), length, IB_ACCESS_REMOTE_READ))
		return no_access(hca, qp, response);
	qp->r_psn = (qp->r_psn + max(rvt_div_round_up_mtu(qp, length), 1U)) & SOFTIB_PSN_MASK;
	qp->r_msn++;
	return read_part(hca, qp, request, 0, response);
}

static enum softib_outcome take_atomic(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				       struct softib_packet *response)
{
	struct ib_atomic_eth *eth = &request->extension.atomic_eth;
	u64 at = get_ib_ateth_vaddr(eth), compare_or_swap = get_ib_ateth_swap(eth);
	struct softib_qp *priv = qp->priv;
	struct rvt_sge_state state;
	u64 *value;

	if (!(qp->qp_access_flags & IB_ACCESS_REMOTE_ATOMIC) || !qp->r_max_rd_atomic || at % sizeof(u64))
		return invalid(hca, qp, response);
	if (!open_region(qp, &state, at, be32_to_cpu(eth->rkey), sizeof(u64), IB_ACCESS_REMOTE_ATOMIC))
		return no_access(hca, qp, response);
	value = state.sge.vaddr;
	if (request->opcode == IB_OPCODE_RC_FETCH_ADD)
		priv->atomic_result = atomic64_fetch_add(compare_or_swap, (atomic64_t *)value);
	else
		priv->atomic_result = cmpxchg(value, get_ib_ateth_compare(eth), compare_or_swap);
	rvt_put_ss(&state);
	priv->atomic_psn = request->psn;
	priv->has_atomic_result = true;
	qp->r_psn = (qp->r_psn + 1) & SOFTIB_PSN_MASK;
	qp->r_msn++;
	response->length = 0;
	return answer(hca, qp, response, IB_OPCODE_RC_ATOMIC_ACKNOWLEDGE, request->psn, ACK);
}

/* A request that was carried out before; its answer did not arrive. */
static enum softib_outcome repeat(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				  u32 part, struct softib_packet *response)
{
	struct softib_qp *priv = qp->priv;

	switch (request->opcode) {
	case IB_OPCODE_RC_RDMA_READ_REQUEST:
		return read_part(hca, qp, request, part, response);
	case IB_OPCODE_RC_COMPARE_SWAP:
	case IB_OPCODE_RC_FETCH_ADD:
		if (!priv->has_atomic_result || priv->atomic_psn != request->psn)
			return SOFTIB_LOST;
		response->length = 0;
		return answer(hca, qp, response, IB_OPCODE_RC_ATOMIC_ACKNOWLEDGE, request->psn, ACK);
	}
	return request->wants_ack ? acknowledge(hca, qp, response, qp->r_psn - 1, ACK) : SOFTIB_TAKEN;
}

/* Returns true if a packet with this opcode and length may come next (IBA 9.7.4.1.2, 9.7.4.1.6). */
static bool in_sequence(struct rvt_qp *qp, const struct softib_packet *request)
{
	struct softib_qp *priv = qp->priv;
	bool sending = test_bit(RVT_R_WRID_VALID, &qp->r_aflags);

	switch (request->opcode) {
	case IB_OPCODE_RC_SEND_MIDDLE:
		return sending && request->length == qp->pmtu;
	case IB_OPCODE_RC_SEND_LAST:
	case IB_OPCODE_RC_SEND_LAST_WITH_IMMEDIATE:
		return sending && request->length <= qp->pmtu;
	case IB_OPCODE_RC_RDMA_WRITE_MIDDLE:
		return priv->write_left && request->length == qp->pmtu;
	case IB_OPCODE_RC_RDMA_WRITE_LAST:
	case IB_OPCODE_RC_RDMA_WRITE_LAST_WITH_IMMEDIATE:
		return priv->write_left && request->length <= qp->pmtu;
	}
	return !sending && !priv->write_left && request->length <= qp->pmtu;
}

static enum softib_outcome take(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *request,
				u32 part, struct softib_packet *response)
{
	int ahead = softib_psn_difference(request->psn, qp->r_psn);

	announce(qp);
	if (qp->state == IB_QPS_RTR && !(qp->r_flags & RVT_R_COMM_EST))
		rvt_comm_est(qp);
	if (ahead < 0)
		return repeat(hca, qp, request, part, response);
	if (ahead > 0)
		return acknowledge(hca, qp, response, qp->r_psn, IB_NAK_PSN_ERROR);
	if (!in_sequence(qp, request))
		return invalid(hca, qp, response);
	switch (request->opcode) {
	case IB_OPCODE_RC_SEND_FIRST:
		return take_send(hca, qp, request, response, true, false);
	case IB_OPCODE_RC_SEND_MIDDLE:
		return take_send(hca, qp, request, response, false, false);
	case IB_OPCODE_RC_SEND_LAST:
	case IB_OPCODE_RC_SEND_LAST_WITH_IMMEDIATE:
		return take_send(hca, qp, request, response, false, true);
	case IB_OPCODE_RC_SEND_ONLY:
	case IB_OPCODE_RC_SEND_ONLY_WITH_IMMEDIATE:
		return take_send(hca, qp, request, response, true, true);
	case IB_OPCODE_RC_RDMA_WRITE_FIRST:
		return take_write(hca, qp, request, response, true, false);
	case IB_OPCODE_RC_RDMA_WRITE_MIDDLE:
		return take_write(hca, qp, request, response, false, false);
	case IB_OPCODE_RC_RDMA_WRITE_LAST:
	case IB_OPCODE_RC_RDMA_WRITE_LAST_WITH_IMMEDIATE:
		return take_write(hca, qp, request, response, false, true);
	case IB_OPCODE_RC_RDMA_WRITE_ONLY:
	case IB_OPCODE_RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE:
		return take_write(hca, qp, request, response, true, true);
	case IB_OPCODE_RC_RDMA_READ_REQUEST:
		return take_read(hca, qp, request, response);
	case IB_OPCODE_RC_COMPARE_SWAP:
	case IB_OPCODE_RC_FETCH_ADD:
		return take_atomic(hca, qp, request, response);
	}
	return invalid(hca, qp, response);
}

static struct rvt_qp *find_connected(struct softib_hca *hca, u32 qpn)
{
	struct rvt_qp *qp = rvt_lookup_qpn(&hca->rdi, &hca->rvp, qpn);

	return qp && qp->ibqp.qp_type == IB_QPT_RC ? qp : NULL;
}

/*
 * Carries out a request that has reached `hca`. Called under RCU, without locks. A READ is answered by several
 * packets: it is called for each, with its number in `part`.
 */
enum softib_outcome softib_respond(struct softib_hca *hca, struct softib_packet *request, u32 part,
				   struct softib_packet *response)
{
	enum softib_outcome outcome = SOFTIB_LOST;
	unsigned long flags;
	struct rvt_qp *qp;

	if (READ_ONCE(hca->leaving) || !softib_is_mine(hca, request))
		return SOFTIB_LOST;
	qp = find_connected(hca, request->dest_qpn);
	if (!qp)
		return SOFTIB_LOST;
	spin_lock_irqsave(&qp->r_lock, flags);
	if (ib_rvt_state_ops[qp->state] & RVT_PROCESS_RECV_OK &&
	    request->slid == rdma_ah_get_dlid(&qp->remote_ah_attr) &&
	    softib_match_pkey(hca, qp, request->pkey) != SOFTIB_PKEYS)
		outcome = take(hca, qp, request, part, response);
	spin_unlock_irqrestore(&qp->r_lock, flags);
	return outcome;
}

/* Lets the user of that queue pair learn what it has received. Called under RCU, without locks. */
void softib_announce(struct softib_hca *hca, u32 qpn)
{
	struct rvt_qp *qp = find_connected(hca, qpn);
	unsigned long flags;

	if (!qp)
		return;
	spin_lock_irqsave(&qp->r_lock, flags);
	announce(qp);
	spin_unlock_irqrestore(&qp->r_lock, flags);
}
