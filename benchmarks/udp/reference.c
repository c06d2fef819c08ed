/* RoCEv2 UD multicast over UDP sockets in C: the peer of the provider `udp`. A command a line in, a line of JSON out.
 *
 * reference ADDRESS CREDITS
 *
 * ADDRESS is that of the interface; CREDITS a file, shared by all ends, in which each receiver counts what it has got
 * (benchmarks/udp/peer.py). Commands:
 *
 *   receive PLACE SIZE COUNT OFFLOADS    receive so many messages, or as many as there are when the sender has ended
 *   send RECEIVERS SIZE COUNT OFFLOADS   send so many messages in batches, at most a window ahead of the slowest receiver
 *
 * OFFLOADS is 1 for UDP GSO and GRO, and 0 for sendmmsg and recvmmsg alone. The ICRC is made and checked in whole, by
 * ISA-L. The kernel numbers the segments of a GSO call from 0 on, and other datagrams that may not be cut with 0; so a
 * receiver knows the identification that the ICRC covers.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#define UDP_GRO 104
#endif

enum {
	ROCE_PORT = 4791,
	BATCH = 64,
	WINDOW = 1024,
	HEAD = 20, /* BTH and DETH */
	ICRC = 4,
	MASKED = 8 + 20 + 8, /* what the ICRC covers in front of BTH: ones, and the IPv4 and UDP headers */
	MAX_SIZE = 4096,
	MAX_DATAGRAM = 65507,
	ARRIVALS = 16, /* datagrams of one recvmmsg with GRO */
	RECEIVE_BUFFER = 32 << 20,
	QKEY = 0x01234567,
	PKEY = 0xFFFF,
	SRC_QP = 0x11,
	PLACES = 16, /* of receivers, in CREDITS */
	LINE = 8,    /* words of a cache line */
};
static const uint32_t GROUP = 0xEF070707; /* 239.7.7.7 */
static const double STALLED = 5;	  /* as in peer.py */

struct credits {
	_Atomic uint64_t received[PLACES * LINE];
	_Atomic uint64_t is_over;
};

static struct credits *credits;
static uint32_t address;
static uint32_t (*crc_more)(uint32_t crc, const void *data, uint64_t size);

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double check_seconds(clockid_t clock)
{
	struct timespec at;

	clock_gettime(clock, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
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

static uint32_t get32(const uint8_t *at)
{
	return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* What the ICRC covers up to BTH, but for the identification. */
static void mask(uint8_t *at, uint32_t source, uint16_t source_port, uint32_t size)
{
	uint8_t *ip = at + 8, *udp = ip + 20;

	memset(at, 0xFF, MASKED);
	ip[0] = 0x45;
	put16(ip + 2, 28 + size);
	put16(ip + 6, 0x4000);
	ip[9] = 17;
	put32(ip + 12, source);
	put32(ip + 16, GROUP);
	put16(udp, source_port);
	put16(udp + 2, ROCE_PORT);
	put16(udp + 4, 8 + size);
}

/* --- sending --- */

struct sender {
	int fd;
	uint16_t port;
	uint32_t psn;
	struct sockaddr_in to;
	uint8_t payload[MAX_SIZE];
};

static void open_sender(struct sender *self)
{
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(address) };
	socklen_t length = sizeof(own);
	int never_cut = IP_PMTUDISC_DO;

	self->fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (setsockopt(self->fd, IPPROTO_IP, IP_MTU_DISCOVER, &never_cut, sizeof(never_cut)) ||
	    setsockopt(self->fd, IPPROTO_IP, IP_MULTICAST_IF, &own.sin_addr, sizeof(own.sin_addr)) ||
	    bind(self->fd, (struct sockaddr *)&own, sizeof(own)) || getsockname(self->fd, (struct sockaddr *)&own, &length))
		die("sender");
	self->port = ntohs(own.sin_port);
	self->to = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(ROCE_PORT), .sin_addr.s_addr = htonl(GROUP) };
}

static void send_batch(struct sender *self, uint32_t size, uint32_t count, int offloads)
{
	static uint8_t heads[BATCH][MASKED + HEAD], masked[BATCH][MASKED + HEAD], tails[BATCH][3 + ICRC];
	struct iovec parts[BATCH][3];
	struct mmsghdr headers[BATCH];
	char control[CMSG_SPACE(sizeof(uint16_t))] __attribute__((aligned(8)));
	uint32_t pad = -size & 3, whole = HEAD + size + pad + ICRC;
	uint32_t in_one = offloads ? MAX_DATAGRAM / whole : 1, datagrams = 0, sent = 0;
	struct cmsghdr *segment = (struct cmsghdr *)(void *)control;

	segment->cmsg_level = IPPROTO_UDP;
	segment->cmsg_type = UDP_SEGMENT;
	segment->cmsg_len = CMSG_LEN(sizeof(uint16_t));
	*(uint16_t *)(void *)CMSG_DATA(segment) = (uint16_t)whole;
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *head = heads[i], *tail = tails[i];
		uint32_t crc;

		head[0] = 0x64;
		head[1] = (uint8_t)(pad << 4);
		put16(head + 2, PKEY);
		put32(head + 4, 0xFFFFFF);
		put32(head + 8, self->psn++ & 0xFFFFFF);
		put32(head + 12, QKEY);
		put32(head + 16, SRC_QP);
		if (!i)
			mask(masked[0], address, self->port, whole);
		else
			memcpy(masked[i], masked[0], MASKED);
		put16(masked[i] + 8 + 4, i % in_one);
		memcpy(masked[i] + MASKED, head, HEAD);
		masked[i][MASKED + 4] = 0xFF;
		crc = crc_more(crc_more(0, masked[i], MASKED + HEAD), self->payload, size);
		memset(tail, 0, 3);
		crc = pad ? crc_more(crc, tail, pad) : crc;
		memcpy(tail + pad, &crc, ICRC);
		parts[i][0] = (struct iovec){ head, HEAD };
		parts[i][1] = (struct iovec){ self->payload, size };
		parts[i][2] = (struct iovec){ tail, pad + ICRC };
	}
	for (uint32_t i = 0; i < count; i += in_one, datagrams++) {
		uint32_t segments = count - i < in_one ? count - i : in_one;

		headers[datagrams].msg_hdr = (struct msghdr){
			.msg_name = &self->to,
			.msg_namelen = sizeof(self->to),
			.msg_iov = parts[i],
			.msg_iovlen = 3 * (size_t)segments,
			.msg_control = segments > 1 ? control : NULL,
			.msg_controllen = segments > 1 ? sizeof(control) : 0,
		};
	}
	while (sent < datagrams) {
		int some = sendmmsg(self->fd, headers + sent, datagrams - sent, 0);

		if (some < 0 && errno != EINTR)
			die("sendmmsg");
		sent += some > 0 ? (uint32_t)some : 0;
	}
}

