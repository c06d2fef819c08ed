/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * An InfiniBand subnet in memory: HCAs on the kernel's rdmavt, switches, and the cables between them.
 *
 * A subnet manager in user space discovers it, gives LIDs and writes the switches' tables; messages then go where
 * these tables send them. One spinlock, softib.lock, guards all that a message meets between two queue pairs:
 * links, tables, counters. No other lock is taken under it.
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
#define SOFTIB_UNTIL_TOLD U32_MAX	/* as a delay */
#define SOFTIB_GSI_QKEY 0x80010000

/* What the PMA of a port tells; IBA 16.1.3.5. Data are counted in words of 4 bytes. */
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
	u32 drop_every, received;	/* a fault: of so many messages that arrive, one is lost */
	struct softib_port *peer;	/* the cable's other end; NULL where there is no cable */
	struct ib_port_info info;	/* as the subnet manager reads it, but for what hca.c knows better */
	u16 pkeys[SOFTIB_PKEYS];
	struct softib_counters counters;
};

/* What has a subnet management agent: an HCA or a switch. */
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
	spinlock_t attach_lock;
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
};

/* One message on a cable. UD has one packet for each message. */
struct softib_packet {
	u16 slid, dlid, pkey;
	u8 sl, vl;
	bool has_grh, has_imm, solicited;
	struct ib_grh grh;
	__be32 imm;
	u32 dest_qpn, src_qpn, qkey, psn;
	u32 length;
	u8 payload[] __aligned(8);
};

struct softib {
	spinlock_t lock;
	unsigned int hcas, switches, mcast_entries;
	unsigned int mlids;			/* a fault: of the mcast_entries, so many are there */
	struct softib_hca *hca[SOFTIB_HCAS];	/* NULL while it is not registered */
	struct softib_switch *sw[SOFTIB_SWITCHES];
	struct workqueue_struct *work;
};

extern struct softib softib;

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

/* module.c */
int softib_add(unsigned int index, bool multicast);

/* hca.c */
struct softib_hca *softib_hca_create(unsigned int index, bool multicast);
void softib_hca_destroy(struct softib_hca *hca);
void softib_event(struct softib_hca *hca, enum ib_event_type type);

/* send.c */
void softib_do_send(struct rvt_qp *qp);
void softib_send_work(struct work_struct *work);
void softib_transmit(struct softib_port *from, struct softib_packet *packet);
struct softib_packet *softib_packet_alloc(u32 length);

/* receive.c */
void softib_receive(struct softib_hca *hca, struct softib_packet *packet);

/* attach.c */
int softib_attach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);
int softib_detach(struct ib_qp *ibqp, union ib_gid *gid, u16 lid);

/* switch.c */
struct softib_switch *softib_switch_create(unsigned int index, u8 ports);
void softib_switch_silence(struct softib_switch *sw);
void softib_switch_destroy(struct softib_switch *sw);
void softib_switch_delay(struct softib_switch *sw, u32 delay_ms);
void softib_switch_written(struct softib_switch *sw);
void softib_carry(struct softib_port *from, struct softib_packet *packet, unsigned long *reached);

/* link.c */
void softib_port_init(struct softib_port *port, struct softib_node *node, u8 number);
void softib_connect(struct softib_port *one, struct softib_port *other);
void softib_disconnect(struct softib_port *port);
void softib_plug(struct softib_port *port, bool in);
void softib_enable(struct softib_port *port, bool enabled);
void softib_link_down(struct softib_port *port, u8 phys_state);
void softib_set_state(struct softib_port *port, u8 state);
struct softib_port *softib_cross(struct softib_port *out, struct softib_packet *packet);

/* sma.c, portinfo.c, pma.c, trap.c */
bool softib_sma(struct softib_port *at, struct ib_smp *smp, bool trusted);
__be16 softib_portinfo(struct softib_port *at, struct ib_smp *smp, bool set);
bool softib_pma(struct softib_node *node, struct ib_pma_mad *mad);
void softib_trap_init(struct softib_node *node);
void softib_trap(struct softib_node *node, __be16 number);
void softib_trap_repress(struct softib_node *node, __be64 tid);

/* debug.c, tap.c */
void softib_debug_create(void);
void softib_debug_destroy(void);
extern const struct file_operations softib_tap_operations;
void softib_tap_record(const struct softib_port *at, const struct softib_packet *packet, bool inbound);

#endif
