/* What C alone does: the reference that the benchmarks compare with.
 *
 * Written as one writes it for speed: arrays of work requests behind one doorbell, one signalled send in a chunk,
 * completions polled in arrays, receives posted again in chains, everything registered and posted beforehand.
 * Reads commands, a line each, and answers each with one line of JSON; see compare.py for what they mean.
 *
 *   reference SENDER_ADDRESS RECEIVER_ADDRESS...
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#ifndef CHUNK
#define CHUNK 32
#endif

enum {
	WINDOW = 128,
	DEPTH = 512,
	SENDS = 128,
	SLOT = 2048,
	GRH = 40,
	ACK_EVERY = 64,
	PROCESS_WINDOW = 256,
	MAX_RECEIVERS = 64,
};

static const char *const DATA = "239.9.1.1", *const BACK = "239.9.1.2";
static const double GIVE_UP = 5.0;

#define CHECK(condition)                                                                      \
	do {                                                                                  \
		if (!(condition)) {                                                           \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition,    \
				strerror(errno));                                             \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

struct endpoint {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_mr *mr;
	uint8_t *slab;
	struct ibv_recv_wr recv_wrs[DEPTH];
	struct ibv_sge recv_sges[DEPTH];
	struct ibv_send_wr send_wrs[SENDS];
	struct ibv_sge send_sges[SENDS];
	struct ibv_ah *ah;
	uint32_t qkey;
	unsigned posted, done;
};

static const char *addresses[1 + MAX_RECEIVERS];
static int receivers;
static double *latencies;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static struct sockaddr_in ipv4(const char *text)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1);
	return address;
}

/* --- an endpoint: an id with a QP, its receives posted --- */

static void post_receives(struct endpoint *self, unsigned count)
{
	struct ibv_recv_wr *bad;

	self->recv_wrs[count - 1].next = NULL;
	CHECK(!ibv_post_recv(self->id->qp, self->recv_wrs, &bad));
	if (count < DEPTH)
		self->recv_wrs[count - 1].next = &self->recv_wrs[count];
}

static void aim(struct endpoint *self, unsigned place, unsigned slot)
{
	self->recv_sges[place] = (struct ibv_sge){ (uintptr_t)self->slab + slot * SLOT, SLOT, self->mr->lkey };
	self->recv_wrs[place].wr_id = slot;
}

static struct endpoint *open_endpoint(const char *address)
{
	struct endpoint *self = calloc(1, sizeof(*self));
	struct sockaddr_in source = ipv4(address);
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = SENDS, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	const size_t bytes = (size_t)(DEPTH + SENDS) * SLOT;

