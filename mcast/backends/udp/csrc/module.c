/* mcast.backends.udp._native: what passes for each message between a queue pair and its sockets.
 *
 * The caller holds the backend's guard in each call of a Ring, so no two calls change one at once; system calls and
 * checksums run without the GIL, and none of them waits. */
#include "object.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <linux/sock_diag.h>

#include "crc.h"

PyTypeObject *ring_type;

static const uint8_t forwarded_mark[8] = { 'm', 'c', 'a', 's', 't', 'u', 'd', 1 };

/* --- receiving --- */

/* A datagram that another process has passed on begins with where it came from. */
static void unwrap(struct datagram *it, uint32_t own)
{
	const uint8_t *from = it->data + sizeof(forwarded_mark);

	if (it->source != own || it->source_port != ROCE_PORT || it->size < FORWARDED_BYTES ||
	    memcmp(it->data, forwarded_mark, sizeof(forwarded_mark)))
		return;
	it->source = (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
	it->source_port = (uint16_t)(from[4] << 8 | from[5]);
	it->dest_port = ROCE_PORT;
	it->size -= FORWARDED_BYTES;
	it->data += FORWARDED_BYTES;
}

static struct arrivals *make_arrivals(void)
{
	struct arrivals *made = calloc(1, sizeof(*made));

	for (int i = 0; made && i < ARRIVALS; i++) {
		made->parts[i] = (struct iovec){ made->data[i], ARRIVAL_BYTES };
		made->headers[i].msg_hdr = (struct msghdr){
			.msg_name = &made->from[i],
			.msg_namelen = sizeof(made->from[i]),
			.msg_iov = &made->parts[i],
			.msg_iovlen = 1,
			.msg_control = made->control[i],
			.msg_controllen = sizeof(made->control[i]),
		};
	}
	return made;
}

/* Judge each message of a datagram; return how many these were. */
static int take_apart(struct object *self, const struct source *source, struct mmsghdr *header)
{
	struct msghdr *all = &header->msg_hdr;
	const struct sockaddr_in *from = all->msg_name;
	uint32_t left = header->msg_len, run = left, dest = source->is_group ? 0 : self->ring.address;
	uint8_t *data = all->msg_iov->iov_base;
	int count = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(all); c; c = CMSG_NXTHDR(all, c))
		if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO)
			dest = ntohl(((struct in_pktinfo *)(void *)CMSG_DATA(c))->ipi_addr.s_addr);
		else if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO)
			run = (uint32_t) * (int *)(void *)CMSG_DATA(c);
	all->msg_namelen = sizeof(*from);
	all->msg_controllen = sizeof(self->arrivals->control[0]);
	do {
		struct datagram it = {
			.source = ntohl(from->sin_addr.s_addr),
			.source_port = ntohs(from->sin_port),
			.dest = dest,
			.dest_port = source->port,
			.size = left < run ? left : run,
			.place = (uint16_t)count,
			.data = data,
		};

		data += it.size;
		left -= it.size;
		count++;
		if (!source->is_group)
			unwrap(&it, self->ring.address);
		ring_take(&self->ring, &it);
	} while (left && !self->ring.is_failed);
	return count;
}

/* Receive what has arrived at a socket, and judge it; return how many messages these were. Those that the queue pair does not
 * receive in its state are dropped uncounted. */
static int receive_from(struct object *self, const struct source *source, int receives)
{
	struct ring *ring = &self->ring;
	int all = 0;

	for (int dropped = 0; dropped < MAX_DROPS && !ring->is_failed;) {
		int is_full = !receives || !ring->free_count;
		int found = recvmmsg(source->fd, self->arrivals->headers, ARRIVALS, MSG_DONTWAIT, NULL);

		if (found < 0 && errno == EINTR)
			continue;
		for (int i = 0; i < found; i++)
			if (receives && !ring->is_failed)
				all += take_apart(self, source, &self->arrivals->headers[i]);
		dropped += is_full ? found : 0;
		if (found < ARRIVALS)
			break;
	}
	return all;
}

int ring_receive(struct object *self, uint64_t sources, int receives)
{
	int most = 0;

	for (uint32_t i = 0; i < self->source_count; i++) {
		int found = i >= SOURCES || sources >> i & 1 ? receive_from(self, &self->sources[i], receives) : 0;

		most = found > most ? found : most;
	}
	return most;
}

int ring_is_prepared(struct object *self)
{
	if (!self->arrivals && !(self->arrivals = make_arrivals()))
		PyErr_NoMemory();
	return self->arrivals != NULL;
}

