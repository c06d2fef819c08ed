// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Checks of an HCA on every packet: the address, the P_Key, the Q_Key; and the counters of violations. */
#include "softib.h"

/* IBA 10.9.3: the same partition, and one of the two a full member. */
static bool same_partition(u16 one, u16 other)
{
	return (one & 0x7FFF) == (other & 0x7FFF) && ((one | other) & 0x8000) && (one & 0x7FFF);
}

/* The index of the first P_Key that goes with this one; SOFTIB_PKEYS if there is none. */
static unsigned int find_pkey(struct softib_port *port, u16 pkey)
{
	unsigned int i;

	for (i = 0; i < SOFTIB_PKEYS && !same_partition(READ_ONCE(port->pkeys[i]), pkey); i++)
		;
	return i;
}

static void count_up(struct softib_hca *hca, __be16 *counter, u16 *mirror)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	if (*mirror < U16_MAX)
		++*mirror;
	*counter = cpu_to_be16(*mirror);
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* Returns the index of the P_Key by which the queue pair takes the packet; SOFTIB_PKEYS, and counts, if it does not. */
unsigned int softib_match_pkey(struct softib_hca *hca, struct rvt_qp *qp, u16 pkey)
{
	struct softib_port *port = &hca->port[1];
	unsigned int index;

	if (qp->ibqp.qp_num == 1)
		index = find_pkey(port, pkey);
	else
		index = same_partition(rvt_get_pkey(&hca->rdi, 0, qp->s_pkey_index), pkey) ?
			qp->s_pkey_index : SOFTIB_PKEYS;
	if (index == SOFTIB_PKEYS)
		count_up(hca, &port->info.pkey_violations, &hca->rvp.pkey_violations);
	return index;
}

/* Returns true if the Q_Key is the queue pair's; counts if it is not. */
bool softib_match_qkey(struct softib_hca *hca, struct rvt_qp *qp, u32 qkey)
{
	if (qkey == (qp->ibqp.qp_num == 1 ? SOFTIB_GSI_QKEY : qp->qkey))
		return true;
	count_up(hca, &hca->port[1].info.qkey_violations, &hca->rvp.qkey_violations);
	return false;
}

/* True if a message to one port is to this one. */
bool softib_is_mine(struct softib_hca *hca, const struct softib_packet *packet)
{
	struct softib_port *port = &hca->port[1];

	if (packet->dlid != SOFTIB_PERMISSIVE &&
	    (packet->dlid & softib_lid_mask(port)) != (softib_lid(port) & softib_lid_mask(port)))
		return false;
	return !packet->has_grh ||
		(packet->grh.dgid.global.interface_id == cpu_to_be64(hca->node.guid + 1) &&
		 (packet->grh.dgid.global.subnet_prefix == port->info.gid_prefix ||
		  packet->grh.dgid.global.subnet_prefix == cpu_to_be64(0xfe80000000000000ULL)));
}