static uint64_t slowest(uint32_t receivers, const uint64_t *lost)
{
	uint64_t least = UINT64_MAX;

	for (uint32_t i = 0; i < receivers; i++) {
		uint64_t has = credits->received[i * LINE] + lost[i];

		least = has < least ? has : least;
	}
	return least;
}

static void run_sender(uint32_t receivers, uint32_t size, uint64_t count, int offloads)
{
	const struct timespec moment = { .tv_nsec = 20000 };
	static struct sender self;
	uint64_t lost[PLACES] = { 0 }, sent = 0, seen = 0;
	double start, cpu, progress, now;

	memset(&self, 0, sizeof(self));
	open_sender(&self);
	start = progress = check_seconds(CLOCK_MONOTONIC);
	cpu = check_seconds(CLOCK_PROCESS_CPUTIME_ID);
	for (;;) {
		uint64_t least = slowest(receivers, lost);
		uint32_t next = (uint32_t)(count - sent < BATCH ? count - sent : BATCH);

		if (least >= count)
			break;
		if (next && sent + next <= least + WINDOW) {
			send_batch(&self, size, next, offloads);
			sent += next;
			continue;
		}
		now = check_seconds(CLOCK_MONOTONIC);
		if (least != seen) {
			seen = least;
			progress = now;
		} else if (now > progress + STALLED) {
			for (uint32_t i = 0; i < receivers; i++)
				lost[i] = sent - credits->received[i * LINE];
			progress = now;
		}
		nanosleep(&moment, NULL);
	}
	cpu = check_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	now = check_seconds(CLOCK_MONOTONIC);
	credits->is_over = 1;
	printf("{\"count\": %llu, \"seconds\": %.9f, \"cpu\": %.9f}\n", (unsigned long long)count, now - start, cpu);
	close(self.fd);
}

/* --- receiving --- */

static int open_receiver(int offloads)
{
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons(ROCE_PORT) };
	struct ip_mreqn group = { .imr_multiaddr.s_addr = htonl(GROUP), .imr_address.s_addr = htonl(address) };
	struct timeval idle = { .tv_usec = 20000 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0), on = 1, off = 0, room = RECEIVE_BUFFER;

	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)))
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &idle, sizeof(idle)) ||
	    setsockopt(fd, IPPROTO_IP, IP_MULTICAST_ALL, &off, sizeof(off)) || bind(fd, (struct sockaddr *)&own, sizeof(own)) ||
	    setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof(group)) ||
	    (offloads && setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof(on))))
		die("receiver");
	return fd;
}

