// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The requester of a reliable connection (IBA 9.7.3, 9.7.5): a work request becomes packets, each is carried to the
 * responder, and its answer back, before the next one is made.
 *
 * A packet, or an answer, that is lost starts rdmavt's retry timer; an RNR NAK starts its RNR timer. The send engine
 * then leaves the message where it is, and the timer wakes it: it goes on with the packet that was lost. A card would
 * learn of some losses sooner, by a NAK for the packet after it. Only the owner of RVT_S_BUSY changes `sent` and
 * s_sge: of the message, so many packets are with the responder, and this memory is next.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "softib.h"

#define MORE (SOFTIB_WAIT - 1)	/* of this message there are more packets */

/* Opcodes come in the order FIRST, MIDDLE, LAST, LAST_WITH_IMMEDIATE, ONLY, ONLY_WITH_IMMEDIATE. */
static u8 opcode_of(const struct rvt_swqe *wqe, bool first, bool last)
{
	bool immediate = wqe->wr.opcode == IB_WR_SEND_WITH_IMM || wqe->wr.opcode == IB_WR_RDMA_WRITE_WITH_IMM;
	u8 base;

	switch (wqe->wr.opcode) {
	case IB_WR_RDMA_READ:
		return IB_OPCODE_RC_RDMA_READ_REQUEST;
	case IB_WR_ATOMIC_CMP_AND_SWP:
		return IB_OPCODE_RC_COMPARE_SWAP;
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		return IB_OPCODE_RC_FETCH_ADD;
	case IB_WR_RDMA_WRITE:
	case IB_WR_RDMA_WRITE_WITH_IMM:
		base = IB_OPCODE_RC_RDMA_WRITE_FIRST;
		break;
	default:
		base = IB_OPCODE_RC_SEND_FIRST;
	}
	if (last)
		return base + (first ? 4 : 2) + immediate;
	return base + !first;
}

static bool is_atomic(const struct rvt_swqe *wqe)
{
	return wqe->wr.opcode == IB_WR_ATOMIC_CMP_AND_SWP || wqe->wr.opcode == IB_WR_ATOMIC_FETCH_AND_ADD;
}

static void fill_atomic(struct softib_packet *request, const struct rvt_swqe *wqe)
{
	struct ib_atomic_eth *eth = &request->extension.atomic_eth;
	bool add = wqe->wr.opcode == IB_WR_ATOMIC_FETCH_AND_ADD;

	put_ib_ateth_vaddr(wqe->atomic_wr.remote_addr, eth);
	eth->rkey = cpu_to_be32(wqe->atomic_wr.rkey);
	put_ib_ateth_swap(add ? wqe->atomic_wr.compare_add : wqe->atomic_wr.swap, eth);
	put_ib_ateth_compare(add ? 0 : wqe->atomic_wr.compare_add, eth);
	request->extension_length = sizeof(*eth);
}

static void fill_reth(struct softib_packet *request, const struct rvt_swqe *wqe, u32 offset)
{
	struct ib_reth *reth = &request->extension.rc.reth;

	put_ib_reth_vaddr(wqe->rdma_wr.remote_addr + offset, reth);
	reth->rkey = cpu_to_be32(wqe->rdma_wr.rkey);
	reth->length = cpu_to_be32(wqe->length - offset);
	request->extension_length = sizeof(*reth);
}

/* Makes the next packet of the message out of `from`, which is moved on. The caller has s_lock. */
static void fill_request(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe,
			 struct softib_packet *request, struct rvt_sge_state *from)
{
	struct softib_qp *priv = qp->priv;
	bool read = wqe->wr.opcode == IB_WR_RDMA_READ, atomic = is_atomic(wqe);
	bool write = wqe->wr.opcode == IB_WR_RDMA_WRITE || wqe->wr.opcode == IB_WR_RDMA_WRITE_WITH_IMM;
	u32 offset = priv->sent * qp->pmtu, left = wqe->length - offset;
	bool last = read || atomic || left <= qp->pmtu;