	CHECK(self && (self->channel = rdma_create_event_channel()));
	CHECK(!rdma_create_id(self->channel, &self->id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_bind_addr(self->id, (struct sockaddr *)&source));
	CHECK((self->pd = ibv_alloc_pd(self->id->verbs)));
	CHECK(!posix_memalign((void **)&self->slab, 4096, bytes));
	memset(self->slab, 0, bytes);
	CHECK((self->mr = ibv_reg_mr(self->pd, self->slab, bytes, IBV_ACCESS_LOCAL_WRITE)));
	CHECK((self->send_cq = ibv_create_cq(self->id->verbs, SENDS, NULL, NULL, 0)));
	CHECK((self->recv_cq = ibv_create_cq(self->id->verbs, DEPTH, NULL, NULL, 0)));
	init.send_cq = self->send_cq;
	init.recv_cq = self->recv_cq;
	CHECK(!rdma_create_qp(self->id, self->pd, &init));
	for (unsigned i = 0; i < DEPTH; i++) {
		self->recv_wrs[i] = (struct ibv_recv_wr){ .next = &self->recv_wrs[i + 1],
							  .sg_list = &self->recv_sges[i], .num_sge = 1 };
		aim(self, i, i);
	}
	post_receives(self, DEPTH);
	return self;
}

static void close_endpoint(struct endpoint *self)
{
	if (self->ah)
		ibv_destroy_ah(self->ah);
	rdma_destroy_qp(self->id);
	ibv_destroy_cq(self->send_cq);
	ibv_destroy_cq(self->recv_cq);
	ibv_dereg_mr(self->mr);
	ibv_dealloc_pd(self->pd);
	rdma_destroy_id(self->id);
	rdma_destroy_event_channel(self->channel);
	free(self->slab);
	free(self);
}

static void join(struct endpoint *self, struct sockaddr_in *group, int send_only)
{
	struct rdma_cm_join_mc_attr_ex attr = {
		.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = send_only ? RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER : RDMA_MC_JOIN_FLAG_FULLMEMBER,
		.addr = (struct sockaddr *)group,
	};

	CHECK(!rdma_join_multicast_ex(self->id, &attr, NULL));
}

static void joined(struct endpoint *self, struct rdma_ud_param *ud)
{
	struct rdma_cm_event *event;

	CHECK(!rdma_get_cm_event(self->channel, &event));
	CHECK(event->event == RDMA_CM_EVENT_MULTICAST_JOIN && !event->status);
	*ud = event->param.ud;
	CHECK(!rdma_ack_cm_event(event));
}

static void join_to_receive(struct endpoint *self, const char *text)
{
	struct sockaddr_in group = ipv4(text);
	struct rdma_ud_param ud;

	join(self, &group, 0);
	joined(self, &ud);
}

static void join_to_send(struct endpoint *self, const char *text)
{
	struct sockaddr_in group = ipv4(text);
	struct rdma_ud_param ud;

	join(self, &group, 1);
	joined(self, &ud);
	CHECK((self->ah = ibv_create_ah(self->pd, &ud.ah_attr)));
	self->qkey = ud.qkey;
	for (unsigned i = 0; i < SENDS; i++) {
		self->send_sges[i] = (struct ibv_sge){ (uintptr_t)self->slab + (DEPTH + i) * SLOT, 0,
						       self->mr->lkey };
		self->send_wrs[i] = (struct ibv_send_wr){
			.sg_list = &self->send_sges[i],
			.num_sge = 1,
			.opcode = IBV_WR_SEND_WITH_IMM,
			.wr.ud = { self->ah, 0xffffff, ud.qkey },
		};
	}
}

/* --- data --- */

static void reap(struct endpoint *self)
{
	struct ibv_wc wcs[CHUNK];
	int polled = ibv_poll_cq(self->send_cq, CHUNK, wcs);

	CHECK(polled >= 0);
	for (int i = 0; i < polled; i++) {
		CHECK(wcs[i].status == IBV_WC_SUCCESS);
		self->done += (unsigned)wcs[i].wr_id;
	}
}

/* Post `count` messages behind one doorbell, the last one signalled. `number` of the first goes with them. */
static void send_chunk(struct endpoint *self, unsigned count, const uint32_t *sizes, uint32_t number)
{
	unsigned first = self->posted % SENDS;
	struct ibv_send_wr *bad;

	while (self->posted - self->done + count > SENDS)
		reap(self);
	for (unsigned i = 0; i < count; i++) {
		unsigned slot = (first + i) % SENDS;
		struct ibv_send_wr *wr = &self->send_wrs[slot];

		self->send_sges[slot].length = sizes[i];
		wr->imm_data = htonl(number + i);
		wr->send_flags = i + 1 == count ? IBV_SEND_SIGNALED : 0;
		wr->wr_id = count;
		wr->next = i + 1 == count ? NULL : &self->send_wrs[(slot + 1) % SENDS];
	}
	CHECK(!ibv_post_send(self->id->qp, &self->send_wrs[first], &bad));
	self->posted += count;
}

/* Take what is there, up to a chunk, and post its receives again; `last` becomes the last number. */
static unsigned receive_chunk(struct endpoint *self, unsigned max, uint32_t *last)
{
	struct ibv_wc wcs[CHUNK];
	int polled = ibv_poll_cq(self->recv_cq, max < CHUNK ? (int)max : CHUNK, wcs);

	CHECK(polled >= 0);
	for (int i = 0; i < polled; i++) {
		CHECK(wcs[i].status == IBV_WC_SUCCESS);
		aim(self, (unsigned)i, (unsigned)wcs[i].wr_id);
	}
	if (polled) {
		*last = ntohl(wcs[polled - 1].imm_data);
		post_receives(self, (unsigned)polled);
	}
	return (unsigned)polled;
}

static int receive_within(struct endpoint *self, double seconds, uint32_t *last)
{
	double end = now() + seconds;

	do
		if (receive_chunk(self, 1, last))
			return 1;
	while (now() < end);
	return 0;
}

/* Send empty messages until every receiver hears them: a switch may take a while to learn of a member. */
static void wait_until_heard(struct endpoint *sender, struct endpoint **members, int count)
{
	uint32_t zero = 0, last;

	for (int tries = 0; tries < 100; tries++) {
		int heard = 0;

		send_chunk(sender, 1, &zero, 0);
		for (int i = 0; i < count; i++)
			heard += receive_within(members[i], 0.1, &last);
		if (heard == count)
			return;
	}
	CHECK(!"no receiver hears the sender");
}

static struct endpoint *pair(struct endpoint **members, int count, int ports)
{
	struct endpoint *sender = open_endpoint(addresses[0]);

