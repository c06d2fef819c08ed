/* A scripted card: librdmacm and libibverbs without hardware, whose answers follow a script. Here is all that a test
 * sets, reads and calls; card.py has the same structs, and explains each call. */
#ifndef CARD_H
#define CARD_H

#include <stdint.h>

enum { GIDS = 16, PKEYS = 8, STAGES = 3, GRH_BYTES = 40, LIE_ZERO = 2147483647 };

/* Where a message and its completions may be kept: before the payload is read and sent; before the send, or the
 * receive, is seen to be complete. */
enum stage { STAGE_WIRE, STAGE_SEND, STAGE_RECV };

enum grh_form {
	GRH_AUTO,	/* as the link layer and the address say */
	GRH_NONE,	/* no GRH on InfiniBand: the first 40 bytes are not written */
	GRH_IPV4,	/* 20 bytes of nothing, then an IPv4 header */
	GRH_IPV6,	/* 40 bytes in the shape of an IPv6 header */
	GRH_IPV4_WRONG, /* an IPv4 header with a wrong checksum */
	GRH_IPV4_JUNK,	/* as GRH_IPV4, but what is in front looks like the start of an IPv6 header */
};

struct card_port {
	uint32_t link_layer;
	uint32_t state;
	uint32_t active_mtu; /* enum ibv_mtu, as the next two */
	uint32_t max_mtu;
	uint32_t group_mtu; /* InfiniBand: longer messages to a group vanish */
	uint32_t active_speed;
	uint32_t active_width;
	uint32_t lid;
	uint32_t lmc;
	uint32_t sm_lid;
	uint32_t group_rate; /* enum ibv_rate, in the address of a join's event */
	uint32_t group_sl;
	uint32_t group_hop_limit;
	uint32_t group_flow_label;
	uint32_t group_qkey;	/* 0: the port space's */
	uint32_t ethernet_slid; /* value that the driver leaves in wc.slid on Ethernet */
	uint32_t grh;		/* enum grh_form of what arrives here */
	uint32_t any_address;	/* any address may be bound: it becomes one of the port's */
	uint32_t ifindex;
	uint32_t qkey_violations;
	uint16_t pkeys[PKEYS];
	uint8_t gids[GIDS][16]; /* zero: not set; the addresses of an Ethernet port, mapped */
	uint8_t addresses[GIDS][16];
};

enum stamping_clock { CLOCK_OWN = 1, CLOCK_OF_DAY = 2 };
enum loopback_blocking { BLOCK_HONOURED, BLOCK_REFUSED, BLOCK_IGNORED };

struct card_device {
	char name[64];
	uint64_t guid;
	uint32_t ports;
	uint32_t max_qp_wr;
	uint32_t max_mcast_grp;
	uint32_t max_mcast_qp_attach;
	uint32_t max_inline;
	uint32_t max_send_sge;
	uint32_t comp_vectors;
	uint32_t block_loopback;
	uint32_t has_cq_ex;
	uint32_t has_modify_cq;
	uint32_t has_gid_table;
	uint32_t has_relaxed_ordering;
	uint32_t has_dmabuf;
	uint32_t clock_khz;
	uint32_t clocks; /* that stamp completions: CLOCK_OWN, CLOCK_OF_DAY */
};

/* A message that no QP sent: what the device writes, and what it says about it. */
struct card_message {
	uint32_t status;
	uint32_t src_qp;
	uint32_t wc_flags;
	uint32_t imm;
	uint32_t slid;
	uint32_t sl;
	uint32_t path_bits;
	uint32_t pkey_index;
	uint8_t grh[GRH_BYTES];
};

/* State of a queue pair for a test. */
struct card_qp {
	uint32_t qp_num;
	uint32_t state;
	uint32_t kept[STAGES];
	uint32_t receives;
	uint32_t attachments;
	uint64_t sent;
	uint64_t dropped;
	uint32_t moderation[2][2];
	uint32_t vectors[2];
};

void card_reset(int with_usual_device);
int card_add_device(const struct card_device *wanted, const struct card_port *ports);
void card_set_port(int number, int port, const struct card_port *wanted);
void card_get_port(int number, int port, struct card_port *out);
void card_remove(int number, int disassociated);

/* poll(2) gives POLLERR for its completion channels from now on, as for those of a device that is gone. */
void card_break_channels(int number);
int card_restore(int number);
int card_fail(const char *name, int nth, int times, int error, int take);
void card_fail_no_more(void);
int card_stall(const char *name, int nth);
int card_stalled(const char *name);
int card_go_on(const char *name);
int64_t card_count(const char *name);
const char *card_call_name(int call);
int card_answer(int join, int nth, int event, int status);
int card_cm_event(const uint8_t *address, int type, int status, const uint8_t *group);
void card_port_event(int number, int port, int type);
int card_qp_event(uint32_t qp_num, int queue, int type);
int card_delay(uint32_t qp_num, int stage, int64_t nanoseconds);
int card_release(uint32_t qp_num, int stage, int index);
int card_release_at(const char *name, int nth, uint32_t qp_num, int stage);
int card_inject(uint32_t qp_num, const struct card_message *message, const void *payload, uint32_t length);
int card_qps(struct card_qp *out, int most);
int64_t card_access(uint32_t lkey);
int card_last_rate(void); /* the static rate of the last address handle that was made */
int card_reports(char *out, int size);
int card_leftovers(char *out, int size);

#endif
