/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * An InfiniBand subnet in memory: HCAs on the kernel's rdmavt, switches, and the cables between them.
 *
 * A subnet manager in user space (OpenSM) discovers it, gives LIDs and writes the switches' forwarding tables; packets
 * then go where these tables send them, and nowhere else. rdmavt keeps queue pairs, completion queues, memory regions
 * and the interface to user space; this driver brings what is beyond a queue pair: packets, RC, SMA, PMA, links.
 *
 * The way of a packet. Nothing waits on a cable: a packet is made, carried and received within one call of the sender.
 *
 *	softib_do_send()	takes a work request off the send queue
 *	  softib_transmit()	UD: one packet, to every HCA that it reaches
 *	    softib_carry()	through switches and cables; the agents of switches answer on the way
 *	    softib_receive()	into the queue pairs of an HCA, whose agents (ib_mad) call process_mad later
 *	  softib_rc_send()	RC: packet by packet
 *	    softib_reach()	softib_carry(), to one HCA
 *	    softib_respond()	carries the request out at the destination, and makes the answer
 *	    softib_reach()	takes the answer back
 *
 * A packet is owned by the call that made it and freed when that returns; nobody keeps a reference.
 *
 * The order of completions. A message completes at its sender before its receive completes: a UD message completes
 * before it is carried, and of an RC message the receive's completion waits for softib_announce(). Otherwise the
 * receiver's program, which runs on another processor, could answer first. On a card the answer comes after the
 * acknowledgement, and programs count on that: perftest's send queue has room for one completion.
 *
 * Contexts:
 *	the send engine	UD: whoever posts, in any context, or the work queue; RC: the work queue, which may sleep.
 *			RVT_S_BUSY in s_flags makes it one at a time for each queue pair. There is no receive
 *			tasklet: what arrives is received by the sender's engine.
 *	timers		rdmavt's retry timer (softirq) and RNR timer (hardirq) of an RC queue pair queue its work.
 *	process_mad	the work queue of ib_mad.
 *	traps		node.trap_work, a delayed work, sends a trap again until the SM represses it.
 *	late tables	sw.late, a delayed work: the fault "tables take effect later".
 *	debugfs		faults, in the context of who writes.
 *
 * Locks, from the outside in. All are taken with interrupts off, but for attach_lock.
 *	r_lock		of the receiving queue pair (rdmavt's): receives, r_psn, the responder half of struct softib_qp
 *	s_lock		of the sending queue pair (rdmavt's): s_flags, s_last, its timers. Where one thread has both
 *			locks of one queue pair, it took r_lock first. The engine has neither while it carries a
 *			packet: two queue pairs that send to each other, or one to itself, cannot deadlock.
 *	softib.lock	all that a packet meets between two queue pairs: links, port states, tables, counters, the
 *			tap. Innermost, but for what ib_dispatch_event() and queue_work() take.
 *	attach_lock	an HCA's list of attached queue pairs; packets read it under RCU.
 *
 * Lifetimes. softib.hca[i] is set before the device is registered and cleared after it is unregistered; who uses it
 * is under RCU, and softib_hca_destroy() waits for that before it frees. From `leaving` on, an HCA takes management
 * packets only, so that its users can still leave their groups. Its port lives and dies with it: softib_disconnect()
 * takes the cable away first, under softib.lock. A queue pair is found under RCU (rdmavt's table, or `attached`), and
 * qp_priv_free() waits for that. Switches live as long as the module; all are silent before the first is freed.
 *
 * Each file calls only files that come before it in Kbuild, where the order is kept, and where a test reads it.
 *	notify, packet, tap, link, tables	what a packet is and what it crosses
 *	portinfo, pma, sma, switch		management agents, forwarding
 *	attach, keys, receive, transmit, trap	an HCA's end of a cable
 *	rc_responder, rc_requester, send	queue pairs
 *	hca, subnet, debug, module		how it is made, and broken
 */
#ifndef SOFTIB_H
#define SOFTIB_H

#include <linux/bitmap.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>
#include <rdma/ib_hdrs.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_pma.h>
#include <rdma/ib_smi.h>
#include <rdma/rdma_vt.h>
#include <rdma/rdmavt_qp.h>

#define SOFTIB_HCAS 64			/* at most */
#define SOFTIB_SWITCHES 16		/* at most */
#define SOFTIB_PKEYS RVT_MAX_PKEY_VALUES
#define SOFTIB_HOPS 64			/* a message that crossed as many cables is in a loop: it is dropped */
#define SOFTIB_MTU IB_MTU_2048
#define SOFTIB_DATA_VLS 1		/* VL 0; as PortInfo:VLCap codes it */

#define SOFTIB_FIRST_MLID 0xC000
#define SOFTIB_PERMISSIVE 0xFFFF
#define SOFTIB_LINEAR_ENTRIES SOFTIB_FIRST_MLID	/* one for each unicast LID, and for LID 0, which is none */
#define SOFTIB_NO_PORT 0xFF
#define SOFTIB_LFT_BLOCK 64		/* LIDs in a block of a linear forwarding table */
#define SOFTIB_MFT_BLOCK 32		/* MLIDs in a block of a multicast forwarding table */
#define SOFTIB_MFT_PORTS 16		/* ports in one position of it */
#define SOFTIB_MCAST_QPN 0xFFFFFF
#define SOFTIB_SMI_VL 15
#define SOFTIB_HELD U32_MAX	/* as a delay */
#define SOFTIB_GSI_QKEY 0x80010000

/* Counters of a port's PMA; IBA 16.1.3.5. Data are counted in words of 4 bytes. */
struct softib_counters {
	u64 link_downed, rcv_errors, relay_errors, xmit_discards, vl15_dropped;
	u64 xmit_data, rcv_data, xmit_packets, rcv_packets;
	u64 unicast_xmit, unicast_rcv, multicast_xmit, multicast_rcv;
};

struct softib_node;

/* One end of a cable; port 0 of a switch has none: it is where its management lives. */
struct softib_port {
	struct softib_node *node;
	u8 number;
	bool unplugged;			/* a fault: no cable at this end, or at the other */
	u32 drop, drop_of, received;	/* a fault: of drop_of messages that arrive, drop are lost, evenly spread */
	struct softib_port *peer;	/* the cable's other end; NULL where there is no cable */
	struct ib_port_info info;	/* as the subnet manager reads it, but for what hca.c knows better */
	u16 pkeys[SOFTIB_PKEYS];
	struct softib_counters counters;
};

/* A node, which has a subnet management agent: an HCA or a switch. */
struct softib_node {
	u8 type;			/* RDMA_NODE_IB_CA, RDMA_NODE_IB_SWITCH */
	u8 index;			/* in softib.hca or softib.sw */
	u8 ports;			/* external ones, numbered from 1 */
	u64 guid;			/* of the node; its port 1, or 0 of a switch, has the next one */
	char description[IB_DEVICE_NODE_DESC_MAX];
	struct softib_port *port;	/* by number */
	struct delayed_work trap_work;
	__be16 trap;			/* the trap to repeat until the SM represses it; 0: none */
	u8 trap_tries;
	u64 trap_tid;
};

struct softib_hca {
	struct rvt_dev_info rdi;	/* first: rdmavt allocates and frees the whole */
	struct rvt_ibport rvp;
	struct softib_node node;
	struct softib_port port[2];	/* 0 is not used */
	struct platform_device *platform;
	bool gsi_fails;			/* a fault: its MADs are not sent, but for SMPs, and end in an error */
	bool leaving;			/* rdmavt takes its tables down: management alone still arrives */
	struct pci_dev pci;		/* rdmavt prints through its name, and asks for nothing else */
	char name[16];
	spinlock_t attach_lock;		/* for changes of `attached` */
	struct list_head attached;	/* struct softib_attachment, read under RCU */
};

struct softib_tables {
	u8 *linear;			/* LID -> port */
	u16 *multicast;			/* [position * softib.mcast_entries + MLID - 0xC000] -> 16 ports */
};

struct softib_switch {
	struct softib_node node;
	struct softib_port *port;
	u16 linear_top;
	u8 life_time;
	bool port_state_changed;
	struct softib_tables written;	/* as the subnet manager wrote and reads them */
	struct softib_tables used;	/* as messages are forwarded; the same, but for a delay */
	u32 delay_ms;			/* a fault: from a write until messages go by it */
	struct delayed_work late;
};

/* A queue pair, attached to a group. */
struct softib_attachment {
	struct list_head list;
	struct rcu_head rcu;
	union ib_gid mgid;
	u16 mlid;
	struct rvt_qp *qp;
};

/* A queue pair, as rdmavt's `priv`. */
struct softib_qp {
	struct rvt_qp *qp;
	struct work_struct work;
	wait_queue_head_t idle;

	/* An RC requester: */
	u32 sent;			/* packets of the current message that the responder has; who has RVT_S_BUSY */
	unsigned int responder;		/* the HCA that was reached last, in softib.hca; who has RVT_S_BUSY */
	bool exhausted;			/* no retry is left; s_lock */

	/* An RC responder, under r_lock: */
	u64 write_at;			/* where the next packet of an RDMA WRITE goes */
	u32 write_rkey, write_length, write_left;
	u32 atomic_psn;			/* of the last atomic, for a requester that misses the answer */
	u64 atomic_result;
	bool has_atomic_result;
	struct ib_wc received;		/* of a receive that is done, and not announced */
	bool has_received, received_solicited;
};

/* The bytes of headers, and of the variant CRC. */
#define SOFTIB_LRH 8
#define SOFTIB_GRH 40
#define SOFTIB_BTH 12
#define SOFTIB_VCRC 2
#define SOFTIB_PSN_MASK 0xFFFFFF

/* One packet on a cable. */
struct softib_packet {
	u16 slid, dlid, pkey;
	u8 sl, vl;
	u8 opcode;			/* of the BTH */
	u8 extension_length;		/* of what is between BTH and payload, the immediate too */
	bool has_grh, has_imm, solicited, wants_ack;
	struct ib_grh grh;
	__be32 imm;
	u32 dest_qpn, psn;
	u32 src_qpn, qkey;		/* UD's extension, but for the immediate */
	union ib_ehdrs extension;	/* RC's, but for the immediate */
	u32 length;
	u8 payload[] __aligned(8);
};

struct softib {
	spinlock_t lock;		/* all that a packet meets on its way, see above */
	unsigned int hcas, switches, mcast_entries;
	unsigned int mlids;			/* a fault: of the mcast_entries, so many are there */
	struct softib_hca *hca[SOFTIB_HCAS];	/* NULL while it is not registered */
	struct softib_switch *sw[SOFTIB_SWITCHES];
	struct workqueue_struct *work;
};

extern struct softib softib;

/* Result of an RC request. */
enum softib_outcome {
	SOFTIB_LOST,			/* it, or its answer, did not arrive */
	SOFTIB_TAKEN,			/* it arrived, and wants no answer */
	SOFTIB_ANSWERED,
};

#define SOFTIB_WAIT (-1)		/* beside enum ib_wc_status: the work request has not ended */

static inline bool softib_is_datagram(const struct softib_packet *packet)
{
	return (packet->opcode & RVT_OPCODE_QP_MASK) == IB_OPCODE_UD;
}

/* From the LRH to the variant CRC. */
static inline u32 softib_wire_length(const struct softib_packet *packet)
{
	return SOFTIB_LRH + SOFTIB_GRH * packet->has_grh + SOFTIB_BTH + packet->extension_length +
		ALIGN(packet->length, 4) + 4 + SOFTIB_VCRC;
}

/* Below 0 if `one` comes before `other`; PSNs have 24 bits and wrap. */
static inline int softib_psn_difference(u32 one, u32 other)
{
	return (int)((one - other) << 8) >> 8;
}

static inline bool softib_is_multicast(u16 lid)
{
	return lid >= SOFTIB_FIRST_MLID && lid != SOFTIB_PERMISSIVE;
}

static inline struct softib_hca *softib_hca_of(struct softib_node *node)
{
	return container_of(node, struct softib_hca, node);
}

static inline struct softib_switch *softib_switch_of(struct softib_node *node)
{
	return container_of(node, struct softib_switch, node);
}

static inline bool softib_is_switch(const struct softib_node *node)
{
	return node->type == RDMA_NODE_IB_SWITCH;
}

/* The port with a node's LID. */
static inline struct softib_port *softib_management_port(struct softib_node *node)
{
	return &node->port[softib_is_switch(node) ? 0 : 1];
}

static inline u8 softib_state(const struct softib_port *port)
{
	return port->info.linkspeed_portstate & 0xF;
}

static inline u16 softib_lid(const struct softib_port *port)
{
	return be16_to_cpu(port->info.lid);
}

static inline u16 softib_lid_mask(const struct softib_port *port)
{
	return (u16)(~0U << (port->info.mkeyprot_resv_lmc & 7));
}

/* notify.c */
void softib_event(struct softib_hca *hca, enum ib_event_type type);
void softib_trap(struct softib_node *node, __be16 number);
void softib_trap_repress(struct softib_node *node, __be64 tid);

/* packet.c */
struct softib_packet *softib_packet_alloc(u32 length);
void softib_packet_address(struct softib_hca *hca, struct softib_packet *packet, struct rdma_ah_attr *to);
void softib_gather(struct rvt_sge_state *from, u8 *to, u32 left, bool release);

/* tap.c */
extern const struct file_operations softib_tap_operations;
void softib_tap_record(const struct softib_port *at, const struct softib_packet *packet, bool inbound);

/* link.c */
void softib_port_init(struct softib_port *port, struct softib_node *node, u8 number);
void softib_connect(struct softib_port *one, struct softib_port *other);
void softib_disconnect(struct softib_port *port);
void softib_plug(struct softib_port *port, bool in);
void softib_enable(struct softib_port *port, bool enabled);
void softib_link_down(struct softib_port *port, u8 phys_state);
void softib_set_state(struct softib_port *port, u8 state);
struct softib_port *softib_cross(struct softib_port *out, struct softib_packet *packet);

/* tables.c */
bool softib_tables_create(struct softib_switch *sw, u8 ports);
void softib_tables_destroy(struct softib_switch *sw);
void softib_tables_delay(struct softib_switch *sw, u32 delay_ms);
void softib_tables_written(struct softib_switch *sw);

/* portinfo.c, pma.c, sma.c */
__be16 softib_portinfo(struct softib_port *at, struct ib_smp *smp, bool set);
bool softib_pma(struct softib_node *node, struct ib_pma_mad *mad);
bool softib_sma(struct softib_port *at, struct ib_smp *smp, bool trusted);

/* switch.c */
struct softib_switch *softib_switch_create(unsigned int index, u8 ports);
void softib_switch_cancel_work(struct softib_switch *sw);
void softib_switch_destroy(struct softib_switch *sw);
void softib_carry(struct softib_port *from, struct softib_packet *packet, unsigned long *reached);

/* attach.c */
int softib_attach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);
int softib_detach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);

/* keys.c */
unsigned int softib_match_pkey(struct softib_hca *hca, struct rvt_qp *qp, u16 pkey);
bool softib_match_qkey(struct softib_hca *hca, struct rvt_qp *qp, u32 qkey);
bool softib_is_mine(struct softib_hca *hca, const struct softib_packet *packet);

/* receive.c */
void softib_receive(struct softib_hca *hca, struct softib_packet *packet);

/* transmit.c */
struct softib_hca *softib_reach(struct softib_port *from, struct softib_packet *packet);
void softib_transmit(struct softib_port *from, struct softib_packet *packet);

/* trap.c */
void softib_trap_init(struct softib_node *node);

/* rc_responder.c */
enum softib_outcome softib_respond(struct softib_hca *hca, struct softib_packet *request, u32 part,
				   struct softib_packet *response);
void softib_announce(struct softib_hca *hca, u32 qpn);

/* rc_requester.c */
void softib_rc_begin(struct rvt_qp *qp, struct rvt_swqe *wqe);
int softib_rc_send(struct softib_hca *hca, struct rvt_qp *qp, struct rvt_swqe *wqe);
void softib_rc_notify(struct rvt_qp *qp);
void softib_rc_timeout(struct rvt_qp *qp, u32 psn, int wait);

/* send.c */
void softib_do_send(struct rvt_qp *qp);
void softib_send_work(struct work_struct *work);

/* hca.c */
struct softib_hca *softib_hca_create(unsigned int index, bool multicast);
void softib_hca_destroy(struct softib_hca *hca);

/* subnet.c */
int softib_add(unsigned int index, bool multicast);
int softib_subnet_create(void);
void softib_subnet_destroy(void);

/* debug.c */
void softib_debug_create(void);
void softib_debug_destroy(void);

#endif