	for (int i = 0; i < count; i++) {
		members[i] = open_endpoint(addresses[1 + i % ports]);
		join_to_receive(members[i], DATA);
	}
	join_to_send(sender, DATA);
	wait_until_heard(sender, members, count);
	return sender;
}

static void unpair(struct endpoint *sender, struct endpoint **members, int count)
{
	close_endpoint(sender);
	for (int i = 0; i < count; i++) {
		struct sockaddr_in group = ipv4(DATA);

		rdma_leave_multicast(members[i]->id, (struct sockaddr *)&group);
		close_endpoint(members[i]);
	}
}

static void sizes_of(uint32_t *sizes, unsigned size)
{
	static const uint32_t mixed[] = { 64, 1024, 200, 512 };

	for (unsigned i = 0; i < CHUNK; i++)
		sizes[i] = size ? size : mixed[i % 4];
}

/* --- the measurements --- */

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void answer(unsigned count, double seconds, unsigned lost)
{
	printf("{\"count\": %u, \"seconds\": %.9f, \"lost\": %u}\n", count, seconds, lost);
}

static void answer_latencies(unsigned count, double seconds)
{
	qsort(latencies, count, sizeof(*latencies), by_size);
	printf("{\"count\": %u, \"seconds\": %.9f, \"lost\": 0, \"p50\": %.9f, \"p99\": %.9f}\n", count, seconds,
	       latencies[count / 2], latencies[count * 99 / 100]);
}

static void batch(unsigned size, unsigned count, int fan_out, int ports)
{
	struct endpoint *members[MAX_RECEIVERS], *sender = pair(members, fan_out, ports);
	uint32_t sizes[CHUNK], last;
	unsigned sent = 0, received[MAX_RECEIVERS] = { 0 }, slowest = 0;
	double start = now(), heard = start, end;

	sizes_of(sizes, size);
	while (slowest < count) {
		if (sent < count && sent - slowest + CHUNK <= WINDOW) {
			unsigned n = count - sent < CHUNK ? count - sent : CHUNK;

			send_chunk(sender, n, sizes, sent);
			sent += n;
		}
		slowest = count;
		for (int i = 0; i < fan_out; i++) {
			unsigned got = receive_chunk(members[i], CHUNK, &last);

			received[i] += got;
			if (received[i] < slowest)
				slowest = received[i];
			if (got)
				heard = now();
		}
		if (now() > heard + GIVE_UP)
			break;
	}
	end = now();
	unpair(sender, members, fan_out);
	answer(count, end - start, count - slowest);
}

static void send_single(struct endpoint *self, uint32_t size, uint32_t number)
{
	unsigned done = self->done;

	send_chunk(self, 1, &size, number);
	while (self->done == done)
		reap(self);
}

static void single(unsigned size, unsigned count)
{
	struct endpoint *member, *sender = pair(&member, 1, 1);
	uint32_t last;
	unsigned lost = 0;
	double start, end;

	while (sender->posted != sender->done)
		reap(sender);
	start = now();
	for (unsigned i = 0; i < count; i++) {
		send_single(sender, size, i);
		lost += !receive_within(member, GIVE_UP, &last);
	}
	end = now();
	unpair(sender, &member, 1);
	answer(count, end - start, lost);
}

/* Of the card made of memory; NULL with a real one. */
__attribute__((weak)) int card_delay(uint32_t qp_num, int stage, int64_t nanoseconds);

enum { STAGE_SEND = 1 };

/* Sending alone, copies in chunks, on a card that completes each send so many nanoseconds late: for room in the send
 * queue only, or for the completion of each chunk. */
static void late(unsigned size, unsigned count, unsigned nanoseconds, unsigned chunk, int waits)
{
	struct endpoint *sender = open_endpoint(addresses[0]);
	uint8_t payload[SLOT] = { 0 };
	uint32_t sizes[CHUNK];
	double start, end;

	CHECK(card_delay && chunk <= CHUNK && size <= SLOT);
	join_to_send(sender, DATA);
	sizes_of(sizes, size);
	card_delay(0, STAGE_SEND, nanoseconds);
	start = now();
	for (unsigned sent = 0; sent < count; sent += chunk) {
		for (unsigned i = 0; i < chunk; i++)
			memcpy(sender->slab + (DEPTH + (sent + i) % SENDS) * SLOT, payload, size);
		send_chunk(sender, chunk, sizes, sent);
		while (waits && sender->posted != sender->done)
			reap(sender);
	}
	end = now();
	while (sender->posted != sender->done)
		reap(sender);
	card_delay(0, STAGE_SEND, 0);
	close_endpoint(sender);
	answer(count, end - start, 0);
}

/* One message there and one back, between two ports in this process. */
static void pingpong(unsigned size, unsigned count)
{
	struct endpoint *near = open_endpoint(addresses[0]), *far = open_endpoint(addresses[1]);
	uint32_t last;
	double start;

	join_to_receive(near, BACK);
	join_to_receive(far, DATA);
	join_to_send(near, DATA);
	join_to_send(far, BACK);
	wait_until_heard(near, &far, 1);
	wait_until_heard(far, &near, 1);
	while (near->posted != near->done)
		reap(near);
	while (far->posted != far->done)
		reap(far);
	latencies = calloc(count, sizeof(*latencies));
	start = now();
	for (unsigned i = 0; i < count; i++) {
		double sent = now();

		send_single(near, size, i);
		CHECK(receive_within(far, GIVE_UP, &last));
		send_single(far, size, i);
		CHECK(receive_within(near, GIVE_UP, &last));
		latencies[i] = now() - sent;
	}
	answer_latencies(count, now() - start);
	free(latencies);
	close_endpoint(near);
	close_endpoint(far);
}

static void joins(unsigned count)
{
	struct endpoint *self = open_endpoint(addresses[0]);
	struct sockaddr_in group = ipv4(DATA);
	struct rdma_ud_param ud;
	double start = now();

	for (unsigned i = 0; i < count; i++) {
		join(self, &group, 0);
		joined(self, &ud);
		CHECK(!rdma_leave_multicast(self->id, (struct sockaddr *)&group));
	}
	answer(count, now() - start, 0);
	close_endpoint(self);
}

static void groups(unsigned count)
{
	struct endpoint *self = open_endpoint(addresses[0]);
	struct sockaddr_in group = ipv4("239.10.0.0");
	struct rdma_ud_param ud;
	double start = now(), end;
	uint32_t base = ntohl(group.sin_addr.s_addr);

	for (unsigned i = 0; i < count; i++) {
		group.sin_addr.s_addr = htonl(base + i);
		join(self, &group, 0);
	}
	for (unsigned i = 0; i < count; i++)
		joined(self, &ud);
	end = now();
	for (unsigned i = 0; i < count; i++) {
		group.sin_addr.s_addr = htonl(base + i);
		CHECK(!rdma_leave_multicast(self->id, (struct sockaddr *)&group));
	}
	answer(count, end - start, 0);
	close_endpoint(self);
}

/* Two processes: the receiver acknowledges by the number of messages so far, so the sender never overruns it. */
static void receive(unsigned count)
{
	struct endpoint *self = open_endpoint(addresses[1]);
	uint32_t last = 0, zero = 0;
	unsigned received = 0, acked = 0;
	double heard;

	join_to_receive(self, DATA);
	join_to_send(self, BACK);
	printf("{\"ready\": true}\n");
	fflush(stdout);
	while (!receive_within(self, GIVE_UP, &last))
		;
	send_chunk(self, 1, &zero, 0);
	heard = now();
	while (received < count && now() < heard + GIVE_UP) {
		unsigned got = receive_chunk(self, CHUNK, &last);

		if (!got)
			continue;
		received += got;
		heard = now();
		if (received - acked >= ACK_EVERY || received == count) {
			send_chunk(self, 1, &zero, received);
			acked = received;
		}
	}
	answer(count, 0, count - received);
	close_endpoint(self);
}

static void sending(unsigned size, unsigned count)
{
	struct endpoint *self = open_endpoint(addresses[0]);
	uint32_t sizes[CHUNK], acked = 0, zero = 0;
	unsigned sent = 0;
	double start, heard;

	join_to_receive(self, BACK);
	join_to_send(self, DATA);
	sizes_of(sizes, size);
	usleep(300000); /* until the bridge knows both groups: the first message is the only one to be answered */
	send_chunk(self, 1, &zero, 0);
	CHECK(receive_within(self, GIVE_UP, &acked));
	acked = 0;
	start = heard = now();
	while (acked < count && now() < heard + GIVE_UP) {
		if (sent < count && sent - acked + CHUNK <= PROCESS_WINDOW) {
			unsigned n = count - sent < CHUNK ? count - sent : CHUNK;

			send_chunk(self, n, sizes, sent);
			sent += n;
		}
		if (receive_chunk(self, CHUNK, &acked))
			heard = now();
	}
	answer(count, now() - start, count - acked);
	close_endpoint(self);
}

int main(int argc, char **argv)
{
	char line[128], what[32];
	unsigned a, b, c, d;

	CHECK(argc >= 3 && argc - 2 <= MAX_RECEIVERS);
	receivers = argc - 2;
	for (int i = 1; i < argc; i++)
		addresses[i - 1] = argv[i];
	while (fgets(line, sizeof(line), stdin)) {
		a = b = c = d = 0;
		CHECK(sscanf(line, "%31s %u %u %u %u", what, &a, &b, &c, &d) >= 1);
		if (!strcmp(what, "batch"))
			batch(a, b, c ? (int)c : 1, d ? (int)d : 1);
		else if (!strcmp(what, "single"))
			single(a, b);
		else if (!strcmp(what, "late") || !strcmp(what, "late_waited"))
			late(a, b, c, d, !strcmp(what, "late_waited"));
		else if (!strcmp(what, "pingpong"))
			pingpong(a, b);
		else if (!strcmp(what, "join"))
			joins(b);
		else if (!strcmp(what, "groups"))
			groups(b);
		else if (!strcmp(what, "receive"))
			receive(b);
		else if (!strcmp(what, "send"))
			sending(a, b);
		else
			CHECK(!"a known command");
		fflush(stdout);
	}
	return 0;
}
