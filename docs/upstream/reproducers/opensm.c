/*
 * Reproducers for the reports on OpenSM: what it answers to SA requests for MCMemberRecord, printed.
 *
 *   cc -o opensm-cases opensm.c -libumad
 *   ./opensm-cases SM_LID PORT_GUID          run-opensm.sh runs it on a simulated fabric
 */
#include <endian.h>
#include <infiniband/umad.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GET = 1, SET = 2, DELETE = 0x15 };
enum { /* bits of the component mask */
	MGID = 1 << 0, PORT_GID = 1 << 1, QKEY = 1 << 2, MTU_SELECTOR = 1 << 4, TCLASS = 1 << 6,
	PKEY = 1 << 7, SL = 1 << 12, FLOW_LABEL = 1 << 13, JOIN_STATE = 1 << 16,
};
enum { FULL = 1, SEND_ONLY_NON = 4, SEND_ONLY_FULL = 8 };
#define JOIN (MGID | PORT_GID | JOIN_STATE)
#define CREATE (JOIN | QKEY | TCLASS | PKEY | SL | FLOW_LABEL)

struct record { /* as it goes over the wire */
	uint8_t mgid[16], port_gid[16];
	uint32_t qkey;
	uint16_t mlid;
	uint8_t mtu, tclass;
	uint16_t pkey;
	uint8_t rate, life;
	uint32_t sl_flow_hop;
	uint8_t scope_state, proxy, reserved[2];
} __attribute__((packed));

struct mad {
	uint8_t base, class, version, method;
	uint16_t status, specific;
	uint64_t tid;
	uint16_t attribute, reserved;
	uint32_t modifier;
	uint8_t rmpp[12];
	uint64_t sm_key;
	uint16_t offset, reserved2;
	uint64_t mask;
	struct record record;
	uint8_t rest[256 - 56 - sizeof(struct record)];
} __attribute__((packed));

static int port, agent;
static uint16_t sm_lid;
static uint64_t guid;

/* Sends the record, and puts the answer's in its place. Returns the SA's status; -1: there was no answer. */
static int ask(int method, uint64_t mask, struct record *record)
{
	static uint64_t tid;
	size_t size = umad_size() + sizeof(struct mad);
	void *umad = calloc(1, size);
	struct mad *mad = umad_get_mad(umad);
	int length = sizeof(*mad), status = -1;

	*mad = (struct mad){ .base = 1, .class = 3, .version = 2, .method = method, .tid = htobe64(++tid),
			     .attribute = htobe16(0x38), .mask = htobe64(mask), .record = *record };
	umad_set_addr(umad, sm_lid, 1, 0, 0x80010000);
	if (!umad_send(port, agent, umad, sizeof(*mad), 2000, 0) &&
	    umad_recv(port, umad, &length, 3000) >= 0 && !umad_status(umad)) {
		status = be16toh(mad->status);
		*record = mad->record;
	}
	free(umad);
	return status;
}

static struct record group(uint8_t number, uint8_t state)
{
	struct record made = { .mgid = { 0xff, 0x12, 0x66, 0x66, [15] = number }, .qkey = htobe32(1),
			       .pkey = htobe16(0xffff), .scope_state = 0x20 | state };
	uint64_t prefix = htobe64(0xfe80000000000000), id = htobe64(guid);

	memcpy(made.port_gid, &prefix, 8);
	memcpy(made.port_gid + 8, &id, 8);
	return made;
}

static int step(const char *what, int method, uint64_t mask, struct record *record)
{
	int status = ask(method, mask, record);

	printf("  %-42s status 0x%04x", what, status);
	if (!status && method != GET)
		printf(", JoinState %d, MLID 0x%x", record->scope_state & 15, be16toh(record->mlid));
	printf("\n");
	return status;
}

static void is_it_there(uint8_t number)
{
	struct record asked = group(number, 0);

	step("Get of the group", GET, MGID, &asked);
}

static void empty_group(void)
{
	struct record made = group(1, FULL | SEND_ONLY_FULL), left = group(1, FULL), rest = group(1, SEND_ONLY_FULL);

	printf("the only member, FullMember and SendOnlyFullMember, leaves FullMember\n");
	step("Set, JoinState 9", SET, CREATE, &made);
	step("Delete, JoinState 1", DELETE, JOIN, &left);
	is_it_there(1);
	step("Delete, JoinState 8", DELETE, JOIN, &rest);
	is_it_there(1);
}

static void lost_bits(void)
{
	struct record made = group(2, SEND_ONLY_FULL | SEND_ONLY_NON), left = group(2, SEND_ONLY_FULL);

	printf("the only member, SendOnlyFullMember and SendOnlyNonMember, leaves SendOnlyFullMember\n");
	step("Set, JoinState 12", SET, CREATE, &made);
	step("Delete, JoinState 8", DELETE, JOIN, &left);
	is_it_there(2);
}

static void lone_selector(void)
{
	struct record made = group(3, FULL), again = group(3, FULL);

	printf("a join with the MTU selector in the mask, and the MTU not\n");
	step("Set, JoinState 1", SET, CREATE, &made);
	again.mtu = 0 << 6 | 5; /* greater than 4096 */
	step("Set, MTUSelector in the mask alone", SET, JOIN | MTU_SELECTOR, &again);
	again = group(3, FULL);
	again.mtu = 0 << 6 | 5;
	step("Set, neither in the mask", SET, JOIN, &again);
}

static void unmasked_mlid(void)
{
	struct record made = group(4, FULL);

	printf("a create with an MLID in the record that is not in the mask\n");
	made.mlid = htobe16(0xc020);
	step("Set, MLID 0xc020, not in the mask", SET, CREATE, &made);
}

static void assigned_mgid(void)
{
	printf("groups with MGID 0, which the SA names\n");
	for (int turn = 0; turn < 3; turn++) {
		struct record made = group(0, FULL);

		memset(made.mgid, 0, sizeof(made.mgid));
		step("Set, MGID 0", SET, CREATE, &made);
		printf("    ");
		for (int at = 0; at < 16; at += 2)
			printf("%02x%02x%s", made.mgid[at], made.mgid[at + 1], at < 14 ? ":" : "\n");
	}
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "opensm-cases SM_LID PORT_GUID\n");
		return 2;
	}
	sm_lid = strtoul(argv[1], NULL, 0);
	guid = strtoull(argv[2], NULL, 0);
	if (umad_init() < 0 || (port = umad_open_port(NULL, 0)) < 0 ||
	    (agent = umad_register(port, 3, 2, 0, NULL)) < 0) {
		fprintf(stderr, "libibumad does not find a port\n");
		return 1;
	}
	empty_group();
	lost_bits();
	lone_selector();
	unmasked_mlid();
	assigned_mgid();
	return 0;
}
