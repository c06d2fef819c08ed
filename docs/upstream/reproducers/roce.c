/*
 * Reproducers for the reports on the kernel and on rdma-core, one function for each.
 *
 *   cc -o roce roce.c -lrdmacm -libverbs
 *   ./roce CASE ADDRESS [ADDRESS]     addresses of RoCE ports of this host; the reports say which case
 *
 * Each case prints what the stack answers. A call that has to work for the case to mean anything ends the
 * program with status 1 if it fails.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GRH 40
#define SLOT 8192
#define DEPTH 16

#define MUST(call)                                                        \
	do {                                                              \
		if (!(call)) {                                            \
			fprintf(stderr, "%s: %s\n", #call, strerror(errno)); \
			exit(1);                                          \
		}                                                         \
	} while (0)

static const char *const GROUP = "239.66.1.1";

struct end {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	char *memory;
	struct ibv_ah *ah;
	uint32_t qkey;
};

static struct sockaddr_storage address_of(const char *text)
{
	struct sockaddr_storage found = { 0 };
	struct sockaddr_in *v4 = (void *)&found;
	struct sockaddr_in6 *v6 = (void *)&found;

	v4->sin_family = AF_INET;
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1)
		return found;
	v6->sin6_family = AF_INET6;
	MUST(inet_pton(AF_INET6, text, &v6->sin6_addr) == 1);
	return found;
}

/* A UD queue pair on the port with that address, with receives posted. */
static struct end open_end(const char *address)
{
	struct sockaddr_storage bound = address_of(address);
	struct end end = { 0 };
	struct ibv_qp_init_attr init = {
		.cap = { DEPTH, DEPTH, 1, 1 }, .qp_type = IBV_QPT_UD
	};

	MUST(end.channel = rdma_create_event_channel());
	MUST(!rdma_create_id(end.channel, &end.id, NULL, RDMA_PS_UDP));
	MUST(!rdma_bind_addr(end.id, (struct sockaddr *)&bound));
	MUST(end.pd = ibv_alloc_pd(end.id->verbs));
	MUST(end.cq = ibv_create_cq(end.id->verbs, 2 * DEPTH, NULL, NULL, 0));
	init.send_cq = init.recv_cq = end.cq;
	MUST(!rdma_create_qp(end.id, end.pd, &init));
	MUST(end.memory = calloc(DEPTH, SLOT));
	MUST(end.mr = ibv_reg_mr(end.pd, end.memory, DEPTH * SLOT, IBV_ACCESS_LOCAL_WRITE));
	for (uint64_t slot = 0; slot < DEPTH; slot++) {
		struct ibv_sge sge = { (uintptr_t)end.memory + slot * SLOT, SLOT, end.mr->lkey };
		struct ibv_recv_wr *bad, wr = { slot, NULL, &sge, 1 };

		MUST(!ibv_post_recv(end.id->qp, &wr, &bad));
	}
	return end;
}

/* The type of the event that ends a join; errno right after it is printed where the event is an error. */
static enum rdma_cm_event_type joined(struct end *end, const char *group)
{
	struct sockaddr_storage to = address_of(group);
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;
	int result = rdma_join_multicast(end->id, (struct sockaddr *)&to, NULL);

	printf("rdma_join_multicast(%s): %d%s%s\n", group, result, result ? ", " : "",
	       result ? strerror(errno) : "");
	if (result)
		return RDMA_CM_EVENT_MULTICAST_ERROR;
	errno = 0;
	MUST(!rdma_get_cm_event(end->channel, &event));
	printf("%s, status %d, errno %d, sgid_index %d\n", rdma_event_str(event->event), event->status,
	       errno, event->param.ud.ah_attr.grh.sgid_index);
	type = event->event;
	if (type == RDMA_CM_EVENT_MULTICAST_JOIN) {
		end->qkey = event->param.ud.qkey;
		MUST(end->ah = ibv_create_ah(end->pd, &event->param.ud.ah_attr));
	}
	MUST(!rdma_ack_cm_event(event));
	return type;
}

