// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The send engine: takes work requests off the send queue and sends each; here by UD, in one packet. */
#include <linux/slab.h>

#include "softib.h"

static struct softib_packet *make_packet(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	struct rvt_sge_state from = {
		.sge = wqe->sg_list[0], .sg_list = wqe->sg_list + 1, .num_sge = wqe->wr.num_sge
	};
	struct rdma_ah_attr *to = rvt_get_swqe_ah_attr(wqe);
	struct softib_packet *packet = softib_packet_alloc(wqe->length);
	bool smi = qp->ibqp.qp_type == IB_QPT_SMI, gsi = qp->ibqp.qp_type == IB_QPT_GSI;
	u32 qkey = rvt_get_swqe_remote_qkey(wqe);

	if (!packet)
		return NULL;
	packet->vl = smi ? SOFTIB_SMI_VL : 0;
	packet->pkey = smi ? IB_DEFAULT_PKEY_FULL :
		rvt_get_pkey(&hca->rdi, 0, gsi ? rvt_get_swqe_pkey_index(wqe) : qp->s_pkey_index);
	packet->src_qpn = qp->ibqp.qp_num;
	packet->qkey = qkey & 0x80000000 ? qp->qkey : qkey;	/* IBA 10.2.5 */
	packet->psn = wqe->psn & SOFTIB_PSN_MASK;
	packet->solicited = wqe->wr.send_flags & IB_SEND_SOLICITED;
	if (wqe->wr.opcode == IB_WR_SEND_WITH_IMM) {
		packet->opcode = IB_OPCODE_UD_SEND_ONLY_WITH_IMMEDIATE;
		packet->has_imm = true;
		packet->imm = wqe->wr.ex.imm_data;
		packet->extension_length += sizeof(packet->imm);
	}
	softib_packet_address(hca, packet, to);
	packet->dest_qpn = softib_is_multicast(packet->dlid) ? SOFTIB_MCAST_QPN : rvt_get_swqe_remote_qpn(wqe);
	softib_gather(&from, packet->payload, wqe->length, false);
	return packet;
}

/* A message that is begun is ended even where no other may begin. The caller has s_lock. */
static bool may_send(struct rvt_qp *qp)
{
	int allowed = ib_rvt_state_ops[qp->state];

	return allowed & RVT_PROCESS_NEXT_SEND_OK || (qp->s_cur != qp->s_last && allowed & RVT_PROCESS_SEND_OK);
}

/* The connection is broken: what else waits is flushed. */
static void break_connection(struct rvt_qp *qp)
{
	unsigned long flags;

	spin_lock_irqsave(&qp->r_lock, flags);
	rvt_rc_error(qp, IB_WC_WR_FLUSH_ERR);
	spin_unlock_irqrestore(&qp->r_lock, flags);
}

static void complete_send(struct rvt_qp *qp, struct rvt_swqe *wqe, int status)
{
	unsigned long flags;

	spin_lock_irqsave(&qp->s_lock, flags);
	rvt_send_complete(qp, wqe, status);
	spin_unlock_irqrestore(&qp->s_lock, flags);
}

static void send_rc(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	int status = softib_rc_send(hca, qp, wqe);

	if (status != SOFTIB_WAIT)
		complete_send(qp, wqe, status);
	softib_rc_notify(qp);
	if (status != SOFTIB_WAIT && status != IB_WC_SUCCESS)
		break_connection(qp);
}

static void send_ud(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe)
{
	struct softib_packet *packet;

	if (qp->ibqp.qp_type == IB_QPT_GSI && READ_ONCE(hca->gsi_fails)) {
		complete_send(qp, wqe, IB_WC_LOC_QP_OP_ERR);
		return;
	}
	packet = make_packet(hca, qp, wqe);
	complete_send(qp, wqe, IB_WC_SUCCESS);
	/* Without memory the message is lost, as on a wire: UD promises no more. */
	if (packet)
		softib_transmit(&hca->port[1], packet);
	kfree(packet);
}

/*
 * Sends what the queue holds. Called without locks, by a post from any context, and by the work queue, which alone
 * sends of RC queue pairs; one of them at a time does the work (RVT_S_BUSY) and takes along what is posted meanwhile.
 */
void softib_do_send(struct rvt_qp *qp)
{
	struct softib_hca *hca = container_of(ib_to_rvt(qp->ibqp.device), struct softib_hca, rdi);
	bool connected = qp->ibqp.qp_type == IB_QPT_RC;
	struct softib_qp *priv = qp->priv;
	unsigned long flags;

	spin_lock_irqsave(&qp->s_lock, flags);
	if (qp->s_flags & RVT_S_BUSY) {
		spin_unlock_irqrestore(&qp->s_lock, flags);
		return;
	}
	qp->s_flags |= RVT_S_BUSY;
	/* A timer that ran out while its message was still looked at has taken its flag away: on it goes. */
	while (qp->s_last != smp_load_acquire(&qp->s_head) && !(qp->s_flags & (RVT_S_TIMER | RVT_S_ANY_WAIT_SEND))) {
		struct rvt_swqe *wqe = rvt_get_swqe_ptr(qp, qp->s_last);

		if (may_send(qp)) {
			if (qp->s_cur == qp->s_last) {
				qp->s_cur = rvt_qp_swqe_incr(qp, qp->s_last);
				if (connected)
					softib_rc_begin(qp, wqe);
			}
			spin_unlock_irqrestore(&qp->s_lock, flags);
			if (connected)
				send_rc(hca, qp, wqe);
			else
				send_ud(hca, qp, wqe);
			spin_lock_irqsave(&qp->s_lock, flags);
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
