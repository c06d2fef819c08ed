// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* PortInfo (IBA 14.2.5.6): what the subnet manager sets of a port, and what follows from it. */
#include "softib.h"

#define BAD_FIELD cpu_to_be16(7 << 2)
#define CLIENT_REREGISTER 0x80

#define STATE_NOP 0
#define PHYS_NOP 0

/* The port that the modifier names; NULL if it has no such port. An HCA's 0 is the port that is asked. */
static struct softib_port *named(struct softib_port *at, const struct ib_smp *smp)
{
	u8 number = be32_to_cpu(smp->attr_mod) & 0xFF;

	if (!number && !softib_is_switch(at->node))
		return at;
	return number <= at->node->ports ? &at->node->port[number] : NULL;
}

/* True if a Set may change the port's state in this way (IBA 7.2.7). */
static bool may_change(const struct softib_port *port, u8 state, u8 phys)
{
	if (phys > IB_PORT_PHYS_STATE_DISABLED)
		return false;
	if (phys != PHYS_NOP && state != STATE_NOP && state != IB_PORT_DOWN)
		return false;
	switch (state) {
	case STATE_NOP:
	case IB_PORT_DOWN:
		return true;
	case IB_PORT_ARMED:
		return softib_state(port) == IB_PORT_INIT || softib_state(port) == IB_PORT_ARMED;
	case IB_PORT_ACTIVE:
		return softib_state(port) == IB_PORT_ARMED || softib_state(port) == IB_PORT_ACTIVE;
	}
	return false;
}

static bool is_valid(const struct softib_port *port, const struct ib_port_info *new)
{
	u8 mtu = new->neighbormtu_mastersmsl >> 4, vls = new->operationalvl_pei_peo_fpi_fpo >> 4;
	u16 lid = be16_to_cpu(new->lid);

	if (port == softib_management_port(port->node) && (!lid || lid >= SOFTIB_FIRST_MLID))
		return false;
	if (port->number && (mtu < IB_MTU_256 || mtu > SOFTIB_MTU || vls > SOFTIB_DATA_VLS))
		return false;
	return true;
}

/* Apply attributes of the node, not of a link: a Set on its only port, or on port 0 of a switch. */
static void set_management(struct softib_port *port, const struct ib_port_info *new)
{
	struct ib_port_info *info = &port->info;
	u8 lmc_mask = softib_is_switch(port->node) ? 0xC0 : 0xC7;	/* port 0 has one LID */

	info->mkey = new->mkey;
	info->mkey_lease_period = new->mkey_lease_period;
	info->mkeyprot_resv_lmc = new->mkeyprot_resv_lmc & lmc_mask;
	info->gid_prefix = new->gid_prefix;
	info->lid = new->lid;
	info->sm_lid = new->sm_lid;
	info->neighbormtu_mastersmsl = (info->neighbormtu_mastersmsl & 0xF0) | (new->neighbormtu_mastersmsl & 0xF);
	info->clientrereg_resv_subnetto = new->clientrereg_resv_subnetto & 0x1F;
	info->mkey_violations = new->mkey_violations;
	info->pkey_violations = new->pkey_violations;
	info->qkey_violations = new->qkey_violations;
}

static void set_link(struct softib_port *port, const struct ib_port_info *new)
{
	struct ib_port_info *info = &port->info;

	info->neighbormtu_mastersmsl = (new->neighbormtu_mastersmsl & 0xF0) | (info->neighbormtu_mastersmsl & 0xF);
	if (new->portphysstate_linkdown & 0xF)
		info->portphysstate_linkdown =
			(info->portphysstate_linkdown & 0xF0) | (new->portphysstate_linkdown & 0xF);
	info->vl_high_limit = new->vl_high_limit;
	info->vlstallcnt_hoqlife = new->vlstallcnt_hoqlife;
	if (new->operationalvl_pei_peo_fpi_fpo >> 4)
		info->operationalvl_pei_peo_fpi_fpo = new->operationalvl_pei_peo_fpi_fpo & 0xF0;
	info->localphyerrors_overrunerrors = new->localphyerrors_overrunerrors;
}

/* Report a Set to rdmavt and its users. */
static void tell_host(struct softib_hca *hca, const struct ib_port_info *before, const struct ib_port_info *asked)
{
	struct ib_port_info *info = &hca->port[1].info;

	hca->rvp.gid_prefix = info->gid_prefix;
	hca->rvp.mkey = info->mkey;
	hca->rvp.sm_lid = be16_to_cpu(info->sm_lid);
	hca->rvp.sm_sl = info->neighbormtu_mastersmsl & 0xF;
	hca->rvp.subnet_timeout = info->clientrereg_resv_subnetto & 0x1F;
	hca->rvp.pkey_violations = be16_to_cpu(info->pkey_violations);
	hca->rvp.qkey_violations = be16_to_cpu(info->qkey_violations);
	if (info->lid != before->lid || (info->mkeyprot_resv_lmc ^ before->mkeyprot_resv_lmc) & 7)
		softib_event(hca, IB_EVENT_LID_CHANGE);
	if (info->gid_prefix != before->gid_prefix)
		softib_event(hca, IB_EVENT_GID_CHANGE);
	if (info->sm_lid != before->sm_lid ||
	    (info->neighbormtu_mastersmsl ^ before->neighbormtu_mastersmsl) & 0xF)
		softib_event(hca, IB_EVENT_SM_CHANGE);
	if (asked->clientrereg_resv_subnetto & CLIENT_REREGISTER)
		softib_event(hca, IB_EVENT_CLIENT_REREGISTER);
}

static void set_states(struct softib_port *port, u8 state, u8 phys)
{
	if (phys != PHYS_NOP)
		softib_link_down(port, phys);
	else if (state == IB_PORT_DOWN)
		softib_link_down(port, IB_PORT_PHYS_STATE_POLLING);
	else if (state != STATE_NOP)
		softib_set_state(port, state);
}

__be16 softib_portinfo(struct softib_port *at, struct ib_smp *smp, bool set)
{
	const struct ib_port_info *managed = &softib_management_port(at->node)->info;
	/* IBA 14.2.4: a requester that does not know a protected M_Key is not told that key. */
	bool hides_key = smp->mkey != managed->mkey && managed->mkeyprot_resv_lmc >> 6;
	struct softib_port *port = named(at, smp);
	const struct ib_port_info asked = *(struct ib_port_info *)smp->data;
	u8 state = asked.linkspeed_portstate & 0xF, phys = asked.portphysstate_linkdown >> 4;
	__be16 status = 0;

	if (!port)
		return BAD_FIELD;
	if (set && (!is_valid(port, &asked) || (port->number && !may_change(port, state, phys)))) {
		status = BAD_FIELD;
	} else if (set) {
		const struct ib_port_info before = port->info;

		if (port == softib_management_port(port->node))
			set_management(port, &asked);
		if (port->number)
			set_link(port, &asked);
		if (!softib_is_switch(port->node))
			tell_host(softib_hca_of(port->node), &before, &asked);
		if (port->number)
			set_states(port, state, phys);
	}
	*(struct ib_port_info *)smp->data = port->info;
	((struct ib_port_info *)smp->data)->local_port_num = at->number;
	if (hides_key)
		((struct ib_port_info *)smp->data)->mkey = 0;
	if (!softib_is_switch(port->node))
		((struct ib_port_info *)smp->data)->cap_mask =
			cpu_to_be32(softib_hca_of(port->node)->rvp.port_cap_flags);
	return status;
}
