// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Traps (IBA 13.4.9, 14.2.5.1): a node tells the subnet manager what changed, until that says that it knows. */
#include <linux/slab.h>

#include "softib.h"

#define TRIES 10
#define AGAIN_MS 500
#define GENERIC_URGENT 0x81

struct notice {
	u8 type, producer[3];
	__be16 trap, issuer, toggle_count;
	union {
		struct {
			__be16 lid;
		} __packed port_changed;
		struct {
			__be16 reserved, lid;
			u8 reserved2, other_changes;
			__be32 capabilities;
		} __packed capabilities_changed;
		u8 details[54];
	} __packed;
} __packed;

static void fill(struct softib_node *node, struct ib_smp *smp)
{
	struct softib_port *port = softib_management_port(node);
	struct notice *notice = (struct notice *)smp->data;

	ib_init_query_mad(smp);
	smp->method = IB_MGMT_METHOD_TRAP;
	smp->attr_id = IB_SMP_ATTR_NOTICE;
	smp->mkey = port->info.mkey;
	smp->tid = cpu_to_be64(node->trap_tid);
	notice->type = GENERIC_URGENT;
	notice->producer[2] = node->type;
	notice->trap = node->trap;
	notice->issuer = port->info.lid;
	if (softib_is_switch(node)) {
		notice->port_changed.lid = port->info.lid;
	} else {
		notice->capabilities_changed.lid = port->info.lid;
		notice->capabilities_changed.capabilities = cpu_to_be32(softib_hca_of(node)->rvp.port_cap_flags);
	}
}

static void send_trap(struct work_struct *work)
{
	struct softib_node *node = container_of(to_delayed_work(work), struct softib_node, trap_work);
	struct softib_packet *packet = softib_packet_alloc(IB_MGMT_MAD_SIZE);
	struct softib_port *port = softib_management_port(node);
	bool again = false;
	unsigned long flags;

	if (!packet) {
		queue_delayed_work(softib.work, &node->trap_work, msecs_to_jiffies(AGAIN_MS));
		return;
	}
	spin_lock_irqsave(&softib.lock, flags);
	if (node->trap) {
		fill(node, (struct ib_smp *)packet->payload);
		packet->slid = softib_lid(port);
		packet->dlid = be16_to_cpu(port->info.sm_lid);
		packet->vl = SOFTIB_SMI_VL;
		packet->pkey = IB_DEFAULT_PKEY_FULL;
		again = ++node->trap_tries < TRIES;
	}
	spin_unlock_irqrestore(&softib.lock, flags);
	if (packet->dlid)	/* before the first sweep there is nobody to tell */
		softib_transmit(port, packet);
	kfree(packet);
	if (again)
		queue_delayed_work(softib.work, &node->trap_work, msecs_to_jiffies(AGAIN_MS));
}

void softib_trap_init(struct softib_node *node)
{
	INIT_DELAYED_WORK(&node->trap_work, send_trap);
}
