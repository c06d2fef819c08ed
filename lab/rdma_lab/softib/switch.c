// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Switches: how a message gets from port to port by the tables that the subnet manager wrote, and by nothing else. */
#include <linux/slab.h>

#include "softib.h"

struct softib_switch *softib_switch_create(unsigned int index, u8 ports)
{
	struct softib_switch *sw = kzalloc(sizeof(*sw), GFP_KERNEL);
	u8 i;

	if (!sw)
		return NULL;
	sw->port = kcalloc(ports + 1, sizeof(*sw->port), GFP_KERNEL);
	if (!softib_tables_create(sw, ports) || !sw->port) {
		softib_switch_destroy(sw);
		return NULL;
	}
	sw->node.type = RDMA_NODE_IB_SWITCH;
	sw->node.index = index;
	sw->node.ports = ports;
	sw->node.guid = 0x5254000000020000ULL + 16 * index;
	sw->node.port = sw->port;
	snprintf(sw->node.description, sizeof(sw->node.description), "softib switch %u", index);
	for (i = 0; i <= ports; i++)
		softib_port_init(&sw->port[i], &sw->node, i);
	return sw;
}

/* Before any switch is freed: this one sends nothing more, and changes nothing by itself. */
void softib_switch_cancel_work(struct softib_switch *sw)
{
	cancel_delayed_work_sync(&sw->node.trap_work);
	cancel_delayed_work_sync(&sw->late);
}

void softib_switch_destroy(struct softib_switch *sw)
{
	softib_tables_destroy(sw);
	kfree(sw->port);
	kfree(sw);
}

/* The port that the linear table has for the LID; NULL if none. */
static struct softib_port *linear_port(struct softib_switch *sw, u16 lid)
{
	u8 number = lid && lid <= sw->linear_top && lid < SOFTIB_LINEAR_ENTRIES ? sw->used.linear[lid] : SOFTIB_NO_PORT;

	return number <= sw->node.ports ? &sw->port[number] : NULL;
}

static void swap_addresses(struct softib_switch *sw, struct softib_packet *packet)
{
	u32 asked = packet->dest_qpn;

	packet->dlid = packet->slid;
	packet->slid = softib_lid(&sw->port[0]);
	packet->dest_qpn = packet->src_qpn;
	packet->src_qpn = asked;
	packet->has_grh = false;
}

/* Where a directed-route SMP goes on its way back, from the place that its hop pointer names (IBA 14.2.2.4). */
static struct softib_port *way_back(struct softib_switch *sw, struct softib_packet *packet)
{
	struct ib_smp *smp = (struct ib_smp *)packet->payload;
	u8 number;

	if (!smp->hop_cnt || smp->hop_ptr < 2 || smp->hop_ptr > smp->hop_cnt + 1)
		return NULL;
	number = smp->return_path[--smp->hop_ptr];
	return number && number <= sw->node.ports ? &sw->port[number] : NULL;
}

/* An SMP with a directed route, as a switch treats it (IBA 14.2.2). Routes with a part by LID are not for us. */
static struct softib_port *directed(struct softib_port *in, struct softib_packet *packet)
{
	struct softib_switch *sw = softib_switch_of(in->node);
	struct ib_smp *smp = (struct ib_smp *)packet->payload;
	u8 number;

	if (smp->hop_cnt >= IB_SMP_MAX_PATH_HOPS || smp->dr_slid != IB_LID_PERMISSIVE ||
	    smp->dr_dlid != IB_LID_PERMISSIVE)
		return NULL;
	if (smp->status & IB_SMP_DIRECTION)
		return way_back(sw, packet);
	if (!smp->hop_ptr || smp->hop_ptr > smp->hop_cnt)
		return NULL;
	smp->return_path[smp->hop_ptr] = in->number;
	if (smp->hop_ptr++ < smp->hop_cnt) {
		number = smp->initial_path[smp->hop_ptr];
		return number && number <= sw->node.ports ? &sw->port[number] : NULL;
	}
	if (!softib_sma(in, smp, false))
		return NULL;
	return way_back(sw, packet);
}

/* A message to the switch itself: it answers, or the message ends here. */
static struct softib_port *to_itself(struct softib_port *in, struct softib_packet *packet)
{
	struct softib_switch *sw = softib_switch_of(in->node);
	struct ib_smp *smp = (struct ib_smp *)packet->payload;
	bool answers = false;