/* Return how many messages of a datagram are right. */
static uint32_t check(const uint8_t *data, uint32_t bytes, uint32_t segment, const struct sockaddr_in *from)
{
	uint8_t masked[MASKED + HEAD];
	uint32_t right = 0;

	mask(masked, ntohl(from->sin_addr.s_addr), ntohs(from->sin_port), segment);
	for (uint32_t at = 0, index = 0; at + segment <= bytes; at += segment, index++) {
		const uint8_t *message = data + at;
		uint32_t crc;

		if (segment < HEAD + ICRC || message[0] != 0x64 || get32(message + 12) != QKEY || get32(message + 4) << 8 != 0xFFFFFF00)
			continue;
		put16(masked + 8 + 4, index);
		memcpy(masked + MASKED, message, HEAD);
		masked[MASKED + 4] = 0xFF;
		crc = crc_more(crc_more(0, masked, MASKED + HEAD), message + HEAD, segment - HEAD - ICRC);
		right += !memcmp(&crc, message + segment - ICRC, ICRC);
	}
	return right;
}

static void run_receiver(uint32_t place, uint32_t size, uint64_t count, int offloads)
{
	uint32_t at_once = offloads ? ARRIVALS : BATCH, room = offloads ? 1 << 16 : HEAD + MAX_SIZE + ICRC;
	struct mmsghdr headers[BATCH];
	struct iovec parts[BATCH];
	struct sockaddr_in from[BATCH];
	char control[BATCH][CMSG_SPACE(sizeof(int))] __attribute__((aligned(8)));
	uint8_t *memory = malloc((size_t)at_once * room);
	uint64_t received = 0;
	int fd = open_receiver(offloads);
	double cpu;

	if (!memory)
		die("malloc");
	printf("{\"ready\": true, \"size\": %u}\n", size);
	fflush(stdout);
	cpu = check_seconds(CLOCK_PROCESS_CPUTIME_ID);
	while (received < count) {
		int found;

		for (uint32_t i = 0; i < at_once; i++) {
			parts[i] = (struct iovec){ memory + (size_t)i * room, room };
			headers[i].msg_hdr = (struct msghdr){
				.msg_name = &from[i],
				.msg_namelen = sizeof(from[i]),
				.msg_iov = &parts[i],
				.msg_iovlen = 1,
				.msg_control = control[i],
				.msg_controllen = sizeof(control[i]),
			};
		}
		found = recvmmsg(fd, headers, at_once, MSG_WAITFORONE, NULL);
		if (found < 0 && errno != EAGAIN && errno != EINTR)
			die("recvmmsg");
		if (found < 0 && credits->is_over)
			break;
		for (int i = 0; i < found; i++) {
			uint32_t segment = headers[i].msg_len;
			struct cmsghdr *has = CMSG_FIRSTHDR(&headers[i].msg_hdr);

			if (has && has->cmsg_level == IPPROTO_UDP && has->cmsg_type == UDP_GRO)
				segment = (uint32_t) * (int *)(void *)CMSG_DATA(has);
			received += check(parts[i].iov_base, headers[i].msg_len, segment, &from[i]);
			credits->received[place * LINE] = received;
		}
	}
	cpu = check_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	printf("{\"count\": %llu, \"cpu\": %.9f}\n", (unsigned long long)received, cpu);
	close(fd);
	free(memory);
}

int main(int argc, char **argv)
{
	void *isal = dlopen("libisal.so.2", RTLD_NOW);
	char line[256], what[16];
	unsigned int first, size, offloads;
	unsigned long long count;
	int fd;

	if (argc != 3) {
		fprintf(stderr, "usage: reference ADDRESS CREDITS\n");
		return 2;
	}
	if (!isal) {
		fprintf(stderr, "there is no ISA-L: apt-get install libisal2\n");
		return 2;
	}
	*(void **)&crc_more = dlsym(isal, "crc32_gzip_refl");
	address = ntohl(inet_addr(argv[1]));
	fd = open(argv[2], O_RDWR);
	if (fd < 0)
		die(argv[2]);
	credits = mmap(NULL, sizeof(*credits), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (credits == MAP_FAILED || !crc_more)
		die("credits");
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%15s %u %u %llu %u", what, &first, &size, &count, &offloads) != 5 || size > MAX_SIZE || first > PLACES)
			return 2;
		if (!strcmp(what, "send"))
			run_sender(first, size, count, (int)offloads);
		else
			run_receiver(first, size, count, (int)offloads);
		fflush(stdout);
	}
	return 0;
}
