/* mcast.backends.udp._native: what passes for each message between a queue pair and its sockets.
 *
 * The caller holds the backend's guard in each call of a Ring, so no two calls change one at once; system calls and
 * checksums run without the GIL, and none of them waits. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <structmember.h>

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "crc.h"
#include "ring.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

enum {
	AT_ONCE = 64,	   /* datagrams of one system call */
	PARTS = 4,	   /* of a message that is sent: head, two of the payload, what is behind */
	MAX_MTU = 4096,
	MAX_DROPS = 4096,  /* messages that one call drops, so that a flood does not keep it */
	MAX_GSO_BYTES = 65000,
	FORWARDED_BYTES = 16,
	FIRST_FORWARDED_PORT = 1024,
};

static const uint8_t forwarded_mark[8] = { 'm', 'c', 'a', 's', 't', 'u', 'd', 1 };

struct object {
	PyObject_HEAD
	struct ring ring;
	Py_buffer memory;
	char has_memory, no_gso;
	uint32_t psn;
	uint8_t *scratch; /* of AT_ONCE datagrams for which no receive is free */
};

static PyObject *ring_type;

/* --- receiving --- */

struct arrival {
	struct sockaddr_in from;
	uint8_t head[HEAD_BYTES], tail[TAIL_BYTES];
	uint8_t control[CMSG_SPACE(sizeof(struct in_pktinfo))];
};

enum { SCRATCH_BYTES = MAX_MTU + 4 + ICRC_BYTES };

static uint32_t dest_of(struct msghdr *header, uint32_t otherwise)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c))
		if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO)
			return ntohl(((struct in_pktinfo *)CMSG_DATA(c))->ipi_addr.s_addr);
	return otherwise;
}

/* A datagram that another process has passed on begins with where it came from. */
static void unwrap(struct datagram *it, uint8_t *whole, uint32_t own)
{
	if (it->is_cut || it->source != own || it->source_port != ROCE_PORT || it->size < FORWARDED_BYTES ||
	    memcmp(it->head, forwarded_mark, sizeof(forwarded_mark)))
		return;
	it->source = (uint32_t)it->head[8] << 24 | (uint32_t)it->head[9] << 16 | (uint32_t)it->head[10] << 8 | it->head[11];
	it->source_port = (uint16_t)(it->head[12] << 8 | it->head[13]);
	it->dest_port = ROCE_PORT;
	it->size -= FORWARDED_BYTES;
	/* join the parts, and part them anew where the message begins */
	memcpy(whole, it->head, HEAD_BYTES);
	uint32_t rest = it->size + FORWARDED_BYTES > HEAD_BYTES ? it->size + FORWARDED_BYTES - HEAD_BYTES : 0;
	uint32_t inside = rest < it->body_room ? rest : it->body_room;
	memcpy(whole + HEAD_BYTES, it->body, inside);
	memcpy(whole + HEAD_BYTES + inside, it->tail, rest - inside);
	uint8_t *message = whole + FORWARDED_BYTES;
	memcpy((uint8_t *)it->head, message, HEAD_BYTES);
	rest = it->size > HEAD_BYTES ? it->size - HEAD_BYTES : 0;
	inside = rest < it->body_room ? rest : it->body_room;
	memcpy(it->body, message + HEAD_BYTES, inside);
	if (rest > inside)
		memcpy((uint8_t *)it->tail, message + HEAD_BYTES + inside, rest - inside);
}

/* Receive what has arrived at the socket, and judge it; return how many datagrams, or -errno. A message that the queue pair does not receive
 * in its state is dropped uncounted. `is_group`: the socket is a member of groups, else it is the queue pair's own. */
