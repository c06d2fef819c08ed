/*
 * Errors of a reliable connection between softib2, the requester, and softib1, the responder, both of this process.
 *
 * Each request has a connection of its own. A line for each: its name, its status, the status of the responder's
 * receive (- if it has none, or still has it), the states of requester and responder, the status of a second request, and
 * how many packets the responder's port has dropped for their P_Key. Words are those of libibverbs.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REGION = 4096, SHORT = 16, LONG = 64, SECONDS = 20 };

struct end {
	struct ibv_context *device;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct ibv_port_attr port;
	_Alignas(4096) char memory[REGION];
};

static struct end responder, requester;

static void require(int is_true, const char *what)
{
	if (!is_true) {
		perror(what);
		exit(2);
	}
}

static void open_end(struct end *end, const char *name)
{
	int count;
	struct ibv_device **all = ibv_get_device_list(&count);

	require(all != NULL, "ibv_get_device_list");
	for (int i = 0; i < count; i++)
		if (!strcmp(ibv_get_device_name(all[i]), name))
			end->device = ibv_open_device(all[i]);
	ibv_free_device_list(all);
	require(end->device != NULL, name);
	end->pd = ibv_alloc_pd(end->device);
	require(end->pd != NULL, "ibv_alloc_pd");
	require(!ibv_query_port(end->device, 1, &end->port), "ibv_query_port");
}

/* A queue pair in INIT, with a region that the other end may use by `access`. */
static void prepare(struct end *end, int access, int pkey_index)
{
	end->cq = ibv_create_cq(end->device, 8, NULL, NULL, 0);
	require(end->cq != NULL, "ibv_create_cq");
	end->mr = ibv_reg_mr(end->pd, end->memory, REGION, IBV_ACCESS_LOCAL_WRITE | access);
	require(end->mr != NULL, "ibv_reg_mr");
	struct ibv_qp_init_attr create = {
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	end->qp = ibv_create_qp(end->pd, &create);
	require(end->qp != NULL, "ibv_create_qp");
	struct ibv_qp_attr to = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.pkey_index = pkey_index,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	require(!ibv_modify_qp(end->qp, &to, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS), "INIT");
}

static void connect_to(struct end *end, const struct end *other)
{
	struct ibv_qp_attr to = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = other->qp->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, /* 0.64 ms */
		.ah_attr = { .dlid = other->port.lid, .port_num = 1 },
	};
	require(!ibv_modify_qp(end->qp, &to,
			       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
		"RTR");
	to = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = 10, /* 4.2 ms */
		.retry_cnt = 2,
		.rnr_retry = 2,
		.max_rd_atomic = 1,
	};
	require(!ibv_modify_qp(end->qp, &to,
			       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				       IBV_QP_MAX_QP_RD_ATOMIC),
		"RTS");
}

static void release(struct end *end)
{
	require(!ibv_destroy_qp(end->qp), "ibv_destroy_qp");
	require(!ibv_dereg_mr(end->mr), "ibv_dereg_mr");
	require(!ibv_destroy_cq(end->cq), "ibv_destroy_cq");
}

/* The status of the next completion; "-" if none comes, and at once if `waits` is 0. */
static const char *completion(struct end *end, int waits)
{
	time_t until = time(NULL) + SECONDS;
	struct ibv_wc wc;
	int got;

	do
		got = ibv_poll_cq(end->cq, 1, &wc);
	while (!got && waits && time(NULL) < until);
	require(got >= 0, "ibv_poll_cq");
	return got ? ibv_wc_status_str(wc.status) : "-";
}

static const char *state(struct end *end)
{
	struct ibv_qp_init_attr created;
	struct ibv_qp_attr is;

	require(!ibv_query_qp(end->qp, &is, IBV_QP_STATE, &created), "ibv_query_qp");
	return is.qp_state == IBV_QPS_ERR ? "ERR" : is.qp_state == IBV_QPS_RTS ? "RTS" : "?";
}

