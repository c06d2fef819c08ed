/* Delivery of a message: which queue pairs get it, with which header, into which receive. */
#include "inside.h"

#include <arpa/inet.h>

enum { MAX_PAYLOAD = 4096 };

/* The bytes of a message, where they lie. */
struct payload {
	struct {
		const uint8_t *from;
		uint32_t length;
	} parts[MAX_SGES];
	int count;
	uint32_t length;
};

/* --- into a receive --- */

/* Where the device finds these bytes; NULL: it may not touch them. */
static uint8_t *reach(const struct qp *qp, uint64_t address, uint64_t length, uint32_t lkey, int writes)
{
	const struct mr *mr = find_mr(lkey);

	if (!mr) {
		report("queue pair %u: no memory region has the key %u, which is in use", qp->qp.qp_num, lkey);
		return NULL;
	}
	if (mr->mr.pd != qp->qp.pd || address < mr->iova || address + length > mr->iova + mr->mr.length ||
	    (writes && !(mr->access & IBV_ACCESS_LOCAL_WRITE)))
		return NULL;
	return mr->base + (address - mr->iova);
}

/* Write into a receive from its byte `at` on. */
static enum ibv_wc_status scatter(const struct qp *qp, const struct receive *receive, const uint8_t *from,
				  size_t length, size_t at)
{
	for (int i = 0; i < receive->count && length; i++) {
		const struct ibv_sge *sge = &receive->sges[i];
		size_t room, part;
		uint8_t *to;

		if (at >= sge->length) {
			at -= sge->length;
			continue;
		}
		room = sge->length - at;
		part = length < room ? length : room;
		to = reach(qp, sge->addr + at, part, sge->lkey, 1);
		if (!to)
			return IBV_WC_LOC_PROT_ERR;
		memcpy(to, from, part);
		from += part;
		length -= part;
		at = 0;
	}
	return length ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* A message uses up a receive. `grh` NULL: the first 40 bytes stay as they are. */
static int arrive(struct qp *qp, struct ibv_wc wc, const uint8_t *grh, const struct payload *payload)
{
	const struct receive *receive;
	size_t at = GRH_BYTES;
	struct work work;
	int scripted;

	if (qp->taken == qp->posted) {
		qp->dropped++;
		return -1;
	}
	receive = &qp->receives[qp->taken++ & qp->mask];
	wc.wr_id = (uint64_t)said(CALL_lie_recv_wr_id, (int64_t)receive->wr_id);
	wc.opcode = IBV_WC_RECV;
	wc.byte_len = (uint32_t)said(CALL_lie_recv_byte_len, GRH_BYTES + payload->length);
	wc.qp_num = qp->qp.qp_num;
	scripted = fault(CALL_recv_completion, NULL, NULL);
	if (scripted)
		wc.status = (enum ibv_wc_status)scripted;
	if (!wc.status && grh)
		wc.status = scatter(qp, receive, grh, GRH_BYTES, 0);
	for (int i = 0; i < payload->count && !wc.status; i++) {
		wc.status = scatter(qp, receive, payload->parts[i].from, payload->parts[i].length, at);
		at += payload->parts[i].length;
	}
	work.qp = qp;
	work.entry = (struct entry){ .wc = wc, .qp = qp };
	work.copied = NULL;
	pass_on(&work, STAGE_RECV);
	if (wc.status)
		fail_qp(qp);
	return 0;
}

int inject(struct qp *qp, const struct card_message *message, const void *payload, uint32_t length)
{
	struct ibv_wc wc = { .status = (enum ibv_wc_status)message->status, .src_qp = message->src_qp,
			     .wc_flags = message->wc_flags, .imm_data = htonl(message->imm),
			     .slid = (uint16_t)message->slid, .sl = (uint8_t)message->sl,
			     .dlid_path_bits = (uint8_t)message->path_bits,
			     .pkey_index = (uint16_t)message->pkey_index };

	struct payload whole = { .parts = { { payload, length } }, .count = 1, .length = length };

	return arrive(qp, wc, message->wc_flags & IBV_WC_GRH ? message->grh : NULL, &whole);
}

/* --- who gets a message --- */

static uint16_t checksum(const uint8_t *header)
{
	uint32_t sum = 0;

	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)(header[i] << 8 | header[i + 1]);
	sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)~(sum + (sum >> 16));
}