	request->opcode = opcode_of(wqe, !priv->sent, last);
	request->psn = (wqe->psn + priv->sent) & SOFTIB_PSN_MASK;
	request->dest_qpn = qp->remote_qpn;
	request->pkey = rvt_get_pkey(&hca->rdi, 0, qp->s_pkey_index);
	request->wants_ack = last;
	request->solicited = last && wqe->wr.send_flags & IB_SEND_SOLICITED;
	request->extension_length = 0;
	request->has_imm = false;
	request->length = read || atomic ? 0 : min_t(u32, left, qp->pmtu);
	if (atomic)
		fill_atomic(request, wqe);
	else if (read || (write && !priv->sent))
		fill_reth(request, wqe, offset);
	if (last && (wqe->wr.opcode == IB_WR_SEND_WITH_IMM || wqe->wr.opcode == IB_WR_RDMA_WRITE_WITH_IMM)) {
		request->has_imm = true;
		request->imm = wqe->wr.ex.imm_data;
		request->extension_length += sizeof(request->imm);
	}
	softib_packet_address(hca, request, &qp->remote_ah_attr);
	softib_gather(from, request->payload, request->length, false);
}

struct journey {
	struct softib_hca *hca;		/* the requester's */
	struct rvt_qp *qp;
	struct softib_packet *request, *response;
};

static enum softib_outcome come_back(struct journey *on, struct softib_hca *responder)
{
	if (softib_reach(&responder->port[1], on->response) != on->hca || !softib_is_mine(on->hca, on->response) ||
	    on->response->dest_qpn != on->qp->ibqp.qp_num ||
	    softib_match_pkey(on->hca, on->qp, on->response->pkey) == SOFTIB_PKEYS)
		return SOFTIB_LOST;
	return SOFTIB_ANSWERED;
}

/* Takes the request to the responder, but for a further part of a READ's answer; and the answer back. */
static enum softib_outcome travel(struct journey *on, u32 part)
{
	enum softib_outcome outcome = SOFTIB_LOST;
	struct softib_qp *priv = on->qp->priv;
	struct softib_hca *responder;

	rcu_read_lock();
	responder = part ? READ_ONCE(softib.hca[priv->responder]) : softib_reach(&on->hca->port[1], on->request);
	if (responder) {
		priv->responder = responder->node.index;
		outcome = softib_respond(responder, on->request, part, on->response);
		if (outcome == SOFTIB_ANSWERED)
			outcome = come_back(on, responder);
	}
	rcu_read_unlock();
	return outcome;
}

static bool may_send(struct rvt_qp *qp)
{
	return ib_rvt_state_ops[qp->state] & RVT_PROCESS_SEND_OK;
}

/* Nothing came back: once more when the timer says so. A timeout of 0 is endless (IBA 11.2.4.2). */
static int lost(struct rvt_qp *qp)
{
	unsigned long flags;

	spin_lock_irqsave(&qp->s_lock, flags);
	if (may_send(qp)) {
		if (qp->timeout)
			rvt_mod_retry_timer(qp);
		else
			qp->s_flags |= RVT_S_WAIT_ACK;
	}
	spin_unlock_irqrestore(&qp->s_lock, flags);
	return SOFTIB_WAIT;
}

static int not_ready(struct rvt_qp *qp, u32 aeth)
{
	int status = SOFTIB_WAIT;
	unsigned long flags;

	spin_lock_irqsave(&qp->s_lock, flags);
	if (!qp->s_rnr_retry) {
		status = IB_WC_RNR_RETRY_EXC_ERR;
	} else if (may_send(qp)) {
		if (qp->s_rnr_retry_cnt < 7)	/* 7 is endless */
			qp->s_rnr_retry--;
		rvt_add_rnr_timer(qp, aeth);
	}
	spin_unlock_irqrestore(&qp->s_lock, flags);
	return status;
}

/* Note that so many more packets reached the responder. */
static int progress(struct rvt_qp *qp, u32 packets, bool done)
{
	struct softib_qp *priv = qp->priv;
	unsigned long flags;
	int status;

	spin_lock_irqsave(&qp->s_lock, flags);
	priv->sent += packets;
	qp->s_retry = qp->s_retry_cnt;
	qp->s_rnr_retry = qp->s_rnr_retry_cnt;
	if (done)
		status = IB_WC_SUCCESS;
	else
		status = may_send(qp) ? MORE : SOFTIB_WAIT;
	spin_unlock_irqrestore(&qp->s_lock, flags);
	return status;
}

/* Handle an ACK or NAK of the message that is sent. */
static int acknowledged(struct journey *on)
{
	u32 aeth = be32_to_cpu(on->response->extension.aeth);
	u8 syndrome = aeth >> IB_AETH_CREDIT_SHIFT;

	if (syndrome < IB_RNR_NAK)
		return on->response->psn == on->request->psn ? progress(on->qp, 1, true) : lost(on->qp);
	if (syndrome < 2 * IB_RNR_NAK)
		return not_ready(on->qp, aeth);
	switch (syndrome) {
	case IB_NAK_INVALID_REQUEST:
		return IB_WC_REM_INV_REQ_ERR;
	case IB_NAK_REMOTE_ACCESS_ERROR:
		return IB_WC_REM_ACCESS_ERR;
	case IB_NAK_REMOTE_OPERATIONAL_ERROR:
		return IB_WC_REM_OP_ERR;
	}
	return lost(on->qp);	/* a PSN that is not expected: the two ends do not agree, and will not */
}

