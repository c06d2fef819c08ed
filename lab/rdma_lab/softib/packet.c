// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Packets: how one is made, addressed, and filled from the memory of a work request. */
#include <linux/slab.h>

#include "softib.h"

/* Returns a UD packet with room for so many bytes of payload; NULL without memory. */
struct softib_packet *softib_packet_alloc(u32 length)
{
	struct softib_packet *packet = kzalloc(struct_size(packet, payload, length), GFP_ATOMIC);

	if (packet) {
		packet->length = length;
		packet->opcode = IB_OPCODE_UD_SEND_ONLY;
		packet->extension_length = 8;
	}
	return packet;
}

static void fill_grh(struct softib_hca *hca, struct softib_packet *packet, struct rdma_ah_attr *to)
{
	const struct ib_global_route *route = rdma_ah_read_grh(to);

	packet->grh.version_tclass_flow =
		cpu_to_be32(IB_GRH_VERSION << IB_GRH_VERSION_SHIFT | route->traffic_class << IB_GRH_TCLASS_SHIFT |
			    (route->flow_label & IB_GRH_FLOW_MASK));
	packet->grh.paylen = cpu_to_be16(softib_wire_length(packet) - SOFTIB_LRH - SOFTIB_GRH - SOFTIB_VCRC);
	packet->grh.next_hdr = IB_GRH_NEXT_HDR;
	packet->grh.hop_limit = route->hop_limit;
	packet->grh.sgid.global.subnet_prefix = hca->port[1].info.gid_prefix;
	packet->grh.sgid.global.interface_id = cpu_to_be64(hca->node.guid + 1);
	packet->grh.dgid = route->dgid;
}

/* Fills the LRH and the GRH. All that counts in the packet's length is set already. */
void softib_packet_address(struct softib_hca *hca, struct softib_packet *packet, struct rdma_ah_attr *to)
{
	struct softib_port *port = &hca->port[1];

	packet->dlid = rdma_ah_get_dlid(to);
	/* A directed route has no LIDs at all (IBA 14.2.1.2): the answer goes back to what is here. */
	packet->slid = packet->dlid != SOFTIB_PERMISSIVE && softib_lid(port) ?
		softib_lid(port) | (rdma_ah_get_path_bits(to) & (u16)~softib_lid_mask(port)) : SOFTIB_PERMISSIVE;
	packet->sl = rdma_ah_get_sl(to);
	packet->has_grh = rdma_ah_get_ah_flags(to) & IB_AH_GRH;
	if (packet->has_grh)
		fill_grh(hca, packet, to);
}

/* Copies out of the memory that `from` describes, and moves it on; `release` gives finished regions back. */
void softib_gather(struct rvt_sge_state *from, u8 *to, u32 left, bool release)
{
	while (left) {
		u32 length = rvt_get_sge_length(&from->sge, left);

		if (WARN_ON_ONCE(!length))
			return;
		memcpy(to, from->sge.vaddr, length);
		rvt_update_sge(from, length, release);
		to += length;
		left -= length;
	}
}
