/* A queue pair's messages: the rules that judge a datagram, and the receives that keep what is delivered. */
#include <stddef.h>
#include <stdint.h>

enum {
	ROCE_PORT = 4791,
	IP_BYTES = 20,
	UDP_BYTES = 8,
	HEAD_BYTES = 20, /* BTH and DETH */
	ICRC_BYTES = 4,
	RECORD_BYTES = 72, /* mcast.contract.batch.RECORD_DTYPE */
	PEERS = 1024,
	PLACES = 64, /* messages of a run, at most */
	RESERVED = 4, /* the byte of BTH that the ICRC does not cover */
};

/* What becomes of a datagram. Of those that apply, the first. */
enum fate {
	DELIVERED,
	MALFORMED,
	ICRC,
	FOREIGN, /* for another queue pair, or for a group that this one is not attached to */
	PKEY,
	QKEY,
	OVERSIZED,
	TOO_LONG,
	OWN, /* blocked, as QpInit.block_loopback asks */
	NO_RECEIVE,
	FATES,
};

/* A message as it came: its addresses in host order, and the whole UDP payload. */
struct datagram {
	uint32_t source, dest;
	uint16_t source_port, dest_port;
	uint32_t size;
	uint16_t place; /* in the run that it came in */
	uint8_t *data;
};

/* What the masked headers of a datagram depend on beside its identification; and their CRC for identification 0. */
struct addresses {
	uint32_t source, dest, ports, size, crc;
};

struct peer {
	uint32_t address, qp_num;
};

struct record {
	uint32_t slot, length, src_qp, imm, source, dest;
	uint8_t has_imm;
};

struct ring {
	uint32_t address, qp_num, qkey, mtu;
	uint16_t pkey;
	uint8_t blocks_own, is_failed;
	uint32_t *groups; /* in ascending order */
	uint32_t group_count, group_room;
	uint8_t *memory;
	uint32_t depth, room;
	size_t stride;
	uint32_t *free; /* a stack */
	uint32_t free_count, low_water, empty;
	struct record *queue; /* a ring of `depth` */
	uint32_t first, queued;
	uint64_t received;
	uint64_t fates[FATES];
	struct addresses received_from, sent_to;
	struct peer peers[PEERS]; /* those that say that they are answered at the port in their number */
};

/* Bytes that go in front of a message, in wire order. */
void put_head(uint8_t *at, int has_imm, uint32_t pad, uint16_t pkey, uint32_t dest_qp, uint32_t psn, uint32_t qkey,
	      uint32_t src_qp);

void icrc_prepare(void);

/* The ICRC's beginning: the masked IPv4 and UDP headers, with an identification that is below PLACES. It is made anew only if these
 * are not the addresses and the size that are known. */
uint32_t icrc_of_addresses(struct addresses *known, struct addresses wanted, uint16_t place);

/* Judge a datagram, and copy its payload to a receive if it is delivered. */
enum fate ring_take(struct ring *ring, const struct datagram *it);

int ring_is_in(const struct ring *ring, uint32_t group);
int ring_is_peer(const struct ring *ring, uint32_t address, uint32_t qp_num);