uint64_t ring_overflow(const struct object *self)
{
	uint64_t all = 0;

	for (uint32_t i = 0; i < self->source_count; i++) {
		uint32_t info[SK_MEMINFO_VARS] = { 0 };
		socklen_t size = sizeof(info);

		if (!getsockopt(self->sources[i].fd, SOL_SOCKET, SO_MEMINFO, info, &size))
			all += info[SK_MEMINFO_DROPS];
	}
	return all;
}

static PyObject *receive(PyObject *object, PyObject *arg)
{
	struct object *self = (struct object *)object;
	int receives = PyObject_IsTrue(arg), found;
	PyThreadState *others;

	if (receives < 0 || !ring_is_prepared(self))
		return NULL;
	others = PyEval_SaveThread();
	found = ring_receive(self, UINT64_MAX, receives);
	PyEval_RestoreThread(others);
	return PyLong_FromLong(found);
}

static PyObject *overflow(PyObject *object, PyObject *nothing)
{
	struct object *self = (struct object *)object;

	self->overflow = ring_overflow(self);
	return PyLong_FromUnsignedLongLong(self->overflow);
}

/* Receive from one more socket; -1 in place of the descriptor: from none. */
static PyObject *ring_watch(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	struct source *more;
	int fd, port, is_group;

	if (!PyArg_ParseTuple(args, "iip:watch", &fd, &port, &is_group))
		return NULL;
	if (fd < 0) {
		self->source_count = 0;
		Py_RETURN_NONE;
	}
	more = realloc(self->sources, (self->source_count + 1) * sizeof(*more));
	if (!more)
		return PyErr_NoMemory();
	self->sources = more;
	more[self->source_count++] = (struct source){ fd, (uint16_t)port, (uint8_t)is_group };
	Py_RETURN_NONE;
}

/* For tests of the rules: judge a datagram that no socket has received. */
static PyObject *ring_judge(PyObject *object, PyObject *args)
{
	struct object *self = (struct object *)object;
	unsigned int source, source_port, dest, dest_port;
	enum fate fate;
	Py_buffer given;

	if (!PyArg_ParseTuple(args, "y*IIII:judge", &given, &source, &source_port, &dest, &dest_port))
		return NULL;
	struct datagram it = { .source = source, .dest = dest, .source_port = (uint16_t)source_port,
			       .dest_port = (uint16_t)dest_port, .size = (uint32_t)given.len, .data = malloc((size_t)given.len + 1) };
	if (!it.data) {
		PyBuffer_Release(&given);
		return PyErr_NoMemory();
	}
	memcpy(it.data, given.buf, (size_t)given.len);
	fate = ring_take(&self->ring, &it);
	free(it.data);
	PyBuffer_Release(&given);
	return PyLong_FromLong(fate);
}

