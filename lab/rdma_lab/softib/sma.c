// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The subnet management agent of HCAs and switches (IBA 14.2.5). What it reads was sent by anybody who may open
 * umad: each index is bounded by the table it indexes. The caller has softib.lock.
 */
#include "softib.h"

#define OK cpu_to_be16(0)
#define BAD_VERSION cpu_to_be16(1 << 2)
#define BAD_METHOD cpu_to_be16(2 << 2)
#define BAD_ATTRIBUTE cpu_to_be16(3 << 2)
#define BAD_FIELD cpu_to_be16(7 << 2)

#define PKEY_BLOCK 32
#define PKEY_BLOCKS DIV_ROUND_UP(SOFTIB_PKEYS, PKEY_BLOCK)

/* IBA 14.2.5.4; the names of the fields that OpenSM sets are as in the specification. */
struct switch_info {
	__be16 linear_cap, random_cap, multicast_cap, linear_top;
	u8 default_port, default_primary, default_not_primary, life_time_state_change;
	__be16 lids_per_port, enforcement_cap;
	u8 enforcement;
	u8 reserved;
	__be16 multicast_top;
} __packed;

#define STATE_CHANGE BIT(2)

static __be16 node_description(struct softib_port *at, struct ib_smp *smp, bool set)
{
	if (set)
		return BAD_METHOD;
	memcpy(smp->data, at->node->description, IB_DEVICE_NODE_DESC_MAX);
	return OK;
}

static __be16 node_info(struct softib_port *at, struct ib_smp *smp, bool set)
{
	struct ib_node_info *info = (struct ib_node_info *)smp->data;

	if (set || smp->attr_mod)
		return set ? BAD_METHOD : BAD_FIELD;
	memset(smp->data, 0, sizeof(smp->data));
	info->base_version = IB_MGMT_BASE_VERSION;
	info->class_version = 1;
	info->node_type = at->node->type;
	info->num_ports = at->node->ports;
	info->sys_guid = cpu_to_be64(at->node->guid);
	info->node_guid = info->sys_guid;
	info->port_guid = cpu_to_be64(at->node->guid + 1);
	info->partition_cap = cpu_to_be16(SOFTIB_PKEYS);
	info->device_id = cpu_to_be16(softib_is_switch(at->node) ? 2 : 1);
	info->revision = cpu_to_be32(1);
	info->local_port_num = at->number;
	return OK;
}

static __be16 switch_info(struct softib_port *at, struct ib_smp *smp, bool set)
{
	struct softib_switch *sw = softib_switch_of(at->node);
	struct switch_info *info = (struct switch_info *)smp->data;

	if (set) {
		if (be16_to_cpu(info->linear_top) >= SOFTIB_LINEAR_ENTRIES)
			return BAD_FIELD;
		sw->linear_top = be16_to_cpu(info->linear_top);
		sw->life_time = info->life_time_state_change >> 3;
		if (info->life_time_state_change & STATE_CHANGE)	/* the SM has seen it */
			sw->port_state_changed = false;
	}
	memset(smp->data, 0, sizeof(smp->data));
	info->linear_cap = cpu_to_be16(SOFTIB_LINEAR_ENTRIES);
	info->multicast_cap = cpu_to_be16(softib.mlids);
	info->linear_top = cpu_to_be16(sw->linear_top);
	/* There is no default: what no table has is dropped. */
	info->default_port = SOFTIB_NO_PORT;
	info->default_primary = SOFTIB_NO_PORT;
	info->default_not_primary = SOFTIB_NO_PORT;
	info->life_time_state_change = sw->life_time << 3 | (sw->port_state_changed ? STATE_CHANGE : 0);
	return OK;
}

static __be16 guid_info(struct softib_port *at, struct ib_smp *smp, bool set)
{
	if (smp->attr_mod)
		return BAD_FIELD;
	memset(smp->data, 0, sizeof(smp->data));	/* the one GUID is read-only */
	*(__be64 *)smp->data = cpu_to_be64(at->node->guid + 1);
	return OK;
}

/* Of an HCA's port, or of port 0; a switch's other ports filter nothing and have none. */
static __be16 pkey_table(struct softib_port *at, struct ib_smp *smp, bool set)
{
	u32 modifier = be32_to_cpu(smp->attr_mod);
	struct softib_port *port = softib_management_port(at->node);
	__be16 *values = (__be16 *)smp->data;
	bool changed = false;
	unsigned int i;

	if ((modifier & 0xFFFF) >= PKEY_BLOCKS || (softib_is_switch(at->node) && modifier >> 16))
		return BAD_FIELD;
	for (i = 0; i < PKEY_BLOCK; i++) {
		if (set && i < SOFTIB_PKEYS) {
			changed |= port->pkeys[i] != be16_to_cpu(values[i]);
			port->pkeys[i] = be16_to_cpu(values[i]);
		}
		values[i] = i < SOFTIB_PKEYS ? cpu_to_be16(port->pkeys[i]) : 0;
	}
	if (changed && !softib_is_switch(at->node))
		softib_event(softib_hca_of(at->node), IB_EVENT_PKEY_CHANGE);
	return OK;
}