static int receive(struct object *self, int fd, int is_group, uint16_t port, int receives)
{
	struct ring *ring = &self->ring;
	struct mmsghdr headers[AT_ONCE];
	struct iovec parts[AT_ONCE][3];
	struct arrival arrivals[AT_ONCE];
	uint32_t slots[AT_ONCE];
	uint8_t *whole = NULL;
	int failed = 0, all = 0;

	for (uint32_t dropped = 0; dropped < MAX_DROPS && !ring->is_failed;) {
		uint32_t wanted = receives && ring->free_count ? ring->free_count : AT_ONCE;
		int in_slots = receives && ring->free_count, found;

		wanted = wanted < AT_ONCE ? wanted : AT_ONCE;
		if (!in_slots && !self->scratch && !(self->scratch = malloc((size_t)AT_ONCE * SCRATCH_BYTES)))
			return -ENOMEM;
		memset(headers, 0, wanted * sizeof(headers[0]));
		for (uint32_t i = 0; i < wanted; i++) {
			struct msghdr *header = &headers[i].msg_hdr;

			slots[i] = in_slots ? ring->free[ring->free_count - 1 - i] : NO_SLOT;
			parts[i][0] = (struct iovec){ arrivals[i].head, HEAD_BYTES };
			parts[i][1] = in_slots ? (struct iovec){ ring->memory + slots[i] * ring->stride, ring->room }
					       : (struct iovec){ self->scratch + (size_t)i * SCRATCH_BYTES, SCRATCH_BYTES };
			parts[i][2] = (struct iovec){ arrivals[i].tail, TAIL_BYTES };
			header->msg_name = &arrivals[i].from;
			header->msg_namelen = sizeof(arrivals[i].from);
			header->msg_iov = parts[i];
			header->msg_iovlen = 3;
			header->msg_control = is_group ? arrivals[i].control : NULL;
			header->msg_controllen = is_group ? sizeof(arrivals[i].control) : 0;
		}
		found = recvmmsg(fd, headers, wanted, MSG_DONTWAIT | MSG_TRUNC, NULL);
		if (found < 0 && errno == EINTR)
			continue;
		if (found < 0) {
			failed = errno == EAGAIN ? 0 : -errno;
			break;
		}
		all += found;
		if (in_slots) {
			ring->free_count -= wanted;
			ring->lent = wanted;
		}
		for (int i = 0; i < found; i++) {
			struct datagram it = {
				.source = ntohl(arrivals[i].from.sin_addr.s_addr),
				.source_port = ntohs(arrivals[i].from.sin_port),
				.dest = is_group ? dest_of(&headers[i].msg_hdr, 0) : ring->address,
				.dest_port = port,
				.size = headers[i].msg_len,
				.is_cut = headers[i].msg_hdr.msg_flags & MSG_TRUNC,
				.head = arrivals[i].head,
				.body = parts[i][1].iov_base,
				.body_room = (uint32_t)parts[i][1].iov_len,
				.tail = arrivals[i].tail,
				.slot = slots[i],
			};

			if (!receives || ring->is_failed)
				continue;
			if (!is_group && it.source_port == ROCE_PORT && it.source == ring->address) {
				if (!whole && !(whole = malloc(HEAD_BYTES + SCRATCH_BYTES + TAIL_BYTES)))
					continue;
				unwrap(&it, whole, ring->address);
			}
			if (ring_take(ring, &it) == DELIVERED)
				slots[i] = NO_SLOT;
		}
		if (in_slots) {
			for (uint32_t i = wanted; i--;)
				if (slots[i] != NO_SLOT)
					ring->free[ring->free_count++] = slots[i];
			ring->lent = 0;
		} else {
			dropped += (uint32_t)found;
		}
		if ((uint32_t)found < wanted)
			break;
	}
	free(whole);
	return failed ? failed : all;
}

static PyObject *ring_receive(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	int fd, is_group, port, receives, failed;
	PyThreadState *others;

	if (!PyArg_ParseTuple(args, "ipip:receive", &fd, &is_group, &port, &receives))
		return NULL;
	others = PyEval_SaveThread();
	failed = receive(self, fd, is_group, (uint16_t)port, receives);
	PyEval_RestoreThread(others);
	return PyLong_FromLong(failed);
}

/* For tests of the rules: judge a datagram that no socket has received. */
static PyObject *ring_judge(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	struct ring *ring = &self->ring;
	unsigned int source, source_port, dest, dest_port;
	uint8_t head[HEAD_BYTES] = { 0 }, tail[TAIL_BYTES] = { 0 }, *lone = NULL;
	uint32_t rest, inside, past, slot = NO_SLOT;
	enum fate fate;
	Py_buffer given;

	if (!PyArg_ParseTuple(args, "y*IIII:judge", &given, &source, &source_port, &dest, &dest_port))
		return NULL;
	struct datagram it = { .source = source, .dest = dest, .source_port = (uint16_t)source_port,
			       .dest_port = (uint16_t)dest_port, .size = (uint32_t)given.len, .head = head, .tail = tail };
	memcpy(head, given.buf, given.len < HEAD_BYTES ? (size_t)given.len : HEAD_BYTES);
	if (ring->free_count) {
		slot = ring->free[--ring->free_count];
		ring->lent = 1;
		it.body = ring->memory + slot * ring->stride;
		it.body_room = ring->room;
	} else {
		lone = malloc(SCRATCH_BYTES);
		it.body = lone;
		it.body_room = SCRATCH_BYTES;
	}
	if (!it.body) {
		PyBuffer_Release(&given);
		return PyErr_NoMemory();
	}
	it.slot = slot;
	rest = given.len > HEAD_BYTES ? (uint32_t)given.len - HEAD_BYTES : 0;
	inside = rest < it.body_room ? rest : it.body_room;
	past = rest - inside < TAIL_BYTES ? rest - inside : TAIL_BYTES;
	memcpy(it.body, (uint8_t *)given.buf + HEAD_BYTES, inside);
	memcpy(tail, (uint8_t *)given.buf + HEAD_BYTES + inside, past);
	it.is_cut = rest - inside > past;
	PyBuffer_Release(&given);
	fate = ring_take(ring, &it);
	if (fate != DELIVERED && slot != NO_SLOT)
		ring->free[ring->free_count++] = slot;
	ring->lent = 0;
	free(lone);
	return PyLong_FromLong(fate);
}