static unsigned int wrong_pkeys(void)
{
	struct ibv_port_attr port;

	require(!ibv_query_port(responder.device, 1, &port), "ibv_query_port");
	return port.bad_pkey_cntr;
}

static void post(enum ibv_wr_opcode opcode, uint64_t at, uint32_t rkey)
{
	struct ibv_sge piece = { .addr = (uintptr_t)requester.memory, .length = LONG, .lkey = requester.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &piece, .num_sge = 1, .opcode = opcode }, *bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		piece.length = sizeof(uint64_t);
		wr.wr.atomic.remote_addr = at;
		wr.wr.atomic.rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = at;
		wr.wr.rdma.rkey = rkey;
	}
	require(!ibv_post_send(requester.qp, &wr, &bad), "ibv_post_send");
}

#define ALL (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

static const struct request {
	const char *name;
	enum ibv_wr_opcode opcode;
	int access;	    /* to the responder's region */
	uint32_t receive;   /* bytes of the responder's receive; 0: none */
	uint64_t offset;    /* in the region */
	uint32_t wrong_key; /* what the R_Key is off by */
	int partition;	    /* the requester's index of its P_Key table; the responder's is 0 */
} requests[] = {
	{ .name = "send", .opcode = IBV_WR_SEND, .receive = LONG },
	{ .name = "write", .opcode = IBV_WR_RDMA_WRITE, .access = ALL, .receive = LONG },
	{ .name = "no_receive", .opcode = IBV_WR_SEND },
	{ .name = "short_receive", .opcode = IBV_WR_SEND, .receive = SHORT },
	{ .name = "wrong_key", .opcode = IBV_WR_RDMA_WRITE, .access = ALL, .receive = LONG, .wrong_key = 256 },
	{ .name = "beyond_the_end", .opcode = IBV_WR_RDMA_READ, .access = ALL, .receive = LONG, .offset = REGION },
	{ .name = "read_only", .opcode = IBV_WR_RDMA_WRITE, .access = IBV_ACCESS_REMOTE_READ, .receive = LONG },
	{ .name = "no_atomics", .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .access = ALL, .receive = LONG },
	{ .name = "partition", .opcode = IBV_WR_SEND, .receive = LONG, .partition = 1 },
};

static void run(const struct request *one)
{
	unsigned int dropped = wrong_pkeys();

	prepare(&responder, one->access, 0);
	prepare(&requester, 0, one->partition);
	connect_to(&responder, &requester);
	connect_to(&requester, &responder);
	struct ibv_sge piece = {
		.addr = (uintptr_t)responder.memory, .length = one->receive, .lkey = responder.mr->lkey
	};
	struct ibv_recv_wr receive = { .sg_list = &piece, .num_sge = 1 }, *bad;
	if (one->receive)
		require(!ibv_post_recv(responder.qp, &receive, &bad), "ibv_post_recv");
	uint64_t at = (uintptr_t)responder.memory + one->offset;
	post(one->opcode, at, responder.mr->rkey + one->wrong_key);
	const char *first = completion(&requester, 1);
	/* A receive that the responder's end flushes completes after its state has changed, and so does one that is used. */
	int ends = !strcmp(state(&responder), "ERR") || (one->opcode == IBV_WR_SEND && !strcmp(first, "success"));
	const char *received = completion(&responder, ends);
	post(one->opcode, at, responder.mr->rkey + one->wrong_key);
	const char *second = completion(&requester, 1);
	printf("%s: %s, %s, %s, %s, %s, %u\n", one->name, first, received, state(&requester), state(&responder), second,
	       wrong_pkeys() - dropped);
	release(&requester);
	release(&responder);
}

int main(void)
{
	open_end(&responder, "softib1");
	open_end(&requester, "softib2");
	for (size_t i = 0; i < sizeof(requests) / sizeof(*requests); i++)
		run(&requests[i]);
	return 0;
}
