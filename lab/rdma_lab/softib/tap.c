// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A capture of every HCA's cable as a pcapng file: headers, payload and both CRCs, in ERF
 * records, because Wireshark 4.0 does not know InfiniBand's own link type. One reader at a time, who gets what is
 * sent from the opening on. What finds no room in the ring is counted in the next packet's epb_dropcount; and in
 * statistics of the interface, when the reader has emptied the ring, because there may be no next packet.
 */
#include <linux/crc32.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "softib.h"

#define ROOM BIT(20)			/* bytes; a power of 2, so that the counts of bytes wrap with it */
#define PAYLOAD 2048
#define MAX_PACKET (SOFTIB_LRH + SOFTIB_GRH + SOFTIB_BTH + sizeof(union ib_ehdrs) + PAYLOAD + 4 + SOFTIB_VCRC)
#define MAX_BLOCK (MAX_PACKET + 128)	/* with the ERF header, the block's own, and its options */

/* draft-ietf-opsawg-pcapng: blocks, options; Endace ERF */
#define SECTION 0x0A0D0D0A
#define INTERFACE 1
#define STATISTICS 5
#define PACKET 6
#define LINKTYPE_ERF 197
#define ERF_INFINIBAND 21
#define ERF_VARYING_LENGTH 4
#define NANOSECONDS 9
enum { END, NAME = 2, FLAGS = 2, DROPPED = 4, ALL_DROPPED = 5, RESOLUTION = 9 };

static unsigned long taken_by;		/* bit 0: there is a reader */
static DECLARE_WAIT_QUEUE_HEAD(more);

/* The block that the reader gets, and how much of it was read. */
static DEFINE_MUTEX(reading);
static u8 given[MAX_BLOCK];
static u32 given_at, given_length;

/* Under softib.lock: */
static u8 *ring;			/* NULL while nobody reads */
static u32 written, taken;
static u64 dropped[SOFTIB_HCAS];	/* since the last packet that had room */
static u64 all_dropped[SOFTIB_HCAS], shown_dropped[SOFTIB_HCAS];
static u8 block[MAX_BLOCK];		/* the one that is made */
static u32 block_length;

static void add(const void *from, u32 length)
{
	memcpy(block + block_length, from, length);
	block_length += length;
}

static void add_padding(void)
{
	while (block_length % 4)
		block[block_length++] = 0;
}

static void add_option(u16 code, const void *value, u16 length)
{
	add((u16[]){ code, length }, 4);
	add(value, length);
	add_padding();
}

static void begin_block(u32 type)
{
	block_length = 0;
	add((u32[]){ type, 0 }, 8);
}

static void ring_put(const void *from, u32 length)
{
	u32 at = written % ROOM, first = min_t(u32, length, ROOM - at);

	memcpy(ring + at, from, first);
	memcpy(ring, from + first, length - first);
	written += length;
}

/* True if the block had room in the ring. */
static bool end_block(void)
{
	u32 total = block_length + 4;

	memcpy(block + 4, &total, 4);
	add(&total, 4);
	if (written - taken + total > ROOM)
		return false;
	ring_put(block, total);
	return true;
}

/* The section, and an interface for each HCA. */
static void begin_file(void)
{
	const u8 resolution = NANOSECONDS;
	unsigned int i;
	char name[16];

	begin_block(SECTION);
	add((u32[]){ 0x1A2B3C4D, 1, U32_MAX, U32_MAX }, 16);
	end_block();
	for (i = 0; i < softib.hcas; i++) {
		begin_block(INTERFACE);
		add((u32[]){ LINKTYPE_ERF, 0 }, 8);
		add_option(NAME, name, snprintf(name, sizeof(name), "softib%u", i + 1));
		add_option(RESOLUTION, &resolution, 1);
		add_option(END, NULL, 0);
		end_block();
	}
}

