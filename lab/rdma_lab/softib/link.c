// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Ports and cables: what a port is at first, the states of a link, and how a message crosses it. */
#include "softib.h"

#define WIDTH_4X 2
#define SPEED_QDR 4			/* 10 Gbit/s a lane: 40 Gbit/s */
#define CODE_SPEEDS 7			/* SDR, DDR and QDR */
#define NOT_SLEEPING 2			/* LinkDownDefaultState: polling */

static void set_phys_state(struct softib_port *port, u8 state)
{
	port->info.portphysstate_linkdown = state << 4 | (port->info.portphysstate_linkdown & 0xF);
}

static u8 phys_state(const struct softib_port *port)
{
	return port->info.portphysstate_linkdown >> 4;
}

void softib_port_init(struct softib_port *port, struct softib_node *node, u8 number)
{
	bool linked = number || !softib_is_switch(node);
	struct ib_port_info *info = &port->info;

	port->node = node;
	port->number = number;
	port->pkeys[0] = IB_DEFAULT_PKEY_FULL;
	info->gid_prefix = cpu_to_be64(0xfe80000000000000ULL);
	info->local_port_num = number;
	info->link_width_enabled = WIDTH_4X | 1;
	info->link_width_supported = WIDTH_4X | 1;
	info->link_width_active = WIDTH_4X;
	info->linkspeed_portstate = CODE_SPEEDS << 4 | (linked ? IB_PORT_DOWN : IB_PORT_ACTIVE);
	info->portphysstate_linkdown = NOT_SLEEPING;
	set_phys_state(port, linked ? IB_PORT_PHYS_STATE_POLLING : IB_PORT_PHYS_STATE_LINK_UP);
	info->linkspeedactive_enabled = SPEED_QDR << 4 | CODE_SPEEDS;
	info->neighbormtu_mastersmsl = SOFTIB_MTU << 4;
	info->vlcap_inittype = SOFTIB_DATA_VLS << 4;
	info->inittypereply_mtucap = SOFTIB_MTU;
	info->operationalvl_pei_peo_fpi_fpo = SOFTIB_DATA_VLS << 4;
	info->guid_cap = linked && softib_is_switch(node) ? 0 : 1;
	info->resv_resptimevalue = 16;	/* 4.096 us * 2^16 = 268 ms */
	if (!number)
		info->cap_mask = cpu_to_be32(IB_PORT_TRAP_SUP | IB_PORT_SYS_IMAGE_GUID_SUP);
}

/* A state that the port enters by itself; the objects that depend on it are told. */
void softib_set_state(struct softib_port *port, u8 state)
{
	u8 before = softib_state(port);

	if (state == before)
		return;
	port->info.linkspeed_portstate = (port->info.linkspeed_portstate & 0xF0) | state;
	if (softib_is_switch(port->node)) {
		/* IBA 14.2.5.4: set whenever the state is entered or left by itself, not by the SM's ARMED, ACTIVE */
		if (state == IB_PORT_DOWN || before == IB_PORT_DOWN) {
			softib_switch_of(port->node)->port_state_changed = true;
			softib_trap(port->node, cpu_to_be16(128));
		}
	} else if (state == IB_PORT_ACTIVE) {
		softib_event(softib_hca_of(port->node), IB_EVENT_PORT_ACTIVE);
	} else if (before == IB_PORT_ACTIVE) {
		softib_event(softib_hca_of(port->node), IB_EVENT_PORT_ERR);
	}
}

/* Up to INIT, if there is a cable and neither end is disabled: the rest is the SM's. */
static void train(struct softib_port *port)
{
	struct softib_port *ends[] = { port, port->peer };
	int i;

	if (!port->peer || port->unplugged || phys_state(port) == IB_PORT_PHYS_STATE_DISABLED ||
	    phys_state(port->peer) == IB_PORT_PHYS_STATE_DISABLED)
		return;
	for (i = 0; i < 2; i++) {
		set_phys_state(ends[i], IB_PORT_PHYS_STATE_LINK_UP);
		softib_set_state(ends[i], IB_PORT_INIT);
	}
}