static int read_answered(struct journey *on, struct rvt_swqe *wqe)
{
	struct softib_packet *response = on->response;
	struct softib_qp *priv = on->qp->priv;
	u32 left = wqe->length - priv->sent * on->qp->pmtu, expected = min_t(u32, left, on->qp->pmtu);

	if (response->length != expected)
		return IB_WC_BAD_RESP_ERR;
	rvt_copy_sge(on->qp, &on->qp->s_sge, response->payload, response->length, false, false);
	return progress(on->qp, 1, left == expected);
}

/* One packet, or all that a READ is answered by. */
static int step(struct journey *on, struct rvt_swqe *wqe)
{
	struct rvt_sge_state from = on->qp->s_sge;
	unsigned long flags;
	u32 part = 0;
	int status;
	u64 value;

	spin_lock_irqsave(&on->qp->s_lock, flags);
	fill_request(on->hca, on->qp, wqe, on->request, &from);
	spin_unlock_irqrestore(&on->qp->s_lock, flags);
	do {
		switch (travel(on, part++)) {
		case SOFTIB_LOST:
			return lost(on->qp);
		case SOFTIB_TAKEN:
			on->qp->s_sge = from;
			return progress(on->qp, 1, false);
		case SOFTIB_ANSWERED:
			break;
		}
		switch (on->response->opcode) {
		case IB_OPCODE_RC_ACKNOWLEDGE:
			return acknowledged(on);
		case IB_OPCODE_RC_ATOMIC_ACKNOWLEDGE:
			value = ib_u64_get(&on->response->extension.at.atomic_ack_eth);
			rvt_copy_sge(on->qp, &on->qp->s_sge, &value, sizeof(value), false, false);
			return progress(on->qp, 1, true);
		}
		status = read_answered(on, wqe);
		cond_resched();
	} while (status == MORE);
	return status;
}

static bool is_exhausted(struct rvt_qp *qp)
{
	struct softib_qp *priv = qp->priv;
	unsigned long flags;
	bool exhausted;

	spin_lock_irqsave(&qp->s_lock, flags);
	exhausted = priv->exhausted;
	priv->exhausted = false;
	spin_unlock_irqrestore(&qp->s_lock, flags);
	return exhausted;
}

/* The timer has run out, rdmavt says, with r_lock and s_lock. */
void softib_rc_timeout(struct rvt_qp *qp, u32 psn, int wait)
{
	if (qp->s_retry)
		qp->s_retry--;
	else
		((struct softib_qp *)qp->priv)->exhausted = true;
}

/* At the start of a message. The caller has s_lock and RVT_S_BUSY. */
void softib_rc_begin(struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	((struct softib_qp *)qp->priv)->sent = 0;
	qp->s_sge = (struct rvt_sge_state){
		.sge = wqe->sg_list[0], .sg_list = wqe->sg_list + 1, .num_sge = wqe->wr.num_sge
	};
}

/*
 * Sends the message, or what is left of it. Returns the status it ends with, or SOFTIB_WAIT if it has not ended.
 * The caller has RVT_S_BUSY and no lock, and may sleep.
 */
int softib_rc_send(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	struct journey on = { .hca = hca, .qp = qp };
	int status;

	if (is_exhausted(qp))
		return IB_WC_RETRY_EXC_ERR;
	on.request = softib_packet_alloc(ib_mtu_enum_to_int(SOFTIB_MTU));
	on.response = softib_packet_alloc(ib_mtu_enum_to_int(SOFTIB_MTU));
	if (on.request && on.response) {
		do {
			status = step(&on, wqe);
			cond_resched();
		} while (status == MORE);
	} else {
		status = lost(qp);
	}
	kfree(on.response);
	kfree(on.request);
	return status;
}

/* After the message's completion, or after the packet that its answer is missing for: the other end may learn of it. */
void softib_rc_notify(struct rvt_qp *qp)
{
	struct softib_hca *responder;

	rcu_read_lock();
	responder = READ_ONCE(softib.hca[((struct softib_qp *)qp->priv)->responder]);
	if (responder)
		softib_announce(responder, qp->remote_qpn);
	rcu_read_unlock();
}