/* Return the first messages, at most so many, as records and as the numbers of their receives. */
static PyObject *ring_take_records(PyObject *object, PyObject *arg)
{
	struct object *self = (struct object *)object;
	struct ring *ring = &self->ring;
	long wanted = PyLong_AsLong(arg);
	PyObject *records, *slots, *both;
	uint32_t count;
	char *row;
	uint32_t *slot;

	if (wanted == -1 && PyErr_Occurred())
		return NULL;
	count = wanted < (long)ring->queued ? (uint32_t)(wanted < 0 ? 0 : wanted) : ring->queued;
	records = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * RECORD_BYTES);
	slots = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * 4);
	both = records && slots ? PyTuple_Pack(2, records, slots) : NULL;
	if (both) {
		row = PyBytes_AsString(records);
		slot = (uint32_t *)(void *)PyBytes_AsString(slots);
		memset(row, 0, (size_t)count * RECORD_BYTES);
		for (uint32_t i = 0; i < count; i++, row += RECORD_BYTES) {
			struct record *one = &ring->queue[(ring->first + i) % ring->depth];
			uint64_t offset = one->slot * (uint64_t)ring->stride;
			uint32_t source = htonl(one->source), dest = htonl(one->dest);

			memcpy(row, &offset, 8);
			memcpy(row + 8, &one->length, 4);
			memcpy(row + 12, &one->src_qp, 4);
			memcpy(row + 16, &one->imm, 4);
			row[24] = (char)one->has_imm;
			memset(row + 42, 0xFF, 2);
			memcpy(row + 44, &source, 4);
			memset(row + 58, 0xFF, 2);
			memcpy(row + 60, &dest, 4);
			slot[i] = one->slot;
		}
		ring->first = (ring->first + count) % ring->depth;
		ring->queued -= count;
	}
	Py_XDECREF(records);
	Py_XDECREF(slots);
	return both;
}

static PyObject *ring_give_back(PyObject *object, PyObject *arg)
{
	struct object *self = (struct object *)object;
	struct ring *ring = &self->ring;
	char *numbers;
	Py_ssize_t size;

	if (PyBytes_AsStringAndSize(arg, &numbers, &size))
		return NULL;
	for (Py_ssize_t at = 0; at + 4 <= size; at += 4) {
		uint32_t slot;

		memcpy(&slot, numbers + at, 4);
		if (slot >= ring->depth || ring->free_count + ring->queued >= ring->depth)
			return PyErr_Format(PyExc_ValueError, "there is no such receive");
		ring->free[ring->free_count++] = slot;
	}
	Py_RETURN_NONE;
}

/* Drop what nobody has taken; return how many messages these were. */
static PyObject *ring_drop(PyObject *object, PyObject *nothing)
{
	struct ring *ring = &((struct object *)object)->ring;
	uint32_t count = ring->queued;

	for (; ring->queued; ring->queued--) {
		ring->free[ring->free_count++] = ring->queue[ring->first].slot;
		ring->first = (ring->first + 1) % ring->depth;
	}
	ring->is_failed = 0;
	return PyLong_FromUnsignedLong(count);
}