/* The next completion; 0 if none comes within two seconds. */
static int completed(struct end *end, struct ibv_wc *wc)
{
	for (int tries = 0; tries < 2000; tries++) {
		if (ibv_poll_cq(end->cq, 1, wc) == 1)
			return 1;
		poll(NULL, 0, 1);
	}
	return 0;
}

static void send_bytes(struct end *end, uint32_t size)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, size, end->mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					.send_flags = IBV_SEND_SIGNALED };
	struct ibv_wc wc;
	int posted;

	wr.wr.ud.ah = end->ah;
	wr.wr.ud.remote_qpn = 0xFFFFFF;
	wr.wr.ud.remote_qkey = end->qkey;
	posted = ibv_post_send(end->id->qp, &wr, &bad);
	printf("send of %u bytes: posted %d, completion: %s\n", size, posted,
	       completed(end, &wc) ? ibv_wc_status_str(wc.status) : "none");
}

static void print_state(struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	MUST(!ibv_query_qp(end->id->qp, &attr, IBV_QP_STATE, &init));
	printf("state of the QP: %s\n", attr.qp_state == IBV_QPS_ERR ? "ERR" : "not ERR");
}

/* The IGMP report leaves a moment after the join, and the switch learns from it: nothing tells when. */
static void wait_for_switch(void)
{
	poll(NULL, 0, 1000);
}

static void wait_for_arrival(struct end *end, const char *what)
{
	struct ibv_wc wc;

	printf("%s: %s\n", what, completed(end, &wc) ? "received" : "not received");
}

/* --- the kernel ---------------------------------------------------------------------------- */

static void oversize(char **address)
{
	struct end sender = open_end(address[0]), receiver = open_end(address[1]);
	struct ibv_port_attr port;
	uint32_t mtu;

	MUST(!ibv_query_port(sender.id->verbs, sender.id->port_num, &port));
	mtu = 128u << port.active_mtu;
	printf("active MTU: %u\n", mtu);
	joined(&sender, GROUP);
	joined(&receiver, GROUP);
	wait_for_switch();
	send_bytes(&sender, mtu);
	wait_for_arrival(&receiver, "as large as the MTU");
	send_bytes(&sender, mtu + 1);
	wait_for_arrival(&receiver, "one byte more");
}

static void second_mlid(char **address)
{
	struct end end = open_end(address[0]);
	union ibv_gid gid = { .raw = { [10] = 0xff, 0xff, 239, 66, 1, 1 } };
	int error;

	printf("attach with LID 0: %d\n", ibv_attach_mcast(end.id->qp, &gid, 0));
	printf("attach with LID 1: %d\n", ibv_attach_mcast(end.id->qp, &gid, 1));
	printf("detach with LID 0: %s\n", strerror(ibv_detach_mcast(end.id->qp, &gid, 0)));
	printf("detach with LID 1: %s\n", strerror(ibv_detach_mcast(end.id->qp, &gid, 1)));
	error = ibv_destroy_qp(end.id->qp);
	printf("ibv_destroy_qp: %s\n", strerror(error));
}

static void attach(char **address)
{
	struct end end = open_end(address[0]);
	union ibv_gid gid = { .raw = { [10] = 0xff, 0xff, 239, 66, 1, 1 } };

	printf("attach: %d\n", ibv_attach_mcast(end.id->qp, &gid, 0));
	printf("detach: %d\n", ibv_detach_mcast(end.id->qp, &gid, 0));
	printf("ibv_destroy_qp: %d\n", ibv_destroy_qp(end.id->qp));
}

static void ipv6_source(char **address)
{
	struct end end = open_end(address[0]);

	if (joined(&end, GROUP) == RDMA_CM_EVENT_MULTICAST_JOIN) {
		send_bytes(&end, 64);
		print_state(&end);
	}
}

/* address[1] is a command that takes the address away. */
static void no_address(char **address)
{
	struct end end = open_end(address[0]);

	MUST(!system(address[1]));
	joined(&end, GROUP);
}