static void write_grh(uint8_t *grh, const struct ibv_global_route *route, const uint8_t *source, uint32_t length,
		      enum grh_form form)
{
	uint32_t first = htonl(6u << 28 | (uint32_t)route->traffic_class << 20 | (route->flow_label & 0xfffff));
	uint16_t bytes;

	memset(grh, 0, GRH_BYTES);
	if (form == GRH_IPV6) {
		bytes = htons((uint16_t)length);
		memcpy(grh, &first, 4);
		memcpy(grh + 4, &bytes, 2);
		grh[6] = 0x1b;
		grh[7] = route->hop_limit;
		memcpy(grh + 8, source, 16);
		memcpy(grh + 24, route->dgid.raw, 16);
		return;
	}
	if (form == GRH_IPV4_JUNK)
		memset(grh, 0x60, 20);
	bytes = htons((uint16_t)(20 + length));
	grh[20] = 0x45;
	grh[21] = route->traffic_class;
	memcpy(grh + 22, &bytes, 2);
	grh[28] = route->hop_limit;
	grh[29] = 17;
	memcpy(grh + 32, source + 12, 4);
	memcpy(grh + 36, route->dgid.raw + 12, 4);
	bytes = htons((uint16_t)(checksum(grh + 20) ^ (form == GRH_IPV4_WRONG)));
	memcpy(grh + 30, &bytes, 2);
}

static int is_mapped(const uint8_t *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid, mapped, sizeof(mapped));
}

static enum grh_form form_at(const struct card_port *port, const struct work *work)
{
	if (port->grh != GRH_AUTO)
		return (enum grh_form)port->grh;
	if (!work->to.is_global)
		return GRH_NONE;
	return port->link_layer == IBV_LINK_LAYER_ETHERNET && is_mapped(work->to.grh.dgid.raw) ? GRH_IPV4 : GRH_IPV6;
}

static void deliver(struct work *work, struct card_port *from, struct qp *qp, struct card_port *to,
		    const struct payload *payload)
{
	int is_ethernet = to->link_layer == IBV_LINK_LAYER_ETHERNET;
	enum grh_form form = form_at(to, work);
	uint8_t grh[GRH_BYTES];
	struct ibv_wc wc = { .src_qp = work->qp->qp.qp_num, .sl = work->to.sl, .pkey_index = qp->pkey_index,
			     .slid = (uint16_t)(is_ethernet ? to->ethernet_slid : from->lid | work->to.src_path_bits) };

	if (work->opcode == IBV_WR_SEND_WITH_IMM) {
		wc.wc_flags |= IBV_WC_WITH_IMM;
		wc.imm_data = work->imm;
	}
	if (!is_ethernet && work->remote_qp != MULTICAST_QP)
		wc.dlid_path_bits = (uint8_t)(work->to.dlid & ((1u << to->lmc) - 1));
	if (form != GRH_NONE) {
		wc.wc_flags |= IBV_WC_GRH;
		write_grh(grh, &work->to.grh, from->gids[work->to.is_global ? work->to.grh.sgid_index : 0], payload->length,
			  form);
	}
	arrive(qp, wc, form == GRH_NONE ? NULL : grh, payload);
}

static int is_attached(const struct work *work, const struct qp *qp, const struct card_port *port)
{
	const struct attachment *end = qp->attachments + qp->attached;

	for (const struct attachment *one = qp->attachments; one < end; one++)
		if (!memcmp(&one->gid, &work->to.grh.dgid, sizeof(one->gid)) &&
		    (port->link_layer == IBV_LINK_LAYER_ETHERNET || one->lid == work->to.dlid))
			return 1;
	return 0;
}