/* Post all receives anew, in that memory. What was queued must have been dropped before. */
static PyObject *ring_post(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	struct ring *ring = &self->ring;
	unsigned int depth, room;
	Py_ssize_t stride;
	uint32_t *free_slots;
	struct record *queue;
	Py_buffer memory;

	if (!PyArg_ParseTuple(args, "w*InI:post", &memory, &depth, &stride, &room))
		return NULL;
	if (!depth || stride < 0 || room > (size_t)stride || (size_t)memory.len / depth < (size_t)stride) {
		PyBuffer_Release(&memory);
		return PyErr_Format(PyExc_ValueError, "there is no room for these receives");
	}
	free_slots = malloc(depth * sizeof(*free_slots));
	queue = malloc(depth * sizeof(*queue));
	if (!free_slots || !queue) {
		free(free_slots);
		free(queue);
		PyBuffer_Release(&memory);
		return PyErr_NoMemory();
	}
	free(ring->free);
	free(ring->queue);
	if (self->has_memory)
		PyBuffer_Release(&self->memory);
	self->memory = memory;
	self->has_memory = 1;
	ring->memory = memory.buf;
	ring->free = free_slots;
	ring->queue = queue;
	ring->depth = ring->free_count = ring->low_water = depth;
	ring->stride = (size_t)stride;
	ring->room = room;
	ring->first = ring->queued = ring->lent = 0;
	for (uint32_t slot = 0; slot < depth; slot++)
		free_slots[slot] = depth - 1 - slot;
	Py_RETURN_NONE;
}

static PyObject *ring_attach(PyObject *object, PyObject *arg)
{
	struct ring *ring = &((struct object *)object)->ring;
	unsigned long group = PyLong_AsUnsignedLong(arg);
	uint32_t place = 0;

	if (group == (unsigned long)-1 && PyErr_Occurred())
		return NULL;
	if (ring_is_in(ring, (uint32_t)group))
		Py_RETURN_NONE;
	if (ring->group_count == ring->group_room) {
		uint32_t room = ring->group_room ? 2 * ring->group_room : 8;
		uint32_t *more = realloc(ring->groups, room * sizeof(*more));

		if (!more)
			return PyErr_NoMemory();
		ring->groups = more;
		ring->group_room = room;
	}
	while (place < ring->group_count && ring->groups[place] < group)
		place++;
	memmove(ring->groups + place + 1, ring->groups + place, (ring->group_count - place) * sizeof(*ring->groups));
	ring->groups[place] = (uint32_t)group;
	ring->group_count++;
	Py_RETURN_NONE;
}

static PyObject *ring_detach(PyObject *object, PyObject *arg)
{
	struct ring *ring = &((struct object *)object)->ring;
	unsigned long group = PyLong_AsUnsignedLong(arg);

	if (group == (unsigned long)-1 && PyErr_Occurred())
		return NULL;
	for (uint32_t place = 0; place < ring->group_count; place++)
		if (ring->groups[place] == group) {
			ring->group_count--;
			memmove(ring->groups + place, ring->groups + place + 1, (ring->group_count - place) * sizeof(*ring->groups));
			break;
		}
	Py_RETURN_NONE;
}

/* --- sending --- */

struct outgoing {
	uint8_t head[HEAD_BYTES + 4], tail[3 + ICRC_BYTES];
};

struct control {
	char bytes[CMSG_SPACE(sizeof(int)) * 2 + CMSG_SPACE(sizeof(uint16_t))];
};

static void add_control(struct msghdr *header, int level, int type, const void *value, size_t size)
{
	struct cmsghdr *c = (struct cmsghdr *)(void *)((char *)header->msg_control + header->msg_controllen);

	c->cmsg_level = level;
	c->cmsg_type = type;
	c->cmsg_len = CMSG_LEN(size);
	memcpy(CMSG_DATA(c), value, size);
	header->msg_controllen += CMSG_SPACE(size);
}

struct send_to {
	int fd;
	struct sockaddr_in address;
	uint32_t dest, dest_qp, qkey;
	uint16_t port;
	int tos, ttl, has_imm;
	uint32_t imm;
};

struct payload {
	struct iovec parts[2];
};

static size_t size_of(const struct payload *one)
{
	return one->parts[0].iov_len + one->parts[1].iov_len;
}

/* Whether the kernel may cut one large datagram into these: all are as long as the first, but for a shorter last one. */
static int are_segments(const struct payload *payloads, int count)
{
	size_t size = size_of(&payloads[0]);

	for (int i = 1; i < count; i++)
		if (size_of(&payloads[i]) != size && (i < count - 1 || size_of(&payloads[i]) > size))
			return 0;
	return count > 1 && (size + HEAD_BYTES + 4 + 3 + ICRC_BYTES) * (size_t)count <= MAX_GSO_BYTES;
}

