// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Notices of a change: an event for the kernel's users of an HCA, a trap for the subnet manager. */
#include "softib.h"

/* The caller has softib.lock. Once the device leaves, nothing would wait for the event before it is freed. */
void softib_event(struct softib_hca *hca, enum ib_event_type type)
{
	struct ib_event event = { .device = &hca->rdi.ibdev, .element.port_num = 1, .event = type };

	if (softib.hca[hca->node.index] && !hca->leaving)
		ib_dispatch_event(&event);
}

/* The caller has softib.lock. */
void softib_trap(struct softib_node *node, __be16 number)
{
	node->trap = number;
	node->trap_tries = 0;
	node->trap_tid++;
	mod_delayed_work(softib.work, &node->trap_work, 0);
}

/* The subnet manager knows of the trap. The caller has softib.lock. */
void softib_trap_repress(struct softib_node *node, __be64 tid)
{
	if (be64_to_cpu(tid) == node->trap_tid)
		node->trap = 0;
}
