/* What the files of the module share: a queue pair's ring with its sockets. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include "ring.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

enum {
	AT_ONCE = PLACES, /* messages of one call to send, and the most that the kernel takes as one datagram to cut */
	PARTS = 4,	   /* of a message that is sent: head, two of the payload, what is behind */
	MAX_DATAGRAM = 65507,
	MIN_ETHERNET_MTU = 1024, /* the RoCE MTU of an interface with 1,500 bytes */
	MAX_COPIED = 2048, /* bytes of a datagram that is sent from a copy */
	SOURCES = 64,	   /* sockets that a set of them can name */
	ARRIVALS = 16,	   /* datagrams of one call to receive; each may be a run of messages */
	ARRIVAL_BYTES = 65536,
	MAX_DROPS = 4096,  /* datagrams that one call drops, so that a flood does not keep it */
	FORWARDED_BYTES = 16,
	FIRST_FORWARDED_PORT = 1024,
	MAX_MESSAGE = HEAD_BYTES + 4 + 4096 + ICRC_BYTES,
};

/* What one call receives. Runs of messages that were sent as one datagram, or that a device has joined (UDP GRO), stay whole
 * up to here: so the kernel handles them once, and not once for each message. */
struct arrivals {
	struct mmsghdr headers[ARRIVALS];
	struct iovec parts[ARRIVALS];
	struct sockaddr_in from[ARRIVALS];
	_Alignas(8) uint8_t control[ARRIVALS][CMSG_SPACE(sizeof(struct in_pktinfo)) + CMSG_SPACE(sizeof(int))];
	uint8_t data[ARRIVALS][ARRIVAL_BYTES];
};

/* A socket of the queue pair: its own one, or one that is a member of groups, which is bound to port 4791. */
struct source {
	int fd;
	uint16_t port;
	uint8_t is_group;
};

struct object {
	PyObject_HEAD
	struct ring ring;
	Py_buffer memory;
	char has_memory, no_gso;
	uint32_t psn;
	int group_ttl; /* the socket's, 0 as sockets.send_by leaves it */
	uint64_t sent;
	struct source *sources;
	uint32_t source_count;
	struct arrivals *arrivals;
	uint64_t overflow; /* as counted when Python last looked */
};

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

/* Send up to AT_ONCE messages; return how many were sent, or -errno if none was. */
int ring_send_some(struct object *self, const struct send_to *to, const struct payload *payloads, int count);
/* Read a tuple of Python; -1: with an error. */
int ring_parse_to(PyObject *what, struct object *self, struct send_to *to);
/* Whether the ring has memory to receive in from now on; 0: with an error. */
int ring_is_prepared(struct object *self);
/* Receive from the sockets in the set, a bit for each of the first SOURCES; return how many messages came at most from one. */
int ring_receive(struct object *self, uint64_t sources, int receives);
/* The first messages, at most so many, as records and as the numbers of their receives. */
PyObject *ring_take_records(struct object *self, unsigned long wanted);
/* How many datagrams found the buffers of the sockets full. */
uint64_t ring_overflow(const struct object *self);

extern PyTypeObject *ring_type;

/* QueuePair.send, send_one, recv and recv_one. */
extern PyType_Spec calls_spec;
int calls_set_up(PyObject *args);
