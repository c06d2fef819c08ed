// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Receive side of an HCA: which queue pairs get a message, and the checks before. */
#include "softib.h"

/* No receive was posted: the message is lost, silently but for this. */
static void count_dropped(struct softib_hca *hca, struct rvt_qp *qp)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	hca->rvp.n_pkt_drops++;
	hca->port[1].counters.vl15_dropped += !qp->ibqp.qp_num;
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* True if the keys let the message in; `index` becomes the P_Key's. QP 0 has none (IBA 9.6.1.4, 9.6.1.5). */
static bool keys_match(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *packet, u16 *index)
{
	*index = 0;
	if (!qp->ibqp.qp_num)
		return true;
	*index = softib_match_pkey(hca, qp, packet->pkey);
	return *index != SOFTIB_PKEYS && softib_match_qkey(hca, qp, packet->qkey);
}

/* True if the message may reach this queue pair at all (IBA 9.6.1, 13.5.3.1). */
static bool well_formed(struct rvt_qp *qp, const struct softib_packet *packet)
{
	bool smi = packet->vl == SOFTIB_SMI_VL;
	u32 number = qp->ibqp.qp_num;

	if (qp->ibqp.qp_type != IB_QPT_UD && qp->ibqp.qp_type != IB_QPT_GSI && qp->ibqp.qp_type != IB_QPT_SMI)
		return false;
	if (smi != !number)
		return false;
	if (number <= 1 && packet->length != IB_MGMT_MAD_SIZE)
		return false;
	return !number || packet->dlid != SOFTIB_PERMISSIVE;
}

static void into_queue_pair(struct softib_hca *hca, struct rvt_qp *qp, struct softib_packet *packet)
{
	struct ib_wc wc = {
		.status = IB_WC_SUCCESS,
		.opcode = IB_WC_RECV,
		.byte_len = sizeof(struct ib_grh) + packet->length,
		.qp = &qp->ibqp,
		.src_qp = packet->src_qpn,
		.slid = packet->slid,
		.sl = packet->sl,
		.port_num = 1,
	};
	unsigned long flags;
	int got;

	if (!well_formed(qp, packet) || !keys_match(hca, qp, packet, &wc.pkey_index))
		return;
	if (!softib_is_multicast(packet->dlid) && packet->dlid != SOFTIB_PERMISSIVE)
		wc.dlid_path_bits = packet->dlid & (u16)~softib_lid_mask(&hca->port[1]);
	if (packet->has_imm) {
		wc.wc_flags |= IB_WC_WITH_IMM;
		wc.ex.imm_data = packet->imm;
	}

	spin_lock_irqsave(&qp->r_lock, flags);
	got = ib_rvt_state_ops[qp->state] & RVT_PROCESS_RECV_OK ? rvt_get_rwqe(qp, false) : 0;
	if (got < 0) {
		rvt_rc_error(qp, IB_WC_LOC_QP_OP_ERR);
	} else if (!got) {
		count_dropped(hca, qp);
	} else if (wc.byte_len > qp->r_len) {
		rvt_rc_error(qp, IB_WC_LOC_LEN_ERR);	/* the receive is used up, and the queue pair stops */
	} else {
		if (packet->has_grh) {
			wc.wc_flags |= IB_WC_GRH;
			rvt_copy_sge(qp, &qp->r_sge, &packet->grh, sizeof(packet->grh), true, false);
		} else {
			rvt_skip_sge(&qp->r_sge, sizeof(packet->grh), true);
		}
		rvt_copy_sge(qp, &qp->r_sge, packet->payload, packet->length, true, false);
		rvt_put_ss(&qp->r_sge);
		if (test_and_clear_bit(RVT_R_WRID_VALID, &qp->r_aflags)) {
			wc.wr_id = qp->r_wr_id;
			rvt_recv_cq(qp, &wc, packet->solicited);
		}
	}
	spin_unlock_irqrestore(&qp->r_lock, flags);
}

static void into_group(struct softib_hca *hca, struct softib_packet *packet)
{
	struct softib_attachment *one;

	if (!packet->has_grh)	/* a group is known by its MGID, which is in the GRH alone */
		return;
	list_for_each_entry_rcu(one, &hca->attached, list)
		if (one->mlid == packet->dlid && !memcmp(&one->mgid, &packet->grh.dgid, sizeof(one->mgid)))
			into_queue_pair(hca, one->qp, packet);
}

/* Called under RCU, without locks. */
void softib_receive(struct softib_hca *hca, struct softib_packet *packet)
{
	struct rvt_qp *qp;

	if (READ_ONCE(hca->leaving) && packet->dest_qpn > 1)
		return;
	if (softib_is_multicast(packet->dlid)) {
		into_group(hca, packet);
		return;
	}
	if (!softib_is_mine(hca, packet))
		return;
	qp = rvt_lookup_qpn(&hca->rdi, &hca->rvp, packet->dest_qpn);
	if (qp)
		into_queue_pair(hca, qp, packet);
}