/* IBA 7.8.1: over all that no switch changes; what one may change counts as ones. */
static u32 invariant_crc(const u8 *packet, u32 length, bool has_grh)
{
	u32 transport = has_grh ? 48 : 8, crc;
	u8 masked[8 + 40 + 12];

	memcpy(masked, packet, transport + 12);
	if (has_grh) {
		memset(masked, 0xFF, 8 + 4);
		masked[8] = packet[8] | 0x0F;		/* the version stays, not traffic class and flow label */
		masked[8 + 7] = 0xFF;			/* hop limit */
	} else {
		masked[0] |= 0xF0;			/* VL */
	}
	masked[transport + 4] = 0xFF;
	crc = crc32_le(~0U, masked, transport + 12);
	return ~crc32_le(crc, packet + transport + 12, length - transport - 12);
}

/* IBA 7.8.2 */
static u16 variant_crc(const u8 *packet, u32 length)
{
	u16 crc = 0xFFFF;
	u8 bit;

	while (length--) {
		crc ^= *packet++;
		for (bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0xD008 : 0);
	}
	return ~crc;
}

/* Adds the packet as it is on the wire, of `length` bytes. */
static void add_packet(const struct softib_packet *packet, u32 length)
{
	const u8 *start = block + block_length;
	u8 pad = -packet->length & 3;
	const __be16 lrh[] = {
		cpu_to_be16(packet->vl << 12 | packet->sl << 4 | (packet->has_grh ? 3 : 2)),
		cpu_to_be16(packet->dlid),
		cpu_to_be16((length - 2) / 4),
		cpu_to_be16(packet->slid),
	};
	bool datagram = softib_is_datagram(packet);
	const __be32 bth[] = {
		cpu_to_be32(packet->opcode << 24 | (packet->solicited ? IB_BTH_SOLICITED : 0) |
			    (datagram ? 0 : IB_BTH_MIG_REQ) | pad << 20 | packet->pkey),
		cpu_to_be32(packet->dest_qpn & IB_QPN_MASK),
		cpu_to_be32((packet->wants_ack ? IB_BTH_REQ_ACK : 0) | packet->psn),
	};
	const __be32 deth[] = { cpu_to_be32(packet->qkey), cpu_to_be32(packet->src_qpn & IB_QPN_MASK) };
	__le32 icrc;
	__le16 vcrc;

	add(lrh, sizeof(lrh));
	if (packet->has_grh)
		add(&packet->grh, sizeof(packet->grh));
	add(bth, sizeof(bth));
	if (datagram)
		add(deth, sizeof(deth));
	else
		add(&packet->extension, packet->extension_length - sizeof(packet->imm) * packet->has_imm);
	if (packet->has_imm)
		add(&packet->imm, sizeof(packet->imm));
	add(packet->payload, packet->length);
	add("\0\0\0", pad);
	icrc = cpu_to_le32(invariant_crc(start, length - 6, packet->has_grh));
	add(&icrc, sizeof(icrc));
	vcrc = cpu_to_le16(variant_crc(start, length - 2));
	add(&vcrc, sizeof(vcrc));
}

/* The caller has softib.lock. */
void softib_tap_record(const struct softib_port *at, const struct softib_packet *packet, bool inbound)
{
	u32 length = softib_wire_length(packet);
	const __be16 lengths[] = { cpu_to_be16(16 + length), 0, cpu_to_be16(length) };
	u64 now = ktime_get_real_ns(), seconds, stamp;
	u8 index = at->node->index;
	u32 nanoseconds;

	if (!ring || packet->length > PAYLOAD)
		return;
	seconds = div_u64_rem(now, NSEC_PER_SEC, &nanoseconds);
	stamp = seconds << 32 | div_u64((u64)nanoseconds << 32, NSEC_PER_SEC);
	begin_block(PACKET);
	add((u32[]){ index, now >> 32, now, 16 + length, 16 + length }, 20);
	add(&stamp, sizeof(stamp));
	add((u8[]){ ERF_INFINIBAND, ERF_VARYING_LENGTH }, 2);
	add(lengths, sizeof(lengths));
	add_packet(packet, length);
	add_padding();
	add_option(FLAGS, (u32[]){ inbound ? 1 : 2 }, 4);
	if (dropped[index])
		add_option(DROPPED, &dropped[index], sizeof(dropped[index]));
	add_option(END, NULL, 0);
	if (end_block()) {
		dropped[index] = 0;
		wake_up(&more);
	} else {
		dropped[index]++;
		all_dropped[index]++;
	}
}

