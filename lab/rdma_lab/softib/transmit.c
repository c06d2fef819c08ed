// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* A packet on its way: from a port through the switches, to the HCAs that it reaches. */
#include "softib.h"

static void carry(struct softib_port *from, struct softib_packet *packet, unsigned long *reached)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	softib_carry(from, packet, reached);
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* Returns the HCA that a packet to one port reaches; NULL if it is lost. Called under RCU. */
struct softib_hca *softib_reach(struct softib_port *from, struct softib_packet *packet)
{
	DECLARE_BITMAP(reached, SOFTIB_HCAS) = { };
	unsigned long first;

	if (softib_is_multicast(packet->dlid))
		return NULL;
	carry(from, packet, reached);
	first = find_first_bit(reached, SOFTIB_HCAS);
	return first < SOFTIB_HCAS ? READ_ONCE(softib.hca[first]) : NULL;
}

/* Delivers a UD packet, from a port of an HCA, or port 0 of a switch, to every HCA that it reaches. */
void softib_transmit(struct softib_port *from, struct softib_packet *packet)
{
	DECLARE_BITMAP(reached, SOFTIB_HCAS) = { };
	struct softib_hca *hca;
	unsigned long i;

	rcu_read_lock();
	carry(from, packet, reached);
	for_each_set_bit(i, reached, SOFTIB_HCAS) {
		hca = READ_ONCE(softib.hca[i]);
		if (hca)
			softib_receive(hca, packet);
	}
	rcu_read_unlock();
}