	if (packet->length != IB_MGMT_MAD_SIZE)
		return NULL;
	if (packet->vl == SOFTIB_SMI_VL && packet->dest_qpn == 0 &&
	    smp->mgmt_class == IB_MGMT_CLASS_SUBN_LID_ROUTED)
		answers = softib_sma(in, smp, false);
	else if (packet->dest_qpn == 1 && packet->qkey == SOFTIB_GSI_QKEY &&
		 smp->mgmt_class == IB_MGMT_CLASS_PERF_MGMT)
		answers = softib_pma(&sw->node, (struct ib_pma_mad *)packet->payload);
	if (!answers)
		return NULL;
	swap_addresses(sw, packet);
	return linear_port(sw, packet->dlid);
}

/* The port that a message to one port leaves by; NULL if it ends here. */
static struct softib_port *next_port(struct softib_port *in, struct softib_packet *packet)
{
	struct softib_switch *sw = softib_switch_of(in->node);
	struct softib_port *out;

	if (packet->dlid == SOFTIB_PERMISSIVE) {
		const struct ib_smp *smp = (const struct ib_smp *)packet->payload;

		if (packet->vl == SOFTIB_SMI_VL && packet->length == IB_MGMT_MAD_SIZE &&
		    smp->mgmt_class == IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE)
			return directed(in, packet);
		return NULL;
	}
	if (packet->dlid == softib_lid(&sw->port[0]))
		return to_itself(in, packet);
	out = linear_port(sw, packet->dlid);
	if (!out || !out->number || out == in) {
		in->counters.relay_errors++;
		return NULL;
	}
	return out;
}

static void arrive(struct softib_port *in, struct softib_packet *packet, unsigned long *reached);

/* To each port in the multicast table's entry but the one it came by. Cables make a tree, so this ends. */
static void spread(struct softib_port *in, struct softib_packet *packet, unsigned long *reached)
{
	struct softib_switch *sw = softib_switch_of(in->node);
	unsigned int entry = packet->dlid - SOFTIB_FIRST_MLID, number;
	bool known = false;

	for (number = 1; entry < softib.mlids && number <= sw->node.ports; number++) {
		u16 ports = sw->used.multicast[number / SOFTIB_MFT_PORTS * softib.mcast_entries + entry];
		struct softib_port *next;

		if (!(ports & BIT(number % SOFTIB_MFT_PORTS)))
			continue;
		known = true;
		if (number == in->number)
			continue;
		next = softib_cross(&sw->port[number], packet);
		if (next)
			arrive(next, packet, reached);
	}
	if (!known)
		in->counters.relay_errors++;
}

static void arrive(struct softib_port *in, struct softib_packet *packet, unsigned long *reached)
{
	unsigned int hops;

	for (hops = 0; in && softib_is_switch(in->node) && hops < SOFTIB_HOPS; hops++) {
		struct softib_port *out;

		if (softib_is_multicast(packet->dlid)) {
			spread(in, packet, reached);
			return;
		}
		out = next_port(in, packet);
		in = out ? softib_cross(out, packet) : NULL;
	}
	if (in && !softib_is_switch(in->node))
		__set_bit(in->node->index, reached);
}

/* True if an HCA hands the message to itself: all of it, or a copy (IBA 11.4.1.1 wants it for multicast). */
static bool loops_back(struct softib_port *from, struct softib_packet *packet)
{
	return softib_state(from) == IB_PORT_ACTIVE &&
		(softib_is_multicast(packet->dlid) ||
		 (packet->dlid & softib_lid_mask(from)) == (softib_lid(from) & softib_lid_mask(from)));
}

/* Sets the numbers of the HCAs that a packet reaches. The caller has softib.lock. */
void softib_carry(struct softib_port *from, struct softib_packet *packet, unsigned long *reached)
{
	if (!softib_is_switch(from->node) && loops_back(from, packet)) {
		__set_bit(from->node->index, reached);
		if (!softib_is_multicast(packet->dlid))
			return;
	}
	if (softib_is_switch(from->node))
		from = linear_port(softib_switch_of(from->node), packet->dlid);
	if (from)
		arrive(softib_cross(from, packet), packet, reached);
}