/* Send up to AT_ONCE messages; return how many were sent, or -errno if none was. */
static int send_some(struct object *self, const struct send_to *to, const struct payload *payloads, int count)
{
	struct mmsghdr headers[AT_ONCE];
	struct iovec parts[AT_ONCE][PARTS];
	struct outgoing outgoing[AT_ONCE];
	struct control control;
	struct msghdr common = { .msg_name = (void *)&to->address, .msg_namelen = sizeof(to->address), .msg_control = &control };
	int in_one = !self->no_gso && are_segments(payloads, count), sent;
	uint16_t segment = 0;

	memset(&control, 0, sizeof(control));
	if (to->tos)
		add_control(&common, IPPROTO_IP, IP_TOS, &to->tos, sizeof(to->tos));
	if (to->ttl)
		add_control(&common, IPPROTO_IP, IP_TTL, &to->ttl, sizeof(to->ttl));
	for (int i = 0; i < count; i++) {
		uint32_t pad = (uint32_t)(-size_of(&payloads[i]) & 3), head = HEAD_BYTES + (to->has_imm ? 4 : 0);
		uint32_t size = (uint32_t)(head + size_of(&payloads[i]) + pad + ICRC_BYTES), crc;
		struct outgoing *one = &outgoing[i];

		put_head(one->head, to->has_imm, pad, self->ring.pkey, to->dest_qp, self->psn + (uint32_t)i, to->qkey,
			 self->ring.qp_num);
		if (to->has_imm) {
			uint32_t imm = htonl(to->imm);

			memcpy(one->head + HEAD_BYTES, &imm, 4);
		}
		/* the kernel numbers the segments of one call from 0 on, and other datagrams that may not be cut with 0 */
		crc = icrc_of_addresses(self->ring.address, to->dest, to->port, ntohs(to->address.sin_port), size,
					in_one ? (uint16_t)i : 0);
		crc = icrc_of_head(crc, one->head);
		crc = crc_more(crc, one->head + HEAD_BYTES, head - HEAD_BYTES);
		memset(one->tail, 0, sizeof(one->tail));
		for (int part = 0; part < 2; part++)
			crc = crc_more(crc, payloads[i].parts[part].iov_base, payloads[i].parts[part].iov_len);
		crc = crc_more(crc, one->tail, pad);
		for (int byte = 0; byte < ICRC_BYTES; byte++)
			one->tail[pad + (uint32_t)byte] = (uint8_t)(crc >> 8 * byte);
		parts[i][0] = (struct iovec){ one->head, head };
		parts[i][1] = payloads[i].parts[0];
		parts[i][2] = payloads[i].parts[1];
		parts[i][3] = (struct iovec){ one->tail, pad + ICRC_BYTES };
		headers[i].msg_hdr = common;
		headers[i].msg_hdr.msg_iov = parts[i];
		headers[i].msg_hdr.msg_iovlen = PARTS;
		if (!i)
			segment = (uint16_t)size;
	}
	if (in_one) {
		add_control(&common, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof(segment));
		common.msg_iov = parts[0];
		common.msg_iovlen = (size_t)count * PARTS;
		do
			sent = (int)sendmsg(to->fd, &common, MSG_DONTWAIT);
		while (sent < 0 && errno == EINTR);
		if (sent < 0 && (errno == EINVAL || errno == EIO || errno == EOPNOTSUPP)) {
			self->no_gso = 1; /* this kernel or interface does not: EINVAL is also an address that is gone */
			return send_some(self, to, payloads, count);
		}
		sent = sent < 0 ? -1 : count;
	} else {
		do
			sent = sendmmsg(to->fd, headers, (unsigned int)count, MSG_DONTWAIT);
		while (sent < 0 && errno == EINTR);
	}
	if (sent < 0)
		return -errno;
	self->psn += (uint32_t)sent;
	return sent;
}

static int parse_to(PyObject *what, struct object *self, struct send_to *to)
{
	unsigned int dest, dest_qp, qkey, port, dest_port;
	unsigned long imm = 0;
	PyObject *given;

	memset(to, 0, sizeof(*to));
	if (!PyArg_ParseTuple(what, "iIIIIIiiO:send", &to->fd, &port, &dest, &dest_port, &dest_qp, &qkey, &to->tos, &to->ttl, &given))
		return -1;
	if (given != Py_None) {
		imm = PyLong_AsUnsignedLong(given);
		if (imm == (unsigned long)-1 && PyErr_Occurred())
			return -1;
	}
	to->has_imm = given != Py_None;
	to->imm = (uint32_t)imm;
	to->port = (uint16_t)port;
	to->dest = dest;
	to->dest_qp = dest_qp;
	to->qkey = qkey;
	if (dest >> 28 != 0xE && ring_is_peer(&self->ring, dest, dest_qp))
		dest_port = dest_qp >> 8;
	to->address.sin_family = AF_INET;
	to->address.sin_port = htons((uint16_t)dest_port);
	to->address.sin_addr.s_addr = htonl(dest);
	return 0;
}