/* The link goes down at both ends; it comes back by itself unless `phys` disables this one. */
void softib_link_down(struct softib_port *port, u8 phys)
{
	set_phys_state(port, phys);
	if (softib_state(port) != IB_PORT_DOWN)
		port->counters.link_downed++;
	softib_set_state(port, IB_PORT_DOWN);
	if (!port->peer)
		return;
	if (phys_state(port->peer) == IB_PORT_PHYS_STATE_LINK_UP) {
		set_phys_state(port->peer, IB_PORT_PHYS_STATE_POLLING);
		port->peer->counters.link_downed++;
	}
	softib_set_state(port->peer, IB_PORT_DOWN);
	train(port);
}

/* Takes a port's cable out, or puts it in; a port without a cable has none to take. */
void softib_plug(struct softib_port *port, bool in)
{
	u8 phys = phys_state(port) == IB_PORT_PHYS_STATE_DISABLED ? IB_PORT_PHYS_STATE_DISABLED :
								    IB_PORT_PHYS_STATE_POLLING;

	if (!port->peer || port->unplugged == !in)
		return;
	port->unplugged = !in;
	port->peer->unplugged = !in;
	if (in)
		train(port);
	else
		softib_link_down(port, phys);
}

/* Disables a port, as an operator does with ibportstate, or enables one that is disabled. */
void softib_enable(struct softib_port *port, bool enabled)
{
	if ((phys_state(port) != IB_PORT_PHYS_STATE_DISABLED) != enabled)
		softib_link_down(port, enabled ? IB_PORT_PHYS_STATE_POLLING : IB_PORT_PHYS_STATE_DISABLED);
}

void softib_connect(struct softib_port *one, struct softib_port *other)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	one->peer = other;
	other->peer = one;
	one->unplugged = false;
	other->unplugged = false;	/* a switch remembers the cable of an HCA that was removed */
	train(one);
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* Before a port is freed: nothing may lead to it any more. */
void softib_disconnect(struct softib_port *port)
{
	unsigned long flags;

	spin_lock_irqsave(&softib.lock, flags);
	softib_plug(port, false);
	if (port->peer)
		port->peer->peer = NULL;
	port->peer = NULL;
	spin_unlock_irqrestore(&softib.lock, flags);
}

/* True if a port takes messages of this kind: management from INIT on, all else when ACTIVE. */
static bool usable(const struct softib_port *port, const struct softib_packet *packet)
{
	return softib_state(port) >= (packet->vl == SOFTIB_SMI_VL ? IB_PORT_INIT : IB_PORT_ACTIVE);
}

/* The port at which a message arrives that is sent out of `out`; NULL if it is lost. */
struct softib_port *softib_cross(struct softib_port *out, struct softib_packet *packet)
{
	bool multicast = softib_is_multicast(packet->dlid);
	struct softib_port *in = out->peer;

	if (!in || !usable(out, packet) ||
	    packet->length > ib_mtu_enum_to_int(out->info.neighbormtu_mastersmsl >> 4)) {
		out->counters.xmit_discards++;
		return NULL;
	}
	out->counters.xmit_packets++;
	out->counters.xmit_data += softib_wire_length(packet) / 4;
	out->counters.multicast_xmit += multicast;
	out->counters.unicast_xmit += !multicast;
	if (!softib_is_switch(out->node))
		softib_tap_record(out, packet, false);
	if (!usable(in, packet))
		return NULL;
	in->received += in->drop;
	if (in->drop && in->received >= in->drop_of) {
		in->received -= in->drop_of;
		in->counters.rcv_errors++;
		return NULL;
	}
	in->counters.rcv_packets++;
	in->counters.rcv_data += softib_wire_length(packet) / 4;
	in->counters.multicast_rcv += multicast;
	in->counters.unicast_rcv += !multicast;
	if (!softib_is_switch(in->node))
		softib_tap_record(in, packet, true);
	return in;
}