/* Statistics of each interface that has dropped more than the reader knows of. The caller has softib.lock. */
static void add_statistics(void)
{
	u64 now = ktime_get_real_ns();
	unsigned int i;

	for (i = 0; i < softib.hcas; i++) {
		if (shown_dropped[i] == all_dropped[i])
			continue;
		begin_block(STATISTICS);
		add((u32[]){ i, now >> 32, now }, 12);
		add_option(ALL_DROPPED, &all_dropped[i], sizeof(all_dropped[i]));
		add_option(END, NULL, 0);
		end_block();
		shown_dropped[i] = all_dropped[i];
	}
}

static int tap_open(struct inode *inode, struct file *file)
{
	unsigned long flags;
	u8 *room;

	if (test_and_set_bit_lock(0, &taken_by))
		return -EBUSY;
	room = vmalloc(ROOM);
	if (!room) {
		clear_bit_unlock(0, &taken_by);
		return -ENOMEM;
	}
	spin_lock_irqsave(&softib.lock, flags);
	ring = room;
	written = 0;
	taken = 0;
	memset(dropped, 0, sizeof(dropped));
	memset(all_dropped, 0, sizeof(all_dropped));
	memset(shown_dropped, 0, sizeof(shown_dropped));
	given_at = 0;
	given_length = 0;
	begin_file();
	spin_unlock_irqrestore(&softib.lock, flags);
	return stream_open(inode, file);
}

/* The next block of the ring; its length, or 0 if there is none. The caller has `reading`. */
static u32 take_block(void)
{
	unsigned long flags;
	u32 length = 0, first, i;

	spin_lock_irqsave(&softib.lock, flags);
	if (written != taken) {
		for (i = 0; i < 4; i++)
			((u8 *)&length)[i] = ring[(taken + 4 + i) % ROOM];
		first = min_t(u32, length, ROOM - taken % ROOM);
		memcpy(given, ring + taken % ROOM, first);
		memcpy(given + first, ring, length - first);
		taken += length;
		if (written == taken)
			add_statistics();
	}
	spin_unlock_irqrestore(&softib.lock, flags);
	return length;
}

/* A read gives one block, or the rest of one: whoever reads 4 kB at a time leaves a sound file, wherever it stops. */
static ssize_t tap_read(struct file *file, char __user *to, size_t length, loff_t *at)
{
	ssize_t result;

	if (mutex_lock_interruptible(&reading))
		return -ERESTARTSYS;
	while (given_at == given_length) {
		if (READ_ONCE(written) == READ_ONCE(taken) && file->f_flags & O_NONBLOCK) {
			result = -EAGAIN;
			goto out;
		}
		if (wait_event_interruptible(more, READ_ONCE(written) != READ_ONCE(taken))) {
			result = -ERESTARTSYS;
			goto out;
		}
		given_at = 0;
		given_length = take_block();
	}
	result = min_t(size_t, length, given_length - given_at);
	if (copy_to_user(to, given + given_at, result))
		result = -EFAULT;
	else
		given_at += result;
out:
	mutex_unlock(&reading);
	return result;
}

static int tap_release(struct inode *inode, struct file *file)
{
	unsigned long flags;
	u8 *room;

	spin_lock_irqsave(&softib.lock, flags);
	room = ring;
	ring = NULL;
	spin_unlock_irqrestore(&softib.lock, flags);
	vfree(room);
	clear_bit_unlock(0, &taken_by);
	return 0;
}

const struct file_operations softib_tap_operations = {
	.owner = THIS_MODULE,
	.open = tap_open,
	.read = tap_read,
	.release = tap_release,
};
