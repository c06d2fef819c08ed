// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The performance management agent: a port's counters, read and reset (IBA 16.1). */
#include "softib.h"

#define OK cpu_to_be16(0)
#define BAD_VERSION cpu_to_be16(1 << 2)
#define BAD_METHOD cpu_to_be16(2 << 2)
#define BAD_ATTRIBUTE cpu_to_be16(3 << 2)
#define BAD_FIELD cpu_to_be16(7 << 2)

/* Both attributes start with these; ALL_PORTS is not offered. */
#define SELECTED_PORT 1
#define COUNTER_SELECT 2

struct field {
	u8 bit;				/* of CounterSelect */
	u8 bytes;
	u8 at;				/* in the attribute */
	u8 counter;			/* in struct softib_counters */
};

#define FIELD(bit, type, name, counter) \
	{ bit, sizeof_field(struct type, name), offsetof(struct type, name), offsetof(struct softib_counters, counter) }

static const struct field short_fields[] = {
	FIELD(2, ib_pma_portcounters, link_downed_counter, link_downed),
	FIELD(3, ib_pma_portcounters, port_rcv_errors, rcv_errors),
	FIELD(5, ib_pma_portcounters, port_rcv_switch_relay_errors, relay_errors),
	FIELD(6, ib_pma_portcounters, port_xmit_discards, xmit_discards),
	FIELD(11, ib_pma_portcounters, vl15_dropped, vl15_dropped),
	FIELD(12, ib_pma_portcounters, port_xmit_data, xmit_data),
	FIELD(13, ib_pma_portcounters, port_rcv_data, rcv_data),
	FIELD(14, ib_pma_portcounters, port_xmit_packets, xmit_packets),
	FIELD(15, ib_pma_portcounters, port_rcv_packets, rcv_packets),
	{ }
};

static const struct field long_fields[] = {
	FIELD(0, ib_pma_portcounters_ext, port_xmit_data, xmit_data),
	FIELD(1, ib_pma_portcounters_ext, port_rcv_data, rcv_data),
	FIELD(2, ib_pma_portcounters_ext, port_xmit_packets, xmit_packets),
	FIELD(3, ib_pma_portcounters_ext, port_rcv_packets, rcv_packets),
	FIELD(4, ib_pma_portcounters_ext, port_unicast_xmit_packets, unicast_xmit),
	FIELD(5, ib_pma_portcounters_ext, port_unicast_rcv_packets, unicast_rcv),
	FIELD(6, ib_pma_portcounters_ext, port_multicast_xmit_packets, multicast_xmit),
	FIELD(7, ib_pma_portcounters_ext, port_multicast_rcv_packets, multicast_rcv),
	{ }
};

static u64 take(const u8 *from, u8 bytes)
{
	u64 value = 0;

	while (bytes--)
		value = value << 8 | *from++;
	return value;
}

/* The counter, or the largest number that fits: they stop there and do not wrap (IBA 16.1.3.5). */
static void put(u8 *to, u8 bytes, u64 value)
{
	if (bytes < 8)
		value = min(value, (1ULL << 8 * bytes) - 1);
	while (bytes--) {
		to[bytes] = value;
		value >>= 8;
	}
}

static __be16 counters(struct softib_node *node, struct ib_pma_mad *mad, const struct field *fields)
{
	u8 number = mad->data[SELECTED_PORT];
	u16 selected = take(mad->data + COUNTER_SELECT, 2);
	struct softib_port *port;

	if (number > node->ports || (!number && !softib_is_switch(node)))
		return BAD_FIELD;
	port = &node->port[number];
	if (mad->mad_hdr.method == IB_MGMT_METHOD_GET)
		memset(mad->data, 0, sizeof(mad->data));
	mad->data[SELECTED_PORT] = number;
	for (; fields->bytes; fields++) {
		u64 *counter = (void *)&port->counters + fields->counter;

		if (mad->mad_hdr.method == IB_MGMT_METHOD_SET && selected & BIT(fields->bit))
			*counter = take(mad->data + fields->at, fields->bytes);
		put(mad->data + fields->at, fields->bytes, *counter);
	}
	return OK;
}

static __be16 class_port_info(struct ib_pma_mad *mad)
{
	struct ib_class_port_info *info = (struct ib_class_port_info *)mad->data;

	memset(mad->data, 0, sizeof(mad->data));
	info->base_version = IB_MGMT_BASE_VERSION;
	info->class_version = 1;
	info->capability_mask = IB_PMA_CLASS_CAP_EXT_WIDTH;
	ib_set_cpi_resp_time(info, 18);	/* 4.096 us * 2^18 = 1 s */
	return OK;
}

static __be16 answer(struct softib_node *node, struct ib_pma_mad *mad)
{
	bool get = mad->mad_hdr.method == IB_MGMT_METHOD_GET;

	if (mad->mad_hdr.base_version != IB_MGMT_BASE_VERSION || mad->mad_hdr.class_version != 1)
		return BAD_VERSION;
	if (mad->mad_hdr.attr_id == IB_PMA_CLASS_PORT_INFO)
		return get ? class_port_info(mad) : BAD_METHOD;
	if (mad->mad_hdr.attr_id == IB_PMA_PORT_COUNTERS)
		return counters(node, mad, short_fields);
	if (mad->mad_hdr.attr_id == IB_PMA_PORT_COUNTERS_EXT)
		return counters(node, mad, long_fields);
	return BAD_ATTRIBUTE;
}

/* Answers a Get or Set in place. The caller has softib.lock. False: there is no answer. */
bool softib_pma(struct softib_node *node, struct ib_pma_mad *mad)
{
	if (mad->mad_hdr.method != IB_MGMT_METHOD_GET && mad->mad_hdr.method != IB_MGMT_METHOD_SET)
		return false;
	mad->mad_hdr.status = answer(node, mad);
	mad->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
	return true;
}