static int is_meant(const struct work *work, const struct qp *qp, const struct card_port *port)
{
	if (work->remote_qp == MULTICAST_QP)
		return !(qp == work->qp && qp->blocks_loopback) && is_attached(work, qp, port);
	if (work->remote_qp != qp->qp.qp_num)
		return 0;
	if (port->link_layer != IBV_LINK_LAYER_ETHERNET)
		return (work->to.dlid & ~((1u << port->lmc) - 1)) == port->lid;
	for (int i = 0; i < GIDS; i++)
		if (!memcmp(port->gids[i], work->to.grh.dgid.raw, 16))
			return 1;
	return 0;
}

static int is_allowed(const struct work *work, const struct card_port *from, const struct qp *qp,
		      struct card_port *to)
{
	uint16_t one = from->pkeys[work->qp->pkey_index % PKEYS], other = to->pkeys[qp->pkey_index % PKEYS];
	uint32_t qkey = work->remote_qkey & 0x80000000 ? work->qp->qkey : work->remote_qkey;

	if (to->link_layer != IBV_LINK_LAYER_ETHERNET && ((one ^ other) & 0x7fff || !((one | other) & 0x8000)))
		return 0;
	if (qkey == qp->qkey)
		return 1;
	to->qkey_violations++;
	return 0;
}

static void spread(struct work *work, struct card_port *from, const struct payload *payload)
{
	uint32_t length = payload->length;
	int is_group = work->remote_qp == MULTICAST_QP;

	for (struct qp *qp = all_qps; qp; qp = qp->next) {
		struct card_port *to = port_of(object_of(KIND_QP, qp)->device, qp->port);

		if (!to || to->link_layer != from->link_layer || to->state != IBV_PORT_ACTIVE ||
		    object_of(KIND_QP, qp)->device->gone || (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_RTR))
			continue;
		if (!is_meant(work, qp, to) || length > 128u << to->active_mtu)
			continue;
		if (is_group && to->link_layer != IBV_LINK_LAYER_ETHERNET && length > 128u << to->group_mtu)
			continue;
		if (is_allowed(work, from, qp, to))
			deliver(work, from, qp, to, payload);
	}
}

/* --- from a send --- */

static enum ibv_wc_status gather(const struct work *work, struct payload *payload)
{
	int is_inline = !!(work->flags & IBV_SEND_INLINE);

	payload->count = 0;
	payload->length = 0;
	for (int i = 0; i < work->sge_count; i++) {
		const struct ibv_sge *sge = &work->sges[i];
		const uint8_t *from = is_inline ? (const uint8_t *)(uintptr_t)sge->addr :
						  reach(work->qp, sge->addr, sge->length, sge->lkey, 0);

		if (!from)
			return IBV_WC_LOC_PROT_ERR;
		if (payload->length + sge->length > MAX_PAYLOAD)
			return IBV_WC_LOC_LEN_ERR;
		payload->parts[payload->count].from = from;
		payload->parts[payload->count++].length = sge->length;
		payload->length += sge->length;
	}
	return IBV_WC_SUCCESS;
}

void transmit(struct work *work)
{
	struct device *device = object_of(KIND_QP, work->qp)->device;
	struct card_port *from = port_of(device, work->qp->port);
	enum ibv_wc_status status = (enum ibv_wc_status)fault(CALL_send_completion, NULL, NULL);
	struct payload payload;

	if (work->qp->state == IBV_QPS_ERR)
		status = IBV_WC_WR_FLUSH_ERR;
	if (!status)
		status = gather(work, &payload);
	if (!status && from && payload.length > 128u << from->active_mtu)
		status = IBV_WC_LOC_LEN_ERR;
	if (!status && from && from->state == IBV_PORT_ACTIVE)
		spread(work, from, &payload);
	work->entry.wc.status = status;
	free(work->copied);
	work->copied = NULL;
	if (status || work->flags & IBV_SEND_SIGNALED)
		work->entry.wc.wr_id = (uint64_t)said(CALL_lie_send_wr_id, (int64_t)work->entry.wc.wr_id);
	if (status || work->flags & IBV_SEND_SIGNALED)
		pass_on(work, STAGE_SEND);
	if (status && work->qp->state != IBV_QPS_ERR)
		fail_qp(work->qp);
}