/* With one data VL every SL goes to VL 0, and nothing can be set. */
static __be16 sl_to_vl(struct softib_port *at, struct ib_smp *smp, bool set)
{
	memset(smp->data, 0, sizeof(smp->data));
	return OK;
}

static __be16 linear_table(struct softib_port *at, struct ib_smp *smp, bool set)
{
	u32 block = be32_to_cpu(smp->attr_mod);
	struct softib_switch *sw = softib_switch_of(at->node);
	u8 *entries;

	if (block >= SOFTIB_LINEAR_ENTRIES / SOFTIB_LFT_BLOCK)
		return BAD_FIELD;
	entries = sw->written.linear + block * SOFTIB_LFT_BLOCK;
	if (set) {
		memcpy(entries, smp->data, SOFTIB_LFT_BLOCK);
		softib_tables_written(sw);
	} else {
		memcpy(smp->data, entries, SOFTIB_LFT_BLOCK);
	}
	return OK;
}

static __be16 multicast_table(struct softib_port *at, struct ib_smp *smp, bool set)
{
	u32 modifier = be32_to_cpu(smp->attr_mod), block = modifier & 0x1FF, position = modifier >> 28;
	struct softib_switch *sw = softib_switch_of(at->node);
	__be16 *values = (__be16 *)smp->data;
	u16 *entries;
	int i;

	if (block >= softib.mlids / SOFTIB_MFT_BLOCK || position > at->node->ports / SOFTIB_MFT_PORTS)
		return BAD_FIELD;
	entries = sw->written.multicast + position * softib.mcast_entries + block * SOFTIB_MFT_BLOCK;
	for (i = 0; i < SOFTIB_MFT_BLOCK; i++) {
		if (set)
			entries[i] = be16_to_cpu(values[i]);
		values[i] = cpu_to_be16(entries[i]);
	}
	if (set)
		softib_tables_written(sw);
	return OK;
}

static const struct {
	__be16 id;
	bool of_switches_alone;
	__be16 (*answer)(struct softib_port *at, struct ib_smp *smp, bool set);
} attributes[] = {
	{ IB_SMP_ATTR_NODE_DESC, false, node_description },
	{ IB_SMP_ATTR_NODE_INFO, false, node_info },
	{ IB_SMP_ATTR_SWITCH_INFO, true, switch_info },
	{ IB_SMP_ATTR_GUID_INFO, false, guid_info },
	{ IB_SMP_ATTR_PORT_INFO, false, softib_portinfo },
	{ IB_SMP_ATTR_PKEY_TABLE, false, pkey_table },
	{ IB_SMP_ATTR_SL_TO_VL_TABLE, false, sl_to_vl },
	{ IB_SMP_ATTR_LINEAR_FORWARD_TABLE, true, linear_table },
	{ IB_SMP_ATTR_MCAST_FORWARD_TABLE, true, multicast_table },
};

static __be16 answer(struct softib_port *at, struct ib_smp *smp)
{
	bool set = smp->method == IB_MGMT_METHOD_SET;
	int i;

	if (smp->base_version != IB_MGMT_BASE_VERSION || smp->class_version != 1)
		return BAD_VERSION;
	if (!set && smp->method != IB_MGMT_METHOD_GET)
		return BAD_METHOD;
	for (i = 0; i < ARRAY_SIZE(attributes); i++)
		if (attributes[i].id == smp->attr_id &&
		    (softib_is_switch(at->node) || !attributes[i].of_switches_alone))
			return attributes[i].answer(at, smp, set);
	return BAD_ATTRIBUTE;
}

/* IBA 14.2.4: a wrong M_Key stops every Set, and a Get only if the protection bits say so. */
static bool key_allows(struct softib_port *at, const struct ib_smp *smp)
{
	struct ib_port_info *info = &softib_management_port(at->node)->info;
	u16 violations = be16_to_cpu(info->mkey_violations);

	if (!info->mkey || smp->mkey == info->mkey)
		return true;
	if (smp->method == IB_MGMT_METHOD_GET && info->mkeyprot_resv_lmc >> 6 < 2)
		return true;
	if (violations < U16_MAX)
		info->mkey_violations = cpu_to_be16(violations + 1);
	return false;
}

/*
 * Answers a request in place. `at` is the port that the request came by; a `trusted` sender, which is the node's own
 * kernel, needs no M_Key. False: there is no answer.
 */
bool softib_sma(struct softib_port *at, struct ib_smp *smp, bool trusted)
{
	switch (smp->method) {
	case IB_MGMT_METHOD_TRAP_REPRESS:
		softib_trap_repress(at->node, smp->tid);
		return false;
	case IB_MGMT_METHOD_GET_RESP:
	case IB_MGMT_METHOD_TRAP:
	case IB_MGMT_METHOD_REPORT:
	case IB_MGMT_METHOD_REPORT_RESP:
		return false;
	}
	if (!trusted && !key_allows(at, smp))
		return false;
	smp->status = answer(at, smp);
	if (smp->mgmt_class == IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE)
		smp->status |= IB_SMP_DIRECTION;
	smp->method = IB_MGMT_METHOD_GET_RESP;
	return true;
}
