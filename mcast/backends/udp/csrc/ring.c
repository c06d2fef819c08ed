/* The rules by which a datagram is delivered or counted; tests/udp/oracle.py has them in Python. */
#include "ring.h"

#include "crc.h"

#include <string.h>

enum { SEND_ONLY = 0x64, SEND_ONLY_IMM = 0x65, FULL_MEMBER = 0x8000, PARTITION = 0x7FFF, MULTICAST_QP = 0xFFFFFF };

static uint32_t get24(const uint8_t *at)
{
	return (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
}

static uint32_t get32(const uint8_t *at)
{
	return (uint32_t)at[0] << 24 | get24(at + 1);
}

static void put16(uint8_t *at, uint32_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

static void put32(uint8_t *at, uint32_t value)
{
	put16(at, value >> 16);
	put16(at + 2, value);
}

void put_head(uint8_t *at, int has_imm, uint32_t pad, uint16_t pkey, uint32_t dest_qp, uint32_t psn, uint32_t qkey,
	      uint32_t src_qp)
{
	at[0] = has_imm ? SEND_ONLY_IMM : SEND_ONLY;
	at[1] = (uint8_t)(pad << 4);
	put16(at + 2, pkey);
	put32(at + 4, dest_qp);
	put32(at + 8, psn & 0xFFFFFF);
	put32(at + 12, qkey);
	put32(at + 16, src_qp);
}

enum { MASKED_BYTES = 8 + IP_BYTES + UDP_BYTES, IDENTIFICATION = 8 + 4 };

static uint32_t by_place[PLACES]; /* how the CRC of masked headers changes with the identification, whatever else is in them */

void icrc_prepare(void)
{
	uint8_t zeros[MASKED_BYTES] = { 0 };
	uint32_t without = crc_more(0, zeros, sizeof(zeros));

	for (uint32_t place = 0; place < PLACES; place++) {
		put16(zeros + IDENTIFICATION, place);
		by_place[place] = crc_more(0, zeros, sizeof(zeros)) ^ without;
	}
}

uint32_t icrc_of_addresses(struct addresses *known, struct addresses wanted, uint16_t place)
{
	uint8_t masked[MASKED_BYTES];
	uint8_t *ip = masked + 8, *udp = ip + IP_BYTES;

	if (known->source != wanted.source || known->dest != wanted.dest || known->ports != wanted.ports ||
	    known->size != wanted.size) {
		memset(masked, 0xFF, sizeof(masked)); /* no LRH; and ones for TOS, TTL and checksums */
		ip[0] = 0x45;
		put16(ip + 2, IP_BYTES + UDP_BYTES + wanted.size);
		put16(ip + 4, 0);
		put16(ip + 6, 0x4000); /* DF: a socket with IP_PMTUDISC_DO, and RoCEv2, never send without */
		ip[9] = 17;
		put32(ip + 12, wanted.source);
		put32(ip + 16, wanted.dest);
		put32(udp, wanted.ports);
		put16(udp + 4, UDP_BYTES + wanted.size);
		*known = wanted;
		known->crc = crc_more(0, masked, sizeof(masked));
	}
	return known->crc ^ by_place[place];
}

int ring_is_in(const struct ring *ring, uint32_t group)
{
	uint32_t begin = 0, end = ring->group_count;

	while (begin < end) {
		uint32_t middle = begin + (end - begin) / 2;

		if (ring->groups[middle] == group)
			return 1;
		if (ring->groups[middle] < group)
			begin = middle + 1;
		else
			end = middle;
	}
	return 0;
}

static uint32_t place_of(uint32_t address, uint32_t qp_num)
{
	return ((address * 0x9E3779B1u) ^ (qp_num * 0x85EBCA6Bu)) >> 16 & (PEERS - 1);
}

int ring_is_peer(const struct ring *ring, uint32_t address, uint32_t qp_num)
{
	const struct peer *known = &ring->peers[place_of(address, qp_num)];

	return known->address == address && known->qp_num == qp_num;
}

/* Whether an identification exists with which the ICRC is right. A socket does not see the one that was sent; that of a message
 * of ours is its place in its run. */
static int has_icrc(struct ring *ring, const struct datagram *it)
{
	const uint8_t *sent = it->data + it->size - ICRC_BYTES;
	uint32_t wanted = sent[0] | (uint32_t)sent[1] << 8 | (uint32_t)sent[2] << 16 | (uint32_t)sent[3] << 24;
	struct addresses from = { it->source, it->dest, (uint32_t)it->source_port << 16 | it->dest_port, it->size, 0 };
	uint32_t crc = icrc_of_addresses(&ring->received_from, from, it->place < PLACES ? it->place : 0);

	it->data[RESERVED] = 0xFF; /* masked, and of no other use */
	crc = crc_more(crc, it->data, it->size - ICRC_BYTES);
	/* behind the identification: the rest of both headers, and the message */
	return crc_differs_by_two_bytes(crc ^ wanted, IP_BYTES - 6 + UDP_BYTES + it->size - ICRC_BYTES);
}

static int is_partner(uint16_t own, uint16_t theirs)
{
	return (own & PARTITION) && !((own ^ theirs) & PARTITION) && ((own | theirs) & FULL_MEMBER);
}

static enum fate judge(struct ring *ring, const struct datagram *it, uint32_t *length)
{
	int has_imm = it->data[0] == SEND_ONLY_IMM;
	uint32_t pad = it->data[1] >> 4 & 3, dest_qp = get24(it->data + 5);
	uint32_t beside = HEAD_BYTES + ICRC_BYTES + (has_imm ? 4 : 0) + pad;
	int is_group = it->dest >> 28 == 0xE;

	if (it->size < HEAD_BYTES + ICRC_BYTES || it->size % 4 || (it->data[0] != SEND_ONLY && !has_imm) || it->data[1] & 0xF ||
	    it->size < beside)
		return MALFORMED;
	*length = it->size - beside;
	if (!has_icrc(ring, it))
		return ICRC;
	if (is_group ? dest_qp != MULTICAST_QP || !ring_is_in(ring, it->dest) : dest_qp != ring->qp_num || it->dest != ring->address)
		return FOREIGN;
	if (!is_partner(ring->pkey, (uint16_t)(get32(it->data) & 0xFFFF)))
		return PKEY;
	if (get32(it->data + 12) != ring->qkey)
		return QKEY;
	if (*length > ring->mtu)
		return OVERSIZED;
	if (ring->blocks_own && is_group && it->source == ring->address && get24(it->data + 17) == ring->qp_num)
		return OWN;
	if (*length > ring->room)
		return TOO_LONG;
	return ring->free_count ? DELIVERED : NO_RECEIVE;
}

static void keep(struct ring *ring, const struct datagram *it, uint32_t length)
{
	struct record *record = &ring->queue[(ring->first + ring->queued) % ring->depth];
	const uint8_t *payload = it->data + HEAD_BYTES;
	struct peer *peer;

	record->has_imm = it->data[0] == SEND_ONLY_IMM;
	record->imm = record->has_imm ? get32(payload) : 0;
	if (record->has_imm)
		payload += 4;
	record->slot = ring->free[--ring->free_count];
	memcpy(ring->memory + record->slot * ring->stride, payload, length);
	record->length = length;
	record->src_qp = get24(it->data + 17);
	record->source = it->source;
	record->dest = it->dest;
	ring->queued++;
	ring->received++;
	if (ring->free_count < ring->low_water)
		ring->low_water = ring->free_count;
	if (!ring->free_count)
		ring->empty++;
	if (record->src_qp >> 8 == it->source_port) {
		peer = &ring->peers[place_of(it->source, record->src_qp)];
		peer->address = it->source;
		peer->qp_num = record->src_qp;
	}
}

enum fate ring_take(struct ring *ring, const struct datagram *it)
{
	uint32_t length = 0;
	enum fate fate = it->size < HEAD_BYTES ? MALFORMED : judge(ring, it, &length);

	ring->fates[fate]++;
	if (fate == DELIVERED)
		keep(ring, it, length);
	/* As a device does: a message that its receive has no room for is an error of the queue pair (K-DATA-7). */
	if (fate == TOO_LONG && ring->free_count)
		ring->is_failed = 1;
	return fate;
}