/* Send each buffer of the list from `begin` on; return how many were sent, and the errno that ended this, or 0. */
static PyObject *ring_send(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	Py_buffer given[AT_ONCE];
	struct payload payloads[AT_ONCE];
	PyObject *what, *list;
	Py_ssize_t at, total;
	struct send_to to;
	int failed = 0;

	if (!PyArg_ParseTuple(args, "O!O!n:send", &PyTuple_Type, &what, &PyList_Type, &list, &at) || parse_to(what, self, &to))
		return NULL;
	for (total = PyList_Size(list); at < total && !failed;) {
		int count = 0, sent = 0;

		for (; count < AT_ONCE && at + count < total; count++) {
			PyObject *one = PyList_GetItem(list, at + count);

			if (!one || PyObject_GetBuffer(one, &given[count], PyBUF_SIMPLE))
				break;
			payloads[count].parts[0] = (struct iovec){ given[count].buf, (size_t)given[count].len };
			payloads[count].parts[1] = (struct iovec){ NULL, 0 };
		}
		if (!PyErr_Occurred()) {
			PyThreadState *others = PyEval_SaveThread();

			sent = send_some(self, &to, payloads, count);
			PyEval_RestoreThread(others);
		}
		while (count)
			PyBuffer_Release(&given[--count]);
		if (PyErr_Occurred())
			return NULL;
		if (sent < 0)
			failed = -sent;
		else
			at += sent;
	}
	return Py_BuildValue("ni", at, failed);
}

/* The same of rows that lie one after another: a head and a body each, of which one may be empty. */
static PyObject *ring_send_rows(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	Py_buffer heads, bodies;
	struct payload payloads[AT_ONCE];
	Py_ssize_t at, total, head, body;
	PyObject *what;
	struct send_to to;
	int failed = 0;

	if (!PyArg_ParseTuple(args, "O!y*ny*nnn:send_rows", &PyTuple_Type, &what, &heads, &head, &bodies, &body, &total, &at))
		return NULL;
	if (parse_to(what, self, &to) || head < 0 || body < 0 || heads.len < head * total || bodies.len < body * total) {
		if (!PyErr_Occurred())
			PyErr_Format(PyExc_ValueError, "there are no such rows");
		failed = -1;
	}
	while (at < total && !failed) {
		int count = total - at < AT_ONCE ? (int)(total - at) : AT_ONCE, sent;
		PyThreadState *others = PyEval_SaveThread();

		for (int i = 0; i < count; i++) {
			payloads[i].parts[0] = (struct iovec){ (char *)heads.buf + (at + i) * head, (size_t)head };
			payloads[i].parts[1] = (struct iovec){ (char *)bodies.buf + (at + i) * body, (size_t)body };
		}
		sent = send_some(self, &to, payloads, count);
		PyEval_RestoreThread(others);
		if (sent < 0)
			failed = -sent;
		else
			at += sent;
	}
	PyBuffer_Release(&heads);
	PyBuffer_Release(&bodies);
	return PyErr_Occurred() ? NULL : Py_BuildValue("ni", at, failed);
}

/* --- the type --- */

static PyObject *ring_counts(PyObject *object, PyObject *nothing)
{
	struct ring *ring = &((struct object *)object)->ring;
	PyObject *fates = PyTuple_New(FATES);

	for (int fate = 0; fates && fate < FATES; fate++)
		if (PyTuple_SetItem(fates, fate, PyLong_FromUnsignedLongLong(ring->fates[fate])))
			Py_CLEAR(fates);
	return fates ? Py_BuildValue("KIIIN", ring->received, ring->free_count, ring->low_water, ring->empty, fates) : NULL;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	unsigned int address, qp_num, qkey, pkey, blocks_own;
	struct object *self;

	if (!PyArg_ParseTuple(args, "IIIIp:Ring", &address, &qp_num, &qkey, &pkey, &blocks_own))
		return NULL;
	self = (struct object *)PyType_GenericAlloc(type, 0);
	if (self) {
		self->ring.address = address;
		self->ring.qp_num = qp_num;
		self->ring.qkey = qkey;
		self->ring.pkey = (uint16_t)pkey;
		self->ring.blocks_own = (uint8_t)blocks_own;
	}
	return (PyObject *)self;
}