static void unicast(char **address)
{
	struct end end = open_end(address[0]);
	char line[128];
	FILE *igmp;

	joined(&end, address[1]);
	MUST(igmp = fopen("/proc/net/igmp", "r"));
	while (fgets(line, sizeof(line), igmp))
		if (line[0] == '\t' && strncmp(line + 4, "010000E0", 8))
			printf("/proc/net/igmp: %.8s\n", line + 4);
}

/* --- rdma-core ----------------------------------------------------------------------------- */

static void sin_zero(char **address)
{
	struct end end = open_end(address[0]);
	struct sockaddr_storage group = address_of(GROUP);
	int result;

	joined(&end, GROUP);
	((struct sockaddr_in *)&group)->sin_zero[0] = 1;
	errno = 0;
	result = rdma_leave_multicast(end.id, (struct sockaddr *)&group);
	printf("leave with a byte of sin_zero set: %d, %s\n", result, strerror(errno));
	((struct sockaddr_in *)&group)->sin_zero[0] = 0;
	printf("leave without: %d\n", rdma_leave_multicast(end.id, (struct sockaddr *)&group));
}

static void late(int signal)
{
	static const char said[] = "rdma_leave_multicast has not returned after 5 s\n";

	(void)signal;
	if (write(1, said, sizeof(said) - 1))
		_exit(0);
}

static void synchronous(char **address)
{
	struct sockaddr_storage bound = address_of(address[0]), group = address_of(GROUP);
	struct ibv_qp_init_attr init = { .cap = { 1, 1, 1, 1 }, .qp_type = IBV_QPT_UD };
	struct rdma_cm_id *id;

	MUST(!rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP));
	MUST(!rdma_bind_addr(id, (struct sockaddr *)&bound));
	MUST(!rdma_create_qp(id, NULL, &init));
	MUST(!rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	printf("id->event after the join: %s\n", id->event ? rdma_event_str(id->event->event) : "none");
	fflush(stdout);
	signal(SIGALRM, late);
	alarm(5);
	printf("rdma_leave_multicast: %d\n", rdma_leave_multicast(id, (struct sockaddr *)&group));
}

static void destroy_qp(char **address)
{
	struct end end = open_end(address[0]);

	joined(&end, GROUP);
	errno = 0;
	rdma_destroy_qp(end.id);
	printf("rdma_destroy_qp while joined: returns nothing; errno: %s\n", strerror(errno));
	printf("id->qp: %s\n", end.id->qp ? "there" : "NULL");
	printf("ibv_destroy_cq: %s\n", strerror(ibv_destroy_cq(end.cq)));
}

static void reply(char **address)
{
	struct end sender = open_end(address[0]), receiver = open_end(address[1]);
	struct ibv_ah_attr attr;
	struct ibv_wc wc;
	int result;

	joined(&sender, GROUP);
	joined(&receiver, GROUP);
	wait_for_switch();
	send_bytes(&sender, 64);
	MUST(completed(&receiver, &wc));
	errno = 0;
	result = ibv_init_ah_from_wc(receiver.id->verbs, receiver.id->port_num, &wc,
				     (struct ibv_grh *)(receiver.memory + wc.wr_id * SLOT), &attr);
	printf("ibv_init_ah_from_wc: %d, %s\n", result, strerror(errno));
}

static const struct {
	const char *name;
	int addresses;
	void (*run)(char **address);
} CASES[] = {
	{ "oversize", 2, oversize },	   { "second-mlid", 1, second_mlid }, { "attach", 1, attach },
	{ "ipv6-source", 1, ipv6_source }, { "no-address", 2, no_address },   { "unicast", 2, unicast },
	{ "sin-zero", 1, sin_zero },	   { "synchronous", 1, synchronous }, { "destroy-qp", 1, destroy_qp },
	{ "reply", 2, reply },
};

int main(int argc, char **argv)
{
	for (size_t at = 0; argc > 1 && at < sizeof(CASES) / sizeof(*CASES); at++)
		if (!strcmp(CASES[at].name, argv[1]) && CASES[at].addresses == argc - 2) {
			CASES[at].run(argv + 2);
			return 0;
		}
	fprintf(stderr, "roce CASE ADDRESS [ADDRESS]; the reports have the cases\n");
	return 2;
}