PyObject *ring_take_records(struct object *self, unsigned long wanted)
{
	struct ring *ring = &self->ring;
	uint32_t count = wanted < ring->queued ? (uint32_t)wanted : ring->queued;
	PyObject *records, *slots, *both;
	char *row;
	uint32_t *slot;

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

static PyObject *take(PyObject *object, PyObject *arg)
{
	unsigned long wanted = PyLong_AsUnsignedLong(arg);

	return PyErr_Occurred() ? NULL : ring_take_records((struct object *)object, wanted);
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
	ring->first = ring->queued = 0;
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
	_Alignas(8) char bytes[CMSG_SPACE(sizeof(int)) * 2 + CMSG_SPACE(sizeof(uint16_t))];
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

static size_t size_of(const struct payload *one)
{
	return one->parts[0].iov_len + one->parts[1].iov_len;
}

/* How many of the messages the kernel may cut from one large datagram: all are as long as the first, but for a shorter last
 * one. Virtual interfaces carry such a datagram whole past an MTU that its messages exceed; so one that a member with an MTU of
 * 1,024 is to lose does not take a shorter one, which is for that member, with it. */
static int run_of(const struct payload *payloads, int count, size_t beside)
{
	size_t size = size_of(&payloads[0]), whole = beside + ((size + 3) & ~(size_t)3);
	int most = (int)(MAX_DATAGRAM / whole), run = 1;

	most = most < count ? most : count;
	while (run < most && size_of(&payloads[run]) == size)
		run++;
	return run < most && size <= MIN_ETHERNET_MTU && size_of(&payloads[run]) < size ? run + 1 : run;
}

static struct iovec *add_part(struct iovec *parts, const void *data, size_t size)
{
	if (size)
		*parts++ = (struct iovec){ (void *)data, size };
	return parts;
}

/* Build the head and the end of the message at that place in its run, and add its parts; return its size. */
static uint32_t put_around(struct object *self, const struct send_to *to, const struct payload *payload, uint32_t psn,
			   uint16_t place, struct outgoing *one, struct iovec **parts)
{
	uint32_t pad = (uint32_t)(-size_of(payload) & 3), head = HEAD_BYTES + (to->has_imm ? 4 : 0);
	uint32_t size = (uint32_t)(head + size_of(payload) + pad + ICRC_BYTES), imm = htonl(to->imm), crc;
	uint32_t ports = (uint32_t)to->port << 16 | ntohs(to->address.sin_port);
	struct addresses addresses = { self->ring.address, to->dest, ports, size, 0 };

	put_head(one->head, to->has_imm, pad, self->ring.pkey, to->dest_qp, psn, to->qkey, self->ring.qp_num);
	memcpy(one->head + HEAD_BYTES, &imm, 4);
	crc = icrc_of_addresses(&self->ring.sent_to, addresses, place);
	one->head[RESERVED] = 0xFF; /* as the ICRC covers it */
	crc = crc_more(crc, one->head, head);
	one->head[RESERVED] = 0;
	memset(one->tail, 0, sizeof(one->tail));
	*parts = add_part(*parts, one->head, head);
	for (int part = 0; part < 2; part++) {
		crc = crc_more(crc, payload->parts[part].iov_base, payload->parts[part].iov_len);
		*parts = add_part(*parts, payload->parts[part].iov_base, payload->parts[part].iov_len);
	}
	crc = crc_more(crc, one->tail, pad);
	for (int byte = 0; byte < ICRC_BYTES; byte++)
		one->tail[pad + (uint32_t)byte] = (uint8_t)(crc >> 8 * byte);
	*parts = add_part(*parts, one->tail, pad + ICRC_BYTES);
	return size;
}

/* Send one datagram; 1, or -1 with errno. A small one is copied, because each of its parts costs the kernel more than that. */
static int send_datagram(int fd, const struct msghdr *header)
{
	uint8_t whole[MAX_COPIED];
	size_t size = 0;

	for (size_t i = 0; i < header->msg_iovlen; i++)
		size += header->msg_iov[i].iov_len;
	if (size > sizeof(whole) || header->msg_controllen)
		return sendmsg(fd, header, MSG_DONTWAIT) < 0 ? -1 : 1;
	size = 0;
	for (size_t i = 0; i < header->msg_iovlen; size += header->msg_iov[i++].iov_len)
		memcpy(whole + size, header->msg_iov[i].iov_base, header->msg_iov[i].iov_len);
	return sendto(fd, whole, size, MSG_DONTWAIT, header->msg_name, header->msg_namelen) < 0 ? -1 : 1;
}

/* Send datagrams; return how many were sent, or -1 with errno. */
static int send_datagrams(int fd, struct mmsghdr *headers, int count)
{
	int sent;

	do
		sent = count == 1 ? send_datagram(fd, &headers[0].msg_hdr) : sendmmsg(fd, headers, (unsigned int)count, MSG_DONTWAIT);
	while (sent < 0 && errno == EINTR);
	return sent;
}

int ring_send_some(struct object *self, const struct send_to *to, const struct payload *payloads, int count)
{
	struct mmsghdr headers[AT_ONCE];
	struct iovec all_parts[AT_ONCE * PARTS], *parts = all_parts;
	struct outgoing outgoing[AT_ONCE];
	struct control controls[AT_ONCE];
	int runs[AT_ONCE], datagrams = 0, is_group = to->dest >> 28 == 0xE, found, sent = 0;
	size_t beside = HEAD_BYTES + (to->has_imm ? 4 : 0) + ICRC_BYTES;

	/* to groups the socket keeps it, because a control message costs each call a tenth of a microsecond */
	if (is_group && to->ttl != self->group_ttl) {
		if (setsockopt(to->fd, IPPROTO_IP, IP_MULTICAST_TTL, &to->ttl, sizeof(to->ttl)))
			return -errno;
		self->group_ttl = to->ttl;
	}
	for (int at = 0; at < count; at += runs[datagrams++]) {
		int run = self->no_gso ? 1 : run_of(&payloads[at], count - at, beside);
		struct msghdr *header = &headers[datagrams].msg_hdr;
		struct iovec *first = parts;
		uint16_t segment = 0;

		/* the kernel numbers the segments of one datagram from 0 on, and one that is not to be cut with 0 */
		for (int i = 0; i < run; i++) {
			uint32_t size = put_around(self, to, &payloads[at + i], self->psn + (uint32_t)(at + i), (uint16_t)i,
						   &outgoing[at + i], &parts);

			segment = i ? segment : (uint16_t)size;
		}
		*header = (struct msghdr){
			.msg_name = (void *)&to->address,
			.msg_namelen = sizeof(to->address),
			.msg_iov = first,
			.msg_iovlen = (size_t)(parts - first),
			.msg_control = &controls[datagrams],
		};
		if (to->tos)
			add_control(header, IPPROTO_IP, IP_TOS, &to->tos, sizeof(to->tos));
		if (to->ttl && !is_group)
			add_control(header, IPPROTO_IP, IP_TTL, &to->ttl, sizeof(to->ttl));
		if (run > 1)
			add_control(header, IPPROTO_UDP, UDP_SEGMENT, &segment, sizeof(segment));
		runs[datagrams] = run;
	}
	found = send_datagrams(to->fd, headers, datagrams);
	if (found < 0 && runs[0] > 1 && (errno == EINVAL || errno == EIO || errno == EOPNOTSUPP)) {
		self->no_gso = 1; /* this kernel or interface does not */
		sent = ring_send_some(self, to, payloads, count);
		self->no_gso = sent >= 0; /* else the error has another cause, such as an address that is gone */
		return sent;
	}
	if (found < 0)
		return -errno;
	for (int i = 0; i < found; i++)
		sent += runs[i];
	self->psn += (uint32_t)sent;
	self->sent += (uint32_t)sent;
	return sent;
}

int ring_parse_to(PyObject *what, struct object *self, struct send_to *to)
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

	if (!PyArg_ParseTuple(args, "O!O!n:send", &PyTuple_Type, &what, &PyList_Type, &list, &at) || ring_parse_to(what, self, &to))
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

			sent = ring_send_some(self, &to, payloads, count);
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
	if (ring_parse_to(what, self, &to) || head < 0 || body < 0 || heads.len < head * total || bodies.len < body * total) {
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
		sent = ring_send_some(self, &to, payloads, count);
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
	free(self->sources);
	free(self->arrivals);
	if (self->has_memory)
		PyBuffer_Release(&self->memory);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyMethodDef ring_methods[] = {
	{ "receive", receive, METH_O, "Receive what has arrived." },
	{ "overflow", overflow, METH_NOARGS, "Count what found a full buffer." },
	{ "watch", ring_watch, METH_VARARGS, "Receive from one more socket." },
	{ "judge", ring_judge, METH_VARARGS, "Judge a datagram." },
	{ "take", take, METH_O, "Return the first messages." },
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
	{ "sent", T_ULONGLONG, offsetof(struct object, sent), READONLY, NULL },
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
	uint8_t bytes[FORWARDED_BYTES + MAX_MESSAGE];
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

static PyObject *set_up(PyObject *module, PyObject *args)
{
	return calls_set_up(args) ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
	{ "set_up", set_up, METH_VARARGS, "The contract's QueuePair, Message, Gid, QpState.RTS and CopiedBatch." },
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

/* Raise the error of a host that has no library for CRCs. */
static void refuse_without_crc(void)
{
	PyObject *said = PyUnicode_FromString("there is neither libisal.so.2 nor libz.so.1, and one of them makes the ICRC");
	PyObject *name = PyUnicode_FromString("libisal.so.2");

	if (said && name)
		PyErr_SetImportError(said, name, NULL);
	Py_XDECREF(said);
	Py_XDECREF(name);
}

PyMODINIT_FUNC PyInit__native(void)
{
	const char *crc_by = crc_prepare();
	PyObject *module, *calls;

	if (!*crc_by) {
		refuse_without_crc();
		return NULL;
	}
	icrc_prepare();
	module = PyModule_Create(&definition);
	calls = PyType_FromSpec(&calls_spec);
	ring_type = (PyTypeObject *)PyType_FromSpec(&ring_spec);
	if (module && (!ring_type || !calls || PyModule_AddStringConstant(module, "CRC_BY", crc_by) ||
		       PyModule_AddObjectRef(module, "Ring", (PyObject *)ring_type) ||
		       PyModule_AddObjectRef(module, "Calls", calls)))
		Py_CLEAR(module);
	Py_XDECREF(calls);
#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	return module;
}
