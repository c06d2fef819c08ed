// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The send queue: each message becomes a packet, which is carried to where it arrives before the send is complete. */
#include <linux/slab.h>

#include "softib.h"

struct softib_packet *softib_packet_alloc(u32 length)
{
	struct softib_packet *packet = kzalloc(struct_size(packet, payload, length), GFP_ATOMIC);

	if (packet)
		packet->length = length;
	return packet;
}

static void gather(struct rvt_swqe *wqe, u8 *to)
{
	struct rvt_sge_state from = {
		.sge = wqe->sg_list[0], .sg_list = wqe->sg_list + 1, .num_sge = wqe->wr.num_sge
	};
	u32 left = wqe->length;

	while (left) {
		u32 length = rvt_get_sge_length(&from.sge, left);

		if (WARN_ON_ONCE(!length))
			return;
		memcpy(to, from.sge.vaddr, length);
		rvt_update_sge(&from, length, false);
		to += length;
		left -= length;
	}
}

static void fill_grh(struct softib_hca *hca, struct softib_packet *packet, struct rdma_ah_attr *to)
{
	const struct ib_global_route *route = rdma_ah_read_grh(to);
	/* BTH, DETH, the immediate, padding, the invariant CRC */
	u32 length = 12 + 8 + 4 * packet->has_imm + ALIGN(packet->length, 4) + 4;

	packet->has_grh = true;
	packet->grh.version_tclass_flow =
		cpu_to_be32(IB_GRH_VERSION << IB_GRH_VERSION_SHIFT | route->traffic_class << IB_GRH_TCLASS_SHIFT |
			    (route->flow_label & IB_GRH_FLOW_MASK));
	packet->grh.paylen = cpu_to_be16(length);
	packet->grh.next_hdr = IB_GRH_NEXT_HDR;
	packet->grh.hop_limit = route->hop_limit;
	packet->grh.sgid.global.subnet_prefix = hca->port[1].info.gid_prefix;
	packet->grh.sgid.global.interface_id = cpu_to_be64(hca->node.guid + 1);
	packet->grh.dgid = route->dgid;
}

static struct softib_packet *make_packet(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	struct rdma_ah_attr *to = rvt_get_swqe_ah_attr(wqe);
	struct softib_packet *packet = softib_packet_alloc(wqe->length);
	struct softib_port *port = &hca->port[1];
	bool smi = qp->ibqp.qp_type == IB_QPT_SMI, gsi = qp->ibqp.qp_type == IB_QPT_GSI;
	u32 qkey = rvt_get_swqe_remote_qkey(wqe);

	if (!packet)
		return NULL;
	packet->dlid = rdma_ah_get_dlid(to);
	/* A directed route has no LIDs at all (IBA 14.2.1.2): the answer goes back to what is here. */
	packet->slid = packet->dlid != SOFTIB_PERMISSIVE && softib_lid(port) ?
		softib_lid(port) | (rdma_ah_get_path_bits(to) & (u16)~softib_lid_mask(port)) : SOFTIB_PERMISSIVE;
	packet->sl = rdma_ah_get_sl(to);
	packet->vl = smi ? SOFTIB_SMI_VL : 0;
	packet->pkey = smi ? IB_DEFAULT_PKEY_FULL :
		rvt_get_pkey(&hca->rdi, 0, gsi ? rvt_get_swqe_pkey_index(wqe) : qp->s_pkey_index);
	packet->dest_qpn = softib_is_multicast(packet->dlid) ? SOFTIB_MCAST_QPN : rvt_get_swqe_remote_qpn(wqe);
	packet->src_qpn = qp->ibqp.qp_num;
	packet->qkey = qkey & 0x80000000 ? qp->qkey : qkey;	/* IBA 10.2.5 */
	packet->psn = wqe->psn & 0xFFFFFF;
	packet->solicited = wqe->wr.send_flags & IB_SEND_SOLICITED;
	if (wqe->wr.opcode == IB_WR_SEND_WITH_IMM) {
		packet->has_imm = true;
		packet->imm = wqe->wr.ex.imm_data;
	}
	if (rdma_ah_get_ah_flags(to) & IB_AH_GRH)
		fill_grh(hca, packet, to);
	gather(wqe, packet->payload);
	return packet;
}

/* From a port of an HCA, or port 0 of a switch, to every HCA that it reaches. */
void softib_transmit(struct softib_port *from, struct softib_packet *packet)
{
	DECLARE_BITMAP(reached, SOFTIB_HCAS) = { };
	struct softib_hca *hca;
	unsigned long flags, i;

	rcu_read_lock();
	spin_lock_irqsave(&softib.lock, flags);
	softib_carry(from, packet, reached);
	spin_unlock_irqrestore(&softib.lock, flags);
	for_each_set_bit(i, reached, SOFTIB_HCAS) {
		hca = READ_ONCE(softib.hca[i]);
		if (hca)
			softib_receive(hca, packet);
	}
	rcu_read_unlock();
}

static void send_one(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	struct softib_packet *packet = make_packet(hca, qp, wqe);

	/* Without memory the message is lost, as on a wire: UD promises no more. */
	if (!packet)
		return;
	softib_transmit(&hca->port[1], packet);
	kfree(packet);
}

/*
 * Sends what the queue holds. Called by a post and by the work queue, without locks, from any context; one of them
 * at a time does the work (RVT_S_BUSY) and takes along what is posted meanwhile.
 */
void softib_do_send(struct rvt_qp *qp)
{
	struct softib_hca *hca = container_of(ib_to_rvt(qp->ibqp.device), struct softib_hca, rdi);
	struct softib_qp *priv = qp->priv;
	unsigned long flags;

	spin_lock_irqsave(&qp->s_lock, flags);
	if (qp->s_flags & RVT_S_BUSY) {
		spin_unlock_irqrestore(&qp->s_lock, flags);
		return;
	}
	qp->s_flags |= RVT_S_BUSY;
	while (qp->s_last != smp_load_acquire(&qp->s_head)) {
		struct rvt_swqe *wqe = rvt_get_swqe_ptr(qp, qp->s_last);

		if (ib_rvt_state_ops[qp->state] & RVT_PROCESS_NEXT_SEND_OK) {
			bool fails = qp->ibqp.qp_type == IB_QPT_GSI && READ_ONCE(hca->gsi_fails);

			qp->s_cur = rvt_qp_swqe_incr(qp, qp->s_last);
			spin_unlock_irqrestore(&qp->s_lock, flags);
			if (!fails)
				send_one(hca, qp, wqe);
			spin_lock_irqsave(&qp->s_lock, flags);
			rvt_send_complete(qp, wqe, fails ? IB_WC_LOC_QP_OP_ERR : IB_WC_SUCCESS);
		} else if (ib_rvt_state_ops[qp->state] & RVT_FLUSH_SEND) {
			rvt_send_complete(qp, wqe, IB_WC_WR_FLUSH_ERR);
		} else {
			break;
		}
	}
	qp->s_flags &= ~RVT_S_BUSY;
	wake_up(&priv->idle);	/* under the lock, which the thread that waits takes before it frees the queue pair */
	spin_unlock_irqrestore(&qp->s_lock, flags);
}

void softib_send_work(struct work_struct *work)
{
	softib_do_send(container_of(work, struct softib_qp, work)->qp);
}