static void ring_dealloc(PyObject *object)
{
	struct object *self = (struct object *)object;
	PyTypeObject *type = Py_TYPE(object);

	free(self->ring.groups);
	free(self->ring.free);
	free(self->ring.queue);
	free(self->scratch);
	if (self->has_memory)
		PyBuffer_Release(&self->memory);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyMethodDef ring_methods[] = {
	{ "receive", ring_receive, METH_VARARGS, "Receive what has arrived at a socket." },
	{ "judge", ring_judge, METH_VARARGS, "Judge a datagram." },
	{ "take", ring_take_records, METH_O, "Return the first messages." },
	{ "give_back", ring_give_back, METH_O, "Post receives again." },
	{ "drop", ring_drop, METH_NOARGS, "Drop what is queued." },
	{ "post", ring_post, METH_VARARGS, "Post all receives anew." },
	{ "attach", ring_attach, METH_O, "Take a group's messages." },
	{ "detach", ring_detach, METH_O, "Take them no longer." },
	{ "send", ring_send, METH_VARARGS, "Send buffers." },
	{ "send_rows", ring_send_rows, METH_VARARGS, "Send rows." },
	{ "counts", ring_counts, METH_NOARGS, "Return what was counted." },
	{ NULL, NULL, 0, NULL },
};

static PyMemberDef ring_members[] = {
	{ "queued", T_UINT, offsetof(struct object, ring.queued), READONLY, NULL },
	{ "free", T_UINT, offsetof(struct object, ring.free_count), READONLY, NULL },
	{ "mtu", T_UINT, offsetof(struct object, ring.mtu), 0, NULL },
	{ "is_failed", T_BOOL, offsetof(struct object, ring.is_failed), READONLY, NULL },
	{ "no_gso", T_BOOL, offsetof(struct object, no_gso), 0, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot ring_slots[] = {
	{ Py_tp_new, ring_new },
	{ Py_tp_dealloc, ring_dealloc },
	{ Py_tp_methods, ring_methods },
	{ Py_tp_members, ring_members },
	{ 0, NULL },
};

static PyType_Spec ring_spec = {
	.name = "mcast.backends.udp._native.Ring",
	.basicsize = sizeof(struct object),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = ring_slots,
};

/* --- functions --- */

static double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* Wait until one of two descriptors (-1: none) is readable, or has room to write if `writes`; at most so many seconds. */
static PyObject *wait_for(PyObject *module, PyObject *args)
{
	struct pollfd asked[2];
	int first, second, writes, found;
	double seconds, end;

	if (!PyArg_ParseTuple(args, "iipd:wait", &first, &second, &writes, &seconds))
		return NULL;
	end = now() + seconds;
	asked[0] = (struct pollfd){ .fd = first, .events = writes ? POLLOUT : POLLIN };
	asked[1] = (struct pollfd){ .fd = second, .events = POLLIN };
	do {
		struct timespec left = { 0, 0 };
		PyThreadState *others;
		double more = end - now();

		if (more > 0) {
			left.tv_sec = (time_t)more;
			left.tv_nsec = (long)((more - (double)left.tv_sec) * 1e9);
		}
		others = PyEval_SaveThread();
		found = ppoll(asked, 2, &left, NULL);
		found = found < 0 ? -errno : found;
		PyEval_RestoreThread(others);
		if (found == -EINTR && PyErr_CheckSignals())
			return NULL;
	} while (found == -EINTR);
	return PyBool_FromLong(found > 0);
}

/* Pass on unicast datagrams of port 4791 to the sockets that their queue pair numbers name; return how many, and how many
 * named none. */
static PyObject *forward(PyObject *module, PyObject *args)
{
	uint8_t bytes[FORWARDED_BYTES + HEAD_BYTES + SCRATCH_BYTES + TAIL_BYTES];
	unsigned int own, passed = 0, lost = 0;
	PyThreadState *others;
	int fd;

	if (!PyArg_ParseTuple(args, "iI:forward", &fd, &own))
		return NULL;
	others = PyEval_SaveThread();
	memcpy(bytes, forwarded_mark, sizeof(forwarded_mark));
	for (int turn = 0; turn < MAX_DROPS; turn++) {
		struct sockaddr_in from;
		socklen_t size = sizeof(from);
		uint8_t *message = bytes + FORWARDED_BYTES;
		ssize_t found = recvfrom(fd, message, sizeof(bytes) - FORWARDED_BYTES, MSG_DONTWAIT | MSG_TRUNC,
					 (struct sockaddr *)&from, &size);
		uint32_t port = found >= 8 ? (uint32_t)message[5] << 8 | message[6] : 0;
		struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(own) };

		if (found < 0 && errno == EINTR)
			continue;
		if (found < 0)
			break;
		if ((size_t)found > sizeof(bytes) - FORWARDED_BYTES || port < FIRST_FORWARDED_PORT || port == ROCE_PORT) {
			lost++;
			continue;
		}
		memcpy(bytes + 8, &from.sin_addr, 4);
		memcpy(bytes + 12, &from.sin_port, 2);
		memset(bytes + 14, 0, 2);
		if (sendto(fd, bytes, FORWARDED_BYTES + (size_t)found, MSG_DONTWAIT, (struct sockaddr *)&to, sizeof(to)) < 0)
			lost++;
		else
			passed++;
	}
	PyEval_RestoreThread(others);
	return Py_BuildValue("II", passed, lost);
}

static int by_index(PyObject *found, struct ifaddrs *all, struct ifaddrs *at, int fd)
{
	struct sockaddr_ll *link = (struct sockaddr_ll *)(void *)at->ifa_addr;
	PyObject *addresses = PyList_New(0), *one;
	struct ifreq request = { .ifr_mtu = 0 };
	int failed;

	strncpy(request.ifr_name, at->ifa_name, IFNAMSIZ - 1);
	if (ioctl(fd, SIOCGIFMTU, &request))
		request.ifr_mtu = 0;
	for (struct ifaddrs *other = all; addresses && other; other = other->ifa_next) {
		if (!other->ifa_addr || other->ifa_addr->sa_family != AF_INET)
			continue;
		/* an address may have a label of its own, such as eth0:1 */
		size_t name = strcspn(other->ifa_name, ":");
		if (strncmp(other->ifa_name, at->ifa_name, name) || at->ifa_name[name])
			continue;
		one = PyLong_FromUnsignedLong(ntohl(((struct sockaddr_in *)(void *)other->ifa_addr)->sin_addr.s_addr));
		failed = !one || PyList_Append(addresses, one);
		Py_XDECREF(one);
		if (failed)
			Py_CLEAR(addresses);
	}
	if (!addresses)
		return -1;
	one = Py_BuildValue("siIiy#N", at->ifa_name, link->sll_ifindex, at->ifa_flags, request.ifr_mtu, (char *)link->sll_addr,
			    (Py_ssize_t)(link->sll_halen > 8 ? 8 : link->sll_halen), addresses);
	failed = !one || PyList_Append(found, one);
	Py_XDECREF(one);
	return failed ? -1 : 0;
}

/* The interfaces: name, index, flags, MTU, hardware address, IPv4 addresses. */
static PyObject *interfaces(PyObject *module, PyObject *nothing)
{
	PyObject *found;
	struct ifaddrs *all;
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || getifaddrs(&all)) {
		PyErr_SetFromErrno(PyExc_OSError);
		if (fd >= 0)
			close(fd);
		return NULL;
	}
	found = PyList_New(0);
	for (struct ifaddrs *at = all; found && at; at = at->ifa_next)
		if (at->ifa_addr && at->ifa_addr->sa_family == AF_PACKET && by_index(found, all, at, fd))
			Py_CLEAR(found);
	freeifaddrs(all);
	close(fd);
	return found;
}

static PyObject *crc32_of(PyObject *module, PyObject *arg)
{
	Py_buffer given;
	uint32_t crc;

	if (PyObject_GetBuffer(arg, &given, PyBUF_SIMPLE))
		return NULL;
	crc = crc_more(0, given.buf, (size_t)given.len);
	PyBuffer_Release(&given);
	return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
	{ "wait", wait_for, METH_VARARGS, "Wait for one of two descriptors." },
	{ "forward", forward, METH_VARARGS, "Pass on unicast datagrams." },
	{ "interfaces", interfaces, METH_NOARGS, "List the interfaces." },
	{ "crc32", crc32_of, METH_O, "Return the CRC-32." },
	{ NULL, NULL, 0, NULL },
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_native",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
	const char *crc_by = crc_prepare();
	PyObject *module;

	if (!*crc_by) {
		PyObject *said = PyUnicode_FromString("there is neither libisal.so.2 nor libz.so.1, and one of them makes the ICRC");
		PyObject *name = PyUnicode_FromString("libisal.so.2");

		if (said && name)
			PyErr_SetImportError(said, name, NULL);
		Py_XDECREF(said);
		Py_XDECREF(name);
		return NULL;
	}
	module = PyModule_Create(&definition);
	if (module && PyModule_AddStringConstant(module, "CRC_BY", crc_by))
		Py_CLEAR(module);
	if (module && (!(ring_type = PyType_FromSpec(&ring_spec)) || PyModule_AddObjectRef(module, "Ring", ring_type)))
		Py_CLEAR(module);
#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	return module;
}
